"""The layers that serve a buffer, and what dispatches give for the calls that come after them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Dict, NamedTuple, Optional, Tuple, TypeVar

import torch

from ..._graphs import outside_graphs
from ..._lifetime import OfThisProcess
from ...errors import InvalidArgument, Unsupported
from ...torch.moe import EPAll2AllLayer
from ...world import World
from .arguments import Call, occurrences
from .events import Queue

_MOST_RANKS = 32  # topk slots of a token in a layer


class LayerKey(NamedTuple):
    """The key of a layer. Two with the same key are the same layer."""

    kind: str  #: payload; "floats": columns of float32
    hidden: int
    max_tokens: int
    num_experts: int  #: experts of all ranks; the number of ranks where only those matter
    topk: int
    fixed_rows: int
    alignment: int = 1  #: rows of an expert are padded to a multiple
    max_per_expert: Optional[int] = None  #: topk slots of an expert that a rank may have


class Layers:
    """Makes layers when they are first needed, which is collective, as the calls are."""

    def __init__(self, world: World, who: str) -> None:
        topology = world.topology
        if topology.num_nodes > 1:
            raise Unsupported(
                f"{who}: the group has {topology.num_nodes} nodes, expected one: the interface of"
                " several nodes is not served; EPAll2AllLayer serves several"
            )
        if world.world_size > _MOST_RANKS:
            raise Unsupported(
                f"{who}: the group has {world.world_size} ranks, expected at most {_MOST_RANKS}"
            )
        self.world, self.rank, self.num_ranks = world, world.rank, world.world_size
        self.device = torch.device(world.device)
        self.queue = Queue(self.device, who)
        self._who, self._is_open = who, True
        self._made: Dict[LayerKey, EPAll2AllLayer] = {}

    def call(self, name: str) -> Call:
        """A call of the buffer, whose layers are still there."""
        call = Call(f"{self._who}.{name}", self.rank, self.device)
        if not self._is_open:
            raise InvalidArgument(f"{call.who}: the buffer of rank {self.rank} was destroyed")
        return call

    def of_ranks(self, kind: str, hidden: int, max_tokens: int) -> LayerKey:
        """A layer whose experts are the ranks, with room for all tokens of all ranks."""
        ranks = self.num_ranks
        return LayerKey(kind, hidden, max_tokens, ranks, ranks, ranks * max_tokens)

    def get(self, key: LayerKey, num_sms: int) -> EPAll2AllLayer:
        """The layer, which is made if it is not there; ``num_sms`` count then."""
        layer = self._made.get(key)
        if layer is None:
            layer = self._made[key] = self._make(key, num_sms)
        return layer

    def _make(self, key: LayerKey, num_sms: int) -> EPAll2AllLayer:
        world = self.world
        dtype = torch.float32 if key.kind == "floats" else torch.bfloat16
        try:
            return EPAll2AllLayer(
                world, key.max_tokens, key.hidden, key.topk, world.rank, key.num_experts,
                world.world_size, world.world_size, dtype, torch.float32, num_sms, dropped_id=-1,
                expert_alignment=key.alignment,
                payload="plain" if key.kind == "floats" else key.kind, fixed_rows=key.fixed_rows,
                copy_out=False, max_per_expert=key.max_per_expert,
            )  # fmt: skip
        except InvalidArgument as error:
            error.args = (
                f"{self._who}: no windows for this call, in which ranks must have the same bytes,"
                f" hidden, num_topk, num_experts, most tokens and kind of payload: {error}",
            )
            raise

    def destroy(self, explicitly: bool) -> None:
        """Collective: gives the symmetric memory of all of them back. Twice does nothing."""
        if not explicitly:
            raise InvalidArgument(
                f"{self._who}.destroy: the buffer was made with explicitly_destroy = False,"
                " expected True"
            )
        self._is_open = False
        for layer in self._made.values():
            layer.finalize()
        self._made.clear()


_T = TypeVar("_T")


def reads_handle(function: Callable[..., _T]) -> Callable[..., _T]:
    """For methods of a handle: the function reads, on the caller's stream, memory that the buffer's
    stream may use again once the handle is gone.
    """

    @functools.wraps(function)
    def read(self: Any, *args: Any) -> _T:
        value = function(self, *args)
        self.queue.note_reads()
        return value

    return outside_graphs(read)


class _Handle(OfThisProcess, Sequence[Any]):
    """A sequence whose entries are made when they are asked for: few callers look into one.

    It holds its buffer's world and is in no cycle of references: Python would end such a world at
    any time, in any thread, and giving memory back waits for the kernels of other ranks on the GPU.
    """

    _why_not_copied = "what one rank's buffer knows of a dispatch: each dispatch gives one"
    _makers: ClassVar[Tuple[Callable[[Any], Any], ...]]

    def __init__(self, owner: Any) -> None:
        self._owner = owner  # the part of a buffer that made it
        self._entries: Dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._makers)

    @property
    def queue(self) -> Queue:
        """The queue of its buffer."""
        return self._owner.queue

    @reads_handle
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        place = range(len(self))[index]
        if place not in self._entries:
            self._entries[place] = self._makers[place](self)
        return self._entries[place]


class Received(NamedTuple):
    """Results of a dispatch on one rank; the caller gets the tensors among them."""

    x: torch.Tensor  #: [rows, hidden]; low latency [local experts, slots, hidden]
    scales: Optional[torch.Tensor]
    topk_idx: Optional[torch.Tensor]
    topk_weights: Optional[torch.Tensor]
    counts: Any  #: rows of each local expert: a list, or low latency a tensor of int32
    handle: Any

    @property
    def rows(self) -> Any:
        """Rows, with their scales if they have some."""
        return self.x if self.scales is None else (self.x, self.scales)


class DispatchHandle(_Handle):
    """The handle of ``Buffer.dispatch``: rank_prefix_matrix [ranks, ranks] (tokens of ranks 0..i
    that rank j gets), channel_prefix_matrix and recv_channel_prefix_matrix [ranks, 1] (there is one
    channel), recv_src_idx [rows] (the row's token at its source), is_token_in_rank [tokens, ranks],
    send_head [tokens, ranks] (the token's place among those for a rank, -1).
    """

    num_rows: Optional[int] = None  #: that arrived; None: only the device knows

    def __init__(self, owner: Any, is_token_in_rank: torch.Tensor, ids: torch.Tensor) -> None:
        self.is_token_in_rank = is_token_in_rank
        self.ids = ids  #: [tokens, ranks]: the rank, or -1
        self.rows_out = 0  #: rows of the tensors that the caller got
        self.layouts: Dict[LayerKey, Any] = {}  #: the layouts of layers that have seen this routing
        super().__init__(owner)

    @property
    def key(self) -> LayerKey:
        """The layer that moved the rows."""
        return next(key for key in self.layouts if key.kind != "floats")

    def layout(self) -> Any:
        """The layout of any of the layers."""
        return next(iter(self.layouts.values()))

    def counts(self) -> torch.Tensor:
        """[ranks, ranks]: tokens of rank i for rank j."""
        ranks = self.ids.shape[1]
        return self.layout()._table("splits")[:, :ranks]

    def prefix(self) -> torch.Tensor:
        """[ranks, ranks] int32."""
        return self.counts().cumsum(0, dtype=torch.int32)

    def _send_head(self) -> torch.Tensor:
        inside = self.is_token_in_rank
        places = inside.cumsum(0, dtype=torch.int32) - 1
        return places.masked_fill(~inside, -1)

    _makers = (
        prefix,
        lambda self: self.counts()[self._owner.rank][:, None].clone(),
        lambda self: torch.zeros_like(self[1]),
        lambda self: self.layout().recv_tags[: self.rows_out, 1].clone(),
        lambda self: self.is_token_in_rank,
        _send_head,
    )


class LowLatencyHandle(_Handle):
    """The handle of ``Buffer.low_latency_dispatch``: src_info [local experts, slots] int32 (the
    row's token at its source, -1), layout_range [local experts, ranks] int64 (first slot << 32 |
    count of the rows of a rank), num_max_dispatch_tokens_per_rank, hidden, num_experts.
    """

    def __init__(self, owner: Any, layout: Any, slots: torch.Tensor, key: LayerKey) -> None:
        self.layout, self.key = layout, key
        self.slots = slots  #: [rows of the layer]: place among [experts * slots], or after them
        self.buffer: Optional[torch.Tensor] = None  #: get_next_low_latency_combine_buffer
        self.ids: Optional[torch.Tensor] = None  #: in host memory, where combine compares them
        self.num_local = key.num_experts // owner.num_ranks
        self.num_slots = key.max_tokens * owner.num_ranks
        super().__init__(owner)

    def _tags(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Tags and slots of the rows that came, and perhaps of others after them."""
        tags = self.layout.recv_tags
        return tags[: self.slots.shape[0]], self.slots[: tags.shape[0]]

    def _src_info(self) -> torch.Tensor:
        tags, slots = self._tags()
        size = self.num_local * self.num_slots
        info = torch.full((size + 1,), -1, dtype=torch.int32, device=tags.device)
        info[slots] = tags[:, 1].contiguous()
        return info[:size].view(self.num_local, self.num_slots)

    def _ranges(self) -> torch.Tensor:
        tags, slots = self._tags()
        size, ranks = self.num_local * self.num_slots, self._owner.num_ranks
        places = (slots // self.num_slots) * ranks + tags[:, 0]
        places = torch.where(slots < size, places, self.num_local * ranks)
        counts = occurrences(places, self.num_local * ranks, torch.int64)
        counts = counts.view(self.num_local, ranks)
        first = counts.cumsum(1) - counts
        return (first << 32) | counts

    _makers = (
        _src_info,
        _ranges,
        lambda self: self.key.max_tokens,
        lambda self: self.key.hidden,
        lambda self: self.key.num_experts,
    )
