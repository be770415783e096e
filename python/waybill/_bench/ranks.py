"""Where ranks of a benchmark lie, how they move rows by hand, and how long their calls take."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import torch
from torch import distributed, multiprocessing

from ..torch.world import run_threads
from ..world import num_gpus

_WAIT_S = 60.0  # a rank waits so long for another
_MOST_CALLS, _LEAST_CALLS = 60, 3


class Place(NamedTuple):
    """Where ranks lie."""

    device: str  #: "cuda" or "cpu"
    ranks: int
    processes: bool  #: else threads

    def __str__(self) -> str:
        if self.processes:
            each = "with a GPU each" if self.device == "cuda" else "on CPUs"
            return f"{self.ranks} ranks, processes {each}"
        where = "on one GPU, which they share" if self.device == "cuda" else "on CPUs"
        return f"{self.ranks} ranks, threads {where}"


def place_of(device: Optional[str], ranks: Optional[int], experts: int) -> Place:
    """Chooses device and ranks. Raises ValueError for what this machine does not have."""
    gpus = min(num_gpus(), torch.cuda.device_count())
    if device is None:
        device = "cuda" if gpus > 0 else "cpu"
    if device == "cuda" and gpus == 0:
        raise ValueError(
            "--device: got cuda, but Waybill finds no GPU here; --device cpu needs none"
        )
    several = device == "cuda" and gpus >= 2
    if ranks is None:
        ranks = next(n for n in range(gpus if several else 2, 0, -1) if experts % n == 0)
    if experts % ranks != 0:
        raise ValueError(f"--experts: got {experts}, expected a multiple of --ranks = {ranks}")
    if several and not 2 <= ranks <= gpus:
        raise ValueError(f"--ranks: got {ranks}, expected 2..{gpus}, the GPUs that are here")
    return Place(device, ranks, several)


class Rank:
    """One rank: its group, and rows moved by hand, by torch.distributed: NCCL, on CPUs gloo. Calls
    are collective.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, group: Any, how: str = ""
    ) -> None:
        self.rank, self.size, self.device, self.group = rank, size, device, group
        self.how = how or ("NCCL" if device.type == "cuda" else "gloo")  #: by hand

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, on the host."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def exchanged(self, rows: Any, received: list[int], sent: list[int]) -> torch.Tensor:
        """``sent[r]`` rows to rank r, one after another; ``received[r]`` from rank r."""
        out = rows.new_empty(sum(received), *rows.shape[1:])
        distributed.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, as many of each."""
        out = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        distributed.all_gather_into_tensor(out, rows.contiguous())
        return out

    def scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sums over all ranks."""
        out = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        distributed.reduce_scatter_tensor(out, rows.contiguous())
        return out

    def settle(self) -> None:
        """Returns when this rank's work is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class ThreadRank(Rank):
    """Rows by copies from the other ranks' tensors, which all threads see."""

    def __init__(self, world: Any, board: list[Any]) -> None:
        device = torch.device(world.device)
        super().__init__(world.rank, world.world_size, device, world, "copies")
        self._board = board

    def gather(self, value: Any) -> list[Any]:
        self.settle()
        self._board[self.rank] = value
        self.group.barrier()
        found = list(self._board)
        self.group.barrier()
        return found

    def _leave(self) -> None:
        """Other ranks' tensors were read: they may go."""
        self.settle()
        self.group.barrier()

    def exchanged(self, rows: Any, received: list[int], sent: list[int]) -> torch.Tensor:
        theirs = self.gather((rows, sent))
        parts = [part.split(counts)[self.rank] for part, counts in theirs]
        out = torch.cat(parts)
        self._leave()
        return out

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.cat(self.gather(rows))
        self._leave()
        return out

    def scattered(self, rows: torch.Tensor) -> torch.Tensor:
        mine = len(rows) // self.size
        part = slice(self.rank * mine, (self.rank + 1) * mine)
        out = torch.stack([theirs[part] for theirs in self.gather(rows)]).sum(0)
        self._leave()
        return out


def start(place: Place, body: Callable[..., Any], *arguments: Any) -> Any:
    """``body(rank, *arguments)`` on each rank; what that of rank 0 returned."""
    if place.processes:
        return _start_processes(place, body, arguments)
    board: list[Any] = [None] * place.ranks

    def one(world: Any) -> Any:
        return body(ThreadRank(world, board), *arguments)

    return run_threads(place.ranks, one, device=place.device, timeout_s=_WAIT_S)[0]


def _start_processes(place: Place, body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")
        torch_processes: Any = multiprocessing
        context = torch_processes.spawn(
            _enter, args=(place, port, path, body, arguments), nprocs=place.ranks, join=False
        )
        try:
            while not context.join(timeout=1.0):  # a rank that fails ends the others
                pass
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.terminate()
        return torch.load(path, weights_only=True)


def _enter(
    rank: int, place: Place, port: int, path: str, body: Callable[..., Any], arguments: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")  # NCCL EP needs it
    device, backend = torch.device("cpu"), "gloo"
    if place.device == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, rank=rank, world_size=place.ranks, timeout=timedelta(seconds=_WAIT_S),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    result = body(Rank(rank, place.ranks, device, distributed.group.WORLD), *arguments)
    if rank == 0:
        torch.save(result, path)
    distributed.barrier()
    distributed.destroy_process_group()


def slowest_us(rank: Rank, call: Callable[[], Any], seconds: float) -> float:
    """The slowest rank's median time from the begin of a call to that of the next, of as many
    calls as fit into the seconds, 3 to 60. Collective.
    """
    call()  # the first one allocates
    rank.settle()
    begin = time.perf_counter()
    call()
    rank.settle()
    one = max(rank.gather(time.perf_counter() - begin))
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(seconds / max(one, 1e-6))))
    for _ in range(min(8, calls // 4)):
        call()
    times = (
        _gpu_times(rank, call, calls) if rank.device.type == "cuda" else _times(rank, call, calls)
    )
    return float(max(rank.gather(statistics.median(times))))


def _gpu_times(rank: Rank, call: Callable[[], Any], calls: int) -> list[float]:
    event_of: Any = torch.cuda.Event
    events = [event_of(enable_timing=True) for _ in range(calls + 1)]
    rank.gather(None)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    rank.settle()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]


def _times(rank: Rank, call: Callable[[], Any], calls: int) -> list[float]:
    rank.gather(None)
    moments = [time.perf_counter()]
    for _ in range(calls):
        call()
        moments.append(time.perf_counter())
    return [(b - a) * 1e6 for a, b in pairwise(moments)]
