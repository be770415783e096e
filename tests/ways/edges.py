"""The edges: batches with something that ordinary ones do not have, as plain data.

Each edge has a name, a title for the table and a function that makes its batches. All ranks and the
judge make the same ones from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Edge:
    """What a way is to be seen with."""

    name: str
    title: str
    make: Callable[..., Any]


# ---- Experts ----


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer of experts."""

    world: int
    per_node: int
    max_tokens: int
    hidden: int
    topk: int
    experts: int

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.world

    @property
    def worst_rows(self) -> int:
        """More rows than any routing brings to a rank."""
        return self.world * self.max_tokens * self.topk


@dataclass(frozen=True)
class ExpertRound:
    """One dispatch of all ranks. A dropped topk slot is -1."""

    ids: tuple[np.ndarray, ...]  #: [T, topk] of each rank
    slices: bool = False  #: empty inputs are slices of memory; otherwise they have none
    odd_address: bool = False  #: rows begin one element behind an address for bulk copies

    @property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return [len(ids) for ids in self.ids]


@dataclass(frozen=True)
class ExpertCase:
    """A layer, and the dispatches that it makes one after another."""

    sizes: ExpertSizes
    rounds: tuple[ExpertRound, ...]
    seed: int = 1


def _usual_counts(sizes: ExpertSizes) -> list[int]:
    """Uneven numbers of tokens, none of them 0."""
    most = sizes.max_tokens
    pattern = [max(1, 2 * most // 3), min(3, most), max(1, most - 2), max(1, most // 2)]
    return [pattern[rank % 4] for rank in range(sizes.world)]


def _random_ids(rng: np.random.Generator, count: int, topk: int, experts: list[int]) -> np.ndarray:
    """Different experts for each token while there are enough, and a few dropped topk slots."""
    pool = np.tile(np.array(experts, np.int64), (count, -(-topk // len(experts))))
    ids = rng.permuted(pool, axis=1)[:, :topk]
    return np.where(rng.random(ids.shape) < 0.1, -1, ids)


class _Draw:
    """Rounds of one case, drawn one after another."""

    def __init__(self, sizes: ExpertSizes, seed: int) -> None:
        self.sizes, self.rng = sizes, np.random.default_rng((7, seed))

    def round(
        self, counts: list[int], experts: list[int] | None = None, **how: bool
    ) -> ExpertRound:
        """Tokens that choose among ``experts``, all unless given."""
        pool = list(range(self.sizes.experts)) if experts is None else experts
        ids = [_random_ids(self.rng, n, self.sizes.topk, pool) for n in counts]
        return ExpertRound(tuple(ids), **how)

    def usual(self) -> ExpertRound:
        """Nothing special."""
        return self.round(_usual_counts(self.sizes))


_Made = tuple[ExpertSizes, list[ExpertRound]]


def _ordinary(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return sizes, [draw.usual(), draw.usual()]


def _one_without(sizes: ExpertSizes, draw: _Draw, slices: bool) -> _Made:
    rounds = [draw.usual()]
    for rank in range(sizes.world):
        counts = _usual_counts(sizes)
        counts[rank] = 0
        rounds.append(draw.round(counts, slices=slices))
    return sizes, rounds


def _without_null(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return _one_without(sizes, draw, False)


def _without_slice(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return _one_without(sizes, draw, True)


def _alone(sizes: ExpertSizes, draw: _Draw) -> _Made:
    rounds = []
    for rank in range(sizes.world):
        counts = [0] * sizes.world
        counts[rank] = sizes.max_tokens
        rounds.append(draw.round(counts))
    return sizes, rounds


def _nothing(sizes: ExpertSizes, draw: _Draw) -> _Made:
    none = [0] * sizes.world
    return sizes, [draw.round(none), draw.usual(), draw.round(none, slices=True)]


def _one_token(sizes: ExpertSizes, draw: _Draw) -> _Made:
    one = [0] * (sizes.world - 1) + [1]
    return sizes, [draw.round([1] * sizes.world), draw.round(one), draw.round(one[::-1])]


def _full(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return sizes, [draw.round([sizes.max_tokens] * sizes.world) for _ in range(2)]


def _all_dropped(sizes: ExpertSizes, draw: _Draw) -> _Made:
    one = draw.usual().ids
    none = tuple(np.full_like(ids, -1) for ids in one)
    return sizes, [ExpertRound(none), ExpertRound((none[0], *one[1:])), draw.usual()]


def _one_expert(sizes: ExpertSizes, draw: _Draw) -> _Made:
    rounds = []
    for expert in (0, sizes.experts - 1):
        ids = []
        for count in _usual_counts(sizes):
            slots = np.full((count, sizes.topk), -1, np.int64)
            slots[np.arange(count), np.arange(count) % sizes.topk] = expert
            ids.append(slots)
        rounds.append(ExpertRound(tuple(ids)))
    return sizes, rounds


def _of_nobody(sizes: ExpertSizes, draw: _Draw) -> _Made:
    """Nobody chooses expert 1, nor any expert of the last rank."""
    used = [e for e in range(max(sizes.local, sizes.experts - sizes.local)) if e != 1]
    return sizes, [draw.round(_usual_counts(sizes), used), draw.usual()]


def _repeated(sizes: ExpertSizes, draw: _Draw) -> _Made:
    one = [np.repeat(ids[:, :1], sizes.topk, axis=1) for ids in draw.usual().ids]
    return sizes, [ExpertRound(tuple(one)), draw.usual()]


def _topk_1(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return _ordinary(*_with(sizes, topk=1))


def _topk_32(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return _ordinary(*_with(sizes, topk=32, experts=12 * sizes.world))


def _odd_rows(sizes: ExpertSizes, draw: _Draw) -> _Made:
    sizes, draw = _with(sizes, hidden=37 if sizes.hidden % 128 else sizes.hidden)
    counts = _usual_counts(sizes)
    return sizes, [draw.round(counts), draw.round(counts, odd_address=True)]


def _one_each(sizes: ExpertSizes, draw: _Draw) -> _Made:
    return _ordinary(*_with(sizes, experts=sizes.world))


def _one_rank(sizes: ExpertSizes, draw: _Draw) -> _Made:
    sizes, draw = _with(sizes, world=1, per_node=1, experts=sizes.local)
    return sizes, [draw.usual(), draw.round([0]), draw.round([sizes.max_tokens])]


def _growing(sizes: ExpertSizes, draw: _Draw) -> _Made:
    most, world = sizes.max_tokens, sizes.world
    steps = (1, most, 0, min(3, most), most, max(1, most // 2))
    rounds = [draw.round([(step if r % 2 == 0 else most - step) for r in range(world)])
              for step in steps]  # fmt: skip
    return sizes, [draw.round([1] * world), *rounds]


def _with(sizes: ExpertSizes, **changes: int) -> tuple[ExpertSizes, _Draw]:
    changed = replace(sizes, **changes)
    return changed, _Draw(changed, 3)


EXPERT_EDGES = {
    edge.name: edge
    for edge in (
        Edge("ordinary", "no edge: the ordinary batch", _ordinary),
        Edge("null", "a rank with no tokens, each in turn, tensors without memory", _without_null),
        Edge(
            "slice", "a rank with no tokens, each in turn, empty slices of memory", _without_slice
        ),
        Edge("alone", "all but one rank without tokens, each in turn", _alone),
        Edge("nothing", "no tokens at all, and then some", _nothing),
        Edge("one_token", "one token: of each rank, of one rank alone", _one_token),
        Edge("full", "exactly `max_tokens` on all ranks", _full),
        Edge("dropped", "all topk slots dropped: of all ranks, of one", _all_dropped),
        Edge("one_expert", "all tokens to one expert", _one_expert),
        Edge("of_nobody", "an expert, and a rank, that nobody chooses", _of_nobody),
        Edge("repeated", "a token chooses one expert several times", _repeated),
        Edge("topk_1", "topk 1", _topk_1),
        Edge("topk_32", "topk 32", _topk_32),
        Edge("odd_rows", "rows, and addresses, that bulk copies cannot take", _odd_rows),
        Edge("one_each", "one expert per rank", _one_each),
        Edge("one_rank", "one rank", _one_rank),
        Edge("sizes", "sizes that grow and shrink from call to call", _growing),
    )
}


def expert_case(edge: str, sizes: ExpertSizes) -> ExpertCase:
    """The edge in a layer of about these sizes."""
    made, rounds = EXPERT_EDGES[edge].make(sizes, _Draw(sizes, 2))
    return ExpertCase(made, tuple(rounds))


# ---- Sequences ----


@dataclass(frozen=True)
class Batch:
    """Packed documents of all ranks: shards in the order of their rows."""

    shards: tuple[tuple[tuple[int, int], ...], ...]  #: of each rank (document, tokens)
    slices: bool = False  #: as of ExpertRound
    odd_address: bool = False

    @property
    def rows(self) -> list[int]:
        """Rows of each rank."""
        return [sum(length for _, length in held) for held in self.shards]


@dataclass(frozen=True)
class SequenceCase:
    """Batches that one dispatcher sends one after another."""

    world: int
    per_node: int
    hidden: tuple[int, int]  #: elements of a row of Q; of K, and of V
    batches: tuple[Batch, ...]
    seed: int = 1


class _Documents:
    """Batches of one case, drawn one after another."""

    def __init__(self, world: int) -> None:
        self.world, self.rng = world, np.random.default_rng((11, world))

    def packed(self, rows: list[int], longest: int = 40, **how: bool) -> Batch:
        """Documents that fill ranks one after another: some lie on two of them or more."""
        shards: list[list[tuple[int, int]]] = []
        document, left = 0, int(self.rng.integers(1, longest))
        for count in rows:
            held = []
            while count > 0:
                length = min(left, count)
                held.append((document, length))
                count, left = count - length, left - length
                if left == 0:
                    document, left = document + 1, int(self.rng.integers(1, longest))
            shards.append(held)
        return Batch(tuple(map(tuple, shards)), **how)

    def usual_rows(self) -> list[int]:
        """Uneven, none of them 0."""
        return [(64, 23, 90, 41)[rank % 4] for rank in range(self.world)]

    def usual(self) -> Batch:
        """Nothing special."""
        return self.packed(self.usual_rows())


def _s_ordinary(draw: _Documents) -> list[Batch]:
    return [draw.usual(), draw.usual()]


def _s_without(draw: _Documents, slices: bool) -> list[Batch]:
    batches = [draw.usual()]
    for rank in range(draw.world):
        rows = draw.usual_rows()
        rows[rank] = 0
        batches.append(draw.packed(rows, slices=slices))
    return batches


def _s_alone(draw: _Documents) -> list[Batch]:
    return [
        draw.packed([70 if rank == one else 0 for rank in range(draw.world)])
        for one in range(draw.world)
    ]


def _s_nothing(draw: _Documents) -> list[Batch]:
    none = Batch(((),) * draw.world)
    return [none, draw.usual(), replace(none, slices=True)]


def _s_one_token(draw: _Documents) -> list[Batch]:
    one = [0] * (draw.world - 1) + [1]
    return [draw.packed([1] * draw.world), draw.packed(one), draw.packed(one[::-1])]


def _s_odd_rows(draw: _Documents) -> list[Batch]:
    return [draw.usual(), replace(draw.usual(), odd_address=True)]


def _s_sizes(draw: _Documents) -> list[Batch]:
    steps = (1, 300, 0, 7, 500, 40)
    return [
        draw.packed([(step if rank % 2 == 0 else 17) for rank in range(draw.world)])
        for step in steps
    ]


def _s_empty_documents(draw: _Documents) -> list[Batch]:
    """Documents without tokens: before, between and after others, and alone on a rank."""
    shards, document = [], 0
    for rank in range(draw.world):
        lengths = (0, 0) if rank == 1 else (0, 5 + rank, 0, 0, 9, 0)
        shards.append(tuple((document + i, length) for i, length in enumerate(lengths)))
        document += len(lengths)
    return [Batch(tuple(shards)), draw.usual()]


def _s_one_document(draw: _Documents) -> list[Batch]:
    uneven = draw.usual_rows()
    return [
        Batch(tuple(((0, count),) for count in rows))
        for rows in ([64] * draw.world, uneven)
    ]  # fmt: skip


def _s_many_documents(draw: _Documents) -> list[Batch]:
    """Documents of one token, and five times as many of none."""
    shards, document = [], 0
    for rank in range(draw.world):
        lengths = [0, 0, 1, 0, 0, 0] * (3 + rank)
        shards.append(tuple((document + i, length) for i, length in enumerate(lengths)))
        document += len(lengths)
    return [Batch(tuple(shards)), draw.usual()]


def _s_short_documents(draw: _Documents) -> list[Batch]:
    """As many documents as rows."""
    return [draw.packed(draw.usual_rows(), longest=2), draw.usual()]


SEQUENCE_EDGES = {
    edge.name: edge
    for edge in (
        Edge("ordinary", "no edge: the ordinary batch", _s_ordinary),
        Edge("null", "a rank with no tokens, each in turn, tensors without memory",
             lambda draw: _s_without(draw, False)),
        Edge("slice", "a rank with no tokens, each in turn, empty slices of memory",
             lambda draw: _s_without(draw, True)),
        Edge("alone", "all but one rank without tokens, each in turn", _s_alone),
        Edge("nothing", "no tokens at all, and then some", _s_nothing),
        Edge("one_token", "one token: of each rank, of one rank alone", _s_one_token),
        Edge("odd_rows", "rows, and addresses, that bulk copies cannot take", _s_odd_rows),
        Edge("one_rank", "one rank", _s_ordinary),
        Edge("sizes", "sizes that grow and shrink from call to call", _s_sizes),
        Edge("empty_documents", "empty documents", _s_empty_documents),
        Edge("one_document", "one document of everything", _s_one_document),
        Edge("short_documents", "documents of one token each", _s_short_documents),
        Edge("many_documents", "more documents than rows", _s_many_documents),
    )
}  # fmt: skip


def sequence_case(edge: str, world: int, per_node: int) -> SequenceCase:
    """The edge on so many ranks."""
    if edge == "one_rank":
        world = per_node = 1
    hidden = (37, 5) if edge == "odd_rows" else (64, 16)
    return SequenceCase(
        world, per_node, hidden, tuple(SEQUENCE_EDGES[edge].make(_Documents(world)))
    )
