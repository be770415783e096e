"""Experts on ranks: EPAll2AllLayer for torch tensors, on the device of a World.

The names of Triton-distributed's layer. Rows are ordered by local expert, then source rank, then
token, then topk slot: always. ``waybill.moe.simulate_dispatch`` says what must arrive.
"""

import typing as _typing

from .. import compat as _compat
from ..moe import EPAllToAllLayoutDesc, EPConfig
from .experts.context import BarrierAllContext, DispatchCombineContext
from .experts.expert_parallel import ExpertParallel
from .experts.grouped import SwiGLUExperts, grouped_mm
from .experts.layer import EPAll2AllLayer, tile_scales

__all__ = [
    "BarrierAllContext",
    "DispatchCombineContext",
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "ExpertParallel",
    "SwiGLUExperts",
    "grouped_mm",
    "tile_scales",
]

__path__: list[str] = []  # compat.py has the modules that this was a package of

if not _typing.TYPE_CHECKING:
    __getattr__ = _compat.say_where(__name__)
