"""Attention of packed documents over ranks as a user writes it by hand, with torch.distributed.

The ways that gather K and V are those of ``python -m waybill bench``; gradients of K and V are
summed by reduce_scatter. Ulysses splits heads instead of tokens: rows of all heads are exchanged
for all rows of some heads, and whole documents are attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from collectives import AllToAll, Gathered
from torch import distributed

import waybill.torch as waybill
from waybill._bench.attention import ByHand, held_pieces


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


def by_hand(way: str, lengths: Sequence[int], device: torch.device) -> ByHand:
    """A way's tables of one batch on this rank of torch.distributed."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return ByHand(way, lengths, device, rank, size, Gathered.apply)


def ulysses_heads(heads: int, kv_heads: int, size: int) -> Optional[tuple[int, int]]:
    """Heads of Q, and of K and V, that a rank gets; None where they do not divide."""
    if heads % size or (kv_heads % size and size % kv_heads):
        return None
    return heads // size, max(1, kv_heads // size)


class Ulysses:
    """Heads split over ranks: DeepSpeed-Ulysses with the kernel for packed documents. Heads of K
    and V are repeated where there are more ranks. One all_to_all there, one back.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.pieces = held_pieces("contiguous", rank, self.size, lengths)
        self.sequences = waybill.kernels.Sequences.of(lengths, lengths, device)

    def token_rows(self) -> torch.Tensor:
        """Which tokens of the batch the rank's rows are."""
        return torch.cat([torch.arange(p.begin, p.end) for p in self.pieces])

    def attention(self, attend: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
        if k.shape[1] < self.size:
            k, v = (t.repeat_interleave(self.size // t.shape[1], 1) for t in (k, v))
        parts = [t.unflatten(1, (self.size, -1)) for t in (q, k, v)]
        counts = [part.shape[2] for part in parts]
        there = self._exchanged(torch.cat(parts, 2).transpose(0, 1).flatten(0, 1))
        out = attend(*there.split(counts, 1), self.sequences)
        home = self._exchanged(out).unflatten(0, (self.size, -1))
        return home.transpose(0, 1).flatten(1, 2)

    def _exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        """The i-th part of the rows goes to rank i."""
        each = [rows.shape[0] // self.size] * self.size
        return AllToAll.apply(rows.contiguous(), each, each)
