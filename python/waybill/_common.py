"""The names that both faces have as they are: ``waybill`` for numpy and ``waybill.torch``."""

from .costs import AttentionCosts, LinkSpeeds, read_links
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
from .metadata import AttnLayout, PackedSeqParams, QkvMetadata, RankKvLayout, RawQkvDispatch
from .planner import AttentionPlan, RelayHop, plan
from .plans import Finding, QkvPlan, QkvRouting, RankAttention, SparseMetadata, validate
from .routing import length_distributions, sample_documents
from .sequence_dispatcher import PlanHandle, TensorFormat
from .simulate import test_qkv_dispatch
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
from .world import Topology, World, cuda_version, end_waits, num_gpus

ReadyPlan = PlanHandle  # its older name

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
