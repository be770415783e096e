#!/usr/bin/env python3
"""Waybill in CollectiveX's own sweep, with its oracle, on the GPUs of this machine or on CPU ranks.

    python bench/collectivex/run.py CHECKOUT --device cpu --ranks 2      # is it right? Minutes
    python bench/collectivex/run.py CHECKOUT                             # on all GPUs: its figures

CHECKOUT is InferenceX or its folder experimental/CollectiveX, which is read, not changed. Every
mode and precision is one case; its JSON goes to --out. On CPU ranks torch.cuda's events are clocks
of the host and few calls are timed: the figures say nothing, the verdicts of the oracle do.
Exit: 0 all cases are right, 1 one is not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

CASES = [(mode, precision) for mode in ("normal", "low-latency") for precision in ("bf16", "fp8")]
_LIMIT_S = 300  # of a wait for other ranks


class HostEvent:
    """torch.cuda.Event for calls of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.moment = 0.0

    def record(self) -> None:
        self.moment = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.moment - self.moment)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="all GPUs unless given; 2 on CPUs")
    parser.add_argument("--mode", choices=("normal", "low-latency"), help="both unless given")
    parser.add_argument("--precision", choices=("bf16", "fp8"), help="both unless given")
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--tokens", help="of a rank, as '1 8 64'; the sweep's own unless given")
    parser.add_argument("--hidden", type=int, help="the sweep's unless given; 256 on CPUs")
    parser.add_argument("--out", type=Path, default=Path("build/collectivex"))
    options = parser.parse_args()
    inside = options.checkout / "experimental" / "CollectiveX"
    options.checkout = (inside if inside.is_dir() else options.checkout).resolve()
    if not (options.checkout / "bench" / "ep_harness.py").is_file():
        parser.error(f"{options.checkout} is no checkout of CollectiveX: bench/ep_harness.py")
    if options.ranks is None:
        options.ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.ranks < 1:
        parser.error("there is no GPU; --device cpu needs none")
    return options


def case_of(options: argparse.Namespace, mode: str, precision: str) -> argparse.Namespace:
    """What the sweep gives to a case, by the checkout's own configs/sweep.json."""
    import ep_harness

    sweep = json.loads((options.checkout / "configs" / "sweep.json").read_text())
    workload, timing = sweep["workload"], sweep["timing"]
    on_cpu = options.device == "cpu"
    ladder = options.tokens or " ".join(map(str, workload["token_ladders"][options.phase]))
    if on_cpu:
        ladder = options.tokens or "1 3 32"
        timing = dict.fromkeys(timing, 2) | {"chain_iters_per_trial": 4, "chain_drop": 1}
    case = {
        "backend": "waybill", "ep": options.ranks, "mode": mode, "phase": options.phase,
        "precision": precision, "routing": sweep["routing"], "workload": workload["name"],
    }  # fmt: skip
    runner = "cpu" if on_cpu else "gpu"
    return argparse.Namespace(
        **{k: case[k] for k in ("mode", "precision", "phase", "routing")},
        tokens_ladder=ladder, hidden=options.hidden or (256 if on_cpu else workload["hidden"]),
        topk=workload["topk"], experts=workload["routed_experts"], seed=workload["seed"],
        case_id=ep_harness.case_id(runner, case), runner=runner, suite=sweep["suite"],
        workload_name=workload["name"], version=sweep["version"],
        warmup=timing["warmup_iters_per_trial"], iters=timing["iters_per_trial"],
        trials=timing["trials_per_point"], chain_iters=timing["chain_iters_per_trial"],
        chain_trials=timing["chain_trials_per_point"], chain_drop=timing["chain_drop"],
        topology_class="one-host", transport="nvlink", scope="scale-up",
        scale_up_transport="nvlink", scale_out_transport="", gpus_per_node=options.ranks,
        scale_up_domain=options.ranks, out=str(options.out / f"{mode}-{precision}.json"),
    )  # fmt: skip


def rank_main(rank: int, options: argparse.Namespace, cases: list[Any], port: int) -> None:
    sys.path[:0] = [str(Path(__file__).parent), str(options.checkout / "bench")]
    on_cpu = options.device == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    if on_cpu:
        torch.set_num_threads(1)
        torch.cuda.Event, torch.cuda.synchronize = HostEvent, lambda *_: None  # type: ignore
    else:
        torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group(
        "gloo" if on_cpu else "nccl", rank=rank, world_size=options.ranks,
        timeout=timedelta(seconds=_LIMIT_S),
    )  # fmt: skip
    import ep_harness
    from ep_waybill import WaybillBackend

    failed = 0
    for mode, precision in cases:
        args = case_of(options, mode, precision)
        backend = WaybillBackend(args, rank, options.ranks, rank, device)
        code = ep_harness.run_sweep(args, backend, torch, distributed, device, rank, options.ranks)
        backend.layer.finalize()
        failed += code != 0
        if rank == 0:
            print(f"{mode} {precision}: {'right' if code == 0 else f'WRONG, {args.out} says what'}")
    distributed.barrier()
    distributed.destroy_process_group()
    if failed:
        sys.exit(1)


def main() -> int:
    options = read_arguments()
    cases = [
        (mode, precision)
        for mode, precision in CASES
        if options.mode in (None, mode) and options.precision in (None, precision)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        multiprocessing.spawn(rank_main, (options, cases, port), nprocs=options.ranks)
    except multiprocessing.ProcessExitedException:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
