"""A step of attention over packed documents, forward and backward, by Waybill and by hand.

A way by hand says which pieces of documents a rank holds; K and V of all ranks are gathered, and
the contexts of the rank's pieces are picked from them. Backward is autograd's: gradients of K and V
are summed and scattered.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch

from .. import torch as waybill
from .ranks import Place, Rank, slowest_us

WAYS = ("contiguous", "per document", "hybrid")


class HeldPiece(NamedTuple):
    """Tokens [begin, end) of the batch, of the document that begins at `start`."""

    start: int
    begin: int
    end: int


def held_pieces(way: str, rank: int, size: int, lengths: Sequence[int]) -> list[HeldPiece]:
    """contiguous: as packed. per document: every document in 2 W pieces, of which a rank has the
    i-th and the i-th from the end. hybrid: documents of up to an eighth of a rank's tokens whole,
    on the rank with the least work; longer ones per document.
    """
    per_rank = sum(lengths) // size
    loads, pieces, start = [0.0] * size, [], 0
    whole = []
    for length in lengths:
        if way == "contiguous":
            begin, end = max(rank * per_rank, start), min((rank + 1) * per_rank, start + length)
            if begin < end:
                pieces.append(HeldPiece(start, begin, end))
        elif way == "hybrid" and length <= per_rank // 8:
            whole.append((length, start))
        else:
            cuts = [start + length * i // (2 * size) for i in range(2 * size + 1)]
            for i in (rank, 2 * size - 1 - rank):
                if cuts[i] < cuts[i + 1]:
                    pieces.append(HeldPiece(start, cuts[i], cuts[i + 1]))
        start += length
    for length, begin in sorted(whole, reverse=True):
        least = loads.index(min(loads))
        loads[least] += length * length
        if least == rank:
            pieces.append(HeldPiece(begin, begin, begin + length))
    return sorted(pieces, key=lambda piece: piece.begin)


def kernel_of(device: torch.device, shape: Any) -> Callable[..., torch.Tensor]:
    """attend(q, k, v, sequences), known to autograd: varlen_attn on GPUs."""
    if device.type != "cuda":
        plain = waybill.kernels.DotProductKernel()
        return lambda q, k, v, sequences: plain.forward(q, k, v, sequences, shape, False)[0]
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True

    def attend(q: Any, k: Any, v: Any, sequences: Any) -> Any:
        return varlen_attn(
            q, k, v, sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.max_seqlen_q,
            sequences.max_seqlen_k, **options,
        )  # fmt: skip

    return attend


class ByHand:
    """One way's tables of one batch on this rank; made anew each step, as documents change.

    ``gather`` gives the rows of all ranks, as many of each, and is known to autograd.
    """

    def __init__(
        self, way: str, lengths: Sequence[int], device: torch.device, rank: int, size: int,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        self.gather = gather
        ranks = [held_pieces(way, r, size, lengths) for r in range(size)]
        self.pieces = ranks[rank]
        counts = [sum(p.end - p.begin for p in held) for held in ranks]
        self.rows, self.most = counts[rank], max(counts)
        where = torch.empty(sum(lengths), dtype=torch.int64)  # row of each token after gathering
        for r, held in enumerate(ranks):
            at = r * self.most
            for _, begin, end in held:
                where[begin:end] = torch.arange(at, at + end - begin)
                at += end - begin
        context = torch.cat([where[p.start : p.end] for p in self.pieces])
        adjacent = bool((context[1:] == context[:-1] + 1).all())
        self.first: Optional[int] = int(context[0]) if adjacent else None
        self.num_keys = len(context)
        if device.type == "cuda":
            context = context.pin_memory()
        self.context = None if adjacent else context.to(device, non_blocking=True)
        self.sequences = waybill.kernels.Sequences.of(
            [p.end - p.begin for p in self.pieces], [p.end - p.start for p in self.pieces], device
        )

    def token_rows(self) -> torch.Tensor:
        """Which tokens of the batch the rank's rows are."""
        return torch.cat([torch.arange(p.begin, p.end) for p in self.pieces])

    def attention(self, attend: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
        k, v = (self._contexts(t) for t in (k, v))
        return attend(q, k, v, self.sequences)

    def _contexts(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.most - self.rows
        if missing:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing))
        everything = self.gather(rows)
        if self.context is not None:
            return everything.index_select(0, self.context)
        assert self.first is not None
        return everything[self.first : self.first + self.num_keys]


_CHECKED_TOKENS = 48  # tokens of each rank in the batch that is compared in full


#: Lengths of the documents of all ranks, and (heads, kv_heads, head_dim).
Documents = tuple[list[int], tuple[int, int, int]]


def documents_of(options: argparse.Namespace, place: Place) -> Documents:
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
    return lengths, (32, 8, 128) if on_gpus else (8, 2, 64)


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
        self.rank, self.module = rank, module
        self.lengths, (heads, kv_heads, head_dim) = documents
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
    lengths, sizes = documents
    total = sum(lengths)
    if rank.rank == 0:
        print(f"bench: attention, {total} tokens", file=sys.stderr, flush=True)
    module = waybill.ContextParallelAttention(
        rank.group, *sizes,
        dtype=torch.bfloat16 if rank.device.type == "cuda" else torch.float32,
    )  # fmt: skip
    few = [max(1, n * _CHECKED_TOKENS * rank.size // total) for n in lengths]
    small = Batch(rank, (whole(few, rank.size), sizes), module)
    batch = Batch(rank, documents, module)
    lines = []
    for way in ("Waybill", *WAYS):
        right = all(rank.gather(small.is_right(way)))
        name = way if way == "Waybill" else f"{way} by hand ({rank.how})"
        us = slowest_us(rank, batch.step(way), seconds / (1 + len(WAYS)))
        lines.append({"way": name, "right": right, "us": us})
    module.close()
    return {
        "documents": len(lengths), "longest": max(lengths), "tokens": total,
        "heads": list(sizes), "backward": batch.backward, "lines": lines,
    }  # fmt: skip
