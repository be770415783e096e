"""Ranks as processes of torch.distributed, and the time of their calls."""

import os
import socket
import statistics
import time
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start(worker, world_size, device, *arguments):
    """Runs worker(rank, *arguments) on each rank, in a process group: NCCL, on the CPU gloo."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(_enter, args=(worker, world_size, device, port, arguments), nprocs=world_size)


def _enter(rank, worker, world_size, device, port, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    worker(rank, *arguments)
    dist.destroy_process_group()


def slowest_us(call, device, calls):
    """The slowest rank's median time from the begin of a call to that of the next. Collective."""
    for _ in range(10):
        call()
    times = _gpu_times(call, calls) if device == "cuda" else _cpu_times(call, calls)
    value = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def _gpu_times(call, calls):
    torch.cuda.synchronize()
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]


def _cpu_times(call, calls):
    dist.barrier()
    moments = [time.perf_counter()]
    for _ in range(calls):
        call()
        moments.append(time.perf_counter())
    return [(b - a) * 1e6 for a, b in pairwise(moments)]
