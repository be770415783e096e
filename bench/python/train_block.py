#!/usr/bin/env python3
"""Transformer layers of Llama-8B's sizes, trained on packed documents over ranks: losses beside one
rank's, time a step, tokens per second and memory, with waybill.torch and by hand.

    torchrun --nproc-per-node N bench/python/train_block.py [--tokens 16384] [--layers 4]
    ... [--device cpu --small --tokens 256]     # a try without GPUs
    ... [--trace FOLDER]                        # a timeline of one step, for chrome://tracing

Every way trains the same weights on the same batches: norms, projections, rotary embeddings,
SwiGLU, AdamW. Parameters are replicated, and their gradients summed over the ranks. "one rank" is
the whole batch on rank 0, whose losses the others must equal within the kernel's noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any, Callable

import torch
from attention_step import waybill_pieces
from attention_ways import by_hand, draw
from step_bench import join
from torch import distributed, nn
from torch.nn import functional

import waybill.torch as waybill
from waybill._bench.attention import WAYS, kernel_of

VOCABULARY = 4096
LLAMA = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336}
SMALL = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    frequencies = 500000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


class Block(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.split = [size["heads"], size["kv_heads"], size["kv_heads"]]
        hidden, self.head_dim = size["hidden"], size["head_dim"]
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, sum(self.split) * self.head_dim, bias=False)
        self.out = nn.Linear(size["heads"] * self.head_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * size["mlp"], bias=False)
        self.down = nn.Linear(size["mlp"], hidden, bias=False)

    def forward(self, attention: Callable[..., Any], x: torch.Tensor, positions: Any) -> Any:
        qkv = self.qkv(self.before_attention(x)).unflatten(1, (-1, self.head_dim))
        q, k, v = qkv.split(self.split, 1)
        x = x + self.out(attention(rotate(q, positions), rotate(k, positions), v).flatten(1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, size: dict[str, int], layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size["hidden"])
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.RMSNorm(size["hidden"])
        self.head = nn.Linear(size["hidden"], VOCABULARY, bias=False)

    def forward(self, attention: Callable[..., Any], tokens: Any, positions: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(attention, x, positions)
        return self.head(self.norm(x))


class Trainer:
    """One way of attention, on this rank."""

    def __init__(self, way: str, options: argparse.Namespace, device: torch.device) -> None:
        self.way, self.options, self.device = way, options, device
        self.size = SMALL if options.small else LLAMA
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.alone = way == "one rank"
        self.rank = 0 if self.alone else distributed.get_rank()
        self.ranks = 1 if self.alone else distributed.get_world_size()
        self.module: Any = None
        self._ahead: dict[int, Callable[..., Any]] = {}
        if way not in WAYS:
            world: Any = None
            if self.alone:
                world = waybill.World.from_all_gather(0, 1, lambda b: [b], device=str(device))
            heads = [self.size[name] for name in ("heads", "kv_heads", "head_dim")]
            self.module = waybill.ContextParallelAttention(
                world, *heads, dtype=self.dtype, device=None if self.alone else device.type,
                in_place=way != "waybill, one call",
            )  # fmt: skip
        planner = waybill.BatchPlanner(
            1, *[self.size[n] for n in ("heads", "kv_heads", "head_dim")]
        )
        self.attend = kernel_of(device, planner.shape)
        torch.manual_seed(0)
        self.model = Model(self.size, options.layers).to(device, self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def batch(self, step: int) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths of a step's documents, and its tokens, labels and positions, of all ranks."""
        lengths = self._lengths(step)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY // 8, (sum(lengths),), generator=generator).cumsum(0)
        packed = waybill.pack((tokens % VOCABULARY).split(lengths))
        return lengths, *packed[:3]

    def _lengths(self, step: int) -> list[int]:
        total = distributed.get_world_size() * self.options.tokens
        return draw(self.options.source, 100 + step, total)

    def step(self, step: int) -> tuple[float, float]:
        """(loss, milliseconds) of a step; the next one's plan and tables are made inside."""
        lengths, *packed = self.batch(step)
        following = self._lengths(step + 1)
        rows = self._rows(lengths)
        tokens, labels, positions = (t[rows].to(self.device) for t in packed)
        num_labels = int((packed[1] >= 0).sum())
        self._meet()
        begin = time.perf_counter()
        attention = self._ahead.pop(step, None) or self._attention(lengths)
        logits = self.model(attention, tokens, positions)
        loss = functional.cross_entropy(logits.float(), labels, reduction="sum") / num_labels
        loss.backward()
        self._ahead[step + 1] = self._attention(following)  # behind what is queued
        total = loss.detach()
        if not self.alone:
            for parameter in self.model.parameters():
                distributed.all_reduce(parameter.grad)
            distributed.all_reduce(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._meet()
        return float(total), 1e3 * (time.perf_counter() - begin)

    def _rows(self, lengths: list[int]) -> Any:
        if self.way in WAYS:
            return by_hand(self.way, lengths, torch.device("cpu")).token_rows()
        per_rank = sum(lengths) // self.ranks
        return slice(self.rank * per_rank, (self.rank + 1) * per_rank)

    def _attention(self, lengths: list[int]) -> Callable[..., Any]:
        if self.way in WAYS:
            batch = by_hand(self.way, lengths, self.device)
            return lambda *qkv: batch.attention(self.attend, *qkv)
        plan = self.module.plan(waybill_pieces(lengths, self.ranks))
        self.module.prepare(plan)
        return lambda *qkv: self.module(plan, *qkv)

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if not self.alone:
            distributed.barrier()

    def run(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        results = [self.step(i) for i in range(self.options.warm + self.options.steps)]
        if self.module is not None:
            self.module.close()
        milliseconds = statistics.median(ms for _, ms in results[self.options.warm :])
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        tokens = distributed.get_world_size() * self.options.tokens
        return {
            "way": self.way, "ms": round(milliseconds, 2),
            "tokens/s": round(1e3 * tokens / milliseconds), "GiB": round(peak / 2**30, 2),
            "losses": [round(loss, 5) for loss, _ in results],
        }  # fmt: skip

    def trace(self) -> None:
        """A timeline of one step."""
        for i in range(self.options.warm):
            self.step(i)
        with torch.profiler.profile() as profile:
            self.step(self.options.warm)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        if self.rank == 0:
            os.makedirs(self.options.trace, exist_ok=True)
            profile.export_chrome_trace(os.path.join(self.options.trace, "train_block.json"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="wlbllm", help="distribution, or JSON file of lengths")
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of losses, relative")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--trace", metavar="FOLDER")
    options = parser.parse_args()
    device = join(options.device)
    found = []
    for way in ("one rank", "waybill", "waybill, one call", *WAYS):
        if way != "one rank" or distributed.get_rank() == 0:
            found.append(Trainer(way, options, device).run())
        if device.type == "cuda":
            torch.cuda.empty_cache()
        distributed.barrier()
    status = show(found, options.tolerance) if distributed.get_rank() == 0 else 0
    if options.trace:
        Trainer("waybill", options, device).trace()
    distributed.destroy_process_group()
    return status


def show(found: list[dict[str, Any]], tolerance: float) -> int:
    """Prints the table; 1 where losses differ from one rank's by more than the tolerance."""
    print("\n| way | ms per step | tokens/s | peak GiB | loss, first | last | largest difference |")
    print("|---|---|---|---|---|---|---|")
    expected, status = found[0]["losses"], 0
    for row in found:
        losses = row["losses"]
        worst = max(abs(a - b) / b for a, b in zip(losses, expected))
        status |= worst > tolerance
        print(
            f"| {row['way']} | {row['ms']} | {row['tokens/s']} | {row['GiB']} | {losses[0]:.4f}"
            f" | {losses[-1]:.4f} | {worst:.2e} |"
        )
    print(json.dumps(found))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
