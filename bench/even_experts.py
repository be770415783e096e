#!/usr/bin/env python3
"""How even copies of hot experts make the ranks, and what they cost: a table, and a picture.

    even_experts.py [--picture docs/pictures/even_experts.svg]

Loads are lognormal, the largest 1 + MaxVio times the mean; 20 seeds; figures are means.
"""

import argparse
import pathlib
import sys
import time

import numpy as np

from waybill.moe import even_experts

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))
from expert_loads import families

LIMITS = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1)
CASES = (((256, 8), "lognormal 1"), ((256, 32), "lognormal 1"), ((256, 64), "lognormal 1"),
         ((256, 64), "lognormal 4"), ((128, 64), "lognormal 4"))  # fmt: skip


def figures(shape, family, spare, limit):
    """Largest over mean without and with copies, copies, weights of the fullest sender, seconds."""
    rows, homes = [], shape[0] // shape[1]
    for seed in range(20):
        loads = dict(families(*shape, seed))[family]
        start = time.perf_counter()
        plan = even_experts(loads, spare_experts=spare, limit=limit)
        seconds = time.perf_counter() - start
        before = loads.sum(axis=0).reshape(shape[1], homes).sum(axis=1).max() / plan.mean_rows
        copies = int((plan.quotas[:, homes:] > 0).sum())
        rows.append(
            (before, plan.max_rows / plan.mean_rows, copies, plan.weights_out.max(), seconds)
        )
    return np.mean(rows, axis=0)


def draw(curves, path):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "waybill"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for (shape, family, spare), points in curves.items():
        if spare != 2:
            continue
        label = f"{shape[0]} experts, {shape[1]} ranks, {family}"
        evenness = [point[1] for point in points]
        axes[0].plot([point[2] / shape[1] for point in points], evenness, "o-", ms=3, label=label)
        axes[1].plot([point[3] for point in points], evenness, "o-", ms=3)
    axes[0].set_xlabel("copies per rank")
    axes[0].set_ylabel("rows of the fullest rank / mean")
    axes[1].set_xlabel("weights that the fullest sender sends")
    axes[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("--spare", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    curves = {}
    print("| experts, ranks | loads | spare | limit | before | after | copies | fullest sender |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, family in CASES:
        for spare in given.spare:
            for limit in LIMITS:
                point = figures(shape, family, spare, limit)
                curves.setdefault((shape, family, spare), []).append(point)
                print(
                    f"| {shape[0]}, {shape[1]} | {family} | {spare} | {limit} | {point[0]:.3f} |"
                    f" {point[1]:.4f} | {point[2]:.1f} | {point[3]:.1f} |"
                )
    if given.picture:
        draw(curves, given.picture)


if __name__ == "__main__":
    main()
