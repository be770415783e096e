"""The names that both faces have as they are: ``waybill`` for numpy and ``waybill.torch``."""

# ruff: noqa: F403, F405

from .costs import *
from .errors import *
from .metadata import AttnLayout, PackedSeqParams, QkvMetadata, RankKvLayout, RawQkvDispatch
from .planner import *
from .plans import *
from .routing import length_distributions, sample_documents
from .sequence_dispatcher import PlanHandle, TensorFormat
from .simulate import test_qkv_dispatch
from .timing import *
from .world import Topology, World, cuda_version, end_waits, num_gpus

ReadyPlan = PlanHandle  # its older name

#: By file: costs, errors, metadata, planner, plans, routing, sequence_dispatcher, simulate, timing,
#: world. (Checkers of types read lists, not ``module.__all__``.)
__all__ = ["AttentionCosts", "LinkSpeeds", "read_links"]
__all__ += ["CudaError", "Disagreement", "Error", "InternalError", "Interrupted", "InvalidArgument"]
__all__ += ["IoError", "NotThreeAxes", "PeerFailed", "RankOutOfRange", "ShapeMismatch", "Timeout"]
__all__ += ["TransportError", "Unsupported", "WrongType"]
__all__ += ["AttnLayout", "PackedSeqParams", "QkvMetadata", "RankKvLayout", "RawQkvDispatch"]
__all__ += ["AttentionPlan", "RelayHop", "plan"]
__all__ += ["Finding", "QkvPlan", "QkvRouting", "RankAttention", "SparseMetadata", "validate"]
__all__ += ["length_distributions", "sample_documents"]
__all__ += ["PlanHandle", "ReadyPlan", "TensorFormat"]
__all__ += ["test_qkv_dispatch"]
__all__ += ["Comparison", "PhasePrediction", "Remedy", "StepCause", "StepPrediction", "compare"]
__all__ += ["explain", "per_document_plan", "predict_step", "zigzag_plan"]
__all__ += ["Topology", "World", "cuda_version", "end_waits", "num_gpus"]
