#!/usr/bin/env python3
"""What forwarding of K and V gains, predicted, by family of documents. Nothing runs on ranks.

    python bench/python/attention_relay.py [--ranks 8 64] [--tokens 16384 65536] [--seeds 3]

Steps of ContextParallelAttention with 32 heads and 8 of K and V of 128, in ms, on nodes of 8 ranks:
with relay="never" (between nodes K and V cross once per node), and as relay="auto" plans them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from attention_ways import draw

import waybill
from waybill._bench.attention import held_pieces
from waybill.torch import BatchPlanner

_PER_NODE = 8
Held = list[list[Any]]


def families(ranks: int, tokens: int, seeds: int) -> Iterator[tuple[str, Held]]:
    """Batches by name."""
    for name in ("wlbllm", "prolong"):
        for seed in range(seeds):
            yield (
                f"{name}, seed {seed}",
                _held("contiguous", draw(name, seed, ranks * tokens), ranks),
            )
    short = [256] * (tokens // 256)
    yield "one document on rank 0, short ones elsewhere", [[tokens]] + [short] * (ranks - 1)
    half = [tokens // 8] * 8
    yield "one document on rank 0, eighths elsewhere", [[tokens]] + [half] * (ranks - 1)
    single = [ranks * tokens]
    yield "one document over all ranks", _held("contiguous", single, ranks)
    yield "one document in zigzag", _held("per document", single, ranks)


def _held(way: str, lengths: list[int], ranks: int) -> Held:
    return [
        [(p.start, p.begin - p.start, p.end - p.begin) for p in held_pieces(way, r, ranks, lengths)]
        for r in range(ranks)
    ]


def milliseconds(held: Held, relay: str) -> tuple[float, bool]:
    """(of a step, whether ranks forward)."""
    planner = BatchPlanner(len(held), 32, 8, 128, relay=relay, ranks_per_node=_PER_NODE)
    plan = planner.plan(held)
    straight = "once_per_node" if len(held) > _PER_NODE else "direct"
    step = waybill.predict_step(plan, "relay" if plan.forwards else straight)
    return 1e3 * step.seconds, plan.forwards


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print("| ranks, tokens each | documents | never | auto | saved |\n|---|---|---|---|---|")
    for ranks in options.ranks:
        for tokens in options.tokens:
            for name, held in families(ranks, tokens, options.seeds):
                never, _ = milliseconds(held, "never")
                auto, forwards = milliseconds(held, "auto")
                saved = f"{100 * (1 - auto / never):.0f} %" if forwards else "no relay"
                print(f"| {ranks}, {tokens} | {name} | {never:.2f} | {auto:.2f} | {saved} |")


if __name__ == "__main__":
    main()
