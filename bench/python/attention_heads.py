#!/usr/bin/env python3
"""What head groups of documents as shards would gain over token ranges, predicted: an upper bound.
Nothing runs on ranks.

    python bench/python/attention_heads.py [--ranks 2 4 8 16 32 64] [--tokens 16384 65536]
    ... [--seeds 3]

For each batch the step of ContextParallelAttention as planned, and the shortest of the steps in
which its k longest documents are split by heads over d ranks, and BatchPlanner plans the others.
A group is the d neighbours among which the document begins; K and V are repeated where d exceeds
the KV heads. Gains are percents of the step by token ranges, the least, median and most over the
batches of a family, and beside them the k and d of the most. An upper bound: work is taken as even
but for ranks whose heads alone are more, and the plan of the others does not know of these.

Both steps by one sum: for each phase the busiest link of any rank, and its kernel; work on rows
that stay is taken out of kernels while rows travel. "off" is the most that this sum for token
ranges differs from waybill.predict_step, which knows who waits for whom; where that is less, gains
are against it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from attention_relay import families
from attention_ways import ulysses_heads

import waybill
from waybill.torch import BatchPlanner

_PER_NODE = 8
_NVLINK, _NETWORK = 345e9, 50e9
_PULL = 325 / 345
_PEER, _FAR_PEER, _PHASE = 0.4e-6, 3e-6, 11e-6
_FORWARD, _BACKWARD = 350e12, 320e12
_DIM, _ELEMENT = 128, 2
_MODELS = ((32, 8), (64, 8), (128, 128))
_LINKS = ("nvlink_in", "nvlink_out", "network_in", "network_out")
#: phases in which rows move: parts of rows like Q, of rows of K and V, and whether they go home
_MOVES = {0: (1, 1, False), 2: (1, 0, True), 3: (1, 0, False), 5: (1, 0, True), 6: (0, 1, True)}
_KERNELS = {1: 4 / _FORWARD, 4: 10 / _BACKWARD}  #: seconds of a pair and element of Q

Held = list[list[tuple[int, int, int]]]  #: of each rank (document, offset, length)
Links = dict[int, Any]  #: of each phase that moves rows [4, W] bytes


class Model(NamedTuple):
    heads: int
    kv_heads: int

    def planner(self, ranks: int, **given: Any) -> BatchPlanner:
        return BatchPlanner(ranks, *self, _DIM, ranks_per_node=_PER_NODE, **given)


class Tokens(NamedTuple):
    """Documents that are cut into token ranges."""

    links: Links
    stays: Any  #: [W] pairs that need no rows of others
    seconds: float  #: of predict_step
    in_place: bool


def by_tokens(held: Held, model: Model, in_place: Any = "auto") -> Tokens:
    """As the module plans them."""
    plan = model.planner(len(held), in_place=in_place).plan(held)
    straight = "once_per_node" if len(held) > _PER_NODE else "direct"
    transfer = "relay" if plan.forwards else straight
    step = waybill.predict_step(plan, transfer)
    links = {i: np.array([getattr(step.phases[i], n) for n in _LINKS], float) for i in _MOVES}
    # Over slow links all work that stays is hidden from the kernel.
    slow = {"nvlink_bytes_per_second": 1e6, "network_bytes_per_second": 1e6}
    kernel = np.asarray(waybill.predict_step(plan, transfer, **slow).phases[1].seconds)
    pair = _KERNELS[1] * model.heads * _DIM
    stays = np.asarray(step.work, float) - kernel / pair
    return Tokens(links, stays.clip(0), step.seconds, plan.in_place)


def by_heads(chosen: dict[int, Any], degree: int, model: Model) -> tuple[Links, Any]:
    """Links, and pairs of each rank, of documents that are split over `degree` ranks. `chosen` has
    by number the rows of each on each rank.
    """
    split = ulysses_heads(*model, degree)
    assert split is not None
    ranks = len(next(iter(chosen.values())))
    groups: dict[int, Any] = {}  # rows by first rank
    work = np.zeros(ranks)
    for rows in chosen.values():
        first = int(np.flatnonzero(rows)[0]) // degree * degree
        groups[first] = groups.get(first, 0) + rows
        work[first : first + degree] += _pairs(rows) / degree
    node = np.arange(ranks) // _PER_NODE
    moved = np.zeros((4, ranks))  # rows of a head
    for first, rows in groups.items():
        inside = (np.arange(ranks) >= first) & (np.arange(ranks) < first + degree)
        of_node = np.bincount(node, rows)[node]
        members = np.bincount(node, inside)[node]
        moved[0] += inside * (of_node - rows)
        moved[1] += rows * (members - inside)
        moved[2] += inside * (rows.sum() - of_node)
        moved[3] += rows * (degree - members)
    links = {}
    for phase, (q, kv, home) in _MOVES.items():
        row = _DIM * _ELEMENT * (q * split[0] + kv * 2 * split[1])
        links[phase] = row * (moved[[1, 0, 3, 2]] if home else moved)
    return links, work


def _pairs(rows: Any) -> float:
    """Of a causal document."""
    return float(rows.sum() * (rows.sum() + 1) / 2)


def seconds(links: Links, work: Any, stays: Any, model: Model) -> float:
    """Phase by phase the slowest rank's. `work`, `stays`: [W] pairs, and those that stay."""
    total, traveled = 0.0, 0.0
    for phase in range(7):
        if phase in _KERNELS:
            pair = _KERNELS[phase] * model.heads * _DIM
            total += float((work * pair - np.minimum(stays * pair, traveled)).max())
            continue
        near, far = links[phase][:2].max(0), links[phase][2:].max(0)
        ranks = len(near)
        near = near / (_NVLINK * (_PULL if phase == 6 else 1))
        near += (near > 0) * (min(ranks, _PER_NODE) - 1) * _PEER
        far = far / _NETWORK + (far > 0) * max(0, ranks - _PER_NODE) * _FAR_PEER
        traveled = float(np.maximum(near, far).max()) + _PHASE
        total += traveled
    return total


class Gain(NamedTuple):
    percent: float
    documents: int  #: of the batch's, the longest, that are split by heads
    degree: int
    off: float  #: of the sum, for token ranges, percent of predict_step's


def gain(held: Held, model: Model) -> Gain:
    """The best of head groups per document against token ranges alone."""
    ranks = len(held)
    lengths: dict[int, Any] = {}
    for rank, pieces in enumerate(held):
        for document, _, rows in pieces:
            lengths.setdefault(document, np.zeros(ranks))[rank] += rows
    longest = sorted(lengths, key=lambda d: -lengths[d].sum())
    mean = np.full(ranks, sum(map(_pairs, lengths.values())) / ranks)
    tokens = by_tokens(held, model)
    now = seconds(tokens.links, mean, tokens.stays.clip(0, mean), model)
    best = Gain(0.0, 0, 0, 100 * (now / tokens.seconds - 1))
    now = min(now, tokens.seconds)
    degrees = [d for d in (2, 4, 8, 16, 32, 64) if d <= ranks and ulysses_heads(*model, d)]
    for count in sorted({min(2**i, len(longest)) for i in range(9)} | {len(longest)}):
        chosen = set(longest[:count])
        rest = [[p for p in pieces if p[0] not in chosen] for pieces in held]
        if count == len(longest):
            others = Tokens({}, np.zeros(ranks), 0, tokens.in_place)
        else:
            others = by_tokens(rest, model, tokens.in_place)
        for degree in degrees:
            links, work = by_heads({d: lengths[d] for d in chosen}, degree, model)
            if others.links:
                links = {phase: links[phase] + others.links[phase] for phase in links}
            stays = others.stays.clip(0, (mean - work).clip(0))
            then = seconds(links, np.maximum(mean, work), stays, model)
            if 100 * (1 - then / now) > best.percent:
                best = best._replace(percent=100 * (1 - then / now), documents=count, degree=degree)
    return best


def batches(ranks: int, tokens: int, seeds: int) -> Iterator[tuple[str, Held]]:
    """Family and batch."""
    for name, held in families(ranks, tokens, seeds):
        number = 0
        pieces: Held = []
        for given in held:
            pieces.append([])
            for piece in given:
                if isinstance(piece, int):
                    piece, number = (2**40 + number, 0, piece), number + 1
                pieces[-1].append(piece)
        yield name.split(", seed")[0], pieces
    yield "a document of a rank's tokens on each rank", [[(r, 0, tokens)] for r in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    models = [Model(*m) for m in _MODELS]
    head = "".join(f" {m.heads}/{m.kv_heads} |" for m in models)
    print(f"| documents | tokens | ranks |{head} off |\n|---|---|---|{'---|' * (len(models) + 1)}")
    for tokens in options.tokens:
        for ranks in options.ranks:
            found: dict[str, list[list[Gain]]] = {}
            for name, held in batches(ranks, tokens, options.seeds):
                found.setdefault(name, []).append([gain(held, m) for m in models])
            for name, rows in found.items():
                cells = "".join(f" {_cell([row[i] for row in rows])} |" for i in range(len(models)))
                off = max((g.off for row in rows for g in row), key=abs)
                print(f"| {name} | {tokens} | {ranks} |{cells} {off:+.0f} % |", flush=True)


def _cell(gains: list[Gain]) -> str:
    best = max(gains)
    percents = sorted(g.percent for g in gains)
    text = f"{best.percent:.1f} %"
    if len(gains) > 1:
        text = f"{percents[0]:.1f}, {statistics.median(percents):.1f}, {text}"
    return f"{text} ({best.documents} x {best.degree})" if best.percent > 0 else text


if __name__ == "__main__":
    main()
