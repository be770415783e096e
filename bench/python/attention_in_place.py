#!/usr/bin/env python3
"""On one GPU: whether rows that stay should be attended to in place, by rows and share of the work
that stays; which waybill.torch.InPlaceRule loses least.

    python bench/python/attention_in_place.py [--ranks 2] [--steps 20] [--heads 32 8 128]
    ... --device cpu --heads 2 1 8 --tokens 128 --steps 1       # a try without a GPU

Plans of several ranks are made, and each rank's part of a step, forward and backward, is timed here
without what the links take, which is the same for both: in place, two calls of the kernel on two
streams; or one call for all rows, and the copies of those that stay into the window and out of it.
The slowest rank counts. Documents: two distributions, and one long document beside short ones.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import statistics
import sys
import time
from typing import Any, Callable

import torch
from attention_ways import draw

import waybill.torch as waybill
from waybill.torch.attention.moves import SideStream, calls_of
from waybill.torch.kernels import choose_kernel

LONG_PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of all tokens, in one document
TOKENS = (1024, 2048, 4096, 16384, 65536)


class Part:
    """A rank's part of a step: calls of the kernel, those on the second stream first."""

    def __init__(self, bench: Bench, plan: Any, rank: int) -> None:
        self.bench, self.rows = bench, plan.home_tokens[rank]
        in_place, arrived, _, _ = plan.routing().rank(rank)
        home, came, _ = calls_of(in_place, arrived, self.rows, True, bench.shape, bench.device)
        calls = [(c.sequences, sum(c.sequences.q_lens), sum(c.sequences.k_lens)) for c in came]
        self.num_beside = len(calls) if home else 0
        calls += [(call.sequences, self.rows, self.rows) for call in home]
        self.calls = [(s, *bench.tensors(q_rows, k_rows)) for s, q_rows, k_rows in calls]
        routing = plan.routing()
        self.stays = [_stays(table, rank) for table in (routing.fwd_q, routing.fwd_kv)]

    def step(self) -> None:
        bench, done = self.bench, []
        kernel, shape, beside = bench.kernel, bench.shape, bench.beside
        self._copies()
        beside.fork()
        for i, (s, qkv, _) in enumerate(self.calls):
            with beside.run() if i < self.num_beside else contextlib.nullcontext():
                done.append(kernel.forward(*qkv, s, shape, False))
        beside.join()
        beside.fork()
        for i, ((s, qkv, grad), (out, lse)) in enumerate(zip(self.calls, done)):
            with beside.run() if i < self.num_beside else contextlib.nullcontext():
                kernel.backward(grad, *qkv, out, lse, s, shape)
        beside.join()

    def _copies(self) -> None:
        """Of rows that stay and go through the window all the same: q, the output and the gradients
        of both; k, v, and their gradients.
        """
        q, k, v, _ = self.bench.batch
        for tensor, rows in ((q, self.stays[0]), (k, self.stays[1]), (v, self.stays[1])):
            for _ in range(4 if tensor is q else 2):
                self.bench.sink[: rows * tensor[0].numel()].copy_(_tile(tensor, rows).view(-1))


def _stays(table: Any, rank: int) -> int:
    """Rows that a rank sends to itself."""
    begin, end = table.rank_offsets[rank], table.rank_offsets[rank + 1]
    copies = table.copy_offsets if len(table.copy_offsets) else range(len(table.seq_len) + 1)
    return sum(
        int(table.seq_len[j])
        for j in range(begin, end)
        for c in range(copies[j], copies[j + 1])
        if table.dst_rank[c] == rank
    )


def _tile(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return (
        tensor[:rows]
        if rows <= len(tensor)
        else tensor.repeat(-(-rows // len(tensor)), 1, 1)[:rows]
    )


class Bench:
    """Tensors, and the two kinds of plans."""

    def __init__(self, options: argparse.Namespace, device: torch.device, tokens: int) -> None:
        self.options, self.device, self.tokens = options, device, tokens
        heads, kv_heads, head_dim = options.heads
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.planners = [
            waybill.BatchPlanner(
                options.ranks, heads, kv_heads, head_dim, dtype=dtype, in_place=way
            )
            for way in (True, False)
        ]
        self.shape = self.planners[0].shape
        self.kernel = choose_kernel("auto", device, "attention_in_place")
        self.beside = SideStream(device, True)
        rows, made = options.ranks * tokens, {"device": device, "dtype": dtype}
        self.batch = [
            torch.randn(rows, n, head_dim, **made) for n in (heads, kv_heads, kv_heads, heads)
        ]
        self.sink = torch.empty(2 * rows * heads * head_dim, **made)

    def tensors(self, q_rows: int, k_rows: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        q, k, v, grad = self.batch
        return [_tile(q, q_rows), _tile(k, k_rows), _tile(v, k_rows)], _tile(grad, q_rows)

    def measure(self, lengths: list[int]) -> tuple[float, float, float]:
        """(share of the work that stays, ms in place, ms of one call)."""
        held = _packed(lengths, self.options.ranks, self.tokens)
        plans = [planner.plan(held) for planner in self.planners]
        slowest = [
            max(self._timed(Part(self, plan, rank).step) for rank in range(self.options.ranks))
            for plan in plans
        ]
        return plans[0].routing().in_place_share(), slowest[0], slowest[1]

    def _timed(self, step: Callable[[], None]) -> float:
        times = []
        for i in range(self.options.warm + self.options.steps):
            begin = time.perf_counter()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                step()
                last.record()
                torch.cuda.synchronize()
                ms = first.elapsed_time(last)
            else:
                step()
                ms = 1e3 * (time.perf_counter() - begin)
            times += [ms] if i >= self.options.warm else []
        return statistics.median(times)


def _packed(lengths: list[int], ranks: int, tokens: int) -> list[list[tuple[int, int, int]]]:
    """Packed in order, cut where a rank is full."""
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    at = 0
    for document, length in enumerate(lengths):
        offset = 0
        while offset < length:
            rows = min(length - offset, tokens - at % tokens)
            held[at // tokens].append((document, offset, rows))
            offset, at = offset + rows, at + rows
    return held


def _workloads(total: int) -> dict[str, list[int]]:
    found = {name: draw(name, 1, total) for name in ("wlbllm", "prolong")}
    short = max(1, total // 64)
    for part in LONG_PARTS:
        long = min(total, int(total * part))
        rest = [short] * ((total - long) // short)
        left = total - long - sum(rest)
        found[f"one of {part:.0%}"] = [n for n in (long, *rest, left) if n]
    return found


def best_rule(rows: list[Any]) -> tuple[float, waybill.InPlaceRule]:
    """The rule whose choices lose least against the better of the two, and the mean loss."""
    shares = sorted({0.0, 1.0, *(round(row[2], 3) for row in rows)})
    found = []
    for min_rows, min_share in itertools.product((0, *TOKENS), shares):
        losses = [
            (in_place if tokens >= min_rows and share >= min_share else one) / min(in_place, one)
            for tokens, _, share, in_place, one in rows
        ]
        found.append((statistics.mean(losses) - 1, min_rows, min_share))
    loss, min_rows, min_share = min(found)
    return loss, waybill.InPlaceRule(min_rows, min_share)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="of a rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar="N")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    options = parser.parse_args()
    faulthandler.enable()
    device, rows = torch.device(options.device), []
    print("| tokens per rank | documents | work that stays | in place, ms | one call, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for tokens in options.tokens:
        bench = Bench(options, device, tokens)
        for name, lengths in _workloads(options.ranks * tokens).items():
            share, in_place, one = bench.measure(lengths)
            rows.append((tokens, name, share, in_place, one))
            cells = f"{tokens} | {name} | {share:.2f} | {in_place:.3f} | {one:.3f}"
            print(f"| {cells} | {one / in_place:.3f} |", flush=True)
    loss, rule = best_rule(rows)
    print(f"least loss, {loss:.2%} in the mean: {rule}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
