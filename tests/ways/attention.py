"""The ways of sequences through ContextParallelAttention: rows that stay, and plans of one size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from device import Way, settle
from edges import SEQUENCE_EDGES, Batch, SequenceCase, sequence_case

import waybill.torch as wt

Arrays = dict[str, np.ndarray]
NAMES = ("out", "of_q", "of_k", "of_v")
#: Heads, those of K and V, their size and dtype: on CPU ranks, and as kernels on GPUs take them.
SMALL = (2, 1, 8, torch.float64)
WIDE = (8, 2, 64, torch.bfloat16)
Piece = tuple[int, int, int]  #: document, first token, tokens


def pieces_of(batch: Batch) -> list[list[Piece]]:
    """Of each rank."""
    ends: dict[int, int] = {}
    ranks = []
    for held in batch.shards:
        pieces = []
        for document, length in held:
            first = ends.setdefault(document, 0)
            pieces.append((document, first, length))
            ends[document] += length
        ranks.append(pieces)
    return ranks


@dataclass(frozen=True)
class AttentionWay(Way):
    """Attention and its gradients, within tolerances of sums over whole documents."""

    family: str = "sequences"
    edges: dict[str, Any] = field(default_factory=lambda: SEQUENCE_EDGES)
    in_place: bool = True
    fixed: bool = False
    relay: str = "auto"
    chunk: int | None = None
    prefix: bool = False

    def excluded(self, edge: str, device: str) -> str | None:
        """Rows of attention are heads."""
        if edge == "odd_rows":
            return "rows are heads of the sizes that kernels of attention take"
        return super().excluded(edge, device)

    def cases(self, edge: str) -> Iterator[SequenceCase]:
        """One for each number of ranks and nodes."""
        for world, per_node in self.topologies:
            yield sequence_case(edge, world, per_node)

    def rank(self, world: Any, case: SequenceCase) -> list[Arrays]:
        """Output and gradients of this rank's rows, for each batch."""
        wide = world.device != "cpu"
        heads, kv_heads, size, dtype = WIDE if wide else SMALL
        attend = wt.ContextParallelAttention(
            world, heads, kv_heads, size, dtype=dtype, block_tokens=4, in_place=self.in_place,
            relay=self.relay, chunk=self.chunk, mask="prefix" if self.prefix else "causal",
        )  # fmt: skip
        plans = [attend.plan(self._held(batch)) for batch in case.batches]
        fixed, rows = None, None
        if self.fixed:
            room = wt.Capacities.of(*plans)
            fixed, rows = attend.fixed_plan(plans[-1], room), room.max_rows
        given = [_numbers(case, n, world.rank, wide) for n in range(len(plans))]
        if rows is not None:
            given = [_padded(tensors, rows) for tensors in given]
        given = [[tensor.to(world.device) for tensor in tensors] for tensors in given]
        settle(world.device)
        world.barrier()
        made = []
        for plan, batch, (q, k, v, gradient) in zip(plans, case.batches, given):
            leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
            if fixed is not None:
                fixed.replace(plan)
            out = attend(plan if fixed is None else fixed, *leaves)
            out.backward(gradient)
            settle(world.device)
            found = [out.detach(), *(leaf.grad for leaf in leaves)]
            count = batch.rows[world.rank]
            made.append({
                name: one[:count].double().cpu().numpy()
                for name, one in zip(NAMES, found)
            })  # fmt: skip
        attend.close()
        return made

    def _held(self, batch: Batch) -> list[Any]:
        """Pieces, with the prefixes of their documents."""
        if not self.prefix:
            return pieces_of(batch)
        prefixes = _prefixes(batch)
        return [[(*piece, prefixes[piece[0]]) for piece in held] for held in pieces_of(batch)]

    def complaints(self, case: SequenceCase, results: list[list[Arrays]]) -> list[str]:
        """Against whole documents, in float64."""
        lines = []
        for number, batch in enumerate(case.batches):
            for rank, of_rank in enumerate(results):
                wide = of_rank[number]["out"].shape[-1] > 8
                wanted = _whole(case, number, wide, self.chunk, self.prefix)[rank]
                limit = 0.06 if wide else 1e-9
                for name, want in wanted.items():
                    got = of_rank[number][name]
                    prefix = f"rows {batch.rows}, rank {rank}: {name}"
                    if got.shape != want.shape:
                        lines.append(f"{prefix} has shape {got.shape}, want {want.shape}")
                    elif not np.allclose(got, want, rtol=limit, atol=limit):
                        lines.append(f"{prefix} differs by {np.abs(got - want).max():.3g}")
        return lines


def _numbers(case: SequenceCase, number: int, rank: int, wide: bool) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, in host memory."""
    heads, kv_heads, size, dtype = WIDE if wide else SMALL
    count, generator = case.batches[number].rows[rank], torch.Generator()
    generator.manual_seed(1000 * case.seed + 10 * number + rank)
    return [
        torch.randn(count, of, size, dtype=torch.float64, generator=generator).to(dtype)
        for of in (heads, kv_heads, kv_heads, heads)
    ]


def _padded(tensors: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Rows beyond those of the batch are NaN; of the gradient 0."""
    fill = (torch.nan, torch.nan, torch.nan, 0.0)
    return [
        torch.cat([t, t.new_full((rows - len(t), *t.shape[1:]), value)])
        for t, value in zip(tensors, fill)
    ]


@lru_cache(maxsize=64)
def _whole(
    case: SequenceCase, number: int, wide: bool, chunk: int | None, prefix: bool
) -> list[Arrays]:
    """Output and gradients of each rank's rows, from whole documents, in float64."""
    given = [[t.double() for t in _numbers(case, number, r, wide)] for r in range(case.world)]
    outs = [torch.zeros_like(one[3]) for one in given]
    leaves = [[tensor.requires_grad_() for tensor in one[:3]] for one in given]
    prefixes = _prefixes(case.batches[number]) if prefix else {}
    for document, parts in _documents(case.batches[number]).items():
        joined = [torch.cat([leaves[r][i][a:b] for r, a, b in parts]) for i in range(3)]
        out = _attention(*joined, chunk, prefixes.get(document, 0))
        for (r, a, b), part in zip(parts, out.split([b - a for _, a, b in parts])):
            outs[r] = outs[r].index_copy(0, torch.arange(a, b), part)
    total = torch.stack([(out * one[3]).sum() for out, one in zip(outs, given)]).sum()
    if total.requires_grad:
        total.backward()
    results = []
    for out, of in zip(outs, leaves):
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in of]
        results.append(dict(zip(NAMES, (t.detach().numpy() for t in (out, *gradients)))))
    return results


def _prefixes(batch: Batch) -> dict[int, int]:
    """Of each document: none, one token, a part of it, all of it, more than all."""
    tokens = {d: sum(b - a for _, a, b in of) for d, of in _documents(batch).items()}
    of = {d: (n // 2, n, 0, n + 3, 1, 2)[d % 6] for d, n in tokens.items()}
    return {d: of.get(d, 0) for held in batch.shards for d, _ in held}


def _documents(batch: Batch) -> dict[int, list[tuple[int, int, int]]]:
    """(rank, first row, end) of each document, in the order of its tokens."""
    documents: dict[int, list[tuple[int, int, int]]] = {}
    for rank, held in enumerate(batch.shards):
        row = 0
        for document, length in held:
            if length > 0:
                documents.setdefault(document, []).append((rank, row, row + length))
            row += length
    return documents


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int | None, prefix: int
) -> torch.Tensor:
    """Causal after a prefix, within chunks, in plain operations."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(len(q))
    of = at // (chunk or len(q) or 1)
    ahead = (at[:, None] < at) & (torch.maximum(at[:, None], at) >= prefix)
    hidden = ahead | (of[:, None] != of)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def _ways() -> Iterator[AttentionWay]:
    yield AttentionWay("attention", "one node, attention, all rows dispatched", in_place=False)
    yield AttentionWay("attention_in_place", "one node, attention in place")
    yield AttentionWay("attention_fixed", "one node, attention, a fixed plan", fixed=True)
    yield AttentionWay(
        "attention_relay", "one node, attention, ranks forward K and V", relay="always"
    )
    yield AttentionWay(
        "attention_fixed_relay", "one node, attention, a fixed plan, ranks forward K and V",
        fixed=True, relay="always",
    )  # fmt: skip
    yield AttentionWay("attention_chunks", "one node, attention in chunks of 7", chunk=7)
    yield AttentionWay("attention_prefixes", "one node, attention with prefixes", prefix=True)
    over = ((4, 2),)
    yield AttentionWay(
        "attention_nodes", "several nodes, mapped, attention in place", topologies=over
    )
    yield AttentionWay(
        "attention_nodes_relay", "several nodes, mapped, attention, ranks forward K and V",
        topologies=over, relay="always",
    )  # fmt: skip


WAYS = {way.name: way for way in _ways()}
