"""Layers and attention that all modules of a model share, and the plans of a batch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._errors import said_by
from .._graphs import outside_graphs
from .._process_group import group_of
from ..errors import Error, InvalidArgument
from ..torch import BatchPlan, ContextParallelAttention, World
from ..torch._tensors import require_device
from ..torch.attention.moves import PieceExchange
from ..torch.attention.plan import RankPieces
from ..torch.experts.autograd import tied_to_parameters
from ..torch.experts.copies import Copies, checked_copies
from ..torch.experts.device_copies import copies_for
from ..torch.experts.grouped import ends_within
from ..torch.moe import EPAll2AllLayer, EPAllToAllLayoutDesc
from ..torch.world import kept_for, world_of
from ..world import agree_on


def shared_layer(
    group: Any,
    rows: torch.Tensor,
    topk: int,
    num_experts: int,
    who: str,
    max_tokens: Optional[int] = None,
    *,
    grows: bool = False,
    copied: Optional[CopiedExperts] = None,
) -> EPAll2AllLayer:
    """The layer of a process group for rows of this width, dtype and device; ids -1 go nowhere. It
    is made if there is none, which is collective.

    :param max_tokens: tokens of a rank, the same on all; None: those of the first call
    :param grows: all ranks have as many tokens, so that one with room for more can be made
    :param copied: experts that have copies on other ranks
    """
    layers = kept_for(group)
    plan = () if copied is None else copied.plan
    key = (EPAll2AllLayer, rows.shape[1], topk, num_experts, rows.dtype, rows.device, plan)
    layer: Optional[EPAll2AllLayer] = layers.get(key)
    tokens = rows.shape[0]
    if layer is not None and (tokens <= layer.max_tokens or not grows):
        if tokens > layer.max_tokens:
            raise InvalidArgument(
                f"{who}: {tokens} tokens on rank {layer.rank}, expected at most {layer.max_tokens},"
                " as in the first call: say max_tokens before it"
            )
        return layer
    if max_tokens is not None and tokens > max_tokens:
        raise InvalidArgument(f"{who}: {tokens} tokens, expected at most max_tokens = {max_tokens}")
    world = world_of(group, None, None if rows.is_cuda else "cpu", who)
    spare = {} if copied is None else copied.agreed_options(world)
    try:
        with said_by(who):
            layer = layers[key] = EPAll2AllLayer(
                world, max(max_tokens or tokens, 1), rows.shape[1], topk, world.rank, num_experts,
                world.topology.ranks_per_node, world.world_size, rows.dtype, torch.float32,
                dropped_id=-1, **spare,
            )  # fmt: skip
    except InvalidArgument as error:
        if max_tokens is None:
            error.args = (
                f"{who}: ranks that have other numbers of tokens in the first call need max_tokens,"
                f" the same on all, said before it: {error}",
            )
        raise
    return layer


def to_experts(
    group: Any,
    tokens: Tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_experts: int,
    who: str,
    max_tokens: Optional[int],
    copied: Optional[CopiedExperts],
    training: bool,
    *,
    grows: bool = False,
) -> Tuple[EPAll2AllLayer, torch.Tensor, torch.Tensor, EPAllToAllLayoutDesc]:
    """Collective: the layer of a group, which brought rows, weights and layout of these tokens, ids
    and weights.
    """
    rows, ids, weights = tokens
    layer = shared_layer(
        group, rows, ids.shape[1], num_experts, who, max_tokens, grows=grows, copied=copied
    )
    present = None if copied is None else copied.before_dispatch(layer, training)
    came, came_weights, layout = layer.dispatch(rows, ids, weights, present=present)
    assert came_weights is not None
    return layer, came, came_weights, layout


class CopiedExperts:
    """Experts of a layer of a framework, with copies of the hot ones on other ranks.

    :param experts: a module of (rows, ends, *weights), as ExpertParallel takes them
    :param options: ``spare_experts``, ``limit``, ``min_rows`` and ``keep_copies`` of ExpertParallel
    """

    def __init__(self, experts: torch.nn.Module, options: Mapping[str, Any], who: str) -> None:
        unknown = [name for name in options if name not in COPY_OPTIONS]
        if unknown:
            raise InvalidArgument(
                f"{who}: got the option {unknown[0]!r}, expected some of {list(COPY_OPTIONS)}"
            )
        self._experts, self._who = experts, who
        self._options = {**COPY_OPTIONS, **options}
        if self._options["spare_experts"] == 0:
            raise InvalidArgument(
                f"{who}: spare_experts = 0, expected 1 or more; without copies Waybill's dispatcher"
                " alone is enough"
            )
        #: Layers of other plans are others.
        self.plan = tuple(self._options[name] for name in ("spare_experts", "limit", "min_rows"))
        self._copies: Optional[Copies] = None

    def agreed_options(self, world: World) -> Dict[str, Any]:
        """Collective: the layer's options."""
        found: Dict[str, Any] = {}

        def check() -> Mapping[str, Any]:
            given = {**self._options, "layer": None, "experts": self._experts, "world": world}
            found.update(checked_copies(**given))
            return self._options

        with said_by(self._who):
            agree_on(world, self._who, check)
        return found

    def before_dispatch(self, layer: EPAll2AllLayer, training: bool) -> Any:
        """Collective where copies are kept, and the first time: what ``present`` is."""
        if self._copies is None:
            with said_by(self._who):
                keep = bool(self._options["keep_copies"])
                (self._copies,) = copies_for(self._experts, layer, keep)
        return self._copies.before_dispatch(self._experts, layer, training)

    @outside_graphs
    def run(
        self, layer: EPAll2AllLayer, layout: Any, rows: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """Collective where there are copies: the outputs of this rank's slots."""
        assert self._copies is not None
        ends = ends_within(layout.recv_expert_offsets, layer.fixed_rows)
        with said_by(self._who):
            outputs = self._copies.run(self._copies.begin(layer, layout), rows, ends, weights)
        return tied_to_parameters(outputs, self._experts, rows, weights[0] if weights else None)

    def memory(self) -> Dict[str, int]:
        """As of ``ExpertParallel.memory``, after the first call."""
        return {} if self._copies is None else self._copies.memory()


#: Options of copies, as of ExpertParallel, with what they are unless they are given.
COPY_OPTIONS = {"spare_experts": 1, "limit": 1.02, "min_rows": 128, "keep_copies": False}


class Pieces:
    """The pieces that all ranks hold of one batch, and the plan of each kind of layer, made when it
    is first asked for. Keep it as long as the batch is in use: it is what a checkpoint asks again.
    """

    def __init__(self, pieces: List[Any]) -> None:
        self.pieces = pieces
        self._plans: weakref.WeakKeyDictionary[ContextParallelAttention, BatchPlan] = (
            weakref.WeakKeyDictionary()
        )

    @outside_graphs
    def attend(
        self, ranks: SharedRanks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, who: str,
        options: Mapping[str, Any], *, return_lse: bool = False, **given: Any,
    ) -> Any:  # fmt: skip
        """Collective: attention of the batch, by the ranks' module for these rows and its plan."""
        attention = ranks.attention(q, k, v, who, options, **given)
        plan = self._plans.get(attention)
        if plan is None:
            plan = self._plans[attention] = attention.plan(self.pieces)
        with said_by(who):
            return attention(plan, q, k, v, return_lse)

    def __deepcopy__(self, memo: Any) -> Pieces:
        return self

    def __reduce__(self) -> Tuple[Any, ...]:
        return Pieces, (self.pieces,)


class SharedRanks:
    """The ranks of a process group, and the modules that they made."""

    def __init__(self, group: Any, device: Any) -> None:
        kind = None if device is None else torch.device(device).type
        self.world: World = world_of(group, None, "cpu" if kind == "cpu" else None, "SharedRanks")
        self.rank, self.world_size = int(self.world.rank), int(self.world.world_size)
        self._exchange: Optional[PieceExchange] = None
        self._modules: Dict[Any, ContextParallelAttention] = {}

    @classmethod
    def of(cls, ranks: Any, device: Any, who: str) -> SharedRanks:
        """The ranks of a process group, a DeviceMesh of one dimension, or None for the default
        group; collective the first time, which says where rows are.
        """
        group = group_of(ranks, who, "ranks")
        place = require_device(device, f"{who}: device")
        kept = kept_for(group)
        found: Optional[SharedRanks] = kept.get(cls)
        if found is None:
            found = kept[cls] = cls(group, place)
        return found

    def gather(self, held: RankPieces, who: str, wrong: Optional[Error] = None) -> Pieces:
        """Collective, tiny: what all ranks hold; what one has ``wrong`` is raised on all."""
        if self._exchange is None:
            self._exchange = PieceExchange(self.world)
        return Pieces(self._exchange.gather(held, who, wrong))

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, who: str,
        options: Mapping[str, Any], **given: Any,
    ) -> ContextParallelAttention:  # fmt: skip
        """The module for heads, sizes and dtype of these rows; made if there is none, which is
        collective.

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


# All but those that rows say themselves.
_OPTIONS = [
    name
    for name, parameter in inspect.signature(ContextParallelAttention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("dtype", "latent_dim", "device", "timeout_s")
]

_of_tensors: Any = WeakTensorKeyDictionary()


def pieces_of(cu_seqlens: torch.Tensor, ranks: SharedRanks, make: Callable[[], Pieces]) -> Pieces:
    """The pieces that were made for a batch, which its tensor of offsets stands for: all layers and
    a checkpoint get the same.
    """
    known = _of_tensors.get(cu_seqlens)
    if known is None or known[0] != (cu_seqlens._version, ranks):
        known = _of_tensors[cu_seqlens] = ((cu_seqlens._version, ranks), make())
    return known[1]
