#!/usr/bin/env python3
"""Predicted times of one layer of experts, without and with copies of hot experts: a table. With
--measure also how long the experts of the fullest rank take alone, with its rows before and after.

    expert_step_times.py [--spare 2] [--limit 1.02] [--min-rows 128]
    expert_step_times.py --measure cuda --ranks 8          # on one GPU

"Where they pay" is the same with min_rows = break_even_rows(...), over the network where there are
nodes. 8 ranks are one node, more are nodes of 8. A rank's tokens go each to the best 8 experts (or
all, where fewer have tokens). Loads are the families of tests/python/expert_loads.py; a token's
experts are drawn without putting back.

What is measured: SwiGLUExperts in bfloat16 (float32 on a CPU), as ExpertParallel runs them: home
experts, then copies, whose weights are there. Each expert's rows are padded to a tile. Medians of
--steps, ms; the predicted ratio is that of rows in whole tiles, of predict_experts.
"""

import argparse
import pathlib
import statistics
import sys

import numpy as np

from waybill.moe import EPConfig, break_even_rows, even_experts, price_copies

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "python"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))
from expert_loads import few_shares, hot_rank_shares, lognormal_shares, zipf_shares

TOPK, SEED = 8, 0


def shares_of(num_experts, num_ranks):
    """Pairs of a family's name and the shares of its experts."""
    for max_vio in (0.2, 1, 4):
        rng = np.random.default_rng(SEED)
        yield f"lognormal, MaxVio {max_vio}", lognormal_shares(num_experts, max_vio, rng)
    for exponent in (0.5, 1.0, 1.5):
        rng = np.random.default_rng(SEED)
        yield f"Zipf {exponent}", zipf_shares(num_experts, exponent, rng)
    for times, inside in ((1.6, "even"), (1.6, "zipf"), (3.0, "even"), (3.0, "zipf")):
        rng = np.random.default_rng(SEED)
        shares = hot_rank_shares(num_experts, num_ranks, times, inside, rng)
        yield f"one rank with {times} times the mean, {inside} inside", shares
    for few in sorted({1, 8, num_ranks}):
        rng = np.random.default_rng(SEED)
        yield f"{few} experts have all tokens", few_shares(num_experts, few, rng)


def measured_shares(num_experts, num_ranks):
    """Those whose experts are timed."""
    wanted = ("lognormal, MaxVio 1", "lognormal, MaxVio 4", "one rank")
    return [one for one in shares_of(num_experts, num_ranks) if one[0].startswith(wanted)]


def ids_of(shares, num_ranks, tokens):
    """[T, topk] of each rank: the largest of log(share) + Gumbel noise."""
    rng = np.random.default_rng(SEED)
    topk = min(TOPK, int((shares > 0).sum()))
    with np.errstate(divide="ignore"):
        scores = np.log(shares).astype(np.float32)
    ids = []
    for _ in range(num_ranks):
        noise = np.log(rng.exponential(size=(tokens, len(shares))).astype(np.float32))
        ids.append(np.argpartition(noise - scores, topk - 1, axis=1)[:, :topk])
    return topk, ids


def priced(given, topk, ids, min_rows):
    config = EPConfig(
        given.tokens, given.sizes[0], topk, given.experts, 0, len(ids), min(8, len(ids)), "bfloat16"
    )
    return price_copies(
        config, ids, spare_experts=given.spare, limit=given.limit, expert_alignment=given.tile,
        intermediate=given.sizes[1],
        min_rows=break_even_rows(config, **_links(len(ids))) if min_rows is None else min_rows,
    )  # fmt: skip


def _links(num_ranks):
    return {} if num_ranks <= 8 else {"link_bytes_per_second": 50e9}


def predict(given):
    print("| loads | ranks | step ms, fullest over mean: without | copies, ms, fullest |"
          " where they pay: copies, ms, fullest |")  # fmt: skip
    print("|" + "---|" * 5)
    for num_ranks in given.ranks:
        for family, shares in shares_of(given.experts, num_ranks):
            topk, ids = ids_of(shares, num_ranks, given.tokens)
            cells = []
            for min_rows in (given.min_rows, None):
                made = priced(given, topk, ids, min_rows)
                mean = made.rows_before.mean()
                if not cells:
                    cells.append(cell(made.before, made.rows_before.max() / mean))
                after = cell(made.after, made.rows_after.max() / mean)
                cells.append(f"{made.num_copies}: {after}")
            print(f"| {family} | {num_ranks} | {' | '.join(cells)} |", flush=True)


def cell(step, fullest):
    return f"{(step.forward + step.backward) * 1e3:.1f}, {fullest:.2f}"


def slot_rows(given, ids):
    """Of the fullest rank, before and after: rows of each home expert and of each spare slot."""
    home = given.experts // len(ids)
    counts = np.array([np.bincount(one.ravel(), minlength=given.experts) for one in ids])
    plan = even_experts(
        counts, spare_experts=given.spare, limit=given.limit, min_rows=given.min_rows,
        alignment=given.tile, num_nodes=max(1, len(ids) // 8),
    )  # fmt: skip
    before = np.zeros_like(plan.quotas)
    before[:, :home] = counts.sum(axis=0).reshape(len(ids), home)
    padded = [-(-rows // given.tile) * given.tile for rows in (before, plan.quotas)]
    return [rows[rows.sum(axis=1).argmax()] for rows in padded]


def timed(given, rows):
    """Median milliseconds of forward and of backward."""
    import torch
    from step_clock import StepClock

    from waybill.torch.experts.copies import StackedExperts
    from waybill.torch.moe import SwiGLUExperts

    device = torch.device(given.measure)
    made = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
    home, (hidden, inner) = len(rows) - given.spare, given.sizes
    experts = StackedExperts(SwiGLUExperts(home, hidden, inner, **made), home)
    spare = SwiGLUExperts(given.spare, hidden, inner, **made)
    leaves = [torch.randn(int(rows.sum()), hidden, **made).requires_grad_()]
    leaves += [*experts.home(), *spare.parameters()]
    copies = list(spare.parameters()) if rows[home:].any() else []
    ends = torch.tensor(np.cumsum(rows), dtype=torch.int32, device=device)
    gradient = torch.randn_like(leaves[0])
    phases = {"forward": [], "backward": []}
    for step in range(given.warm + given.steps):
        for leaf in leaves:
            leaf.grad = None
        clock = StepClock(device)
        outputs = experts.run(experts.home(), copies, leaves[0], ends, [])
        clock.mark("forward")
        outputs.backward(gradient)
        clock.mark("backward")
        for phase, (milliseconds, _) in clock.finish()[1].items():
            phases[phase] += [milliseconds] if step >= given.warm else []
    return [statistics.median(one) for one in phases.values()]


def measure(given):
    print("| loads | ranks | rows before, after | ms before: forward, backward | after |"
          " after / before | predicted |")  # fmt: skip
    print("|" + "---|" * 7)
    for num_ranks in given.ranks:
        for family, shares in measured_shares(given.experts, num_ranks):
            topk, ids = ids_of(shares, num_ranks, given.tokens)
            made = priced(given, topk, ids, given.min_rows)
            both = slot_rows(given, ids)
            times = [timed(given, rows) for rows in both]
            cells = ["{}, {}".format(*(rows.sum() for rows in both))]
            cells += ["{:.2f}, {:.2f}".format(*one) for one in times]
            cells.append(f"{sum(times[1]) / sum(times[0]):.3f}")
            cells.append(f"{made.after.gemm / made.before.gemm:.3f}")
            print(f"| {family} | {num_ranks} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spare", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--min-rows", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 64))
    parser.add_argument("--experts", type=int, default=256, help="of all ranks")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--tile", type=int, default=128, help="rows of a tile")
    parser.add_argument(
        "--sizes", type=int, nargs=2, default=(7168, 2048), metavar="N", help="hidden, inner"
    )
    parser.add_argument("--measure", metavar="DEVICE", help="times the experts there: cuda, cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3)
    given = parser.parse_args()
    measure(given) if given.measure else predict(given)


if __name__ == "__main__":
    main()
