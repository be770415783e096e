"""Workloads of attention, and its ways by hand over the ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from collectives import Gathered
from torch import distributed

from waybill._bench.attention_ways import ByHand


def by_hand(way: str, lengths: Sequence[int], device: torch.device) -> ByHand:
    """One way's tables of one batch on this rank."""
    ranks = distributed.get_rank(), distributed.get_world_size()
    return ByHand(way, lengths, device, *ranks, Gathered.apply)


def draw(source: str, seed: int, total: int) -> list[int]:
    """Lengths of documents that fill `total` tokens: of a distribution by name, or chosen from the
    list in a JSON file.
    """
    if source == "single":
        return [total]
    if not source.endswith(".json"):
        return waybill_lengths(source, seed, total)
    import json
    import random

    with open(source, encoding="utf-8") as file:
        pool = json.load(file)
    rng, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(rng.choice(pool), total - sum(lengths)))
    return lengths


def waybill_lengths(name: str, seed: int, total: int) -> list[int]:
    from waybill import sample_documents

    return sample_documents(name, total, seed).tolist()
