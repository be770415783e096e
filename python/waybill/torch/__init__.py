"""The functions of ``waybill`` for torch tensors, on the CPU and on CUDA devices.

Tensors in, tensors out, on the device of the inputs; tensors of the CPU share memory with what the
compiled part reads and writes. A program written for DistCA changes only its import:
the random generators without a seed draw from torch's global generator, in DistCA's order.
"""

import torch as _torch

from .. import _common
from .._common import *  # noqa: F403
from .._graphs import never_compile_calls as _never_compile_calls
from . import (
    attention_step,
    batch_plan,
    calibrate,
    context_parallel,
    generators,
    index_ops,
    kernels,
    packing,
    routing,
    simulate,
    start,
)
from ._context_parallel_fixed import Capacities, FixedPlan
from .attention_step import *  # noqa: F403
from .batch_plan import *  # noqa: F403
from .calibrate import *  # noqa: F403
from .context_parallel import *  # noqa: F403
from .generators import *  # noqa: F403
from .index_ops import *  # noqa: F403
from .metadata import Metadata
from .packing import *  # noqa: F403
from .routing import *  # noqa: F403
from .sequence_dispatcher import SequenceDispatcher
from .simulate import *  # noqa: F403
from .start import *  # noqa: F403
from .world import run_threads

_never_compile_calls(_torch)

__all__ = [
    "Capacities",
    "FixedPlan",
    "Metadata",
    "SequenceDispatcher",
    "kernels",
    "run_threads",
]
__all__ += _common.__all__
__all__ += attention_step.__all__
__all__ += batch_plan.__all__
__all__ += calibrate.__all__
__all__ += context_parallel.__all__
__all__ += generators.__all__
__all__ += index_ops.__all__
__all__ += packing.__all__
__all__ += routing.__all__
__all__ += simulate.__all__
__all__ += start.__all__
