#!/usr/bin/env python3
"""What calls of experts and of a SequenceDispatcher take of the host, in Python and in the library:
tiny sizes, without a GPU. attention_host.py does the same for ContextParallelAttention.

    python bench/python/calls_host.py [--ranks 1] [--steps 1000] [--profile NAME]

Ranks are threads; times are those that the first one worked. Calls of CUDA are not in them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import waybill.torch as waybill
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel

TOKENS, HIDDEN, EXPERTS, TOPK = 8, 16, 4, 2


def expert_calls(world: Any) -> dict[str, Callable[[], Any]]:
    draws = torch.Generator().manual_seed(world.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=draws).bfloat16()
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=draws).topk(TOPK)
    leaf, gradient = x.clone().requires_grad_(), torch.ones_like(x)
    sizes = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
    given = {"group": world, "gradients": "sum", **sizes}
    module = ExpertParallel(lambda rows, _: rows, **given)
    fixed = ExpertParallel(lambda rows, _: rows, fixed_rows=1.0, **given)
    layer = EPAll2AllLayer(
        world, TOKENS, HIDDEN, TOPK, world.rank, EXPERTS, world.world_size, world.world_size,
        dropped_id=-1,
    )  # fmt: skip
    rows, _, layout = layer.dispatch(x, ids, scores)
    quiet = torch.no_grad()

    def without(call: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            with quiet:
                return call()

        return called

    return {
        "module": without(lambda: module(x, scores, ids)),
        "module, fixed": without(lambda: fixed(x, scores, ids)),
        "module and backward": lambda: module(leaf, scores, ids).backward(gradient),
        "layer.dispatch": without(lambda: layer.dispatch(x, ids, scores)),
        "layer.dispatch, known": without(lambda: layer.dispatch(x, ids, layout_desc=layout)),
        "layer.combine": without(lambda: layer.combine(rows, layout)),
    }


def sequence_calls(world: Any) -> dict[str, Callable[[], Any]]:
    lengths = [40, 20, 6] * world.world_size
    plan = waybill.plan(lengths, world.world_size, 0, kv_layout="per_rank", block_tokens=4)
    routing = plan.to_routing()
    mine = plan.home_tokens[world.rank]
    q, k, v = (torch.randn(mine, heads, 4).bfloat16() for heads in (2, 1, 1))
    dispatcher = waybill.SequenceDispatcher(world)
    there = dispatcher.plan_dispatch((routing.fwd_q, q), (routing.fwd_kv, k, v))
    sums = dispatcher.plan_kv_gradient((routing.fwd_kv, k, v))
    dispatcher.reserve(there, sums)
    _, dk, dv = (t.clone() for t in dispatcher.dispatch(there, q, k, v))
    return {
        "dispatcher.dispatch": lambda: dispatcher.dispatch(there, q, k, v),
        "dispatcher.kv_gradient": lambda: dispatcher.kv_gradient(sums, dk, dv),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--profile")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def body(world: Any) -> dict[str, tuple[float, float]]:
        calls = {**expert_calls(world), **sequence_calls(world)}
        found = {}
        for name, call in calls.items():
            if options.profile not in (None, name):
                continue
            for _ in range(30):
                call()
            profile = cProfile.Profile()
            if options.profile and world.rank == 0:
                profile.enable()
            times = []
            for _ in range(options.steps):
                begin = time.thread_time_ns()
                call()
                times.append((time.thread_time_ns() - begin) / 1e3)
            profile.disable()
            if options.profile and world.rank == 0:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            found[name] = min(times), statistics.median(times)
        return found

    for name, (least, median) in waybill.run_threads(options.ranks, body)[0].items():
        print(f"{name:28} least {least:7.1f} us, median {median:7.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
