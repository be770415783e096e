"""What the benchmarks of whole steps begin with, and their loop over workloads."""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed

import waybill.torch as waybill


def join(device: str) -> torch.device:
    """Joins the group of torchrun; returns where this process computes."""
    faulthandler.enable()
    waybill.initialize_distributed(device=device)
    if device == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(device)


def run_workloads(
    make: Callable[[str], Any], workloads: Iterable[str], profiles: bool, show: Callable[..., Any]
) -> None:
    """Runs ``make(workload)`` of all ranks for each; rank 0 prints the results and their table."""
    table = []
    for workload in workloads:
        bench = make(workload)
        table.append({"workload": workload, **bench.run()})
        if distributed.get_rank() == 0:
            print(json.dumps(table[-1]), flush=True)
        if profiles:
            bench.profile()
        bench.close()
        del bench
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    if distributed.get_rank() == 0:
        show(table)
    distributed.barrier()
    distributed.destroy_process_group()
