"""EPLB from its description, as a baseline: which experts get copies, and where they lie.

Counts: one copy more for the expert with the largest load per copy, until all slots are used.
Packing: items in descending order, each to the least loaded pack that still has room; all packs get
as many items. With groups: groups to nodes, then copies and packing inside each node. Two copies of
an expert may lie on one rank.
"""

import numpy as np


def replicate(loads, num_slots):
    counts = np.ones(len(loads), np.int64)
    for _ in range(num_slots - len(loads)):
        counts[np.argmax(loads / counts)] += 1
    return counts


def pack(items, num_packs):
    """The pack of each item."""
    room = len(items) // num_packs
    sums, sizes = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    packs = np.zeros(len(items), np.int64)
    for item in np.argsort(-np.asarray(items), kind="stable"):
        open_packs = np.flatnonzero(sizes < room)
        packs[item] = best = open_packs[np.argmin(sums[open_packs])]
        sums[best] += items[item]
        sizes[best] += 1
    return packs


def place(loads, num_ranks, slots_per_rank, num_nodes=1, num_groups=0):
    """Loads of the ranks, and what they are if a rank that got an expert twice has one copy of it.

    Rows of an expert are split evenly over its copies: with two on a rank unevenly over ranks.
    """
    loads = np.asarray(loads, float)
    nodes = [np.arange(len(loads))]
    if num_groups:
        groups = np.arange(len(loads)).reshape(num_groups, -1)
        packs = pack(loads[groups].sum(axis=1), num_nodes)
        nodes = [groups[packs == node].ravel() for node in range(num_nodes)]
    ranks = num_ranks // len(nodes)
    result, once = [], []
    for experts in nodes:
        counts = replicate(loads[experts], ranks * slots_per_rank)
        owners = np.repeat(np.arange(len(experts)), counts)
        packs = pack(loads[experts][owners] / counts[owners], ranks)
        held = np.zeros((len(experts), ranks))
        np.add.at(held, (owners, packs), 1)
        for copies, into in ((held, result), (held > 0, once)):
            share = loads[experts] / copies.sum(axis=1)
            into.extend((share @ copies).tolist())
    return np.array(result), np.array(once)
