"""Attention of packed documents over ranks as a user writes it by hand.

A way says which pieces of documents a rank holds; K and V of all ranks are gathered, and the
contexts of the rank's pieces are picked from them. Backward is autograd's: gradients of K and V are
summed and scattered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch

from .. import torch as waybill

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
