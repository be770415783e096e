"""Dispatch plans: which shard of which document lives where, and which rank attends to it."""

from __future__ import annotations

import os
from typing import Any, Optional, Sequence, Union

from . import _core, _html, _plot
from ._arrays import AnyArray, IntArray, flat_list, int64
from ._copies import Unchanging
from ._errors import said_by
from ._files import json_text, kept
from .layouts import QkvMetadata, RawQkvDispatch, attention_layout
from .metadata import Metadata
from .sparse import QkvRouting

__all__ = ["QkvPlan"]

KV_LAYOUTS = ("per_rank", "per_query")
MASKS = ("causal", "full")


class QkvPlan(Unchanging):
    """A dispatch plan in sparse form; everything else is computed from it. Immutable.

    Shards are numbered rank by rank, in the order of their rows. A document is a list of shards in
    the order of its tokens; they may lie on different ranks. Under a causal mask the query shard at
    position q of its document needs the KV shards at positions kv_begin..q, under a full mask all.

    Args:
        world_size: W.
        rank_shard_offsets: (W + 1,), rank w has shards [o[w], o[w + 1]).
        shard_len: (N,), tokens.
        q_dst: (N,), the rank that attends to the shard's queries.
        doc_shard_offsets: (D + 1,), into doc_shards.
        doc_shards: (N,), shards, document by document.
        kv_begin: (N,) by shard, first KV position that it needs; None is 0 for all.
        kv_layout: "per_rank", one copy of KV a rank and document; or "per_query", DistCA's.
        mask: "causal"; "full", without kv_begin: every query meets all keys of its document.
    """

    __slots__ = ("_plan",)

    def __init__(
        self,
        world_size: int,
        rank_shard_offsets: Sequence[int],
        shard_len: Sequence[int],
        q_dst: Sequence[int],
        doc_shard_offsets: Sequence[int],
        doc_shards: Sequence[int],
        kv_begin: Optional[Sequence[int]] = None,
        kv_layout: str = "per_rank",
        mask: str = "causal",
    ) -> None:
        tables = {
            "rank_shard_offsets": rank_shard_offsets, "shard_len": shard_len, "q_dst": q_dst,
            "doc_shard_offsets": doc_shard_offsets, "doc_shards": doc_shards,
            "kv_begin": [] if kv_begin is None else kv_begin,
        }  # fmt: skip
        lists = {name: flat_list(table, f"QkvPlan: {name}") for name, table in tables.items()}
        with said_by("QkvPlan"):
            self._plan = _core.make_plan(world_size, **lists, kv_layout=kv_layout, mask=mask)

    @classmethod
    def _wrap(cls, plan: _core.Plan) -> QkvPlan:
        self = cls.__new__(cls)
        self._plan = plan
        return self

    @classmethod
    def from_json(cls, text: Union[str, os.PathLike[str]]) -> QkvPlan:
        """From a text of format ``waybill.plan``, or from a file that holds one."""
        return cls._wrap(_core.plan_from_json(*json_text(text, "QkvPlan.from_json")))

    def to_json(
        self, path: Union[str, os.PathLike[str], None] = None, compact: bool = False
    ) -> str:
        """The text of format ``waybill.plan``; also written to ``path`` when one is given."""
        return kept(self._plan.to_json(compact), path)

    @property
    def world_size(self) -> int:
        """Number of ranks, W."""
        return self._plan.world_size

    @property
    def kv_layout(self) -> str:
        """ "per_rank" or "per_query"."""
        return self._plan.kv_layout

    @property
    def mask(self) -> str:
        """ "causal" or "full"."""
        return self._plan.mask

    @property
    def rank_shard_offsets(self) -> IntArray:
        """(W + 1,): rank w has shards [o[w], o[w + 1]). Read-only, as all tables."""
        return self._plan.rank_shard_offsets

    @property
    def shard_len(self) -> IntArray:
        """(N,): tokens."""
        return self._plan.shard_len

    @property
    def q_dst(self) -> IntArray:
        """(N,): the rank that attends to the shard's queries."""
        return self._plan.q_dst

    @property
    def doc_shard_offsets(self) -> IntArray:
        """(D + 1,): into doc_shards."""
        return self._plan.doc_shard_offsets

    @property
    def doc_shards(self) -> IntArray:
        """(N,): shards, document by document."""
        return self._plan.doc_shards

    @property
    def kv_begin(self) -> IntArray:
        """(N,) first KV position that each shard needs, or (0,) for all 0."""
        return self._plan.kv_begin

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
        """(W,): (query, key) pairs that each rank attends to under the mask."""
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
        """The same in sparse form: what a SequenceDispatcher takes. num_threads 0: all cores."""
        threads = int64(num_threads, "QkvPlan.to_routing: num_threads")
        return QkvRouting._wrap(_core.compute_qkv_routing(self._plan, threads), self)

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

    def plot_traffic(self, ax: Any = None) -> Any:
        """Draws the rows of Q and KV between ranks as a heat map; returns the axes."""
        q, kv = self.traffic()
        return _plot.heat_map(q + kv, ax, "rows sent", "receiving rank", "sending rank")

    def plot_load(self, ax: Any = None) -> Any:
        """Draws the work of every rank; returns the axes."""
        return _plot.bars({"(query, key) pairs": self.work}, ax, "work")

    def __eq__(self, other: object) -> bool:
        return self._plan == other._plan if isinstance(other, QkvPlan) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.world_size, self.rank_shard_offsets, self.shard_len, self.q_dst,
            self.doc_shard_offsets, self.doc_shards, self.kv_begin, self.kv_layout, self.mask,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"QkvPlan(world_size={self.world_size}, documents={self.num_documents},"
            f" shards={self.num_shards}, tokens={int(self.shard_len.sum())},"
            f" kv_layout={self.kv_layout!r}, imbalance={self.imbalance:.3f}"
            f"{', mask=' + repr(self.mask) if self.mask != 'causal' else ''})"
        )

    def _repr_html_(self) -> str:
        caption = (
            f"Plan: {_html.count(self.world_size)} ranks, {_html.count(self.num_documents)}"
            f" documents, {_html.count(self.num_shards)} shards,"
            f" {_html.count(self.shard_len.sum())} tokens; max / mean work {self.imbalance:.3f};"
            f" KV {self.kv_layout}"
        )
        return _html.plan_html(self.work, self.traffic(), caption)
