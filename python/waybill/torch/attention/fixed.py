"""Tables of one size for plans of many batches: what a CUDA graph holds and replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Tuple

import numpy as np
import torch

from ..._arrays import instance, number, within
from ...errors import InvalidArgument
from ...plans import SparseMetadata
from ...routing import compute_metadata
from .._tensors import require_rows
from ..kernels import AttentionKernel, AttentionShape, Sequences
from ..sequence_dispatcher import SequenceDispatcher
from .moves import WHO, Call, Moves, SideStream, put_rows, with_gaps
from .plan import BatchPlan
from .step import RankStep

_CHUNK_BYTES = 8192  # as the dispatcher cuts rows
_TABLES = ("fwd_q", "rev_q", "fwd_kv", "sum_kv")
_CALLS = ("qkv", "out", "out and lse", "grad", "dq", "sums")


class Capacities(NamedTuple):
    """For how much there is room on each rank, in every plan of a FixedPlan."""

    max_rows: int  #: that a rank holds: q, k and v have so many
    max_seqlen: int  #: queries or keys of a sequence
    max_sequences: int  #: sequences of a call of the kernel, and the gaps between them
    max_q_rows: int  #: rows of Q that a rank sends to others, or gets from them
    max_kv_rows: int  #: rows of K and V that a rank gets
    max_copies: int  #: copies of pieces of rows that a rank sends, or forwards
    #: batches of K and V that a rank sends or forwards, where ranks forward; 0: none does
    max_batches: int = 0

    @classmethod
    def of(cls, *plans: BatchPlan) -> Capacities:
        """The needs of these plans, the largest of each."""
        if not plans:
            raise InvalidArgument("Capacities.of: got no plans, expected one or more")
        for i, plan in enumerate(plans):
            instance(plan, BatchPlan, f"Capacities.of: plans[{i}]", "a BatchPlan")
        return cls(*(max(needs) for needs in zip(*(_needs(plan) for plan in plans))))

    def scaled(self, factor: float) -> Capacities:
        """Capacities times ``factor``, rounded up."""
        times = number(factor, "Capacities.scaled: factor")
        if not 0 < times < 2**31:
            raise InvalidArgument(f"Capacities.scaled: factor = {times}, expected > 0")
        return type(self)(*(int(np.ceil(room * times)) for room in self))


def _needs(plan: BatchPlan, forwards: bool = True) -> Capacities:
    """The needs of one plan, on the rank that needs most of it: the same on all ranks.

    :param forwards: whether ranks forward, where the plan says so
    """
    routing = plan.routing()
    tables = [tuple(t.reshape(-1, n) for t, n in zip(routing.rank(rank), (5, 5, 2, 2)))
              for rank in range(plan.world_size)]  # fmt: skip
    attended = np.concatenate([t for home, came, *_ in tables for t in (home, came)])
    longest = int(attended[:, (1, 3)].max(initial=1))
    most = {"sequences": 1, "q": 1, "kv": 1}
    for home, came, sent, _ in tables:
        last = home[-1] if len(home) else np.zeros(5, np.int64)
        ends = int(last[0] + last[1]), int(last[2] + last[3])
        with_between, _ = with_gaps(home[:, :4].tolist(), *ends, longest)
        most["sequences"] = max(most["sequences"], len(with_between), len(came))
        most["q"] = max(most["q"], int(came[:, 1].sum()), int(sent[:, 1].sum()))
        most["kv"] = max(most["kv"], int(came[:, 3].sum()))
    copies = max(int(_copies(getattr(routing, name)).max(initial=1)) for name in _TABLES)
    rows = max(1, *plan.home_tokens)
    forwarded, batches = _forwarded(plan) if forwards and plan.forwards else (0, 0)
    return Capacities(rows, longest, most["sequences"], most["q"], most["kv"],
                      max(copies, forwarded), batches)  # fmt: skip


def _forwarded(plan: BatchPlan) -> Tuple[int, int]:
    """(pieces, batches) of K and V that a rank sends at most, where ranks forward. Each hop that
    leaves a rank is in one batch, before which other rows may be one, and each that ends there may
    have a batch of copies.
    """
    hops = np.array(plan.tables().relay.hops(), np.int64)
    world, table = plan.world_size, plan.routing().fwd_kv
    out, into = (np.bincount(hops[:, end], minlength=world) for end in (0, 1))
    pieces = _copies(table) + out + np.bincount(table.dst_rank, minlength=world)
    return int(pieces.max()), int((2 * (out + into)).max()) + 1


def _copies(table: Any) -> Any:
    """Copies that each rank sends, one per destination."""
    begins = table.rank_offsets
    if len(table.copy_offsets):
        begins = table.copy_offsets[begins]
    return np.diff(begins)


def checked_capacities(capacities: Any, who: str) -> Capacities:
    """Capacities whose numbers make sense."""
    if not isinstance(capacities, (tuple, list)) or len(capacities) != len(Capacities._fields):
        raise InvalidArgument(
            f"{who}: capacities is a {type(capacities).__name__}, expected Capacities, as of"
            " Capacities.of(plan, ...)"
        )
    *rooms, batches = capacities
    for name, room in zip(Capacities._fields, rooms):
        within(room, 1, 2**31 - 1, f"{who}: {name}", "2^31 - 1")
    within(batches, 0, 2**20, f"{who}: max_batches", "2^20")
    return Capacities(*map(int, capacities))


class FixedRows:
    """Ranges of a rank's rows, as Rows, in tables of one size. Their other entries are other rows,
    each once, which get what they have.
    """

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self.count = min(rows, most)
        self._rows = rows
        self._numbers = torch.zeros(self.count, dtype=torch.int64, device=device)
        self._unused = torch.ones(self.count, dtype=torch.bool, device=device)

    def replace(self, table: Any) -> None:
        used = np.zeros(self._rows, bool)
        ranges = [np.arange(begin, begin + rows) for begin, rows in table.tolist()]
        numbers = np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
        used[numbers] = True
        others = np.flatnonzero(~used)[: self.count - len(numbers)]
        _copy(self._numbers, np.concatenate([numbers, others]))
        _copy(self._unused, np.arange(self.count) >= len(numbers))

    def _mask(self, like: torch.Tensor) -> torch.Tensor:
        return self._unused.view(-1, *(1,) * (like.ndim - 1))

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts the rows of ``source`` to their places."""
        kept = target.index_select(0, self._numbers)
        rows = torch.where(self._mask(target), kept, source[: self.count])
        put_rows(target, self._numbers, rows)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds them to what is there, in the wider of the two dtypes, rounded once."""
        kept = target.index_select(0, self._numbers)
        sums = kept + source[: self.count].masked_fill(self._mask(target), 0)
        put_rows(target, self._numbers, sums.to(target.dtype))


class FixedMoves(Moves):
    """Calls of the dispatcher whose tables stay where they are."""

    def __init__(
        self, routing: Any, dispatcher: SequenceDispatcher, shape: AttentionShape,
        capacities: Capacities,
    ) -> None:  # fmt: skip
        super().__init__(routing, dispatcher, shape, 0)
        self._capacities = capacities
        largest = [self._plan_of(name, self._largest(name)) for name in _CALLS]
        first = [self._plan_of(name, self._parts(name)) for name in _CALLS]
        dispatcher.reserve(*first)
        self._plans = dict(zip(_CALLS, largest))

    def replace(self, routing: Any, relay: Any) -> None:
        self._routing, self._relays = routing, {"fwd_kv": relay}
        for name, plan in self._plans.items():
            self._dispatcher.replace_plan(plan, *self._parts(name))

    def _empty(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        return super()._empty(like, self._capacities.max_rows)

    def _room(self, name: str) -> int:
        fits = self._capacities
        return fits.max_kv_rows if name.endswith("kv") else fits.max_q_rows

    def _table(self, name: str) -> SparseMetadata:
        return super()._table(name).with_room(self._room(name), self._batches(name))

    def _batches(self, name: str) -> int:
        """Only K and V are forwarded: sums are made at home."""
        return self._capacities.max_batches if name == "fwd_kv" else 0

    def _largest(self, name: str) -> list[Tuple[Any, ...]]:
        """Parts with the most copies and rows that the capacities allow: their memory is enough for
        all plans. They are never sent.
        """
        world, copies = self._dispatcher.world.world_size, self._capacities.max_copies
        parts = []
        for table, formats in self._formats(name):
            least = min(max(1, f.hidden * f.dtype.itemsize) for f in formats)
            rows = self._room(table) * (world if table.endswith("kv") else 1)
            length = -(-rows // copies) + max(1, _CHUNK_BYTES // least)
            receivers = np.tile((np.arange(world)[:, None] + 1) % world, (1, copies))
            forward, _ = compute_metadata(np.full((world, copies), length), receivers)
            sparse = SparseMetadata.from_dense(forward)
            parts.append((sparse.with_room(0, self._batches(table)), *formats))
        return parts


class FixedStep(RankStep):
    """A rank's tables for any plan within the capacities. After the sequences of a plan come some
    that cover the other rows, queries without keys and keys without queries, and then sequences of
    no rows.
    """

    _moves: FixedMoves
    uploads_ahead = False  # they go on the stream of the calls

    def __init__(
        self, plan: BatchPlan, dispatcher: SequenceDispatcher, kernel: AttentionKernel,
        side: SideStream, capacities: Capacities,
    ) -> None:  # fmt: skip
        check_fits(plan, capacities)
        self.capacities = capacities
        super().__init__(plan, dispatcher, kernel, side)

    def _make_tables(self, plan: BatchPlan) -> None:
        fits, device = self.capacities, self.device
        self.rows = fits.max_rows
        self.q_rows: Any = FixedRows(self.rows, fits.max_q_rows, device)
        self.kv_rows: Any = FixedRows(self.rows, self.rows, device)
        self.moves = True  # in some plan, perhaps: also one rank sends itself rows
        #: Rows of queries and of keys, and the sequences, of what stays and of what comes.
        self._places = [
            (ends, self._cu_seqlens(ends))
            for ends in ((self.rows, self.rows), (fits.max_q_rows, fits.max_kv_rows))
        ]
        self._moves = FixedMoves(plan.routing(), self.dispatcher, self.shape, fits)
        self.replace(plan)

    def _cu_seqlens(self, ends: Tuple[int, int]) -> list[torch.Tensor]:
        fits = self.capacities
        most = fits.max_sequences + sum(-(-rows // fits.max_seqlen) for rows in ends)
        return [torch.zeros(most + 1, dtype=torch.int32, device=self.device) for _ in ends]

    def replace(self, plan: BatchPlan) -> None:
        relay = plan.tables().relay if check_fits(plan, self.capacities) else None
        self.planner, self.pieces = plan.planner, plan._pieces
        rank, routing = self.dispatcher.world.rank, plan.routing()
        home, came, q_rows, kv_rows = routing.rank(rank)
        self.home, self.arrived = (
            [self._call(table, *place)] for table, place in zip((home, came), self._places)
        )
        self.q_rows.replace(q_rows.reshape(-1, 2))
        self.kv_rows.replace(kv_rows.reshape(-1, 2))
        self._moves.replace(routing, relay)
        self.generation += 1

    def _call(self, table: Any, ends: Tuple[int, int], cu_seqlens: list[torch.Tensor]) -> Call:
        """The call of a plan's sequences, whose tables stay where they are."""
        longest = self.capacities.max_seqlen
        lens = with_gaps(table.reshape(-1, 5)[:, :4].tolist(), *ends, longest)
        full = [tuple(of) + (0,) * (len(cu_seqlens[0]) - 1 - len(of)) for of in lens]
        for device_table, lengths in zip(cu_seqlens, full):
            _copy(device_table, np.cumsum((0, *lengths), dtype=np.int32))
        cu_q, cu_k = cu_seqlens
        sequences = Sequences(cu_q, cu_k, longest, longest, full[0], full[1])
        return Call(slice(0, ends[0]), slice(0, ends[1]), sequences, self.shape)

    def prepare(self) -> None:
        """All is there."""


class FixedPlan:
    """A plan in tables of one size at fixed places, made by ContextParallelAttention.fixed_plan,
    and given to calls in place of a BatchPlan. ``replace`` puts the plan of another batch there: a
    CUDA graph that was captured with it replays the new one.
    """

    __slots__ = ("_owner", "_step", "plan")
    plan: BatchPlan  #: that is there now

    def __init__(self, owner: Any, step: FixedStep, plan: BatchPlan) -> None:
        self._owner, self._step, self.plan = owner, step, plan

    @property
    def capacities(self) -> Capacities:
        """The capacities that it has room for."""
        return self._step.capacities

    def replace(self, plan: BatchPlan) -> None:
        """Puts another plan there, queued on the current stream: that of the calls, or of the
        graph. Backward passes of the old one must have been queued before.

        Raises InvalidArgument, on all ranks and with nothing changed, for a plan that does not fit,
        naming the capacity.
        """
        self._owner._check_planner(plan)
        self._step.replace(plan)
        self.plan = plan

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with zeros after its rows, up to max_rows."""
        require_rows(tensor, "FixedPlan.padded: tensor")
        missing = self.capacities.max_rows - tensor.shape[0]
        if missing < 0:
            raise InvalidArgument(
                f"FixedPlan.padded: got {tensor.shape[0]} rows, expected at most max_rows ="
                f" {self.capacities.max_rows}"
            )
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])

    def __repr__(self) -> str:
        return f"FixedPlan({self.plan}, {self.capacities})"


def check_fits(plan: BatchPlan, capacities: Capacities) -> bool:
    """Whether ranks forward: where the plan says so, and with "auto" only where there is room."""
    forwards, needs = plan.forwards, _needs(plan)
    if forwards and plan.planner.relay == "auto" and any(map(int.__gt__, needs, capacities)):
        forwards, needs = False, _needs(plan, False)
    for name, got, most in zip(Capacities._fields, needs, capacities):
        if got > most:
            raise InvalidArgument(f"{WHO}: the plan needs {name} = {got}, expected at most {most}")
    return forwards


def _copy(table: torch.Tensor, values: Sequence[int] | Any) -> None:
    """Writes into a table that stays where it is, after the work queued on the current stream."""
    given = torch.from_numpy(np.ascontiguousarray(values)).to(table.dtype)
    if table.device.type == "cpu":
        table.copy_(given)
    else:
        table.copy_(given.pin_memory(), non_blocking=True)
