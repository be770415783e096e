"""Where the ranks of a process group lie: on which hosts, and on which GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch.distributed import distributed_c10d

from . import _core
from ._process_group import GroupExchange, distributed, group_of
from .errors import InvalidArgument, PeerFailed

__all__ = ["device_of", "node_size", "nodes_of_group", "place_group", "refuse_shared_gpus"]


class Place(NamedTuple):
    """Of a rank."""

    host: str
    gpu: str  #: which it takes because it is torch's current one; "" where it was named, or none


def place_group(
    group: Any,
    device: Any,
    ranks_per_node: Optional[int],
    who: str,
    check: Callable[[str, int], float],
) -> Tuple[GroupExchange, str, int]:
    """Collective: how its ranks meet, the device of this one, and ranks of a node.

    :param check: refuses a device, of a world of so many ranks, that this rank cannot have, and
        what else is wrong here alone, before the others wait for it; returns seconds of waits
    """
    group = group_of(group, who)
    exchange = GroupExchange(group, 0.0, who)  # counted on all ranks, whatever is wrong on one
    with _failures_told(exchange):
        named = device_of(group, device)
        exchange.timeout_s = check(named, exchange.world_size)
        own = Place(host_name(), _gpu_id(torch.cuda.current_device()) if named == "cuda" else "")
        everyone = exchange.all_gather(json.dumps(own).encode())
    places = [Place(*json.loads(text)) for text in everyone]
    refuse_shared_gpus(places, who)
    if ranks_per_node is None:
        ranks_per_node = node_size([place.host for place in places], who)
    if named == "cuda":
        named = f"cuda:{torch.cuda.current_device()}"
    return exchange, named, ranks_per_node


def nodes_of_group(group: Any, timeout_s: float, who: str) -> int:
    """Collective: ranks of each host of the group."""
    exchange = GroupExchange(group, timeout_s, who)
    with _failures_told(exchange):
        hosts = exchange.all_gather(host_name().encode())
    return node_size([host.decode() for host in hosts], who)


@contextmanager
def _failures_told(exchange: GroupExchange) -> Iterator[None]:
    """Whoever gives up, by an interrupt too, says so: the others do not wait for it."""
    try:
        yield
    except PeerFailed:  # which the others are told by that rank
        raise
    except BaseException as error:
        exchange.tell_failure(str(error) or type(error).__name__)
        raise


def device_of(group: Any, device: Any) -> str:
    """Its name, "cuda" for torch's current one; of None the kind that the group is for."""
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


def host_name() -> str:
    """Other hosts may be simulated on one, as for NCCL."""
    return os.environ.get("NCCL_HOSTID") or str(_core.host_id())


def _gpu_id(device: int) -> str:
    """The same whatever devices a process sees."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "uuid"):  # torch 2.4
        return str(properties.uuid)
    return f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{device}"
