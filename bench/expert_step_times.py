#!/usr/bin/env python3
"""Predicted times of one layer of experts, without and with copies of hot experts: a table.

    expert_step_times.py [--spare 2] [--limit 1.02] [--min-rows 128]

"Where they pay" is the same with min_rows = break_even_rows(...), over the network where there are
nodes. 256 experts of 7168 x 2048, bfloat16; 8 ranks of one node and 8 nodes of 8; 4096 tokens per
rank, each to the best 8 (or all, where fewer have tokens). Loads are the families of
tests/python/expert_loads.py; a token's experts are drawn without putting back.
"""

import argparse
import pathlib
import sys

import numpy as np

from waybill.moe import EPConfig, break_even_rows, price_copies

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))
from expert_loads import few_shares, hot_rank_shares, lognormal_shares, zipf_shares

EXPERTS, TOKENS, TOPK, HIDDEN, INNER, TILE, SEED = 256, 4096, 8, 7168, 2048, 128, 0


def shares_of(num_ranks):
    """Pairs of a family's name and the shares of its experts."""
    for max_vio in (0.2, 1, 4):
        rng = np.random.default_rng(SEED)
        yield f"lognormal, MaxVio {max_vio}", lognormal_shares(EXPERTS, max_vio, rng)
    for exponent in (0.5, 1.0, 1.5):
        yield f"Zipf {exponent}", zipf_shares(EXPERTS, exponent, np.random.default_rng(SEED))
    for times, inside in ((1.6, "even"), (1.6, "zipf"), (3.0, "even"), (3.0, "zipf")):
        rng = np.random.default_rng(SEED)
        shares = hot_rank_shares(EXPERTS, num_ranks, times, inside, rng)
        yield f"one rank with {times} times the mean, {inside} inside", shares
    for few in sorted({1, 8, num_ranks}):
        yield (
            f"{few} experts have all tokens",
            few_shares(EXPERTS, few, np.random.default_rng(SEED)),
        )


def ids_of(shares, num_ranks):
    """[T, topk] of each rank: the largest of log(share) + Gumbel noise."""
    rng = np.random.default_rng(SEED)
    topk = min(TOPK, int((shares > 0).sum()))
    with np.errstate(divide="ignore"):
        scores = np.log(shares).astype(np.float32)
    ids = []
    for _ in range(num_ranks):
        noisy = scores - np.log(rng.exponential(size=(TOKENS, EXPERTS)).astype(np.float32))
        ids.append(np.argpartition(-noisy, topk - 1, axis=1)[:, :topk])
    return topk, ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spare", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--min-rows", type=int, default=128)
    given = parser.parse_args()
    print("| loads | ranks | step ms, fullest over mean: without | copies, ms, fullest |"
          " where they pay: copies, ms, fullest |")  # fmt: skip
    print("|" + "---|" * 5)
    for num_ranks in (8, 64):
        for family, shares in shares_of(num_ranks):
            topk, ids = ids_of(shares, num_ranks)
            config = EPConfig(TOKENS, HIDDEN, topk, EXPERTS, 0, num_ranks, 8, "bfloat16")
            link = {} if num_ranks == 8 else {"link_bytes_per_second": 50e9}
            cells = []
            for min_rows in (given.min_rows, break_even_rows(config, **link)):
                made = price_copies(
                    config, ids, spare_experts=given.spare, limit=given.limit, min_rows=min_rows,
                    expert_alignment=TILE, intermediate=INNER,
                )  # fmt: skip
                mean = made.rows_before.mean()
                if not cells:
                    cells.append(cell(made.before, made.rows_before.max() / mean))
                after = cell(made.after, made.rows_after.max() / mean)
                cells.append(f"{made.num_copies}: {after}")
            print(f"| {family} | {num_ranks} | {' | '.join(cells)} |", flush=True)


def cell(step, fullest):
    return f"{(step.forward + step.backward) * 1e3:.1f}, {fullest:.2f}"


if __name__ == "__main__":
    main()
