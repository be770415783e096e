"""Where the ranks of a process group lie: on which hosts, and on which GPUs."""

from __future__ import annotations

import atexit
import json
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch

from . import _core
from ._process_group import GroupExchange, distributed, distributed_c10d, group_of
from .errors import Error, InvalidArgument
from .world import World, _process_engine

__all__ = ["Place", "node_size", "refuse_shared_gpus", "shared_world", "world_of_group"]

_TIMEOUT_S = 60.0


class Place(NamedTuple):
    """Of a rank."""

    host: str
    gpu: str  #: which it takes because it is torch's current one; "" where it was named, or none


def world_of_group(
    group: Any,
    device: Any,
    nvshmem: bool,
    ranks_per_node: Optional[int],
    timeout_s: float,
    who: str,
) -> World:
    """Collective: a world of the group's ranks, as World.from_process_group says."""
    group = group_of(group, who)
    exchange = GroupExchange(group, timeout_s, who)
    try:
        named = device_of(group, device)
        _process_engine(named, nvshmem, who)  # before the others wait
        own = Place(_host(), _gpu_id(torch.cuda.current_device()) if named == "cuda" else "")
    except Error as error:
        exchange.tell_failure(str(error))
        raise
    everyone = exchange.all_gather(json.dumps(own).encode())
    places = [Place(*json.loads(text)) for text in everyone]
    refuse_shared_gpus(places, who)
    if ranks_per_node is None:
        ranks_per_node = node_size([place.host for place in places], who)
    if named == "cuda":
        named = f"cuda:{torch.cuda.current_device()}"
    return World._from_exchange(
        who, exchange.rank, exchange.world_size, exchange.all_gather, exchange.tell_failure,
        named, nvshmem, ranks_per_node, timeout_s,
    )  # fmt: skip


def device_of(group: Any, device: Any) -> str:
    """The name of a device, "cuda" for torch's current one; of None the kind that the group is for."""
    if device is not None and str(device) != "cuda":
        return str(device)
    if not torch.cuda.is_available():
        return "cpu" if device is None else "cuda:0"  # whose absence World says
    if device is None:
        config = distributed_c10d._world.pg_backend_config.get(group, "")
        return "cuda" if "nccl" in f"{config} {distributed.get_backend(group)}" else "cpu"
    return "cuda"


def node_size(hosts: Sequence[str], who: str) -> int:
    """Ranks of each host, from the hosts of all ranks."""
    runs: list[list[int]] = []
    for rank, host in enumerate(hosts):
        if rank == 0 or host != hosts[rank - 1]:
            runs.append([])
        runs[-1].append(rank)
    sizes = {len(run) for run in runs}
    if len(sizes) == 1 and len(runs) == len(set(hosts)):
        return len(runs[0])
    text = "; ".join(", ".join(map(str, run)) for run in runs)
    raise InvalidArgument(
        f"{who}: the ranks of the group lie on {len(set(hosts))} hosts as {text}, expected"
        " consecutive ranks, as many on each host; ranks_per_node = 1 makes each rank a node"
    )


def refuse_shared_gpus(places: Sequence[Place], who: str) -> None:
    """Two ranks on one GPU have forgotten to choose theirs."""
    first: dict[Place, int] = {}
    for rank, place in enumerate(places):
        if not place.gpu:
            continue
        other = first.setdefault(place, rank)
        if other != rank:
            raise InvalidArgument(
                f"{who}: ranks {other} and {rank} have the same GPU as torch's current device,"
                " expected one each: call torch.cuda.set_device(local_rank) before, as"
                ' waybill.torch.initialize_distributed() does, or name it: device="cuda:0" (ranks'
                ' may share it), or "cpu"'
            )


def _host() -> str:
    """Other hosts may be simulated on one, as for NCCL."""
    return os.environ.get("NCCL_HOSTID") or str(_core.host_id())


def _gpu_id(device: int) -> str:
    """The same whatever devices a process sees."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "uuid"):  # torch 2.4
        return str(properties.uuid)
    return f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{device}"


class _SharedWorlds:
    """The worlds of one group, by kind of device and ranks of a node."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.node_size: Optional[int] = None  #: of hosts
        self.worlds: dict[tuple[bool, int], World] = {}


# A group that is destroyed takes its worlds along; they do not keep it.
_shared: weakref.WeakKeyDictionary[Any, _SharedWorlds] = weakref.WeakKeyDictionary()
atexit.register(_shared.clear)


def shared_world(group: Any, device: Any, ranks_per_node: Optional[int], who: str) -> World:
    """The world that all layers of the group share; the first one makes it, which is collective."""
    group = group_of(group, who)
    named = device_of(group, device)
    shared = _shared.setdefault(group, _SharedWorlds())
    with shared.lock:
        if ranks_per_node is None:
            if shared.node_size is None:
                hosts = GroupExchange(group, _TIMEOUT_S, who).all_gather(_host().encode())
                shared.node_size = node_size([host.decode() for host in hosts], who)
            ranks_per_node = shared.node_size
        key = (named != "cpu", ranks_per_node)
        world = shared.worlds.get(key)
        if world is None:
            world = world_of_group(group, device, False, ranks_per_node, _TIMEOUT_S, who)
            shared.worlds[key] = world
    if named == "cuda":
        named = f"cuda:{torch.cuda.current_device()}"
    if named != world.device:
        raise InvalidArgument(
            f"{who}: device is {named}, expected {world.device}, where the first layer of the group"
            " is: make a World.from_process_group for another one"
        )
    return world
