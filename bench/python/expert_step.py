#!/usr/bin/env python3
"""One step, forward and backward, of a layer of experts over ranks: waybill.torch.moe's
ExpertParallel, three ways by hand, and the experts' grouped products alone.

    torchrun --standalone --nproc-per-node 2 bench/python/expert_step.py
    ... --workload 4096:1.5          # TOKENS[:SKEW]; may be given several times
    ... --profile                    # also the longest kernels and gaps of one step of each way
    ... --device cpu --workload 16:1.5 --sizes 32 16 4 2 --steps 2         # a try without GPUs

TOKENS are a rank's; SKEW is the rows of the fullest rank over the mean. Ways take turns in one run;
outputs and gradients of all are compared first. Times are the slowest rank's, medians over the
steps, ms: of a step, and of forward alone, without gradients, with experts that do nothing
("moves"; rows are then copied nowhere, as nothing is kept for a backward). Ways:

  all_to_all, all_gather, deduplicated   by hand, see experts_by_hand.py
  waybill                   ExpertParallel as it comes: layers of a model would share its windows
  waybill, own windows      rows stay in a window of this layer's alone: they are not copied
  waybill, weights inside   multiplied between the experts' products
  waybill, no local sums    a row per topk slot comes home, and is weighted there
  waybill, fixed rows       the host waits for no counts; room for 1.25 times the rows that come
  waybill, two chunks       the rows of one travel while the experts work on the other's
  alone                     the experts, on rows that are there
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from experts_by_hand import WAYS
from step_bench import join, run_workloads
from step_profile import profiled
from torch import distributed

from waybill.torch.moe import ExpertParallel, grouped_mm

MODULES: dict[str, dict[str, Any]] = {
    "waybill": {},
    "waybill, own windows": {"windows": "own"},
    "waybill, weights inside": {"windows": "own", "weights": "experts"},
    "waybill, no local sums": {"enable_local_combine": False},
    "waybill, fixed rows": {"windows": "own", "fixed_rows": 1},
    "waybill, two chunks": {"chunks": 2},
}
WORKLOADS = ["4096", "16384", "4096:1.5", "16384:1.5"]
GRADIENTS = ("x", "weights", "first", "second")


class Bench:
    """One workload on this rank: tokens, routing, experts, and how each way takes a step."""

    def __init__(self, options: argparse.Namespace, device: torch.device, workload: str) -> None:
        tokens, _, skew = workload.partition(":")
        self.device, self.options = device, options
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.tokens, self.skew = int(tokens), float(skew or 1)
        self.hidden, self.inner, local, self.topk = options.sizes
        self.num_experts = local * self.size
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draws = torch.Generator(device=device).manual_seed(self.rank)
        made = {"device": device, "generator": draws}
        self.ids, self.weights = self._routed(torch.randn(self.tokens, self.num_experts, **made))
        self.x, self.gradient = (
            torch.randn(self.tokens, self.hidden, **made).to(self.dtype) for _ in range(2)
        )
        shapes = ((self.hidden, 2 * self.inner), (self.inner, self.hidden))
        self.first, self.second = (
            (torch.randn(local, *shape, **made) / shape[0] ** 0.5).to(self.dtype)
            for shape in shapes
        )
        self.leaves = [self.x, self.weights, self.first, self.second]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.modules: dict[str, ExpertParallel] = {}

    def _routed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices, with so much added to the logits of the first rank's experts that it gets its
        share of the rows.
        """
        local, low, high = self.num_experts // self.size, 0.0, 16.0
        for _ in range(30 if self.skew != 1 else 1):
            more = (low + high) / 2 if self.skew != 1 else 0.0
            raised = logits.clone()
            raised[:, :local] += more
            scores, ids = raised.softmax(-1).topk(self.topk)
            share = (ids < local).double().mean()
            distributed.all_reduce(share)
            low, high = (more, high) if share < self.skew else (low, more)
        return ids, scores.float()

    def module(self, way: str) -> ExpertParallel:
        if way not in self.modules:
            given = dict(MODULES[way])
            if "fixed_rows" in given:
                given["fixed_rows"] = int(1.25 * self.skew * self.tokens * self.topk)
            if given.get("windows") == "own" and "fixed_rows" not in given:
                given["layer"] = self.module("waybill").layer  # not at a time: one memory will do
            elif self.options.num_sms is not None:
                given["num_sm"] = self.options.num_sms
            self.modules[way] = ExpertParallel(
                self.experts, num_experts=self.num_experts, topk=self.topk, hidden=self.hidden,
                max_tokens=self.tokens, dtype=self.dtype, device=self.device.type,
                gradients="sum", **given,
            )  # fmt: skip
        return self.modules[way]

    def close(self) -> None:
        for module in self.modules.values():
            module.finalize()

    def experts(self, rows: Any, ends: Any, weights: Any = None) -> torch.Tensor:
        gate, up = grouped_mm(rows, self.first, ends).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        if weights is not None:
            inner = (inner.float() * weights[:, None]).to(self.dtype)
        return grouped_mm(inner, self.second, ends)

    def layer(self, way: str, moves: bool = False) -> torch.Tensor:
        """The layer's output; with `moves` of experts that give back what they get."""
        experts = (lambda rows, *_: rows) if moves else self.experts
        if way in WAYS:
            return WAYS[way](self.x, self.ids, self.weights, experts, self.num_experts)
        module = self.module(way)
        module.experts = experts
        return module(self.x, self.weights, self.ids)

    def prepare(self, way: str) -> Callable[[], Any]:
        """A step."""
        if way == "alone":
            rows, ends = self._arrived()
            gradient = torch.randn_like(rows)
            leaves = [rows.requires_grad_(), self.first, self.second]
            run = lambda: self.experts(rows, ends).backward(gradient)
        else:
            leaves, run = self.leaves, lambda: self.layer(way).backward(self.gradient)

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            run()

        return step

    def _arrived(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as this rank's experts get them."""
        seen: list[torch.Tensor] = []

        def keep(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            seen.extend((rows.detach().clone(), ends.clone()))
            return rows

        with torch.no_grad():
            WAYS["all_to_all"](self.x, self.ids, self.weights, keep, self.num_experts)
        return seen[0], seen[1]

    def compare(self, ways: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Distance of output and gradients from those of the first way, over their size."""
        found: dict[str, dict[str, float]] = {}
        reference: list[torch.Tensor] = []
        for way in ways:
            for leaf in self.leaves:
                leaf.grad = None
            out = self.layer(way)
            out.backward(self.gradient)
            mine = [out.detach(), *(leaf.grad for leaf in self.leaves)]
            reference = reference or [one.clone() for one in mine]
            pairs = zip(mine, reference)
            squares = torch.tensor(
                [(_square(a.float() - b.float()), _square(b.float())) for a, b in pairs],
                device=self.device,
            )
            distributed.all_reduce(squares)
            distances = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
            found[way] = {k: round(v, 5) for k, v in zip(("out", *GRADIENTS), distances)}
        return found

    def run(self) -> dict[str, Any]:
        ways = tuple(way for way in (*WAYS, *MODULES) if self._wanted(way))
        result: dict[str, Any] = {"differences": self.compare(ways)}
        steps: dict[str, Callable[[], Any]] = {way: self.prepare(way) for way in (*ways, "alone")}
        result["step ms"] = self._interleaved(steps)
        del steps["alone"]

        def moves(way: str) -> Callable[[], Any]:
            def call() -> None:
                with torch.no_grad():
                    self.layer(way, moves=True)

            return call

        result["moves ms"] = self._interleaved({way: moves(way) for way in ways})
        alone = result["step ms"]["alone"]
        result["step / alone"] = {way: round(result["step ms"][way] / alone, 3) for way in ways}
        self._steps = steps
        return result

    def profile(self) -> None:
        """Of another step of each way, by torch's profiler."""
        calls = {way: (lambda _, step=step: step()) for way, step in self._steps.items()}
        for way, lines in profiled(calls, 1, self.device).items():
            if self.rank == 0:
                print(f"\n{self.tokens} tokens, skew {self.skew}: {way}", *lines, sep="\n")

    def _wanted(self, way: str) -> bool:
        return not self.options.way or way in self.options.way

    def _interleaved(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        ways = tuple(calls)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(self.options.warm + self.options.steps):
            turn = step % len(ways)
            for way in ways[turn:] + ways[:turn]:
                milliseconds = self._timed(calls[way])
                if step >= self.options.warm:
                    times[way].append(milliseconds)
        slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        return {way: round(statistics.median(t), 3) for way, t in zip(ways, slowest.tolist())}

    def _timed(self, call: Callable[[], Any]) -> float:
        """Milliseconds from when all ranks are there."""
        distributed.barrier()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)


def _square(value: torch.Tensor) -> float:
    return (
        float(value.double().square().sum()) if value.numel() < 2**24 else float(value.norm()) ** 2
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", metavar="TOKENS[:SKEW]")
    parser.add_argument("--way", action="append", choices=(*WAYS, *MODULES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument(
        "--sizes", type=int, nargs=4, default=(7168, 2048, 32, 8), metavar="N",
        help="hidden, inner, experts of a rank, topk",
    )  # fmt: skip
    parser.add_argument("--num-sms", type=int, help="that a call may use; else as the layer has it")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = join(options.device)
    run_workloads(
        functools.partial(Bench, options, device),
        options.workload or WORKLOADS,
        bool(options.profile),
        show,
    )
    return 0


def show(table: list[dict[str, Any]]) -> None:
    ways = list(table[0]["step / alone"])
    print("\n| tokens a rank : skew | " + " | ".join([*ways, "alone"]) + " |")
    print("|---" * (len(ways) + 2) + "|")
    for row in table:
        figures = [[row[k][way] for k in ("step ms", "step / alone", "moves ms")] for way in ways]
        cells = [f"{step:.2f} ({times:.2f}; {moves:.2f})" for step, times, moves in figures]
        print(f"| {row['workload']} | " + " | ".join(cells) + f" | {row['step ms']['alone']:.2f} |")
    print("step, ms (times the experts alone; forward without experts, ms)")


if __name__ == "__main__":
    sys.exit(main())
