"""Runs one cell: the ranks of a way, as threads or as processes, with one edge."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import attention
import copies
import deep_ep_ways
import sequences
import torch
from device import Way

import experts
import waybill
import waybill.torch as wt

WAYS: dict[str, Way] = {
    **experts.WAYS,
    **copies.WAYS,
    **deep_ep_ways.WAYS,
    **sequences.WAYS,
    **attention.WAYS,
}
REFUSALS = (waybill.InvalidArgument, waybill.Unsupported)
Failure = tuple[str, str]  #: the error's type and its words


@dataclass(frozen=True)
class Outcome:
    """What came of a cell."""

    result: str  #: "right", "refused", "wrong" or "not run"
    words: str = ""
    failed: bool = False  #: a rank had an error


def timeout_s(device: str) -> float:
    """The deadline of every wait. Kernels of processes on one GPU take turns."""
    patience = float(os.environ.get("WAYS_PATIENCE", "1"))
    return patience * (10.0 if device == "cuda" else 20.0)


class Threads:
    """Ranks as threads, which share the GPUs."""

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        gc.freeze()  # what was imported is not searched again before each cell
        if device == "cuda":
            # Loads torch's kernels, which no rank may do while another waits on the same GPU.
            ones = torch.ones(4, device="cuda")
            (ones.to(torch.bfloat16).float() @ ones).item()

    def run(self, way: Way, edge: str, index: int) -> tuple[list[Any], list[Failure | None]]:
        """(result of each rank, error of each rank)."""
        case = list(way.cases(edge))[index]
        world, per_node = size_of(case)
        errors: list[Failure | None] = [None] * world

        def one_rank(one: Any) -> Any:
            torch.autograd.set_multithreading_enabled(False)
            try:
                return way.rank(one, case)
            except BaseException as error:
                errors[one.rank] = failure(error)
                raise

        with settled_garbage() if self.device == "cuda" else contextlib.nullcontext():
            try:
                results = wt.run_threads(
                    world, one_rank, device=self.device, ranks_per_node=per_node,
                    timeout_s=way.patience * timeout_s(self.device),
                )  # fmt: skip
            except Exception as error:
                if not any(errors):
                    errors[0] = failure(error)
                return [], errors
        return results, errors

    def is_usable(self, outcome: Outcome) -> bool:
        """Whether a next cell may run here: an error may have taken the GPU from this process. Who
        refuses a call leaves it; the GPU says so.
        """
        if self.device == "cpu" or not outcome.failed:
            return True
        if outcome.result != "refused":
            return False
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(1, device="cuda").item() == 1)
        except RuntimeError:
            return False

    def close(self) -> None:
        """Nothing is left."""


def failure(error: BaseException) -> Failure:
    """Its type and words."""
    kind = "refused" if isinstance(error, REFUSALS) else type(error).__name__
    return kind, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def settled_garbage() -> Iterator[None]:
    """Nothing is given back while ranks run: memory of a GPU that is freed waits for kernels of
    other ranks there, which may wait for the rank that frees it.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def size_of(case: Any) -> tuple[int, int]:
    """(ranks, ranks of a node) of a case of either family."""
    case = case[1] if isinstance(case, tuple) else case
    sizes = getattr(case, "sizes", case)
    return sizes.world, sizes.per_node


class Processes:
    """Ranks as processes, forked from one that touches no GPU: others for each number of ranks and
    nodes, as NCCL keeps the name of its host. Worlds are kept for all cells.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.folder = tempfile.TemporaryDirectory(prefix="ways-")
        self.pipes: dict[tuple[int, int], list[Connection]] = {}
        self.processes: dict[tuple[int, int], list[Any]] = {}

    def _fork(self, size: tuple[int, int]) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(size[0]):
            mine, theirs = context.Pipe()
            one = context.Process(
                target=_serve, args=(theirs, rank, self.device, self.folder.name), daemon=True
            )
            one.start()
            self.pipes.setdefault(size, []).append(mine)
            self.processes.setdefault(size, []).append(one)

    def run(self, way: Way, edge: str, index: int) -> tuple[list[Any], list[Failure | None]]:
        """(result of each rank, error of each rank)."""
        size = size_of(list(way.cases(edge))[index])
        if size not in self.pipes:
            self._fork(size)
        results: list[Any] = []
        errors: list[Failure | None] = [None] * size[0]
        limit_s = 2.5 * timeout_s("processes")
        until = time.monotonic() + limit_s
        for pipe in self.pipes[size]:
            pipe.send((way.name, edge, index))
        for rank, pipe in enumerate(self.pipes[size]):
            try:
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    errors[rank] = (
                        "lost",
                        f"the process of rank {rank} said nothing in {limit_s:.0f} s",
                    )
                    continue
                errors[rank], result = pipe.recv()
            except (EOFError, OSError) as error:
                status = self.processes[size][rank].exitcode
                errors[rank] = "lost", f"the process of rank {rank} ended ({status}): {error}"
                continue
            results.append(result)
        return results, errors

    def is_usable(self, outcome: Outcome) -> bool:
        """Whether a next cell may run here: a failed world is of no more use."""
        return not outcome.failed

    def close(self) -> None:
        """Ends the processes of this object; they end by themselves unless they hang."""
        for pipe in (pipe for ranks in self.pipes.values() for pipe in ranks):
            with contextlib.suppress(OSError):
                pipe.send(None)
        for one in (one for ranks in self.processes.values() for one in ranks):
            one.join(timeout=5 * timeout_s("cuda"))
            one.kill()
            one.join()
        self.folder.cleanup()


def _serve(pipe: Connection, rank: int, device: str, folder: str) -> None:
    """A rank that is a process: it answers each cell with (error, result)."""
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    worlds: dict[Any, Any] = {}
    meetings = 0
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            break
        if asked is None:
            break
        name, edge, index = asked
        try:
            way = WAYS[name]
            case = list(way.cases(edge))[index]
            key = (*size_of(case), way.backend)
            if key not in worlds:
                meetings += 1  # a folder serves one
                place = pathlib.Path(folder) / f"{key[0]}_{key[1]}_{key[2]}_{meetings}"
                try:
                    worlds[key] = _join(rank, *key, device, place)
                except waybill.Unsupported as error:
                    pipe.send((("not run", str(error)), None))
                    continue
            pipe.send((None, way.rank(worlds[key], case)))
        except BaseException as error:
            pipe.send((failure(error), None))
    os._exit(0)


def _join(
    rank: int, world: int, per_node: int, backend: str, device: str, place: pathlib.Path
) -> Any:
    """The world of this rank, which meets the others in a folder."""
    node = rank // per_node
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node), WAYBILL_RENDEZVOUS=f"file://{place}",
    )  # fmt: skip
    if backend == "nccl":  # each rank is a host of its own to NCCL, which then shares GPUs
        os.environ.update(
            WAYBILL_HOST_ID=f"host-{node}", NCCL_HOSTID=f"host-{rank}", NCCL_NET="Socket",
            NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0",
        )  # fmt: skip
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        torch.ones(4, device=device).to(torch.bfloat16).float().sum().item()
    return waybill.World.from_environment(
        device=device, nvshmem=backend == "nvshmem", timeout_s=timeout_s("processes")
    )


def run_cell(ranks: Threads | Processes, way: Way, edge: str) -> Outcome:
    """Every case of the edge, up to the first that is not right."""
    for index, case in enumerate(way.cases(edge)):
        results, errors = ranks.run(way, edge, index)
        if any(errors):
            return _outcome_of(errors)
        complaints = way.complaints(case, results)
        if complaints:
            more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
            return Outcome("wrong", complaints[0] + more)
    return Outcome("right")


def _outcome_of(errors: list[Failure | None]) -> Outcome:
    """Refused, if some rank refused and none got a result or another error of its own."""
    said = [error for error in errors if error]
    missing = [words for kind, words in said if kind == "not run"]
    if missing:
        return Outcome("not run", missing[0])
    refusals = [words for kind, words in said if kind == "refused"]
    others = [words for kind, words in said if kind not in ("refused", "PeerFailed")]
    if refusals and not others and len(said) == len(errors):
        return Outcome("refused", refusals[0], True)
    first = (others or refusals or [words for _, words in said])[0]
    rank = next(r for r, error in enumerate(errors) if error and error[1] == first)
    return Outcome("wrong", f"rank {rank}: {first}", True)
