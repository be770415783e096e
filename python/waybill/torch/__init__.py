"""The functions of ``waybill`` for torch tensors, on the CPU and on CUDA devices.

Tensors in, tensors out, on the device of the inputs; tensors of the CPU share memory with what the
compiled part reads and writes. A program written for the original changes only its import:
the random generators without a seed draw from torch's global generator, in the original's order.
"""

from .._dispatcher import ReadyPlan, TensorFormat
from .._threads import end_waits
from ..errors import (
    CudaError,
    Disagreement,
    Error,
    InternalError,
    Interrupted,
    InvalidArgument,
    IoError,
    NotThreeAxes,
    PeerFailed,
    RankOutOfRange,
    ShapeMismatch,
    Timeout,
    TransportError,
    Unsupported,
    WrongType,
)
from ..layouts import AttnLayout, PackedSeqParams, QkvMetadata, RankKvLayout, RawQkvDispatch
from ..planner import AttentionPlan, RelayHop, plan, plan_documents
from ..plans import QkvPlan
from ..simulate import test_qkv_dispatch
from ..sparse import QkvRouting, RankAttention, SparseMetadata
from ..timing import (
    Comparison,
    PhasePrediction,
    Remedy,
    StepCause,
    StepPrediction,
    compare,
    explain,
    per_document_plan,
    predict_step,
    zigzag_plan,
)
from ..validation import Finding, validate
from ..world import Topology, World, num_gpus
from .attention_step import AttentionStep, recomputed_attention
from .generators import (
    create_qkv_dispatch,
    create_qkv_dispatch_with_custom_mapping,
    create_raw_qkv_dispatch,
    gen_seq_lens,
)
from .index_ops import (
    exclusive_cumsum,
    index_put_with_neg_padding_1d,
    mask_by_neg,
    prepend_zero,
    prepend_zero_fn,
)
from .metadata import Metadata
from .routing import (
    compute_attn_layout_seqlens,
    compute_e2e_metadata,
    compute_metadata,
    compute_metadata_kv,
    mlp_layout_packed_params,
    plan_metadata,
)
from .sequence_dispatcher import SequenceDispatcher
from .simulate import orchestrate_simulate, simulate_communication, sum_kv_copies
from .world import run_threads

__all__ = [
    "AttentionPlan",
    "AttentionStep",
    "AttnLayout",
    "Comparison",
    "CudaError",
    "Disagreement",
    "Error",
    "Finding",
    "InternalError",
    "Interrupted",
    "InvalidArgument",
    "IoError",
    "Metadata",
    "NotThreeAxes",
    "PackedSeqParams",
    "PeerFailed",
    "PhasePrediction",
    "QkvMetadata",
    "QkvPlan",
    "QkvRouting",
    "RankAttention",
    "RankKvLayout",
    "RankOutOfRange",
    "RawQkvDispatch",
    "ReadyPlan",
    "RelayHop",
    "Remedy",
    "SequenceDispatcher",
    "ShapeMismatch",
    "SparseMetadata",
    "StepCause",
    "StepPrediction",
    "TensorFormat",
    "Timeout",
    "Topology",
    "TransportError",
    "Unsupported",
    "World",
    "WrongType",
    "compare",
    "compute_attn_layout_seqlens",
    "compute_e2e_metadata",
    "compute_metadata",
    "compute_metadata_kv",
    "create_qkv_dispatch",
    "create_qkv_dispatch_with_custom_mapping",
    "create_raw_qkv_dispatch",
    "end_waits",
    "exclusive_cumsum",
    "explain",
    "gen_seq_lens",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "mlp_layout_packed_params",
    "num_gpus",
    "orchestrate_simulate",
    "per_document_plan",
    "plan",
    "plan_documents",
    "plan_metadata",
    "predict_step",
    "prepend_zero",
    "prepend_zero_fn",
    "recomputed_attention",
    "run_threads",
    "simulate_communication",
    "sum_kv_copies",
    "test_qkv_dispatch",
    "validate",
    "zigzag_plan",
]
