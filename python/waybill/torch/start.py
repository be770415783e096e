"""How a program of several processes begins: its process group, and a GPU for each."""

from __future__ import annotations

import datetime
import os
from typing import Any, Optional, Tuple

import torch
from torch import distributed as _distributed

from .._arrays import choice, int64
from .._process_group import store_of_ranks
from ..errors import InvalidArgument
from ..world import num_gpus, seconds_of

__all__ = ["initialize_distributed"]

distributed: Any = _distributed  # not all that it documents is typed

#: What launchers set: this rank, number of ranks, rank on the host; the first that is there.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def initialize_distributed(
    backend: Optional[str] = None, *, device: Any = None, timeout_s: Optional[float] = None
) -> Tuple[int, int]:
    """Collective: this process's rank and the number of ranks, as torchrun, Open MPI, Slurm or PMI
    say, alone without any of them; torch's default process group, and its current device.

    ``torch.distributed.destroy_process_group()`` ends it. A group that is there already stays;
    another backend or timeout than it has is refused.

    :param backend: None is "cpu:gloo,cuda:nccl" on GPUs, else "gloo"
    :param device: "cpu"; "cuda" for the GPU of the rank on its host; None is "cuda" where Waybill
        was built with CUDA and there are GPUs, else "cpu"
    :param timeout_s: of the group; None is torch's
    :raises InvalidArgument: naming the variable that is missing or wrong, also on all processes
        where two have the same rank, or the option that the group which is there has otherwise, and
        where a host has more ranks than GPUs; Timeout naming a rank that did not come
    """
    who = "initialize_distributed"
    if timeout_s is not None:
        seconds_of(timeout_s, who)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and num_gpus() > 0 else "cpu"
    device = choice(
        str(device) if isinstance(device, torch.device) else device, f"{who}: device", "cpu", "cuda"
    )
    names, rank, world_size, local_rank = _launched(who)
    if distributed.is_initialized():
        _require_same(backend, timeout_s, who)
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise InvalidArgument(
                f"{who}: rank {local_rank} of its host, expected 0..{gpus - 1}: one for each GPU;"
                ' device="cpu" needs none'
            )
        torch.cuda.set_device(local_rank)
    if not distributed.is_initialized():
        options: dict[str, Any] = {"rank": rank, "world_size": world_size}
        limit = None
        if timeout_s is not None:
            limit = options["timeout"] = datetime.timedelta(seconds=seconds_of(timeout_s, who))
        if world_size == 1 and "MASTER_ADDR" not in os.environ:
            options["store"] = distributed.HashStore()
        elif "MASTER_ADDR" not in os.environ:
            raise InvalidArgument(
                f"{who}: MASTER_ADDR is not set, expected the host of rank 0; torchrun sets it"
            )
        else:
            os.environ.setdefault("MASTER_PORT", "29500")
            options["store"] = store_of_ranks(names, rank, world_size, limit, who)
        if backend is None:
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, **options)
    return distributed.get_rank(), distributed.get_world_size()


def _require_same(backend: Optional[str], timeout_s: Optional[float], who: str) -> None:
    """Nothing can be changed of the default group that is there."""
    from torch.distributed import distributed_c10d  # not every torch has torch.distributed

    group = distributed.group.WORLD
    its = distributed_c10d._world.pg_backend_config.get(group, "")
    if backend is not None and backend not in (its, distributed.get_backend(group)):
        raise InvalidArgument(
            f"{who}: backend = {backend!r}, expected {its!r}, that of the process group that is"
            " there"
        )
    if timeout_s is None:
        return
    kind = its.partition(":")[0] or "cpu"
    options = getattr(group._get_backend(torch.device(kind)), "options", None)
    has = getattr(options, "_timeout", None)  # not every backend says it
    if has is None or seconds_of(timeout_s, who) != has.total_seconds():
        expected = "None" if has is None else f"{has.total_seconds():g}"
        raise InvalidArgument(
            f"{who}: timeout_s = {timeout_s:g}, expected {expected}, that of the process group"
            " that is there"
        )


def _launched(who: str) -> Tuple[Tuple[str, ...], int, int, int]:
    """The variables' names, rank, number of ranks, rank on the host."""
    for names in _LAUNCHERS:
        if names[0] in os.environ:
            rank, world_size = _number(names[0], who), _number(names[1], who)
            if rank >= world_size:
                raise InvalidArgument(
                    f"{who}: {names[0]} = {rank} with {names[1]} = {world_size}, expected less"
                )
            local_rank = _number(names[2], who) if names[2] in os.environ else 0
            return names, rank, world_size, local_rank
    return _LAUNCHERS[0], 0, 1, 0


def _number(name: str, who: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal():
        raise InvalidArgument(f"{who}: {name} = {text!r}, expected a number")
    return int64(int(text), f"{who}: {name}")
