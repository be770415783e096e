"""From documents to a plan: even work, few bytes, buffers that hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, Sequence, Union

from . import _core, _report
from ._arrays import (
    IntArray,
    at_least,
    choice,
    converted,
    flag,
    flat_list,
    int64,
    json_text,
    kept,
    library_dtype_of,
    number,
    sequence,
    within,
)
from ._errors import flat_names, reworded, shown
from ._lifetime import Made, Unchanging, forwarded
from .costs import AttentionCosts, LinkSpeeds, check_speed, planned
from .errors import InvalidArgument
from .metadata import QkvMetadata
from .plans import MASKS, Finding, QkvPlan, QkvRouting, validate

__all__ = ["AttentionPlan", "RelayHop", "plan"]


class RelayHop(NamedTuple):
    """Rows [row_begin, row_begin + num_rows) of a KV shard go from one rank to another."""

    src_rank: int
    dst_rank: int
    shard: int  #: number in the plan
    stage: int  #: hops before it on the way from home: 0 from home itself
    row_begin: int  #: rows of the shard
    num_rows: int
    after: int  #: the hop, earlier in the list, that brought the rows to src_rank; -1 from home


class AttentionPlan(Unchanging, Made):
    """Which rank attends to which queries, and what that costs. From ``plan``; immutable.

    Bytes are wire bytes, forward: rows of Q that leave home, and rows of KV that other ranks need,
    once per rank and document. Backward in and out change places.
    """

    __slots__ = ("_plan",)
    _plan: _core.AttentionPlan
    _made_by = "waybill.plan(...)"

    @classmethod
    def from_json(cls, text: Union[str, os.PathLike[str]]) -> AttentionPlan:
        """From a text of format ``waybill.attention_plan``, or from a file that holds one."""
        given = json_text(text, "AttentionPlan.from_json")
        return cls._with(_plan=_core.attention_plan_from_json(*given))

    def to_json(
        self, path: Union[str, os.PathLike[str], None] = None, compact: bool = False
    ) -> str:
        """The text of format ``waybill.attention_plan``; also written to ``path`` when given."""
        return kept(self._plan.to_json(compact), path)

    work: IntArray = forwarded(
        "_plan.work",
        "(W,): what is balanced: (query, key) pairs of the mask that each rank attends to, exact, "
        "and with ``costs`` what its rows and shards take besides them, in pairs. "
        "``to_qkv_plan().work`` is pairs alone.",
    )
    home_tokens: IntArray = forwarded("_plan.home_tokens", "(W,): rows in the MLP layout.")
    attention_tokens: IntArray = forwarded(
        "_plan.attention_tokens", "(W,): rows of Q in the attention layout."
    )
    kv_tokens: IntArray = forwarded("_plan.kv_tokens", "(W,): rows of KV in the attention layout.")

    @property
    def bytes_in(self) -> IntArray:
        """(W,): from other ranks; relay does not change it."""
        return self._plan.bytes_in()

    @property
    def bytes_out(self) -> IntArray:
        """(W,): to other ranks, every row straight from home."""
        return self._plan.bytes_out(False)

    @property
    def relay_bytes_out(self) -> IntArray:
        """(W,): to other ranks when receivers forward; bytes_out where there is no relay."""
        return self._plan.bytes_out(True)

    @property
    def imbalance(self) -> float:
        """Largest work of a rank over the mean."""
        return self._plan.imbalance()

    @property
    def balanced(self) -> bool:
        """Whether imbalance is within its target, or the largest work one block from the mean."""
        return self._plan.balanced()

    @property
    def relay_hops(self) -> list[RelayHop]:
        """The relay schedule, in an order in which it can be carried out; empty without relay."""
        return [RelayHop(*hop) for hop in self._plan.relay.hops()]

    def limit_seconds(self, relay: Optional[bool] = None) -> float:
        """The least time that the links allow; with relay where there is one, unless said."""
        return self._plan.limit_seconds(not self._plan.relay.empty if relay is None else relay)

    def validate(self, max_findings: int = 100) -> list[Finding]:
        """The findings: everything is counted again from the routing; empty when all is right."""
        return validate(self, max_findings=max_findings)

    def _validate(self, max_findings: int) -> Any:
        return self._plan.validate(max_findings)

    def to_qkv_plan(self) -> QkvPlan:
        """The plan without its figures."""
        return QkvPlan._wrap(self._plan.plan)

    def to_metadata(self, num_threads: int = 1) -> QkvMetadata:
        """Forward and reverse metadata of Q and KV, and the attention layout of every rank."""
        return self.to_qkv_plan().to_metadata(num_threads)

    def to_routing(self, num_threads: int = 1) -> QkvRouting:
        """Routing in sparse form, as a SequenceDispatcher takes it, with the relay schedule."""
        routing = self.to_qkv_plan().to_routing(num_threads)
        relay = None if self._plan.relay.empty else self._plan.relay
        return QkvRouting._with(_routing=routing._routing, _plan=self, _relay=relay)

    def summary(self, gb_per_s: float = 0.0) -> str:
        """Figures and bars in text, for the rows that were planned. gb_per_s adds times."""
        return self._plan.summary_text(gb_per_s)

    def to_html(
        self,
        path: Union[str, os.PathLike[str], None] = None,
        gb_per_s: float = 0.0,
        title: str = "Waybill report",
    ) -> str:
        """A page that stands alone in one file; also written to ``path`` when one is given."""
        return kept(self._plan.report_page(gb_per_s, title), path)

    def plot_traffic(self, ax: Any = None) -> Any:
        """Draws the rows of Q and KV between ranks as a heat map; returns the axes."""
        return self.to_qkv_plan().plot_traffic(ax)

    def plot_load(self, ax: Any = None) -> Any:
        """Draws the work of every rank; returns the axes."""
        return _report.bars({"(query, key) pairs": self.work}, ax, "work")

    def __eq__(self, other: object) -> bool:
        return self._plan == other._plan if isinstance(other, AttentionPlan) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self.to_json(compact=True),)

    def __str__(self) -> str:
        return self._plan.text()

    def __repr__(self) -> str:
        return (
            f"AttentionPlan(world_size={len(self.work)}, imbalance={self.imbalance:.4f},"
            f" max_bytes_in={int(self.bytes_in.max())}, max_bytes_out={int(self.bytes_out.max())},"
            f" limit_seconds={self.limit_seconds():.3g})"
        )

    def _repr_html_(self) -> str:
        return self.to_qkv_plan()._repr_html_()


def plan(
    doc_lengths: Sequence[Any],
    world_size: int,
    tokens_per_rank: int = 65536,
    q_hidden: int = 4096,
    kv_hidden: int = 1024,
    dtype: str = "bfloat16",
    mask: str = "causal",
    window: Optional[int] = None,
    max_tokens_per_rank: Optional[int] = None,
    relay: bool = True,
    *,
    kv_layout: str = "per_rank",
    imbalance_target: float = 1.01,
    byte_weight: float = 0.0,
    block_tokens: int = 128,
    ranks_per_node: int = 8,
    nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
    network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    message_seconds: float = 0.4e-6,
    pairs_per_second: float = 0.0,
    costs: Optional[AttentionCosts] = None,
    tails: bool = False,
    chunk: Optional[int] = None,
    prefix: Optional[Union[int, Sequence[Any]]] = None,
) -> AttentionPlan:
    """Decides which rank attends to which queries, so that the work is even and few bytes move.

    Args:
        doc_lengths: tokens, each >= 1. A flat list is packed in order into the ranks, so a document
            may lie on several. A list of lists has the documents of each rank.
        world_size: ranks.
        tokens_per_rank: rows of a rank in the MLP layout; 0 lets flat documents fill all ranks
            evenly and lists have any length.
        q_hidden, kv_hidden: elements of a row of Q; of K, and of V.
        dtype: of Q, K and V: a name such as "bfloat16", or a dtype of numpy or torch.
        mask: "causal": a query attends to itself and the keys before it; "full": to its document;
            "prefix": as "causal", but the first tokens of a document all attend to each other.
        window: with "causal", the number of keys that a query attends to, its own included.
        max_tokens_per_rank: rows of Q, and rows of KV, that a rank's buffers hold: a hard limit.
        relay: receivers may forward KV to each other.
        kv_layout: "per_rank": a rank stores each KV row that it needs once; "per_query": once for
            each query shard.
        imbalance_target: the planner's target for largest work over mean work.
        byte_weight: above 0, looser targets are tried too, and the plan with the least (largest
            work / pairs_per_second + byte_weight * limit_seconds()) is taken.
        block_tokens: documents are cut at multiples of it where balance allows.
        ranks_per_node: consecutive ranks joined by NVLink; the last node may have fewer.
        nvlink_bytes_per_second, network_bytes_per_second: of a rank, each way.
        message_seconds: cost of each peer besides its bytes.
        pairs_per_second: (query, key) pairs a rank attends to, forward; 0: not known.
        costs: what the kernel takes for rows and shards besides pairs, as measured; plans make the
            sum even. Also gives pairs_per_second unless that is set.
        tails: a rank gives away ends of documents, never their middle: fewer shards, more bytes.
        chunk: tokens after which a document's attention begins anew, counted from its beginning: a
            query attends to keys of its own chunk alone, as mask and window say.
        prefix: with mask = "prefix", how many tokens: one number, or one for each document, in
            lists as doc_lengths has them. A document with fewer tokens is all prefix.

    Raises:
        InvalidArgument: names the option or document; "infeasible: rank 3 needs 71680 tokens,
            max_tokens_per_rank has 65536" if no plan within the limit is found.
    """
    given = compiled_options("plan", locals())
    known = planned(costs, "plan")
    given.update({k: v for k, v in known.items() if not given[k]})
    sequence(doc_lengths, "plan: doc_lengths", "lengths, or a list of them for each rank")
    first = doc_lengths[0] if len(doc_lengths) > 0 else 0
    lengths: list[Any]
    if hasattr(first, "__len__") and getattr(first, "ndim", 1) > 0:  # a number of torch has a len
        lengths = [flat_list(docs, f"plan: doc_lengths[{r}]") for r, docs in enumerate(doc_lengths)]
    else:
        lengths = flat_list(doc_lengths, "plan: doc_lengths")
    try:
        options = _core.planner_options(**given)
        return AttentionPlan._with(_plan=_core.plan_attention(lengths, options))
    except InvalidArgument as error:
        raise reworded(error, "plan", in_words) from None


def in_words(text: str) -> str:
    """An error of the planner in the words of Python's arguments."""
    text = flat_names(text)
    for mask in ("full", "prefix"):
        none = f'expected None with mask = "{mask}"'
        text = text.replace(f"expected 0: the mask is {mask}", none)
    return text


def _prefix(prefix: Any, mask: str, who: str) -> dict[str, Any]:
    """The argument as the compiled part takes it: one number, or one for each document."""
    if mask != "prefix":
        if prefix is not None:
            raise InvalidArgument(
                f'{who}: prefix = {shown(prefix)}, expected None with mask = "{mask}"'
            )
        return {"prefix": 0, "prefixes": []}
    if not hasattr(prefix, "__len__") or getattr(prefix, "ndim", 1) == 0:
        return {"prefix": at_least(prefix, 0, f"{who}: prefix"), "prefixes": []}
    nested = [docs if hasattr(docs, "__len__") and getattr(docs, "ndim", 1) > 0 else [docs]
              for docs in prefix]  # fmt: skip
    flat = [n for docs in nested for n in flat_list(docs, f"{who}: prefix")]
    return {"prefix": 0, "prefixes": flat}


def compiled_options(who: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the compiled planner, from arguments of ``plan`` by name: those that a caller
    does not have are as of ``plan``.
    """
    return {
        "tails": False, "kv_layout": "per_rank", "byte_weight": 0.0, "block_tokens": 128,
        "max_tokens_per_rank": 0, "row_pairs": 0, "shard_pairs": 0,
        **converted(
            who, given,
            (_world, "world_size"), (library_dtype_of, "dtype"), (_mask, "mask"),
            (int64, "tokens_per_rank q_hidden kv_hidden block_tokens ranks_per_node"),
            (_limit, "window chunk max_tokens_per_rank"),
            (number, "imbalance_target byte_weight message_seconds pairs_per_second"),
            (check_speed, "nvlink_bytes_per_second network_bytes_per_second"),
            (flag, "relay tails"), (lambda value, _: value, "kv_layout"),
        ),
        **_prefix(given["prefix"], given["mask"], who),
    }  # fmt: skip


def _mask(value: Any, name: str) -> str:
    return choice(value, name, *MASKS)


def _world(value: Any, name: str) -> int:
    return within(value, 1, 2**20, name, "2^20")


def _limit(value: Optional[int], name: str) -> int:
    """None is none, which the compiled part writes as 0; 0 itself would be a mistake."""
    if value is None:
        return 0
    most = int64(value, name)
    if most < 1:
        raise InvalidArgument(f"{name} = {most}, expected >= 1, or None for none")
    return most
