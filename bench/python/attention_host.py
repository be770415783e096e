#!/usr/bin/env python3
"""What a step of ContextParallelAttention takes of the host: planning, tables, forward, backward,
in Python and in the library, of one rank without a GPU and with a kernel that does nothing.

    python bench/python/attention_host.py [--steps 1000] [--documents 5] [--profile]

Rows go through the rank's own window, so that every call is made that a step with others makes.
Calls of CUDA are not in it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from typing import Any

import torch

import waybill.torch as waybill

NAMES = ("plan", "prepare", "forward to kernel", "forward", "backward")


class Nothing(waybill.kernels.AttentionKernel):
    """As large as kernels of GPUs, and computes nothing."""

    takes_gaps = True
    needs_lse = True
    entered = 0.0

    def forward(self, q: Any, k: Any, v: Any, sequences: Any, shape: Any, want_lse: bool) -> Any:
        self.entered = time.perf_counter()
        lse = q.new_empty(shape.heads, q.shape[0], dtype=torch.float32)
        return q.new_empty(q.shape[0], shape.heads, shape.v_head_dim), lse

    def backward(self, grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = waybill.World.from_all_gather(0, 1, lambda mine: [mine], device="cpu")
    kernel = Nothing()
    attention = waybill.ContextParallelAttention(
        world, 2, 1, 2, dtype=torch.bfloat16, kernel=kernel, in_place=False
    )
    lengths = [20 + 7 * (i % 9) for i in range(options.documents)]
    rows = sum(lengths)
    tensors = [torch.randn(rows, heads, 2, dtype=torch.bfloat16) for heads in (2, 1, 1, 2)]
    profile = cProfile.Profile()
    times: list[list[float]] = [[] for _ in NAMES]
    for step in range(options.steps + 100):
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        if step == 100 and options.profile:
            profile.enable()
        at = [time.perf_counter()]
        plan = attention.plan([lengths])
        at.append(time.perf_counter())
        attention.prepare(plan)
        at.append(time.perf_counter())
        out = attention(plan, q, k, v)
        at.append(time.perf_counter())
        out.backward(tensors[3])
        at.append(time.perf_counter())
        if step < 100:
            continue
        spans = (at[1] - at[0], at[2] - at[1], kernel.entered - at[2], at[3] - at[2], at[4] - at[3])
        for found, seconds in zip(times, spans):
            found.append(1e6 * seconds)
    profile.disable()
    for name, found in zip(NAMES, times):
        print(f"{name:18} least {min(found):7.1f} us, median {statistics.median(found):7.1f} us")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
