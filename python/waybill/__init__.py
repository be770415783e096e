"""Waybill routes tokens between GPU ranks: computes which rows go where, proves it, simulates it.

Arrays in, numpy arrays out; ``waybill.torch`` has the same functions for torch tensors. Offsets,
lengths and counts are tokens (rows), never bytes.
"""

from . import moe as moe
from ._core import version as __version__
from ._threads import end_waits
from .errors import (
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
from .generators import (
    create_qkv_dispatch,
    create_qkv_dispatch_with_custom_mapping,
    create_raw_qkv_dispatch,
    gen_seq_lens,
    length_distributions,
    sample_documents,
)
from .index_ops import (
    exclusive_cumsum,
    index_put_with_neg_padding_1d,
    mask_by_neg,
    prepend_zero,
    prepend_zero_fn,
)
from .layouts import AttnLayout, PackedSeqParams, QkvMetadata, RankKvLayout, RawQkvDispatch
from .metadata import Metadata
from .planner import AttentionPlan, RelayHop, plan, plan_documents
from .plans import QkvPlan
from .routing import (
    compute_attn_layout_seqlens,
    compute_e2e_metadata,
    compute_metadata,
    compute_metadata_kv,
    mlp_layout_packed_params,
)
from .sequence_dispatcher import ReadyPlan, SequenceDispatcher, TensorFormat
from .simulate import (
    orchestrate_simulate,
    simulate_communication,
    source_rows,
    sum_kv_copies,
    test_qkv_dispatch,
)
from .sparse import QkvRouting, RankAttention, SparseMetadata
from .timing import (
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
from .validation import Finding, validate
from .world import Topology, World, num_gpus, run_threads

__all__ = [
    "AttentionPlan",
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
    "__version__",
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
    "length_distributions",
    "mask_by_neg",
    "mlp_layout_packed_params",
    "num_gpus",
    "orchestrate_simulate",
    "per_document_plan",
    "plan",
    "plan_documents",
    "predict_step",
    "prepend_zero",
    "prepend_zero_fn",
    "run_threads",
    "sample_documents",
    "simulate_communication",
    "source_rows",
    "sum_kv_copies",
    "test_qkv_dispatch",
    "validate",
    "zigzag_plan",
]
