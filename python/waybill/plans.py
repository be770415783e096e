"""Dispatch plans, their routing in sparse form, and the validator."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from . import _core, _report
from ._arrays import (
    AnyArray,
    IntArray,
    flat_list,
    index_array,
    instance,
    int64,
    json_text,
    kept,
    within,
)
from ._errors import said_by
from ._lifetime import Made, Unchanging, forwarded
from .errors import InvalidArgument
from .metadata import (
    AttnLayout,
    Metadata,
    QkvMetadata,
    RankKvLayout,
    RawQkvDispatch,
    attention_layout,
    layout_fields,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Finding", "QkvPlan", "QkvRouting", "RankAttention", "SparseMetadata", "validate"]


class SparseMetadata(Unchanging, Made):
    """Which rows of one tensor go where, in one direction, without padding. Immutable.

    Lines are shards, grouped by sending rank, in the order of their rows there. Offsets and lengths
    are tokens. Tables are read-only views.
    """

    __slots__ = ("_min_batches", "_min_rows", "_name", "_relay", "_routing", "_table")
    _table: _core.SparseMetadata
    _relay: Any  # the compiled relay schedule that these rows may follow, or None
    _routing: Optional[QkvRouting]  # whose table it is, under _name; None of from_dense
    _name: str
    _min_rows: int  # for which windows have room in any case
    _min_batches: int  # forwarded rows have room for so many batches
    _made_by = "QkvPlan.to_routing() or SparseMetadata.from_dense(metadata)"

    @classmethod
    def _wrap(
        cls, table: _core.SparseMetadata, routing: Any = None, name: str = "", relay: Any = None
    ) -> SparseMetadata:
        return cls._with(
            _table=table, _routing=routing, _name=name, _relay=relay, _min_rows=0, _min_batches=0
        )

    def with_room(self, rows: int, batches: int = 0) -> SparseMetadata:
        """This table, for which every rank's window has at least so many rows: plans of several
        tensors then put them at the same places, as a CUDA graph wants that replays them. With
        ``batches`` a plan can be replaced by one in which ranks forward rows, in up to so many
        batches per rank.
        """
        number = within(rows, 0, 2**44 - 1, "SparseMetadata.with_room: rows", "2^44 - 1")
        count = within(batches, 0, 2**20, "SparseMetadata.with_room: batches", "2^20")
        roomy = self._wrap(self._table, self._routing, self._name, self._relay)
        roomy._min_rows, roomy._min_batches = number, count
        return roomy

    @classmethod
    def from_dense(cls, metadata: Metadata) -> SparseMetadata:
        """The entries of ``metadata`` that move something; not of a slice."""
        instance(metadata, Metadata, "SparseMetadata.from_dense: metadata", "a waybill.Metadata")
        return cls._wrap(_core.to_sparse(metadata._fields()))

    def to_dense(self) -> Metadata:
        """The dense form, without the mask of copies that come back: QkvPlan.to_metadata has it."""
        return Metadata._from_fields(_core.to_dense(self._table))

    world_size: int = forwarded("_table.world_size", "Number of ranks, W.")
    rank_offsets: IntArray = forwarded(
        "_table.rank_offsets", "(W + 1,): rank w sends lines [o[w], o[w + 1])."
    )
    seq_len: IntArray = forwarded("_table.seq_len", "(lines,): rows of the shard.")
    copy_offsets: IntArray = forwarded(
        "_table.copy_offsets", "(lines + 1,): copies of a line, or (0,) where every line has one."
    )
    dst_rank: IntArray = forwarded("_table.dst_rank", "(copies,): where the copy goes.")
    dst_offset: IntArray = forwarded(
        "_table.dst_offset", "(copies,): first row in the destination's buffer."
    )
    num_total_recv_tokens: IntArray = forwarded(
        "_table.recv_total", "(W,): rows that each rank receives, its own included."
    )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseMetadata):
            return NotImplemented
        return self._table == other._table and room_of(self) == room_of(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        if any(room_of(self)):
            return operator.methodcaller("with_room", *room_of(self)), (self.with_room(0),)
        if self._routing is None:
            return type(self).from_dense, (self.to_dense(),)
        return getattr, (self._routing, self._name)

    def __repr__(self) -> str:
        return (
            f"SparseMetadata(world_size={self.world_size}, lines={len(self.seq_len)},"
            f" copies={len(self.dst_rank)}, rows={int(self.seq_len.sum())})"
        )


class RankAttention(NamedTuple):
    """The shards that one rank attends to, in rows: one entry per query shard that it received."""

    shard: IntArray  #: (n,): number of the shard in the plan
    q_begin: IntArray  #: (n,): first row of the shard's queries in the rank's Q
    q_len: IntArray  #: (n,)
    kv_begin: IntArray  #: (n,): first row of its context in the rank's K and V
    kv_len: IntArray  #: (n,): rows of its context, which holds the shard itself


class QkvRouting(Unchanging, Made):
    """All that a step needs, in sparse form: four metadata and the attention layout. Immutable."""

    __slots__ = ("_plan", "_relay", "_routing")
    _routing: _core.Routing
    _plan: Any  # the QkvPlan or AttentionPlan of which it is
    _relay: Any
    _made_by = "QkvPlan.to_routing()"

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
        number = within(rank, 0, self.world_size - 1, "QkvRouting.attention: rank")
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
    """The compiled relay schedule of metadata, or None."""
    return value._relay if isinstance(value, SparseMetadata) else None


def room_of(value: Any) -> tuple[int, int]:
    """Rows and batches for which there is room in any case."""
    return (value._min_rows, value._min_batches) if isinstance(value, SparseMetadata) else (0, 0)


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


KV_LAYOUTS = ("per_rank", "per_query")
MASKS = ("causal", "full", "prefix")


class QkvPlan(Unchanging, Made):
    """A dispatch plan in sparse form; everything else is computed from it. Immutable.

    Shards are numbered rank by rank, in the order of their rows. A document is a list of shards in
    the order of its tokens; they may lie on different ranks. A query shard needs
    the KV shards at positions [kv_begin, kv_end) of its document, itself among them.

    Args:
        world_size: W.
        rank_shard_offsets: (W + 1,), rank w has shards [o[w], o[w + 1]).
        shard_len: (N,), tokens.
        q_dst: (N,), the rank that attends to the shard's queries.
        doc_shard_offsets: (D + 1,), into doc_shards.
        doc_shards: (N,), shards, document by document.
        kv_begin: (N,) by shard, first KV position that it needs; None is 0 for all.
        kv_layout: "per_rank", one copy of KV a rank and document; or "per_query", DistCA's.
        mask: "full" stands for the kv_end with which every shard needs all of its document.
        kv_end: (N,) by shard, the position after the last that it needs, all keys of which its
            queries meet; 0: it needs none after itself, and its queries meet none after themselves.
            None: 0 for all.
    """

    __slots__ = ("_plan",)

    def __init__(
        self,
        world_size: int,
        rank_shard_offsets: Union[Sequence[int], IntArray],
        shard_len: Union[Sequence[int], IntArray],
        q_dst: Union[Sequence[int], IntArray],
        doc_shard_offsets: Union[Sequence[int], IntArray],
        doc_shards: Union[Sequence[int], IntArray],
        kv_begin: Optional[Union[Sequence[int], IntArray]] = None,
        kv_layout: str = "per_rank",
        mask: str = "causal",
        kv_end: Optional[Sequence[int]] = None,
    ) -> None:
        tables = {
            "rank_shard_offsets": rank_shard_offsets, "shard_len": shard_len, "q_dst": q_dst,
            "doc_shard_offsets": doc_shard_offsets, "doc_shards": doc_shards,
            "kv_begin": [] if kv_begin is None else kv_begin,
            "kv_end": [] if kv_end is None else kv_end,
        }  # fmt: skip
        lists = {name: flat_list(table, f"QkvPlan: {name}") for name, table in tables.items()}
        with said_by("QkvPlan"):
            self._plan = _core.make_plan(world_size, **lists, kv_layout=kv_layout, mask=mask)

    @classmethod
    def _wrap(cls, plan: _core.Plan) -> QkvPlan:
        return cls._with(_plan=plan)

    @classmethod
    def from_json(cls, text: Union[str, os.PathLike[str]]) -> QkvPlan:
        """From a text of format ``waybill.plan``, or from a file that holds one."""
        return cls._wrap(_core.plan_from_json(*json_text(text, "QkvPlan.from_json")))

    def to_json(
        self, path: Union[str, os.PathLike[str], None] = None, compact: bool = False
    ) -> str:
        """The text of format ``waybill.plan``; also written to ``path`` when one is given."""
        return kept(self._plan.to_json(compact), path)

    world_size: int = forwarded("_plan.world_size", "Number of ranks, W.")
    kv_layout: str = forwarded("_plan.kv_layout", '"per_rank" or "per_query".')
    rank_shard_offsets: IntArray = forwarded(
        "_plan.rank_shard_offsets",
        "(W + 1,): rank w has shards [o[w], o[w + 1]). Read-only, as all tables.",
    )
    shard_len: IntArray = forwarded("_plan.shard_len", "(N,): tokens.")
    q_dst: IntArray = forwarded(
        "_plan.q_dst", "(N,): the rank that attends to the shard's queries."
    )
    doc_shard_offsets: IntArray = forwarded("_plan.doc_shard_offsets", "(D + 1,): into doc_shards.")
    doc_shards: IntArray = forwarded("_plan.doc_shards", "(N,): shards, document by document.")
    kv_begin: IntArray = forwarded(
        "_plan.kv_begin", "(N,) first KV position that each shard needs, or (0,) for all 0."
    )
    kv_end: IntArray = forwarded(
        "_plan.kv_end", "(N,) position after the last that each shard needs, or (0,): see QkvPlan."
    )

    @property
    def mask(self) -> str:
        """ "full" where every shard needs all of its document, "prefix" where some queries alone
        meet keys after themselves, else "causal".
        """
        counts, ends = np.diff(self.doc_shard_offsets), self.kv_end
        if len(ends) == 0 or len(self.kv_begin) > 0:
            return "causal"
        whole = np.array_equal(ends[self.doc_shards], np.repeat(counts, counts))
        some = "prefix" if (ends == 0).any() and ends.any() else "causal"
        return "full" if whole else some

    @property
    def num_shards(self) -> int:
        """N."""
        return len(self.shard_len)

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.doc_shard_offsets) - 1

    @property
    def work(self) -> IntArray:
        """(W,): (query, key) pairs that each rank attends to, with all keys of each range. Exact
        for causal, full and prefix masks; of others whole blocks.
        """
        return self._plan.rank_work()

    @property
    def shard_work(self) -> IntArray:
        """(N,): the same by shard."""
        return self._plan.shard_work()

    @property
    def imbalance(self) -> float:
        """Largest work of a rank over the mean."""
        work = self.work
        return float(work.max() / work.mean()) if work.any() else 1.0

    def to_metadata(self, num_threads: int = 1) -> QkvMetadata:
        """Forward and reverse metadata of Q and KV, and the attention layout of every rank."""
        *tables, layout, _, _ = self._plan.to_metadata(num_threads)
        q, rev_q, kv, rev_kv = (Metadata._from_fields(table) for table in tables)
        return QkvMetadata(q, rev_q, kv, rev_kv, attention_layout(layout, True))

    def to_routing(self, num_threads: int = 1) -> QkvRouting:
        """Routing in sparse form, as a SequenceDispatcher takes it. num_threads 0: all cores."""
        threads = int64(num_threads, "QkvPlan.to_routing: num_threads")
        routing = _core.compute_qkv_routing(self._plan, threads)
        return QkvRouting._with(_routing=routing, _plan=self, _relay=None)

    def to_raw_dispatch(self, max_cp_degree: int = 1) -> RawQkvDispatch:
        """The plan in DistCA's dense form (causal plans, one KV copy per query)."""
        return RawQkvDispatch._make((*self._plan.to_raw_dispatch(max_cp_degree), ()))

    def traffic(self) -> tuple[AnyArray, AnyArray]:
        """Rows of Q and of KV: two (W, W), sending rank first, local ones on the diagonal."""
        q, kv = self._plan.traffic()
        return q.T, kv.T

    def summary(
        self, q_row_bytes: int = 8192, kv_row_bytes: int = 4096, gb_per_s: float = 0.0
    ) -> str:
        """Figures and bars in text. Bytes are those of one row; kv counts K and V together."""
        return self._plan.summary_text(q_row_bytes, kv_row_bytes, gb_per_s, True)

    def to_html(
        self,
        path: Union[str, os.PathLike[str], None] = None,
        q_row_bytes: int = 8192,
        kv_row_bytes: int = 4096,
        gb_per_s: float = 0.0,
        title: str = "Waybill report",
    ) -> str:
        """A page that stands alone in one file; also written to ``path`` when one is given."""
        return kept(self._plan.report_page(q_row_bytes, kv_row_bytes, gb_per_s, title), path)

    def plot_traffic(self, ax: Optional[Axes] = None) -> Axes:
        """Draws the rows of Q and KV between ranks as a heat map; returns the axes."""
        q, kv = self.traffic()
        return _report.heat_map(q + kv, ax, "rows sent", "receiving rank", "sending rank")

    def plot_load(self, ax: Optional[Axes] = None) -> Axes:
        """Draws the work of every rank; returns the axes."""
        return _report.bars({"(query, key) pairs": self.work}, ax, "work")

    def __eq__(self, other: object) -> bool:
        return self._plan == other._plan if isinstance(other, QkvPlan) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.world_size, self.rank_shard_offsets, self.shard_len, self.q_dst,
            self.doc_shard_offsets, self.doc_shards, self.kv_begin, self.kv_layout, "causal",
            self.kv_end,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"QkvPlan(world_size={self.world_size}, documents={self.num_documents},"
            f" shards={self.num_shards}, tokens={int(self.shard_len.sum())},"
            f" kv_layout={self.kv_layout!r}, imbalance={self.imbalance:.3f})"
        )

    def _repr_html_(self) -> str:
        caption = (
            f"Plan: {_report.count(self.world_size)} ranks, {_report.count(self.num_documents)}"
            f" documents, {_report.count(self.num_shards)} shards,"
            f" {_report.count(self.shard_len.sum())} tokens; max / mean work {self.imbalance:.3f};"
            f" KV {self.kv_layout}"
        )
        return _report.plan_html(self.work, self.traffic(), caption)


class Finding(NamedTuple):
    """One thing that is wrong. Numbers that do not apply are -1."""

    kind: str  #: "shape", "overlap", "count", ...
    table: str  #: "plan", "fwd_q", "rev_q", "fwd_kv", "rev_kv", "attention", ...
    field: str  #: "dst_offset", ...
    rank: int
    shard: int
    copy: int
    got: str
    expected: str
    text: str  #: all of it in one line

    def __str__(self) -> str:
        return str(self.text)


def validate(
    *tables: Any,
    q_capacity: Optional[int] = None,
    kv_capacity: Optional[int] = None,
    max_findings: int = 100,
) -> List[Finding]:
    """The findings; empty when all is right. Never raises for what it finds.

    Args:
        tables: one of: a QkvPlan or AttentionPlan; one Metadata; forward and reverse Metadata; the
            four metadata of Q and KV, as create_qkv_dispatch returns them, where each pair is
            checked (an attention layout may follow and is not looked at: only a plan says what
            belongs in it); a QkvPlan or AttentionPlan and the QkvMetadata of its to_metadata(),
            where everything is.
        q_capacity, kv_capacity: most rows of a rank's buffer; None is any number.
        max_findings: stop after so many.
    """
    options = (
        -1 if q_capacity is None else int64(q_capacity, "validate: q_capacity"),
        -1 if kv_capacity is None else int64(kv_capacity, "validate: kv_capacity"),
        int64(max_findings, "validate: max_findings"),
    )
    return [Finding(*found) for found in _findings(tables, options)]


def _findings(tables: Any, options: Any) -> Any:
    kinds = [type(table) for table in tables]
    metadata = [table for table in tables if isinstance(table, Metadata)]
    if len(tables) == 1 and isinstance(tables[0], QkvPlan):
        return _core.validate_plan(tables[0]._plan, options)
    if len(tables) == 1 and _is_plan(tables[0]):
        return tables[0]._validate(options[2])
    if len(tables) == 1 and len(metadata) == 1:
        return _core.validate_metadata(metadata[0]._fields(), options)
    if len(tables) == 2 and len(metadata) == 2:
        return _core.validate_pair(metadata[0]._fields(), metadata[1]._fields(), options)
    if len(tables) == 2 and _is_plan(tables[0]) and _is_qkv_metadata(tables[1]):
        plan = tables[0] if isinstance(tables[0], QkvPlan) else tables[0].to_qkv_plan()
        fwd_q, rev_q, fwd_kv, rev_kv, layout = tables[1]
        return _core.validate_all(
            plan._plan, fwd_q._fields(), rev_q._fields(), fwd_kv._fields(), rev_kv._fields(),
            _layout_arrays(layout, fwd_q._host), options,
        )  # fmt: skip
    if len(tables) in (4, 5) and len(metadata) == 4:
        q = _core.validate_pair(metadata[0]._fields(), metadata[1]._fields(), options)
        kv = _core.validate_pair(metadata[2]._fields(), metadata[3]._fields(), options)
        return [_of_pair(found, "_q") for found in q] + [_of_pair(found, "_kv") for found in kv]
    raise InvalidArgument(
        f"validate: got {[kind.__name__ for kind in kinds]}, expected a plan, one Metadata, forward"
        " and reverse Metadata, four Metadata, or a plan and its QkvMetadata"
    )


def _layout_arrays(layout: Any, host: Any) -> Any:
    """Its fields as numpy arrays and lists of them; ``host`` takes them there."""

    def array(value: Any) -> Any:
        if isinstance(value, list):
            return [array(one) for one in value]
        return index_array(host(value), "validate: attention layout")

    return tuple(array(field) for field in layout_fields(layout))


def _is_plan(value: Any) -> bool:
    """A QkvPlan, or an AttentionPlan, whose module imports this one."""
    return isinstance(value, QkvPlan) or hasattr(type(value), "_validate")


def _is_qkv_metadata(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 5
        and all(isinstance(table, Metadata) for table in value[:4])
        and isinstance(value[4], (AttnLayout, RankKvLayout))
    )


def _of_pair(found: Any, suffix: str) -> Any:
    """A finding about "fwd" or "rev" under the name of the table that the caller gave."""
    kind, table, *rest, text = found
    named = table + suffix
    return (kind, named, *rest, named + text.removeprefix(table))
