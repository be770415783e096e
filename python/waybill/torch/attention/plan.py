"""The plan of one batch of packed documents, and the batch itself: data, the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch

from ... import _core
from ..._arrays import IntArray, at_least, choice, instance, int64, number, sequence, within
from ..._errors import reworded, said_by, shown
from ..._graphs import outside_graphs
from ..._lifetime import Unchanging, WrittenOnce
from ...costs import AttentionCosts, LinkSpeeds, planned
from ...errors import InvalidArgument
from ...planner import AttentionPlan
from ...plans import MASKS, QkvPlan
from .._tensors import dtype_name, require_device, require_rows
from ..kernels import AttentionShape, Sequences
from .own_plan import own_tables

_UNNUMBERED = -(2**62)  # below it are the documents that got no number: rank * 2**32 + place


class InPlaceRule(NamedTuple):
    """When rows that stay are attended to in place. ``bench/python/attention_in_place.py`` says of
    a GPU and sizes of heads which numbers lose least.
    """

    #: rows per rank: with fewer, one call of the kernel costs less than two without copies
    min_rows: int = 2048
    #: share of the work that stays: where it is less, there is little to gain
    min_share: float = 0.5


class Piece(NamedTuple):
    """Tokens [offset, offset + length) of a document, which ranks know by one number."""

    document: int  #: >= 0, the same on all ranks
    offset: int
    length: int


#: A rank holds whole documents of its own by their lengths, pieces of documents, or both. With
#: mask = "prefix" (length, prefix) and (document, offset, length, prefix) also say how many tokens
#: at the document's beginning all meet each other; modules of other masks refuse it.
RankPieces = Sequence[
    Union[int, Piece, Tuple[int, int], Tuple[int, int, int], Tuple[int, int, int, int]]
]


class BatchPlanner(WrittenOnce, Unchanging):
    """Makes plans of one module's shape and mask. Needs no ranks and no device: it can be pickled,
    and a worker of a DataLoader may plan in advance.

    Args:
        world_size: ranks that plan together.
        heads, kv_heads, head_dim, v_head_dim, dtype, mask, window: as of ContextParallelAttention.
        in_place: whether rows that stay are attended to where they are while the others travel, or
            all rows travel through the window and one call of the kernel serves them. "auto" is
            InPlaceRule(): True but for batches of few rows, or where more than half of the
            work travels. Another InPlaceRule draws these lines elsewhere.
        block_tokens: documents are cut at multiples of it.
        imbalance_target: largest work of a rank over the mean that is aimed at, > 1.
        latent_dim: of rows of which K and V are projected where they arrive; None: K and V travel.
        chunk: tokens after which a document's attention begins anew, counted from its beginning: a
            query meets keys of its own chunk alone, as mask and window say; None: no chunks.
        costs: what the kernel takes besides (query, key) pairs, as calibrate_attention measures it;
            the same on all ranks.
        relay: whether ranks forward K and V that they received to others. "auto": in a batch whose
            predicted step is shorter with it; "never"; "always": wherever rows travel.
        ranks_per_node: consecutive ranks with NVLink between them; None: all.
    """

    __slots__ = (
        "_called",
        "_compiled",
        "_given",
        "_options",
        "chunk",
        "costs",
        "in_place",
        "latent_dim",
        "relay",
        "shape",
        "world_size",
    )

    def __init__(
        self,
        world_size: int,
        heads: int,
        kv_heads: Optional[int] = None,
        head_dim: int = 128,
        v_head_dim: Optional[int] = None,
        *,
        dtype: Union[str, torch.dtype] = "bfloat16",
        mask: str = "causal",
        window: Optional[int] = None,
        scale: Optional[float] = None,
        in_place: Union[str, bool, InPlaceRule] = "auto",
        block_tokens: int = 128,
        imbalance_target: float = 1.01,
        costs: Optional[AttentionCosts] = None,
        latent_dim: Optional[int] = None,
        chunk: Optional[int] = None,
        relay: str = "auto",
        ranks_per_node: Optional[int] = None,
        who: str = "BatchPlanner",
    ) -> None:
        given = dict(locals())  # the arguments
        self._given = {name: given[name] for name in given if name not in ("self", "world_size")}
        self._called = f"{who}.plan"
        self.shape = _shape(heads, kv_heads, head_dim, v_head_dim, dtype, mask, window, scale, who)
        self.world_size = at_least(world_size, 1, f"{who}: world_size")
        self.in_place = _in_place(in_place, who)
        self.costs = costs
        self.latent_dim = 0 if latent_dim is None else at_least(latent_dim, 1, f"{who}: latent_dim")
        self.chunk = None if chunk is None else at_least(chunk, 1, f"{who}: chunk")
        if mask == "prefix" and chunk is not None:
            raise InvalidArgument(f'{who}: chunk = {chunk}, expected None with mask = "prefix"')
        self.relay = choice(relay, f"{who}: relay", "auto", "never", "always")
        nodes = max(8, self.world_size) if ranks_per_node is None else ranks_per_node
        shape = self.shape
        kv_row = shape.kv_heads * (shape.head_dim + shape.v_head_dim)
        self._options = {
            "world_size": self.world_size, "tokens_per_rank": 0,
            "q_hidden": shape.heads * (shape.head_dim + shape.v_head_dim) // 2,
            "kv_hidden": max(1, (self.latent_dim or kv_row) // 2),
            "dtype": dtype_name(shape.dtype), "mask": mask, "window": window or 0,
            "chunk": self.chunk or 0, "prefix": 0, "prefixes": [],
            "max_tokens_per_rank": 0, "relay": False, "kv_layout": "per_query",
            "block_tokens": at_least(block_tokens, 1, f"{who}: block_tokens"),
            "ranks_per_node": at_least(nodes, 1, f"{who}: ranks_per_node"),
            "imbalance_target": number(imbalance_target, f"{who}: imbalance_target"),
            "byte_weight": 0.0, "message_seconds": 0.4e-6, "pairs_per_second": 0.0,
            "tails": True, **LinkSpeeds().rates, **planned(costs, who),
        }  # fmt: skip
        self._compiled = _core.planner_options(**self._options)
        with said_by(who):
            _core.check_planner_options(self._compiled, who)

    def plan(self, pieces: Union[Sequence[Any], QkvPlan, AttentionPlan]) -> BatchPlan:
        """The plan of what the ranks hold: one entry per rank, as
        ``ContextParallelAttention.gather`` returns it, or lists of lengths and pieces. Pure: the
        same everywhere.

        Or a plan of one's own, which is taken as it is: its shards are what the ranks hold, in that
        order, and its relay schedule, where it has one, is who forwards.

        Raises InvalidArgument naming the document whose pieces do not add up, or rank and piece;
        of an own plan the shard that lacks keys which the mask shows.
        """
        who = self._called
        if isinstance(pieces, (QkvPlan, AttentionPlan)):
            return self._own(pieces, who)
        sequence(pieces, f"{who}: pieces", "a list for each rank")
        if len(pieces) != self.world_size:
            raise InvalidArgument(
                f"{who}: pieces of {len(pieces)} ranks, expected {self.world_size}"
            )
        mask = self.shape.mask
        tables = [piece_table(held, rank, who, mask) for rank, held in enumerate(pieces)]
        try:
            plan = self._planned(tables)
        except InvalidArgument as error:
            raise reworded(error, who) from None
        return BatchPlan._make(self, tables, QkvPlan._wrap(plan))

    def _own(self, given: Union[QkvPlan, AttentionPlan], who: str) -> BatchPlan:
        plan = given.to_qkv_plan() if isinstance(given, AttentionPlan) else given
        mask = plan.mask
        of_any = plan.num_shards == 0 or self.shape.mask == "prefix"
        if of_any or (self.chunk is not None and len(plan.kv_end)):
            mask = self.shape.mask
        for name, got, expected in (
            ("world_size", plan.world_size, self.world_size),
            ("mask", mask, self.shape.mask),
        ):
            if got != expected:
                raise InvalidArgument(f"{who}: the plan has {name} = {got}, expected {expected}")
        tables = own_tables(plan, mask, self.shape.window, self.chunk, who)
        own = given if isinstance(given, AttentionPlan) else None
        return BatchPlan._make(self, tables, plan, own)

    def _planned(self, tables: list[IntArray]) -> Any:
        pieces = np.concatenate(tables)
        options = self._compiled
        if self.shape.mask == "prefix":
            options = _core.planner_options(**{**self._options, "prefixes": _prefixes(pieces)})
        flat = pieces[:, :3].ravel().tolist()
        return _core.plan_pieces([len(table) for table in tables], flat, options)

    def facts(self) -> dict[str, Any]:
        """All that plans and results depend on, by the names of arguments: planners of which one is
        another make other plans.
        """
        options = self._options
        own = ("block_tokens", "imbalance_target", "row_pairs", "shard_pairs", "pairs_per_second",
               "ranks_per_node")  # fmt: skip
        return {
            **self.shape._asdict(), "latent_dim": self.latent_dim or None,
            "chunk": self.chunk, "in_place": self.in_place, "relay": self.relay,
            **{name: options[name] for name in own},
        }  # fmt: skip

    @property
    def attends_as(self) -> str:
        """Names the settings that a plan and its module must have alike."""
        latent = f", latent_dim={self.latent_dim}" if self.latent_dim else ""
        chunk = "" if self.chunk is None else f", chunk={self.chunk}"
        return f"{self.shape}{latent}{chunk}"

    @property
    def fingerprint(self) -> int:
        """facts() as one number."""
        return zlib.crc32(repr((self.world_size, self.facts())).encode())

    def __reduce__(self) -> Tuple[Any, ...]:
        return _planner, (self.world_size, (), self._given)

    def __repr__(self) -> str:
        return f"BatchPlanner(world_size={self.world_size}, {self.attends_as})"


def _planner(world_size: int, given: Tuple[Any, ...], options: dict[str, Any]) -> BatchPlanner:
    return BatchPlanner(world_size, *given, **options)


class BatchPlan(WrittenOnce):
    """Which rank attends to which queries of one batch, and where its rows are from.

    Plain data, from ``BatchPlanner.plan``: read-only, can be pickled, the same on all ranks. A
    module makes its tables of it the first time that it is used there.
    """

    __slots__ = (
        "__weakref__",
        "_own",
        "_pieces",
        "_routings",
        "_tables",
        "in_place",
        "planner",
        "qkv_plan",
    )
    planner: BatchPlanner
    qkv_plan: QkvPlan
    in_place: bool  #: whether rows that stay are attended to where they are
    _own: Optional[AttentionPlan]  #: whose relay schedule is the batch's
    _pieces: list[IntArray]
    _routings: list[Any]  #: one, once it was asked for
    _tables: list[Any]  #: the same

    def __init__(self) -> None:
        raise InvalidArgument("BatchPlan: got a constructor call, expected BatchPlanner.plan(...)")

    @classmethod
    def _make(
        cls, planner: BatchPlanner, pieces: list[IntArray], plan: QkvPlan,
        own: Optional[AttentionPlan] = None,
    ) -> BatchPlan:  # fmt: skip
        self = cls.__new__(cls)
        in_place, routing = planner.in_place is not False, None
        rule = InPlaceRule() if planner.in_place == "auto" else planner.in_place
        if isinstance(rule, InPlaceRule) and planner.world_size > 1:
            rows = sum(int(table[:, 2].sum()) for table in pieces)
            if rows >= rule.min_rows * planner.world_size:
                routing = _core.compute_varlen_routing(plan._plan, True)
            if routing is None or routing.in_place_share() < rule.min_share:
                in_place, routing = False, None
        routings = [] if routing is None else [routing]
        self._write(
            planner=planner, qkv_plan=plan, _pieces=pieces, _own=own, in_place=in_place,
            _routings=routings, _tables=[],
        )  # fmt: skip
        return self

    @property
    def world_size(self) -> int:
        """Ranks that share the batch."""
        return self.planner.world_size

    @property
    def work(self) -> IntArray:
        """(W,): (query, key) pairs by rank, whole blocks where shards are cut at a window; without
        what ``costs`` add, which plans even out too.
        """
        return self.qkv_plan.work

    @property
    def imbalance(self) -> float:
        """Largest work of a rank over the mean: of pairs, also where plans are made by costs."""
        return self.qkv_plan.imbalance

    @property
    def home_tokens(self) -> list[int]:
        """(W,): rows that each rank holds."""
        return [int(table[:, 2].sum()) for table in self._pieces]

    def pieces(self, rank: int) -> list[Piece]:
        """A rank's pieces, in the order of its rows. Documents without a number are negative."""
        return [Piece(*row[:3]) for row in self._table(rank, "pieces").tolist()]

    def prefixes(self, rank: int) -> list[int]:
        """The prefix of the document of each of a rank's pieces, as given; without one 0."""
        prefixes: list[int] = self._table(rank, "prefixes")[:, 3].tolist()
        return prefixes

    def positions(self, rank: int, device: Any = None) -> torch.Tensor:
        """(rows,): the position in its document of each row of a rank, for rotary embeddings."""
        table = self._table(rank, "positions")
        lengths = table[:, 2]
        first = np.cumsum(lengths) - lengths
        positions = np.arange(int(lengths.sum())) + np.repeat(table[:, 1] - first, lengths)
        return _moved(torch.from_numpy(positions), device, "positions")

    def documents(self, rank: int, device: Any = None) -> torch.Tensor:
        """(rows,): the document of each row of a rank."""
        table = self._table(rank, "documents")
        documents = torch.from_numpy(np.repeat(table[:, 0], table[:, 2]))
        return _moved(documents, device, "documents")

    def last_rows(self, rank: int, device: Any = None) -> torch.Tensor:
        """(rows,) bool: rows whose token is the last of its document: they have no label."""
        table = self._table(rank, "last_rows")
        ends: dict[int, int] = {}
        for document, offset, length, _ in np.concatenate(self._pieces).tolist():
            ends[document] = max(ends.get(document, 0), offset + length)
        last = np.zeros(int(table[:, 2].sum()), bool)
        is_end = [
            ends[document] == offset + length for document, offset, length, _ in table.tolist()
        ]
        last[np.cumsum(table[:, 2]) - 1] = is_end
        return _moved(torch.from_numpy(last), device, "last_rows")

    def home_sequences(self, rank: int, device: Any = "cpu") -> Sequences:
        """The pieces of a rank as sequences, for what looks at neighbouring rows alone (such as a
        convolution). Not what attention needs: documents may lie on several ranks.
        """
        lengths = self._table(rank, "home_sequences")[:, 2].tolist()
        place = require_device(device, "BatchPlan.home_sequences: device")
        return Sequences.of(lengths, lengths, place or "cpu")

    def routing(self) -> _core.VarlenRouting:
        """The compiled part's routing, made when it is first asked for."""
        if not self._routings:
            self._routings.append(_core.compute_varlen_routing(self.qkv_plan._plan, self.in_place))
        return self._routings[0]

    def tables(self) -> _core.BatchTables:
        """The compiled part's tables: the routing with who forwards what, for predictions too."""
        if not self._tables:
            routing, planner = self.routing(), self.planner
            plan = self.qkv_plan._plan
            own = None if self._own is None else self._own._plan.relay
            given = None if own is None or own.empty else own
            made = _core.BatchTables(plan, routing, planner._compiled, planner.relay, given)
            self._tables.append(made)
        return self._tables[0]

    @property
    def forwards(self) -> bool:
        """Whether ranks forward K and V that they received to others."""
        return not self.tables().relay.empty

    def _table(self, rank: int, who: str) -> IntArray:
        return self._pieces[within(rank, 0, self.world_size - 1, f"BatchPlan.{who}: rank")]

    def __reduce__(self) -> Tuple[Any, ...]:
        return BatchPlan._make, (self.planner, self._pieces, self.qkv_plan, self._own)

    def __repr__(self) -> str:
        return (
            f"BatchPlan(world_size={self.world_size}, rows={sum(self.home_tokens)},"
            f" documents={self.qkv_plan.num_documents}, imbalance={self.imbalance:.4f},"
            f" in_place={self.in_place})"
        )


def piece_table(held: Any, rank: int, who: str, mask: str = "prefix") -> IntArray:
    """(n, 4): document, offset, length, prefix. Whole documents get negative numbers of the
    rank's. A prefix is refused where the mask has none, but not in a table, which modules of
    several masks may share.
    """
    if isinstance(held, np.ndarray) and held.dtype == np.int64 and held.shape[1:] == (4,):
        for i in np.flatnonzero((held[:, 0] < 0) & (held[:, 0] >= _UNNUMBERED)).tolist():
            raise InvalidArgument(
                f"{who}: pieces of rank {rank}: [{i}] has document {held[i, 0]}, expected >= 0"
            )
        return held.copy()
    rows: list[Tuple[int, ...]] = []
    of_rank = f"{who}: pieces of rank {rank}"
    gathered = "" if who.endswith("held") else ": gather gives those of all ranks"
    sequence(held, of_rank, f"a list of lengths and pieces{gathered}")
    for i, item in enumerate(held):
        unnumbered = _UNNUMBERED - (rank * 2**32 + i) - 1
        if _is_plain(item):
            rows.append((unnumbered, 0, item, 0))
        elif isinstance(item, (tuple, list)) or getattr(item, "ndim", 0) > 0:
            rows.append(_row_of(item, unnumbered, f"{of_rank}: [{i}]", mask))
        else:
            rows.append((unnumbered, 0, int64(item, f"{of_rank}: [{i}]"), 0))
    return np.array(rows, np.int64).reshape(-1, 4)


def _row_of(item: Any, unnumbered: int, name: str, mask: str) -> Tuple[int, ...]:
    """The row of an entry of two to four numbers."""
    if not 2 <= len(item) <= 4:
        raise InvalidArgument(
            f"{name} has {len(item)} numbers, expected (document, offset, length)"
            " with or without a prefix, or (length, prefix)"
        )
    row = [n if _is_plain(n) else int64(n, name) for n in item]
    if len(row) == 2:
        row = [unnumbered, 0, *row]
    elif _UNNUMBERED <= row[0] < 0:
        raise InvalidArgument(f"{name} has document {row[0]}, expected >= 0")
    row += [0] * (4 - len(row))
    if row[3] and mask != "prefix":
        hint = ""
        if len(item) == 2 and ": held: " in name:  # perhaps the lengths of another rank
            hint = "; two numbers are (length, prefix), and a rank gives its own documents alone"
        raise InvalidArgument(
            f'{name} has prefix {row[3]}, expected none with mask = "{mask}"{hint}'
        )
    return tuple(row)


def _prefixes(pieces: IntArray) -> list[int]:
    """Returns the prefix of each document, in the order in which documents first appear."""
    _, first, inverse = np.unique(pieces[:, 0], return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    for i in np.flatnonzero(pieces[:, 3] != pieces[first[inverse], 3])[:1].tolist():
        raise InvalidArgument(
            f"plan_pieces: document {pieces[i, 0]}: pieces have prefix"
            f" {pieces[first[inverse[i]], 3]} and {pieces[i, 3]}, expected the same"
        )
    for i in np.flatnonzero(pieces[:, 3] < 0)[:1].tolist():
        raise InvalidArgument(f"plan_pieces: pieces have prefix {pieces[i, 3]}, expected >= 0")
    prefixes: list[int] = pieces[np.sort(first), 3].tolist()
    return prefixes


def _is_plain(value: Any) -> bool:
    """An int of 64 bits, as most are: only another needs a name, in case that it is wrong."""
    return type(value) is int and -(2**63) <= value < 2**63


def check_table(table: IntArray, rank: int, who: str) -> None:
    """Lengths and offsets of pieces; whether they make documents is seen when all are there."""
    for column, name, least in ((1, "offset", 0), (2, "length", 1), (3, "prefix", 0)):
        for i in np.flatnonzero(table[:, column] < least).tolist():
            raise InvalidArgument(
                f"{who}: pieces of rank {rank}: [{i}] has {name} {table[i, column]}, expected >="
                f" {least}"
            )


def _moved(tensor: torch.Tensor, device: Any, who: str) -> torch.Tensor:
    return tensor.to(require_device(device, f"BatchPlan.{who}: device"))


def _shape(
    heads: Any, kv_heads: Any, head_dim: Any, v_head_dim: Any, dtype: Any, mask: Any, window: Any,
    scale: Any, who: str,
) -> AttentionShape:  # fmt: skip
    heads = at_least(heads, 1, f"{who}: heads")
    kv_heads = heads if kv_heads is None else at_least(kv_heads, 1, f"{who}: kv_heads")
    if heads % kv_heads != 0:
        raise InvalidArgument(
            f"{who}: kv_heads = {kv_heads}, expected a divisor of heads ({heads})"
        )
    head_dim = at_least(head_dim, 1, f"{who}: head_dim")
    v_head_dim = head_dim if v_head_dim is None else at_least(v_head_dim, 1, f"{who}: v_head_dim")
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        got = found if isinstance(found, torch.dtype) else shown(dtype)
        raise InvalidArgument(
            f"{who}: dtype = {got}, expected a torch float dtype of 16 bits or more"
        )
    choice(mask, f"{who}: mask", *MASKS)
    if window is not None:
        window = at_least(window, 1, f"{who}: window")
        if mask != "causal":
            raise InvalidArgument(f'{who}: window = {window}, expected None with mask = "{mask}"')
    scale = head_dim**-0.5 if scale is None else number(scale, f"{who}: scale")
    if not 0 < scale < float("inf"):
        raise InvalidArgument(f"{who}: scale = {scale}, expected > 0")
    return AttentionShape(heads, kv_heads, head_dim, v_head_dim, found, mask, window, scale)


def _in_place(value: Any, who: str) -> Union[str, bool, InPlaceRule]:
    if isinstance(value, InPlaceRule):
        rows = at_least(value.min_rows, 0, f"{who}: in_place.min_rows")
        share = number(value.min_share, f"{who}: in_place.min_share")
        if not 0 <= share <= 1:
            raise InvalidArgument(f"{who}: in_place.min_share = {share}, expected 0 to 1")
        return InPlaceRule(rows, share)
    if isinstance(value, str) and value == "auto":
        return value
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(
            f'{who}: in_place = {shown(value)}, expected "auto", True, False or an InPlaceRule'
        )
    return bool(value)


class PackedBatch(NamedTuple):
    """Rows of some documents, or of a part of them."""

    tokens: torch.Tensor  #: (rows, ...)
    #: (rows, ...): the next token of the same document; its last has none. int64 of integers
    labels: torch.Tensor
    positions: torch.Tensor  #: (rows,): in the document, for rotary embeddings
    pieces: list[Union[int, Piece]]  #: for ContextParallelAttention.gather

    def cut(self, begin: int, end: int) -> PackedBatch:
        """Rows [begin, end), such as one rank's; of documents with numbers, as they lie on several
        ranks then.
        """
        rows = len(self.tokens)
        begin, end = int64(begin, "cut: begin"), int64(end, "cut: end")
        if not 0 <= begin <= end <= rows:
            raise InvalidArgument(f"cut: rows {begin}..{end}, expected within 0..{rows}")
        pieces: list[Union[int, Piece]] = []
        at = 0
        for piece in self.pieces:
            if not isinstance(piece, Piece):
                raise InvalidArgument(
                    "cut: the documents have no numbers, by which other ranks know them: expected"
                    " pack(documents, first_document=...)"
                )
            first, last = max(begin, at), min(end, at + piece.length)
            if first < last:
                pieces.append(Piece(piece.document, piece.offset + first - at, last - first))
            at += piece.length
        rows_of = slice(begin, end)
        return PackedBatch(
            self.tokens[rows_of], self.labels[rows_of], self.positions[rows_of], pieces
        )

    def to(self, device: Any) -> PackedBatch:
        """The batch with its tensors on a device."""
        place = require_device(device, "PackedBatch.to: device")
        tokens, labels, positions = (t.to(place) for t in self[:3])
        return PackedBatch(tokens, labels, positions, self.pieces)


@outside_graphs
def pack(
    documents: Iterable[torch.Tensor], *, first_document: Optional[int] = None, ignored: int = -100
) -> PackedBatch:
    """Packs documents [tokens, ...] one after another; empty ones are left out.

    Args:
        first_document: numbers the documents from it on, where they are to be cut among ranks:
            the same number for a document on all of them. Without, they stay whole.
        ignored: the label of a document's last token; cross_entropy's ignore_index.
    """
    is_list = isinstance(documents, Iterable) and not isinstance(documents, (Mapping, str, bytes))
    if not is_list or getattr(documents, "ndim", 1) == 0:
        raise InvalidArgument(f"pack: documents is a {type(documents).__name__}, expected a list")
    ignored = int64(ignored, "pack: ignored")
    kept = [require_rows(d, f"pack: documents[{i}]") for i, d in enumerate(documents)]
    _check_alike(kept)
    kept = [document for document in kept if len(document) > 0]
    if not kept:
        none = torch.empty(0, dtype=torch.int64)
        return PackedBatch(none, none.clone(), none.clone(), [])
    tokens = torch.cat(kept)
    # Tokens of few bits, or without a sign, have no number for "ignored".
    floats = tokens.is_floating_point() or tokens.is_complex()
    labels = torch.empty_like(tokens, dtype=None if floats else torch.int64)
    labels[:-1] = tokens[1:]
    ends = torch.tensor([len(document) for document in kept]).cumsum(0)
    labels[ends.to(tokens.device) - 1] = ignored
    positions = torch.cat([torch.arange(len(d), device=tokens.device) for d in kept])
    pieces: list[Union[int, Piece]] = [len(document) for document in kept]
    if first_document is not None:
        first = at_least(first_document, 0, "pack: first_document")
        pieces = [Piece(first + i, 0, len(document)) for i, document in enumerate(kept)]
    return PackedBatch(tokens, labels, positions, pieces)


def _check_alike(documents: list[torch.Tensor]) -> None:
    """One dtype, device and shape of rows: else numbers would change, or torch would say less."""
    for i, document in enumerate(documents):
        for name, got, expected in (
            ("dtype", document.dtype, documents[0].dtype),
            ("device", document.device, documents[0].device),
            ("rows of shape", list(document.shape[1:]), list(documents[0].shape[1:])),
        ):
            if got != expected:
                raise InvalidArgument(
                    f"pack: documents[{i}] has {name} {got}, expected {expected}, as documents[0]"
                )


def _length_of(piece: Any) -> Any:
    if not isinstance(piece, tuple) or not 2 <= len(piece) <= 4:
        return piece
    return piece[0] if len(piece) == 2 else piece[2]


@outside_graphs
def unpack(rows: torch.Tensor, pieces: Sequence[Union[int, Piece]]) -> list[torch.Tensor]:
    """The rows of each piece, views: the inverse of pack for whatever was computed from it."""
    require_rows(rows, "unpack: rows")
    instance(pieces, Sequence, "unpack: pieces", "a list")
    lengths = [int64(_length_of(piece), f"unpack: pieces[{i}]") for i, piece in enumerate(pieces)]
    if min(lengths, default=0) < 0:
        raise InvalidArgument(f"unpack: pieces hold the length {min(lengths)}, expected >= 0")
    if sum(lengths) != len(rows):
        raise InvalidArgument(f"unpack: {len(rows)} rows, expected {sum(lengths)}, as of pieces")
    return list(torch.split(rows, lengths))
