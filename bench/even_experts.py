#!/usr/bin/env python3
"""How even copies of hot experts make the ranks, and what they cost: a table, and a picture.

    even_experts.py [--picture docs/pictures/even_experts.svg]
    even_experts.py --nodes 8

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


def node_figures(shape, family, limit, nodes):
    """Of plans that do not know nodes, and of those that do: copies, weights that cross nodes,
    those of the node that sends or receives most, weights of the fullest sender, rows of the
    fullest rank over the mean."""
    both = []
    for known in (1, nodes):
        found, homes, ranks_of_node = [], shape[0] // shape[1], shape[1] // nodes
        for seed in range(20):
            loads = [rows for name, rows in families(*shape, seed) if name.split()[0] == family]
            for rows in loads:
                plan = even_experts(rows, spare_experts=2, limit=limit, num_nodes=known)
                ranks, slots = np.nonzero(plan.quotas[:, homes:])
                experts = plan.slots[ranks, homes + slots]
                pairs = {(e // homes // ranks_of_node, r // ranks_of_node, e)
                         for r, e in zip(ranks, experts)}  # fmt: skip
                pairs = {pair for pair in pairs if pair[0] != pair[1]}
                ends = [np.bincount([pair[i] for pair in pairs], minlength=1).max() for i in (0, 1)]
                evenness = plan.max_rows / plan.mean_rows
                found.append((len(ranks), len(pairs), max(ends), plan.weights_out.max(), evenness))
        both.append(np.mean(found, axis=0))
    return both


def print_nodes(nodes):
    print("| experts, ranks | loads | limit | copies | cross | of a node | sender | after |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in ((256, 64), (128, 64)):
        for family in ("lognormal", "zipf", "hot", "few"):
            for limit in (1.0, 1.02):
                both = np.array(node_figures(shape, family, limit, nodes)).T
                cells = [f"{one:.1f}, {other:.1f}" for one, other in both[:4]]
                cells.append(f"{both[4][0]:.4f}, {both[4][1]:.4f}")
                print(f"| {shape[0]}, {shape[1]} | {family} | {limit} |", " | ".join(cells), "|")


def draw(curves, path):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "waybill"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for (shape, family, spare), points in curves.items():
        form = {"color": f"C{CASES.index((shape, family))}", "marker": "o", "ms": 3}
        form["linestyle"] = "-" if spare == 2 else "--"
        label = f"{shape[0]} experts, {shape[1]} ranks, {family}" if spare == 2 else None
        evenness = [point[1] for point in points]
        axes[0].plot([point[2] / shape[1] for point in points], evenness, label=label, **form)
        axes[1].plot([point[3] for point in points], evenness, **form)
    axes[1].plot([], [], "k-", label="two spare slots")
    axes[1].plot([], [], "k--", label="one")
    axes[1].legend(fontsize=6, loc="upper left")
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
    parser.add_argument("--nodes", type=int)
    given = parser.parse_args()
    if given.nodes:
        return print_nodes(given.nodes)
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
