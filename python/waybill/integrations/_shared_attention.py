"""The attention that all layers of a model share, and the plans of a batch that they share."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Tuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._errors import said_by
from .._process_group import group_of
from ..errors import Error, InvalidArgument
from ..torch import BatchPlan, ContextParallelAttention, World
from ..torch._piece_exchange import PieceExchange
from ..torch._tensors import require_device
from ..torch.batch_plan import RankPieces
from ..torch.moe.tensors import world_of

__all__ = ["Pieces", "SharedRanks", "pieces_of"]


class Pieces:
    """What all ranks hold of one batch, and the plan of each kind of layer, made when it is first
    asked for. Keep it as long as the batch is in use: it is what a checkpoint asks again.
    """

    def __init__(self, pieces: List[Any]) -> None:
        self.pieces = pieces
        self._plans: weakref.WeakKeyDictionary[ContextParallelAttention, BatchPlan] = (
            weakref.WeakKeyDictionary()
        )

    def plan_of(self, attention: ContextParallelAttention) -> BatchPlan:
        """The same on all ranks."""
        plan = self._plans.get(attention)
        if plan is None:
            plan = self._plans[attention] = attention.plan(self.pieces)
        return plan

    def __deepcopy__(self, memo: Any) -> Pieces:
        return self

    def __reduce__(self) -> Tuple[Any, ...]:
        return Pieces, (self.pieces,)


class SharedRanks:
    """The ranks of a process group, and the modules that they made."""

    # A group that is destroyed takes its modules along.
    _known: ClassVar[weakref.WeakKeyDictionary[Any, SharedRanks]] = weakref.WeakKeyDictionary()

    def __init__(self, group: Any, device: Any) -> None:
        kind = None if device is None else torch.device(device).type
        self.world: World = world_of(group, None, "cpu" if kind == "cpu" else None, "SharedRanks")
        self._exchange: Optional[PieceExchange] = None
        self._modules: Dict[Any, ContextParallelAttention] = {}

    @classmethod
    def of(cls, ranks: Any, device: Any, who: str) -> SharedRanks:
        """Of a process group, a DeviceMesh of one dimension, or None for the default group;
        collective the first time, which says where rows are.
        """
        group = group_of(ranks, who, "ranks")
        place = require_device(device, f"{who}: device")
        found = cls._known.get(group)
        if found is None:
            found = cls._known[group] = cls(group, place)
        return found

    @property
    def rank(self) -> int:
        return int(self.world.rank)

    @property
    def world_size(self) -> int:
        return int(self.world.world_size)

    def gather(self, held: RankPieces, who: str, wrong: Optional[Error] = None) -> Pieces:
        """Collective, tiny: what all ranks hold; what one has ``wrong`` is raised on all."""
        if self._exchange is None:
            self._exchange = PieceExchange(self.world)
        return Pieces(self._exchange.gather(held, who, wrong))

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, who: str,
        options: Mapping[str, Any], **given: Any,
    ) -> ContextParallelAttention:  # fmt: skip
        """Of heads, sizes and dtype of these rows; made if there is none, which is collective.

        :param options: more of ContextParallelAttention, by the user
        """
        wrong = [name for name in options if name in given or name not in _OPTIONS]
        if wrong:
            raise InvalidArgument(
                f"{who}: options hold {wrong[0]!r} on rank {self.rank}, expected some of"
                f" {[name for name in _OPTIONS if name not in given]}"
            )
        options = {**given, **options}
        shape = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        key = (shape, q.dtype, tuple(sorted(options.items())))
        try:
            hash(key)
        except TypeError as error:
            raise InvalidArgument(f"{who}: options on rank {self.rank}: {error}") from None
        found = self._modules.get(key)
        if found is None:
            with said_by(who):
                found = self._modules[key] = ContextParallelAttention(
                    self.world, *shape, dtype=q.dtype, **options
                )
        return found


# Of rows, all but what they say themselves.
_OPTIONS = [
    name
    for name, parameter in inspect.signature(ContextParallelAttention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("dtype", "latent_dim", "device", "timeout_s")
]

_of_tensors: Any = WeakTensorKeyDictionary()


def pieces_of(cu_seqlens: torch.Tensor, ranks: SharedRanks, make: Callable[[], Pieces]) -> Pieces:
    """Those that were made for a batch, which its tensor of offsets stands for: all layers and a
    checkpoint get the same.
    """
    known = _of_tensors.get(cu_seqlens)
    if known is None or known[0] != (cu_seqlens._version, ranks):
        known = _of_tensors[cu_seqlens] = ((cu_seqlens._version, ranks), make())
    found: Pieces = known[1]
    return found
