"""A step of attention over packed documents, forward and backward, by Waybill and by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import torch as waybill
from .attention_ways import WAYS, ByHand, held_pieces, kernel_of
from .ranks import Place, Rank, slowest_us

_CHECKED_TOKENS = 48  # tokens of each rank in the batch that is compared in full


class Documents(NamedTuple):
    """A workload: lengths of the documents of all ranks, and (heads, kv_heads, head_dim)."""

    lengths: list[int]
    heads: tuple[int, int, int]

    @classmethod
    def of(cls, options: argparse.Namespace, place: Place) -> Documents:
        """Lengths as given, or drawn from a distribution: 16384 tokens per rank, 512 on CPUs."""
        on_gpus = place.device == "cuda"
        text = options.attention
        if text.replace(",", "").isdigit():
            lengths = [int(part) for part in text.split(",") if part]
        else:
            total = place.ranks * (16384 if on_gpus else 512)
            lengths = [int(n) for n in waybill.sample_documents(text, total, 0)]
        lengths = whole(lengths, place.ranks)
        if not lengths:
            raise ValueError(
                f"--attention: got {text!r}, expected lengths of at least {place.ranks} tokens"
            )
        return cls(lengths, (32, 8, 128) if on_gpus else (8, 2, 64))


def whole(lengths: Sequence[int], ranks: int) -> list[int]:
    """The lengths with as much left out at the end as makes them a multiple of the ranks."""
    left = sum(lengths) // ranks * ranks
    kept = []
    for length in lengths:
        kept.append(min(length, left))
        left -= kept[-1]
    return [length for length in kept if length > 0]


class Gathered(torch.autograd.Function):
    """All ranks' rows; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, rank: Rank) -> torch.Tensor:
        ctx.rank = rank
        return rank.gathered(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.rank.scattered(gradient.contiguous()), None


class Batch:
    """One batch on this rank: the rows of all ranks, and the module."""

    def __init__(self, rank: Rank, documents: Documents, module: Any) -> None:
        self.rank, self.lengths, self.module = rank, documents.lengths, module
        heads, kv_heads, head_dim = documents.heads
        dtype = torch.bfloat16 if rank.device.type == "cuda" else torch.float32
        self.tokens = sum(self.lengths)
        made = torch.Generator().manual_seed(1)
        self.rows = [
            torch.randn(self.tokens, n, head_dim, generator=made).to(rank.device, dtype)
            for n in (heads, kv_heads, kv_heads, heads)
        ]
        self.attend = kernel_of(rank.device, module.planner.shape)
        # Ranks that are threads and share a GPU have one thread of autograd.
        self.backward = not (rank.how == "copies" and rank.device.type == "cuda")

    def tables(self, way: str) -> Any:
        """Returns the tables of the batch that a way reads."""
        rank = self.rank
        if way == "Waybill":
            held = [held_pieces("contiguous", r, rank.size, self.lengths) for r in range(rank.size)]
            pieces = [[(p.start, p.begin - p.start, p.end - p.begin) for p in one] for one in held]
            plan = self.module.plan(pieces)
            self.module.prepare(plan)
            return plan
        gather = lambda rows: Gathered.apply(rows, rank)
        return ByHand(way, self.lengths, rank.device, rank.rank, rank.size, gather)

    def token_rows(self, tables: Any) -> torch.Tensor:
        """Which tokens of the batch this rank has."""
        if isinstance(tables, ByHand):
            return tables.token_rows().to(self.rank.device)
        mine = self.tokens // self.rank.size
        return torch.arange(mine, device=self.rank.device) + self.rank.rank * mine

    def step(self, way: str) -> Callable[[], list[torch.Tensor]]:
        """Returns a function that makes one step. It makes the tables of the next step after its
        calls, and returns the output and the gradients of q, k and v.
        """
        tables = self.tables(way)
        here = self.token_rows(tables)
        q, k, v, gradient = (rows[here] for rows in self.rows)
        leaves = [t.detach().requires_grad_(self.backward) for t in (q, k, v)]

        def run() -> list[torch.Tensor]:
            nonlocal tables
            for leaf in leaves:
                leaf.grad = None
            by_hand = isinstance(tables, ByHand)
            out = (
                tables.attention(self.attend, *leaves) if by_hand else self.module(tables, *leaves)
            )
            if self.backward:
                out.backward(gradient)
            tables = self.tables(way)
            return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

        return run

    def is_right(self, way: str) -> bool:
        """Whether a step equals plain attention in one piece, within rounding."""
        expected = self._plain()
        here = self.token_rows(self.tables(way))
        for mine, right in zip(self.step(way)(), expected):
            wanted = right[here]
            off = float((mine.float() - wanted).abs().max()) if mine.numel() else 0.0
            if not off <= 0.03 * max(1.0, float(right.abs().max())):
                return False
        return True

    def _plain(self) -> list[torch.Tensor]:
        q, k, v, gradient = (rows.float().clone() for rows in self.rows)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        share = q.shape[1] // k.shape[1]
        outs = []
        for q1, k1, v1 in zip(*(torch.split(t, self.lengths) for t in leaves)):
            k1, v1 = (t.repeat_interleave(share, 1) for t in (k1, v1))
            scores = torch.einsum("qhd,khd->hqk", q1, k1) * q1.shape[-1] ** -0.5
            later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v1))
        out = torch.cat(outs)
        torch.autograd.backward(out, gradient)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def measure(rank: Rank, documents: Documents, seconds: float) -> dict[str, Any]:
    """A line for each way. Collective."""
    if rank.rank == 0:
        print(f"bench: attention, {sum(documents.lengths)} tokens", file=sys.stderr, flush=True)
    heads, kv_heads, head_dim = documents.heads
    module = waybill.ContextParallelAttention(
        rank.group, heads, kv_heads, head_dim,
        dtype=torch.bfloat16 if rank.device.type == "cuda" else torch.float32,
    )  # fmt: skip
    total = sum(documents.lengths)
    few = [max(1, n * _CHECKED_TOKENS * rank.size // total) for n in documents.lengths]
    small = Batch(rank, Documents(whole(few, rank.size), documents.heads), module)
    batch = Batch(rank, documents, module)
    lines = []
    for way in ("Waybill", *WAYS):
        right = all(rank.gather(small.is_right(way)))
        name = way if way == "Waybill" else f"{way} by hand ({rank.how})"
        us = slowest_us(rank, batch.step(way), seconds / (1 + len(WAYS)))
        lines.append({"way": name, "right": right, "us": us})
    module.close()
    return {
        "documents": len(documents.lengths), "longest": max(documents.lengths), "tokens": total,
        "heads": list(documents.heads), "backward": batch.backward, "lines": lines,
    }  # fmt: skip
