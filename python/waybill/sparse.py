"""Routing in sparse form: linear in shards and copies, and what a SequenceDispatcher takes."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Optional

from . import _core
from ._arrays import IntArray, int64
from ._copies import Unchanging
from .errors import InvalidArgument
from .metadata import Metadata

__all__ = ["QkvRouting", "RankAttention", "SparseMetadata"]


class SparseMetadata(Unchanging):
    """Which rows of one tensor go where, in one direction, without padding. Immutable.

    Lines are shards, grouped by sending rank, in the order of their rows there. Offsets and lengths
    are tokens. Tables are read-only views.
    """

    __slots__ = ("_min_rows", "_name", "_relay", "_routing", "_table")
    _table: _core.SparseMetadata
    _relay: Any  # the compiled AttentionPlan whose relay schedule these rows may follow, or None
    _routing: Optional[QkvRouting]  # whose table it is, under _name; None of from_dense
    _name: str
    _min_rows: int  # for which windows have room in any case

    def __init__(self) -> None:
        raise InvalidArgument(
            "SparseMetadata: got a constructor call, expected QkvPlan.to_routing() or"
            " SparseMetadata.from_dense(metadata)"
        )

    @classmethod
    def _wrap(
        cls,
        table: _core.SparseMetadata,
        routing: Optional[QkvRouting] = None,
        name: str = "",
        relay: Any = None,
    ) -> SparseMetadata:
        self = cls.__new__(cls)
        self._table, self._relay = table, relay
        self._routing, self._name, self._min_rows = routing, name, 0
        return self

    def with_room(self, rows: int) -> SparseMetadata:
        """The same, for which every rank's window has at least so many rows: plans of several
        tensors then put them at the same places, as a CUDA graph wants that replays them.
        """
        number = int64(rows, "SparseMetadata.with_room: rows")
        if not 0 <= number < 2**44:
            raise InvalidArgument(
                f"SparseMetadata.with_room: rows = {number}, expected 0..2^44 - 1"
            )
        roomy = self._wrap(self._table, self._routing, self._name, self._relay)
        roomy._min_rows = number
        return roomy

    @classmethod
    def from_dense(cls, metadata: Metadata) -> SparseMetadata:
        """The entries of ``metadata`` that move something; not of a slice."""
        if not isinstance(metadata, Metadata):
            raise InvalidArgument(
                f"SparseMetadata.from_dense: metadata is a {type(metadata).__name__}, expected a"
                " waybill.Metadata"
            )
        return cls._wrap(_core.to_sparse(metadata._fields()))

    def to_dense(self) -> Metadata:
        """The dense form, without the mask of copies that come back: QkvPlan.to_metadata has it."""
        return Metadata._from_fields(_core.to_dense(self._table))

    @property
    def world_size(self) -> int:
        """Number of ranks, W."""
        return self._table.world_size

    @property
    def rank_offsets(self) -> IntArray:
        """(W + 1,): rank w sends lines [o[w], o[w + 1])."""
        return self._table.rank_offsets

    @property
    def seq_len(self) -> IntArray:
        """(lines,): rows of the shard."""
        return self._table.seq_len

    @property
    def copy_offsets(self) -> IntArray:
        """(lines + 1,): copies of a line, or (0,) where every line has one."""
        return self._table.copy_offsets

    @property
    def dst_rank(self) -> IntArray:
        """(copies,): where the copy goes."""
        return self._table.dst_rank

    @property
    def dst_offset(self) -> IntArray:
        """(copies,): first row in the destination's buffer."""
        return self._table.dst_offset

    @property
    def num_total_recv_tokens(self) -> IntArray:
        """(W,): rows that each rank receives, its own included."""
        return self._table.recv_total

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseMetadata):
            return NotImplemented
        return self._table == other._table and self._min_rows == other._min_rows

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._min_rows:
            return operator.methodcaller("with_room", self._min_rows), (self.with_room(0),)
        if self._routing is None:
            return type(self).from_dense, (self.to_dense(),)
        return getattr, (self._routing, self._name)

    def __repr__(self) -> str:
        return (
            f"SparseMetadata(world_size={self.world_size}, lines={len(self.seq_len)},"
            f" copies={len(self.dst_rank)}, rows={int(self.seq_len.sum())})"
        )


class RankAttention(NamedTuple):
    """What one rank attends to: one entry per query shard that it received, in order, in rows."""

    shard: IntArray  #: (n,): number of the shard in the plan
    q_begin: IntArray  #: (n,): first row of the shard's queries in the rank's Q
    q_len: IntArray  #: (n,)
    kv_begin: IntArray  #: (n,): first row of its context in the rank's K and V
    kv_len: IntArray  #: (n,): rows of its context, which ends with the shard itself


class QkvRouting(Unchanging):
    """All that a step needs, in sparse form: four metadata and the attention layout. Immutable."""

    __slots__ = ("_plan", "_relay", "_routing")
    _routing: _core.Routing
    _plan: Any  # the QkvPlan or AttentionPlan of which it is
    _relay: Any

    def __init__(self) -> None:
        raise InvalidArgument("QkvRouting: got a constructor call, expected QkvPlan.to_routing()")

    @classmethod
    def _wrap(cls, routing: _core.Routing, plan: Any, relay: Any = None) -> QkvRouting:
        self = cls.__new__(cls)
        self._routing, self._plan, self._relay = routing, plan, relay
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks, W."""
        return self.fwd_q.world_size

    @property
    def kv_layout(self) -> str:
        """ "per_rank" or "per_query"."""
        return "per_query" if self._routing.per_query else "per_rank"

    @property
    def fwd_q(self) -> SparseMetadata:
        """Q to the ranks that attend to it; also the gradient of attention's output."""
        return SparseMetadata._wrap(self._routing.fwd_q, self, "fwd_q")

    @property
    def rev_q(self) -> SparseMetadata:
        """Back: attention's output, and the gradient of Q."""
        return SparseMetadata._wrap(self._routing.rev_q, self, "rev_q")

    @property
    def fwd_kv(self) -> SparseMetadata:
        """K and V; also what plan_kv_gradient takes. Of an AttentionPlan it carries the relay."""
        return SparseMetadata._wrap(self._routing.fwd_kv, self, "fwd_kv", self._relay)

    @property
    def rev_kv(self) -> SparseMetadata:
        """Copies of K and V back into planes, one per copy."""
        return SparseMetadata._wrap(self._routing.rev_kv, self, "rev_kv")

    def attention(self, rank: int) -> RankAttention:
        """The query shards that a rank received, and where their rows and contexts lie."""
        number = int64(rank, "QkvRouting.attention: rank")
        if not 0 <= number < self.world_size:
            raise InvalidArgument(
                f"QkvRouting.attention: rank = {number}, expected 0..{self.world_size - 1}"
            )
        return RankAttention(*self._routing.attention_of(number))

    def __reduce__(self) -> tuple[Any, ...]:
        # Smaller than its tables, which follow from it.
        return operator.methodcaller("to_routing"), (self._plan,)

    def __repr__(self) -> str:
        return (
            f"QkvRouting(world_size={self.world_size}, kv_layout={self.kv_layout!r},"
            f" shards={len(self.fwd_q.seq_len)}, kv_copies={len(self.fwd_kv.dst_rank)})"
        )


def relay_of(value: Any) -> Any:
    """The compiled AttentionPlan with the relay schedule of metadata, or None."""
    return value._relay if isinstance(value, SparseMetadata) else None


def room_of(value: Any) -> int:
    """Rows for which windows have room in any case."""
    return value._min_rows if isinstance(value, SparseMetadata) else 0


def sparse_table(value: Any, who: str) -> Any:
    """The compiled part's table of metadata in either form."""
    if isinstance(value, SparseMetadata):
        return value._table
    if isinstance(value, Metadata):
        return SparseMetadata.from_dense(value)._table
    raise InvalidArgument(
        f"{who}: got a {type(value).__name__}, expected SparseMetadata (as of QkvPlan.to_routing())"
        " or Metadata"
    )
