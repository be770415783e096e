"""How a program begins: its process group and GPU, ranks as threads, the worlds of groups."""

from __future__ import annotations

import atexit
import datetime
import os
import threading
import weakref
from typing import Any, Optional, Tuple

import torch
from torch import distributed as _distributed

from .._arrays import choice, int64
from .._errors import shown
from .._process_group import device_of, group_of, nodes_of_group, store_of_ranks
from ..errors import InvalidArgument
from ..world import World, agree, num_gpus, run_threads, seconds_of

__all__ = ["initialize_distributed", "run_threads"]


distributed: Any = _distributed  # torch types a part of it only

#: Launchers set these: this rank, number of ranks, rank on the host; the first that is there.
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


_TIMEOUT_S = 60.0


# A group that is destroyed takes along what was made for it, which does not keep it.
_kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
atexit.register(_kept.clear)


def kept_for(group: Any) -> dict[Any, Any]:
    """All that was made for a process group: worlds, layers, modules, by what tells them apart."""
    return _kept.setdefault(group, {})


def world_of(
    group: Any, local_world_size: Optional[int], device: Any, who: str, name: str = "group",
    timeout_s: Optional[float] = None,
) -> World:  # fmt: skip
    """A World itself, or the one that layers of a process group or DeviceMesh share (None: of the
    default group); the first one makes it, which is collective.

    A World has a device and a deadline: others are refused.
    """
    if isinstance(group, World):
        try:
            _refuse_other(group, device, timeout_s, who)
        except InvalidArgument as error:
            agree(group, who, {}, error)  # the others compare what they make
        return group
    return shared_world(group, device, local_world_size, who, name)


def _refuse_other(world: World, device: Any, timeout_s: Optional[float], who: str) -> None:
    """Refuses another device or deadline than the World has."""
    known = (world.device, world.device.split(":")[0])
    is_name = isinstance(device, (str, torch.device))
    if device is not None and not (is_name and str(device) in known):
        got = shown(device)
        raise InvalidArgument(f"{who}: device = {got}, expected {world.device}, that of the World")
    if timeout_s is not None and seconds_of(timeout_s, who) != world.timeout_s:
        raise InvalidArgument(
            f"{who}: timeout_s = {timeout_s:g}, expected {world.timeout_s:g}, that of the World"
        )


def group_of_layer(group: Any) -> Any:
    """A weak reference: a layer does not keep its group; None for a World."""
    if isinstance(group, World):
        return None
    return weakref.ref(group_of(group, "EPAll2AllLayer", "ep_group"))


def shared_world(
    group: Any, device: Any, ranks_per_node: Optional[int], who: str, name: str = "group"
) -> World:
    """The world that all layers of the group share; the first one makes it, which is collective."""
    group = group_of(group, who, name)
    named = device_of(group, device)
    kept = kept_for(group)
    with kept.setdefault("lock", threading.RLock()):
        if ranks_per_node is None:
            if "ranks of a host" not in kept:
                kept["ranks of a host"] = nodes_of_group(group, _TIMEOUT_S, who)
            ranks_per_node = kept["ranks of a host"]
        key = (World, named != "cpu", ranks_per_node)
        world: Optional[World] = kept.get(key)
        if world is None:
            world = kept[key] = World.from_process_group(
                group, device=device, ranks_per_node=ranks_per_node, timeout_s=_TIMEOUT_S
            )
    if named == "cuda":
        named = f"cuda:{torch.cuda.current_device()}"
    if named != world.device:
        raise InvalidArgument(
            f"{who}: device is {named}, expected {world.device}, where the first layer of the group"
            " is: make a World.from_process_group for another one"
        )
    return world
