#!/usr/bin/env python3
"""One attention step, forward and backward, of packed documents over ranks: waybill.torch's
ContextParallelAttention, four ways by hand, and attention alone.

    torchrun --nproc-per-node N bench/python/attention_step.py [--workload SOURCE:TOKENS:SEED ...]
    ... [--steps 50] [--device cpu --heads 4 2 16 --workload wlbllm:512:1]     # a try without GPUs
    ... [--profile FOLDER]       # and where the time of a step goes, a file for each rank

SOURCE is a distribution (waybill.length_distributions), a JSON file with a list of lengths, or
"single", one document; TOKENS are a rank's. Every step has its documents in another order;
planning, tables and their upload are inside the time of each way: those of the next step, behind
the calls of this one. Ways take turns in one run, but for the ring, which runs afterwards; outputs
and gradients of all are compared first.
Times are the slowest rank's, medians over the steps; beside them by phase, on the device and on
the host. Ways:

  contiguous, per document, hybrid  by hand, see attention_ways.py
  ulysses                      by hand, heads split instead of tokens; where heads divide
  waybill                      the module, which decides between the next and the last of these:
  waybill, in place            rows that stay are attended to where they are
  waybill, one stream          the same, and others travel before that instead of beside it
  waybill, one call            all rows through the window
  waybill, costs               as waybill, by a plan that knows what the kernel takes (--costs)
  ring of torch                of single documents: its context_parallel
  alone                        one call of the kernel, on rows that are where the plan wants them
  alone, split                 the two calls of the module on such rows, on two streams
  alone, split, one stream     the same, one after another
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import sys
from typing import Any, Callable

import torch
from attention_ways import Ulysses, by_hand, draw, ulysses_heads
from ring_attention import ring_milliseconds
from step_bench import join, run_workloads
from step_clock import StepClock
from step_profile import profiled
from torch import distributed

import waybill.torch as waybill
from waybill._bench.attention import WAYS, held_pieces, kernel_of
from waybill.torch.attention.moves import SideStream, calls_of

MODULES = {
    "waybill": {},
    "waybill, in place": {"in_place": True},
    "waybill, one stream": {"in_place": True, "overlap": False},
    "waybill, one call": {"in_place": False},
}
ALONE = ("alone", "alone, split", "alone, split, one stream")
SIZES = (("wlbllm", 65536), ("prolong", 65536), ("wlbllm", 16384))
_PROFILED = 3  # steps
WORKLOADS = [f"{name}:{tokens}:{seed}" for name, tokens in SIZES for seed in (1, 2, 3)]


class Bench:
    """One workload on this rank: the rows of a batch, and how each way takes a step of it."""

    def __init__(self, options: argparse.Namespace, device: torch.device, workload: str) -> None:
        source, tokens, seed = workload.rsplit(":", 2)
        self.name = f"{os.path.basename(source)}:{tokens}:{seed}"
        self.planned = self.chosen = 0  #: plans that the module made, and those in place
        self.device, self.options = device, options
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.per_rank = int(tokens)
        self.lengths = draw(source, int(seed), self.size * self.per_rank)
        self.heads, self.kv_heads, self.head_dim = options.heads
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        arguments = (None, self.heads, self.kv_heads, self.head_dim)
        self.modules = {
            way: waybill.ContextParallelAttention(
                *arguments, dtype=dtype, device=device.type, num_sms=options.num_sms, **given
            )
            for way, given in MODULES.items()
        }
        self.shape = self.modules["waybill"].planner.shape
        self.attend = dict.fromkeys(WAYS, kernel_of(device, self.shape))
        split = ulysses_heads(self.heads, self.kv_heads, self.size)
        if split is not None:
            shape = self.shape._replace(heads=split[0], kv_heads=split[1])
            self.attend["ulysses"] = kernel_of(device, shape)
        generator = torch.Generator(device=device).manual_seed(int(seed))
        shapes = [
            (n, self.head_dim) for n in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        rows, given = self.size * self.per_rank, {"device": device, "dtype": dtype}
        self.batch = [torch.randn(rows, *s, generator=generator, **given) for s in shapes]
        self.streams = {way: SideStream(device, way == "alone, split") for way in ALONE}

    def close(self) -> None:
        for module in self.modules.values():
            module.close()

    def order(self, step: int) -> list[int]:
        lengths = list(self.lengths)
        random.Random(step).shuffle(lengths)
        return lengths

    def leaves(self, rows: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k and v of some tokens, and the gradient of the output."""
        q, k, v, grad = (t[rows] for t in self.batch)
        return [t.detach().requires_grad_() for t in (q, k, v)], grad

    def tables(self, way: str, lengths: list[int]) -> Any:
        """What a way needs to know about a batch, on the device."""
        if way in MODULES:
            module = self.modules[way]
            plan = module.plan(waybill_pieces(lengths, self.size))
            module.prepare(plan)
            if self.device.type == "cuda":  # their upload is a part of the time
                torch.cuda.current_stream().wait_stream(module._side.uploads)
            if way == "waybill":
                self.planned, self.chosen = self.planned + 1, self.chosen + plan.in_place
            return plan
        return self.by_hand(way, lengths) if way in self.attend else None

    def by_hand(self, way: str, lengths: list[int]) -> Any:
        """The tables of a way by hand."""
        if way == "ulysses":
            return Ulysses(lengths, self.device)
        return by_hand(way, lengths, self.device)

    def prepare(self, way: str, lengths: list[int]) -> Callable[..., Any]:
        """A step of this way, with its rows in place: a function of the batch's tables, and of one
        that is called when forward is queued.
        """
        if way in ALONE:
            return self._alone(way, lengths)
        begin = self.rank * self.per_rank
        rows: Any = slice(begin, begin + self.per_rank)
        if way in self.attend:
            held = self.by_hand(way, lengths).pieces
            rows = torch.cat([torch.arange(p.begin, p.end) for p in held]).to(self.device)
        inputs, grad = self.leaves(rows)

        def step(tables: Any, forward_done: Callable[[], None] = _nothing) -> Any:
            if way in MODULES:
                out = self.modules[way](tables, *inputs)
            else:
                out = tables.attention(self.attend[way], *inputs)
            forward_done()
            out.backward(grad)
            return out, inputs

        return step

    def _alone(self, way: str, lengths: list[int]) -> Callable[..., Any]:
        """Kernel calls on rows of their own, as many and as long as the module's."""
        one_call = way == "alone"
        module = self.modules["waybill, one call" if one_call else "waybill, in place"]
        plan = module.plan(waybill_pieces(lengths, self.size))
        in_place, arrived, _, _ = plan.routing().rank(self.rank)
        own = self.per_rank
        takes_gaps = module.kernel.takes_gaps
        home, came, _ = calls_of(in_place, arrived, own, takes_gaps, self.shape, self.device)
        calls = [(c.sequences, sum(c.sequences.q_lens), sum(c.sequences.k_lens)) for c in came]
        num_beside = 0 if one_call else len(calls)
        calls += [(call.sequences, own, own) for call in home]
        parts = [(s, *self._random(rows, keys)) for s, rows, keys in calls]
        beside = self.streams[way]

        def step(_: Any, forward_done: Callable[[], None] = _nothing) -> Any:
            kernel, shape = module.kernel, self.shape
            done = []
            beside.fork()
            for i, (s, qkv, _) in enumerate(parts):
                with beside.run() if i < num_beside else contextlib.nullcontext():
                    done.append(kernel.forward(*qkv, s, shape, False))
            beside.join()
            forward_done()
            beside.fork()
            for i, ((s, qkv, grad), (out, lse)) in enumerate(zip(parts, done)):
                with beside.run() if i < num_beside else contextlib.nullcontext():
                    kernel.backward(grad, *qkv, out, lse, s, shape)
            beside.join()

        return step

    def _random(self, rows: int, keys: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        q, k, v, grad = self.batch
        tile = lambda t, n: t.repeat(-(-n // len(t)), 1, 1)[:n].contiguous()
        return [tile(q, rows), tile(k, keys), tile(v, keys)], tile(grad, rows)

    def compare(self) -> dict[str, float]:
        """Largest differences of output and gradients between each way and the module."""
        lengths = self.order(0)
        found = {}
        for way in (*MODULES, *self.attend):
            out, inputs = self.prepare(way, lengths)(self.tables(way, lengths))
            rows = torch.arange(self.rank * self.per_rank, (self.rank + 1) * self.per_rank)
            if way in self.attend:
                rows = self.by_hand(way, lengths).token_rows()
            mine = (out.detach(), *(t.grad for t in inputs))
            found[way] = [self._everywhere(rows.to(self.device), t) for t in mine]
        reference = found["waybill"]
        return {
            way: round(max(float((a - b).abs().max()) for a, b in zip(got, reference)), 6)
            for way, got in found.items()
        }

    def _everywhere(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(self.size * self.per_rank, *values.shape[1:], device=self.device)
        full[rows] = values.float()
        distributed.all_reduce(full)
        return full

    def run(self) -> dict[str, Any]:
        ways = (*MODULES, *self.attend, *ALONE)
        differences = self.compare() if self.options.compare else {}
        times: dict[str, list[float]] = {way: [] for way in ways}
        phases: dict[str, list[Any]] = {way: [] for way in ways}
        tables: dict[str, Any] = {way: self.tables(way, self.order(0)) for way in ways}
        for step in range(self.options.warm + self.options.steps):
            turn = ways[step % len(ways) :] + ways[: step % len(ways)]
            waybill_pieces(self.order(step + 1), self.size)
            for way in turn:
                work = self.prepare(way, self.order(step))
                (ms, parts), tables[way] = self.timed(way, work, tables[way], self.order(step + 1))
                if step >= self.options.warm:
                    times[way].append(ms)
                    phases[way].append(parts)
        self._tables = tables
        slowest = torch.tensor(
            [times[way] for way in ways], dtype=torch.float64, device=self.device
        )
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        medians = {w: round(statistics.median(t), 3) for w, t in zip(ways, slowest.tolist())}
        best = min(medians[way] for way in self.attend)
        if len(self.lengths) == 1:
            medians["ring of torch"] = self._ring()
        return {
            "documents": len(self.lengths), "longest": max(self.lengths), "ms": medians,
            "waybill / alone": round(medians["waybill"] / medians["alone"], 3),
            "best by hand / waybill": round(best / medians["waybill"], 3),
            "in place in": f"{self.chosen}/{self.planned}",
            "phases of rank 0 [device, host]": {w: _medians(p) for w, p in phases.items()},
            "largest differences": differences,
        }  # fmt: skip

    def timed(
        self, way: str, work: Callable[..., Any], tables: Any, following: list[int]
    ) -> tuple[Any, Any]:
        """What a StepClock says of a step from when all ranks are there, and the tables of the next
        one, which are made inside of the time: behind the step's calls, or with --late before them.
        """
        distributed.barrier()
        clock = StepClock(self.device)
        if self.options.late:
            following_tables = self.tables(way, following)
            clock.mark("tables")
        work(tables, lambda: clock.mark("forward"))
        clock.mark("backward")
        if not self.options.late:
            following_tables = self.tables(way, following)
            clock.mark("tables")
        return clock.finish(), following_tables

    def _ring(self) -> float:
        try:
            return round(ring_milliseconds(self.batch, self.options.steps, self.options.warm), 3)
        except (RuntimeError, ValueError, TypeError) as error:  # a prototype; GPUs only
            if self.rank == 0:
                print(f"ring of torch: {type(error).__name__}: {error}", flush=True)
            return float("nan")

    def profile(self) -> None:
        """Of a few more steps of some ways, by torch's profiler."""
        tables, first = self._tables, self.options.warm + self.options.steps
        steps = {}
        for way in ("waybill, in place", "waybill, one call", "hybrid", "alone, split"):
            works = [self.prepare(way, self.order(first + i)) for i in range(_PROFILED)]

            def step(i: int, way: str = way, works: Any = works) -> None:
                _, tables[way] = self.timed(way, works[i], tables[way], self.order(first + i + 1))

            steps[way] = step
        os.makedirs(self.options.profile, exist_ok=True)
        name = f"{self.name.replace('/', '_')}.rank{self.rank}.txt"
        with open(os.path.join(self.options.profile, name), "w", encoding="utf-8") as file:
            for way, lines in profiled(steps, _PROFILED, self.device).items():
                print(f"\n== {self.name}, {way}", *lines, sep="\n", file=file)


def _nothing() -> None:
    pass


def _medians(steps: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {
        phase: [round(statistics.median(s[phase][i] for s in steps), 3) for i in range(2)]
        for phase in steps[0]
    }


def waybill_pieces(lengths: list[int], size: int) -> list[list[tuple[int, int, int]]]:
    """As packed, cut where a rank is full, as in the contiguous way; a loader would know."""
    return _pieces(tuple(lengths), size)


@functools.lru_cache(maxsize=4)
def _pieces(lengths: tuple[int, ...], size: int) -> list[list[tuple[int, int, int]]]:
    return [
        [
            (piece.start, piece.begin - piece.start, piece.end - piece.begin)
            for piece in held_pieces("contiguous", rank, size, lengths)
        ]
        for rank in range(size)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", metavar="SOURCE:TOKENS:SEED")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar="N")
    parser.add_argument("--num-sms", type=int, default=16, help="that a dispatch may use")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--late", action="store_true", help="make tables before a step's calls")
    parser.add_argument(
        "--costs", metavar="FILE", help="calibrated where there is none; a way more"
    )
    parser.add_argument("--profile", metavar="FOLDER", help="also profile a few steps")
    parser.add_argument("--no-compare", dest="compare", action="store_false")
    options = parser.parse_args()
    device = join(options.device)
    if options.costs:
        MODULES["waybill, costs"] = {"costs": costs_of(options, device)}
    run_workloads(
        functools.partial(Bench, options, device),
        options.workload or WORKLOADS,
        bool(options.profile),
        show,
    )
    return 0


def costs_of(options: argparse.Namespace, device: torch.device) -> Any:
    """Rank 0's, from the file, or measured and written there."""
    text: list[Any] = [None]
    if distributed.get_rank() == 0:
        if not os.path.exists(options.costs):
            heads, kv_heads, head_dim = options.heads
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            waybill.calibrate_attention(
                heads, kv_heads, head_dim, dtype=dtype, device=device,
                rows=16384 if device.type == "cuda" else 512,
            ).to_json(options.costs)  # fmt: skip
        with open(options.costs, encoding="utf-8") as file:
            text[0] = file.read()
        print(text[0], flush=True)
    distributed.broadcast_object_list(text)
    return waybill.AttentionCosts.from_json(text[0])


def show(table: list[dict[str, Any]]) -> None:
    ways = list(dict.fromkeys(way for row in table for way in row["ms"]))
    ratios = ["waybill / alone", "best by hand / waybill"]
    print("\n| workload, longest | " + " | ".join(ways + ratios) + " |")
    print("|---" * (1 + len(ways) + len(ratios)) + "|")
    for row in table:
        cells = [f"{row['workload']}, {row['longest']}"]
        cells += [f"{row['ms'].get(way, float('nan')):.2f}" for way in ways] + [
            f"{row[r]:.3f}" for r in ratios
        ]
        print("| " + " | ".join(cells) + " |")
    for ratio in ratios:
        print(f"mean of {ratio}: {statistics.mean(row[ratio] for row in table):.3f}")


if __name__ == "__main__":
    sys.exit(main())
