"""The names that both faces have as they are: ``waybill`` for numpy and ``waybill.torch``."""

from ._dispatcher import PlanHandle, TensorFormat
from ._threads import end_waits
from .attention_costs import AttentionCosts
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
from .generators import length_distributions, sample_documents
from .layouts import AttnLayout, PackedSeqParams, QkvMetadata, RankKvLayout, RawQkvDispatch
from .links import LinkSpeeds, read_links
from .planner import AttentionPlan, RelayHop, plan
from .plans import QkvPlan
from .simulate import test_qkv_dispatch
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
from .world import Topology, World, cuda_version, num_gpus

ReadyPlan = PlanHandle  # its name in version 0.1

__all__ = [
    "AttentionCosts",
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
    "LinkSpeeds",
    "NotThreeAxes",
    "PackedSeqParams",
    "PeerFailed",
    "PhasePrediction",
    "PlanHandle",
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
    "cuda_version",
    "end_waits",
    "explain",
    "length_distributions",
    "num_gpus",
    "per_document_plan",
    "plan",
    "predict_step",
    "read_links",
    "sample_documents",
    "test_qkv_dispatch",
    "validate",
    "zigzag_plan",
]
