#!/usr/bin/env python3
"""compute_metadata of waybill.torch beside DistCA's way of computing it, in torch.

The torch formulation below is written from the specification: one-hot destinations of every shard,
prefix sums over them, and scatters; O(W * S * C * W). Both get the same tensors, both results are
compared field by field, then both are timed in turns in one run.

    python bench/python/compute_metadata.py [--shards 10000] [--world-sizes 8 64 512]
    python bench/python/compute_metadata.py --copies 400
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Callable

import torch

import waybill as numpy_face
import waybill.torch as waybill


@torch.no_grad()
def torch_compute_metadata(seq_len: torch.Tensor, dispatch: torch.Tensor) -> tuple[Any, Any]:
    """Forward and reverse metadata by one-hots. seq_len (W, S), dispatch (W, S) or (W, S, C)."""
    world = dispatch.shape[0]
    plan = dispatch if dispatch.ndim == 3 else dispatch.unsqueeze(-1)
    one_hot = torch.nn.functional.one_hot(plan + 1, world + 1)[..., 1:]  # (W, S, C, W)
    tokens = one_hot * seq_len[:, :, None, None]

    def place(amounts: torch.Tensor) -> torch.Tensor:
        """What every entry finds at its destination before it, in the global order."""
        flat = amounts.reshape(-1, world)
        before = (flat.cumsum(0) - flat).reshape(one_hot.shape)
        return (before * one_hot).sum(-1)

    sent = tokens.sum(dim=(1, 2))  # (W, W), sending rank first
    with_total = lambda counts: torch.cat([counts, counts.sum(1, keepdim=True)], 1)
    recv, back = with_total(sent.T), with_total(sent)
    forward = {
        "dst_rank": dispatch,
        "dst_offset": place(tokens).reshape(dispatch.shape),
        "seq_len": seq_len,
        "num_recv_tokens": recv,
        "num_seqs": (seq_len > 0).sum(1),
        "num_total_recv_tokens": recv[:, -1].tolist(),
    }

    lens = seq_len.unsqueeze(2).expand_as(plan).transpose(1, 2)  # (W, C, S): copies in planes
    begins = (lens.reshape(world, -1).cumsum(1).reshape(lens.shape) - lens).transpose(1, 2)
    slots = place(one_hot)
    num_received = one_hot.reshape(-1, world).sum(0)
    width = int(num_received.max())
    at = torch.where(plan.flatten() >= 0)[0]
    to = plan.flatten()[at] * width + slots.flatten()[at]
    tables = {}
    home = torch.arange(world).reshape(-1, 1, 1).expand_as(plan)
    for name, values, padding in (
        ("dst_rank", home, -1),
        ("dst_offset", begins, 0),
        ("seq_len", lens.transpose(1, 2), 0),
    ):
        table = torch.full((world * width,), padding, dtype=torch.int64)
        table[to] = values.flatten()[at]
        tables[name] = table.reshape(world, width)
    reverse = {
        **tables,
        "num_recv_tokens": back,
        "num_seqs": (tables["seq_len"] > 0).sum(1),
        "num_total_recv_tokens": back[:, -1].tolist(),
    }
    return forward, reverse


def random_plan(
    world: int, shards: int, seed: int, copies: int = 0, used: int = 100
) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, S) lengths and destinations, S = shards / W; (W, S, C) with copies. Of those after the
    first ``used`` in a hundred go anywhere, the others are -1.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (world, max(shards // world, 1))
    lens = torch.randint(1, 4096, shape, generator=generator)
    if copies == 0:
        return lens, torch.randint(0, world, shape, generator=generator)
    ranks = torch.randint(0, world, (*shape, copies), generator=generator)
    dropped = torch.randint(0, 100, ranks.shape, generator=generator) >= used
    dropped[..., 0] = False
    return lens, ranks.masked_fill_(dropped, -1)


def time_copies(world: int, shards: int, calls: int) -> None:
    """numpy and torch, tables with and without a copy axis: medians, and the time of the CPU."""
    print(f"{'table':>14} {'second copies':>14} {'numpy':>20} {'torch':>20}")
    for copies, used in ((0, 0), (1, 0), (2, 0), (2, 100)):
        lens, dispatch = random_plan(world, shards, 1, copies, used)
        row = f"{list(dispatch.shape)!s:>14} {f'{used} %' if copies > 1 else '':>14}"
        for face, tables in (
            (numpy_face, (lens.numpy(), dispatch.numpy())),
            (waybill, (lens, dispatch)),
        ):
            call = lambda: face.compute_metadata(*tables)  # noqa: B023
            call()
            used_cpu = time.process_time()
            seconds = statistics.median(seconds_of(call) for _ in range(calls))
            used_cpu = (time.process_time() - used_cpu) / calls
            row += f" {seconds * 1e6:8.1f} us ({used_cpu * 1e6:5.1f})"
        print(row)


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def check_equal(expected: tuple[Any, Any], got: Any) -> None:
    for table, metadata in zip(expected, got):
        for name, value in table.items():
            ours = getattr(metadata, name)
            same = torch.equal(value, ours) if isinstance(value, torch.Tensor) else value == ours
            if not same:
                sys.exit(f"compute_metadata: {name} differs from the torch formulation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=10_000, help="of all ranks together")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rounds", type=int, default=7, help="the figure is their median")
    parser.add_argument(
        "--copies", type=int, metavar="CALLS",
        help="instead, times so many calls with and without a copy axis, 64 ranks",
    )  # fmt: skip
    options = parser.parse_args()
    if options.copies:
        time_copies(64, 64 * 160, options.copies)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads for torch, 1 for waybill")
    print(f"{'ranks':>6} {'shards':>7} {'torch':>12} {'waybill':>12} {'ratio':>8}")
    for world in options.world_sizes:
        lens, dispatch = random_plan(world, options.shards, seed=world)
        theirs = lambda: torch_compute_metadata(lens, dispatch)  # noqa: B023
        ours = lambda: waybill.compute_metadata(lens, dispatch)  # noqa: B023
        check_equal(theirs(), ours())
        slow, fast = [], []
        for _ in range(options.rounds):
            slow.append(seconds_of(theirs))
            fast += [seconds_of(ours) for _ in range(5)]
        s, f = statistics.median(slow), statistics.median(fast)
        print(f"{world:6} {lens.numel():7} {s * 1e3:9.2f} ms {f * 1e3:9.3f} ms {s / f:7.0f}x")


if __name__ == "__main__":
    main()
