"""The names that both faces have as they are: ``waybill`` for numpy and ``waybill.torch``."""

from . import costs, errors, planner, plans, timing
from .costs import *  # noqa: F403
from .errors import *  # noqa: F403
from .metadata import AttnLayout, PackedSeqParams, QkvMetadata, RankKvLayout, RawQkvDispatch
from .planner import *  # noqa: F403
from .plans import *  # noqa: F403
from .routing import length_distributions, sample_documents
from .sequence_dispatcher import PlanHandle, TensorFormat
from .simulate import test_qkv_dispatch
from .timing import *  # noqa: F403
from .world import Topology, World, cuda_version, end_waits, num_gpus

ReadyPlan = PlanHandle  # its older name

__all__ = ["AttnLayout", "PackedSeqParams", "PlanHandle", "QkvMetadata", "RankKvLayout"]
__all__ += ["RawQkvDispatch", "ReadyPlan", "TensorFormat", "Topology", "World", "cuda_version"]
__all__ += ["end_waits", "length_distributions", "num_gpus", "sample_documents"]
__all__ += ["test_qkv_dispatch"]
__all__ += costs.__all__
__all__ += errors.__all__
__all__ += planner.__all__
__all__ += plans.__all__
__all__ += timing.__all__
