"""Waybill routes tokens between GPU ranks: computes which rows go where, proves it, simulates it.

Arrays in, numpy arrays out; ``waybill.torch`` has the same functions for torch tensors. Offsets,
lengths and counts are tokens (rows), never bytes.
"""

import typing as _typing

from . import _common, compat, routing, simulate
from . import moe as moe
from ._common import *  # noqa: F403
from ._core import version as __version__
from .metadata import Metadata
from .moe import EPAll2AllLayer
from .routing import *  # noqa: F403
from .sequence_dispatcher import SequenceDispatcher
from .simulate import *  # noqa: F403
from .world import run_threads

compat.install()

if not _typing.TYPE_CHECKING:  # checkers shall see which names there are
    __getattr__ = compat.say_where(__name__)

__all__ = ["EPAll2AllLayer", "Metadata", "SequenceDispatcher", "__version__", "run_threads"]
__all__ += _common.__all__
__all__ += routing.__all__
__all__ += simulate.__all__
