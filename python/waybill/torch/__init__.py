"""The functions of ``waybill`` for torch tensors, on the CPU and on CUDA devices.

Tensors in, tensors out, on the device of the inputs; tensors of the CPU share memory with what the
compiled part reads and writes. A program written for DistCA changes only its import:
the random generators without a seed draw from torch's global generator, in DistCA's order.
"""

import typing as _typing

import torch as _torch

from .. import _common
from .. import compat as _compat
from .._common import *  # noqa: F403
from .._graphs import never_compile_calls as _never_compile_calls
from . import attention_step, functions, kernels, world
from .attention.calibrate import calibrate_attention
from .attention.fixed import Capacities, FixedPlan
from .attention.module import ContextParallelAttention
from .attention.plan import BatchPlan, BatchPlanner, InPlaceRule, PackedBatch, Piece, pack, unpack
from .attention_step import *  # noqa: F403
from .experts.layer import EPAll2AllLayer
from .functions import *  # noqa: F403
from .sequence_dispatcher import SequenceDispatcher
from .world import *  # noqa: F403

_never_compile_calls(_torch)

if not _typing.TYPE_CHECKING:
    __getattr__ = _compat.say_where(__name__)

__all__ = [
    "BatchPlan",
    "BatchPlanner",
    "Capacities",
    "ContextParallelAttention",
    "EPAll2AllLayer",
    "FixedPlan",
    "InPlaceRule",
    "PackedBatch",
    "Piece",
    "SequenceDispatcher",
    "calibrate_attention",
    "kernels",
    "pack",
    "unpack",
]
__all__ += _common.__all__
__all__ += attention_step.__all__
__all__ += functions.__all__
__all__ += world.__all__
