"""Worlds of process groups of torch.distributed: exchange, hosts and GPUs, sharing."""

from __future__ import annotations

import datetime
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional, Tuple

import torch
from torch import distributed as _distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from . import _core
from ._errors import shown
from .errors import InvalidArgument, PeerFailed, Timeout, TransportError

_LONGEST_SLEEP_S = 0.01
_ANSWER_S = 10.0  # for a process that serves a store to answer
_LEAVE_S = 5.0  # for other processes to read why all end
distributed: Any = _distributed  # torch types a part of it only

#: Worlds that groups of these ranks have made: the same number on all of them, as making one is
#: collective. It goes on when a group is made again, perhaps with the same store.
_worlds: dict[tuple[int, ...], int] = {}


def group_of(group: Any, who: str, name: str = "group") -> Any:
    """The process group itself, that of a DeviceMesh of one dimension, or of None the default one.
    Errors call it as the caller does.

    Raises InvalidArgument where this process is in none.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        raise InvalidArgument(
            f"{who}: {name} is {shown(group)}, expected a process group of an initialized"
            " torch.distributed: call waybill.torch.initialize_distributed() first"
        )
    if isinstance(group, DeviceMesh):
        group = _group_of_mesh(group, who, name)
    if group is None:
        return distributed.group.WORLD
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(f"{who}: this process is not in the group")
    if not isinstance(group, distributed.ProcessGroup):
        raise InvalidArgument(
            f"{who}: {name} is {shown(group)}, expected a process group of torch.distributed,"
            " a DeviceMesh of one dimension, or None for the default group"
        )
    if distributed.get_rank(group) < 0:
        raise InvalidArgument(f"{who}: this process is not in the group")
    return group


def _group_of_mesh(mesh: Any, who: str, name: str) -> Any:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f'mesh["{names[-1]}"]' if names else "a slice of it"
        raise InvalidArgument(
            f"{who}: {name} is a DeviceMesh of {mesh.ndim} dimensions, expected one, such as"
            f" {example}"
        )
    if mesh.get_coordinate() is None:
        raise InvalidArgument(f"{who}: this process is not in the DeviceMesh")
    return mesh.get_group()


#: How often this process has begun a default group: the same on all ranks.
_starts = 0


def store_of_ranks(names: Sequence[str], rank: int, world_size: int, limit: Any, who: str) -> Any:
    """Collective: the store of the default group, when one process of each rank has come.

    :param names: variables that rank and world_size are from
    :param limit: a timedelta; None is torch's
    :raises InvalidArgument: on all processes, where two have the same rank
    :raises Timeout: naming a rank that did not come
    """
    global _starts
    _starts += 1
    limit = limit or distributed_c10d.default_pg_timeout
    where = f"MASTER_ADDR = {os.environ['MASTER_ADDR']}, MASTER_PORT = {os.environ['MASTER_PORT']}"
    said = f"{names[0]} = {rank} of {names[1]} = {world_size}"
    try:
        store, serves = _shared_store(rank, world_size, limit)
    except RuntimeError as error:  # torch's DistNetworkError is one
        reason = f"no process with {names[0]} = 0 answered"
        if rank == 0:
            reason = "another program has the port, or no name server knows the host:"
        text = f"{who}: {said}, but {reason} at {where} within {limit.total_seconds():g} s"
        raise Timeout(f"{text}: {str(error).splitlines()[0]}") from None
    prefix = f"waybill/start/{_starts}"
    store.add(f"{prefix}/{rank}", 1)
    store.add(prefix, 1)
    _await_ranks(store, serves, prefix, names, world_size, limit.total_seconds(), who)
    return distributed.PrefixStore("default_pg", store)


def _shared_store(rank: int, world_size: int, limit: Any) -> tuple[Any, bool]:
    """The store that torchrun serves, or rank 0, which waits for nobody yet; and whether this
    process serves it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return next(distributed.rendezvous("env://", rank, world_size, timeout=limit))[0], False
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def connect(serves: bool, limit: Any) -> Any:
        return distributed.TCPStore(
            address, port, world_size, serves, limit, wait_for_workers=False, multi_tenant=True
        )

    try:
        return connect(rank == 0, limit), rank == 0
    except RuntimeError:
        if rank != 0:
            raise
    # Perhaps the one that has the port says that it is rank 0, too.
    return connect(False, min(limit, datetime.timedelta(seconds=_ANSWER_S))), False


def _await_ranks(
    store: Any, serves: bool, prefix: str, names: Sequence[str], world_size: int, limit_s: float,
    who: str,
) -> None:  # fmt: skip
    """Returns when each rank has come once."""
    start, pause = time.monotonic(), 0.0005
    try:
        while (num_come := store.add(prefix, 0)) < world_size:
            if time.monotonic() - start > limit_s:
                break
            _core.check_interrupt()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        if store.check([f"{prefix}/{rank}" for rank in range(world_size)]):
            return
        come = [rank for rank in range(world_size) if store.check([f"{prefix}/{rank}"])]
        twice = [rank for rank in come if store.add(f"{prefix}/{rank}", 0) > 1]
        num_left, until = store.add(f"{prefix}/left", 1), time.monotonic() + _LEAVE_S
        while serves and num_left < num_come and time.monotonic() < until:
            time.sleep(0.01)  # the others read it, too
            num_left = store.add(f"{prefix}/left", 0)
    except RuntimeError as error:
        raise PeerFailed(f"{who}: the process with {names[0]} = 0 has ended: {error}") from None
    missing = next(rank for rank in range(world_size) if rank not in come)
    if not twice:
        raise Timeout(f"{who}: no process with {names[0]} = {missing} came within {limit_s:g} s")
    raise InvalidArgument(
        f"{who}: {names[0]} = {twice[0]} of two processes or more, expected 0..{world_size - 1},"
        f" one process for each: none has {missing}"
    )


class GroupExchange:
    """An all-gather of bytes in the store of a group; None is the default group.

    Round k's bytes of rank r have the key "k/r". Who begins round k has seen round k - 1 of all, so
    all have seen round k - 2: its own key of that round can go.
    """

    def __init__(self, group: Any, timeout_s: float, who: str) -> None:
        group = group_of(group, who)
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        self._who, self.timeout_s, self._round = who, timeout_s, 0
        # Were the group kept, it would outlive destroy_process_group and end with the interpreter,
        # whose lock gloo's threads may still wait for then: the process would abort.
        self._group = weakref.ref(group)
        ranks = tuple(distributed.get_process_group_ranks(group))
        _worlds[ranks] = number = _worlds.get(ranks, 0) + 1
        self._prefix = f"waybill/{number}/{ranks[0]}-{ranks[-1]}"

    def all_gather(self, mine: bytes) -> Sequence[bytes]:
        """The bytes of all ranks, by rank."""
        group = self._group()
        if group is None or group not in distributed_c10d._world.pg_map:
            raise InvalidArgument(
                f"{self._who}: the group was destroyed before the world's last collective call"
            )
        store = _store_of(group, self._prefix)
        if store is None:
            everyone: list[Any] = [None] * self.world_size
            distributed.all_gather_object(everyone, mine, group=group)
            return everyone
        self._round += 1
        try:
            return self._exchange(store, mine)
        except RuntimeError as error:  # the rank that serves the store has ended, as a rule
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"{self._who}: the store of the group failed: {error}") from None

    def report_failure(self, reason: str) -> None:
        """Ends what the others wait for."""
        group = self._group()
        store = None if group is None else _store_of(group, self._prefix)
        if store is not None:
            store.set("failed", f"rank {self.rank} failed: {reason}")

    def _exchange(self, store: Any, mine: bytes) -> Sequence[bytes]:
        store.set(self._key(self.rank), mine)
        if self._round > 2:
            store.delete_key(self._key(self.rank, self._round - 2))
        keys = [self._key(rank) for rank in range(self.world_size)]
        start, pause = time.monotonic(), 0.0005
        while not store.check(keys):
            self._check_failed(store)
            waited = time.monotonic() - start
            if waited > self.timeout_s:
                raise self._missed(store, waited)
            _core.check_interrupt()
            time.sleep(min(pause, self.timeout_s - waited + 0.0005))
            pause = min(2 * pause, _LONGEST_SLEEP_S)
        self._check_failed(store)  # these bytes may be left from ranks that have given up
        if hasattr(store, "has_extended_api") and store.has_extended_api():
            return store.multi_get(keys)  # type: ignore[no-any-return]
        return [store.get(key) for key in keys]

    def _check_failed(self, store: Any) -> None:
        if store.check(["failed"]):
            raise PeerFailed(f"{self._who}: {store.get('failed').decode(errors='replace')}")

    def _key(self, rank: int, number: Optional[int] = None) -> str:
        return f"{self._round if number is None else number}/{rank}"

    def _missed(self, store: Any, waited_s: float) -> Timeout:
        ranks = range(self.world_size)
        peer = next((rank for rank in ranks if not store.check([self._key(rank)])), self.rank)
        error = Timeout(
            f"{self._who}: rank {self.rank} waited {waited_s:.1f} s for exchange >= {self._round}"
            f" from rank {peer}; last seen {self._round - 1}"
        )
        error.operation, error.what, error.rank, error.peer = (
            self._who, "exchange", self.rank, peer
        )  # fmt: skip
        error.wanted, error.seen, error.seconds = self._round, self._round - 1, waited_s
        return error


def _store_of(group: Any, prefix: str) -> Any:
    """Part of the group's store; None: it has none that can be asked."""
    _, store = distributed_c10d._world.pg_map.get(group, (None, None))
    if store is None or type(store) is distributed.Store:  # a placeholder, as with MPI
        return None
    return distributed.PrefixStore(prefix, store)


#: A rank's host, and the GPU that it takes because that is torch's current one: "" where a GPU was
#: named, or there is none.
Place = Tuple[str, str]


def place_group(
    group: Any,
    device: Any,
    ranks_per_node: Optional[int],
    who: str,
    check: Callable[[str, int], float],
) -> Tuple[GroupExchange, str, int]:
    """Collective: how its ranks reach each other, the device of this one, and ranks of a node.

    :param check: refuses a device, of a world of so many ranks, that this rank cannot have, and
        what else is wrong here alone, before the others wait for it; returns seconds of waits
    """
    group = group_of(group, who)
    exchange = GroupExchange(group, 0.0, who)  # counted on all ranks, whatever is wrong on one
    with _failures_reported(exchange):
        named = device_of(group, device)
        exchange.timeout_s = check(named, exchange.world_size)
        own = host_name(), _gpu_id(torch.cuda.current_device()) if named == "cuda" else ""
        everyone = exchange.all_gather(json.dumps(own).encode())
    places: list[Place] = [tuple(json.loads(text)) for text in everyone]
    refuse_shared_gpus(places, who)
    if ranks_per_node is None:
        ranks_per_node = node_size([host for host, _ in places], who)
    if named == "cuda":
        named = f"cuda:{torch.cuda.current_device()}"
    return exchange, named, ranks_per_node


def nodes_of_group(group: Any, timeout_s: float, who: str) -> int:
    """Collective: ranks of each host of the group."""
    exchange = GroupExchange(group, timeout_s, who)
    with _failures_reported(exchange):
        hosts = exchange.all_gather(host_name().encode())
    return node_size([host.decode() for host in hosts], who)


@contextmanager
def _failures_reported(exchange: GroupExchange) -> Iterator[None]:
    """Reports errors and interrupts of this rank to the others, which do not wait for it then."""
    try:
        yield
    except PeerFailed:  # which that rank reports to the others
        raise
    except BaseException as error:
        exchange.report_failure(str(error) or type(error).__name__)
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
        other = first.setdefault(place, rank)
        if place[1] and other != rank:
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
    """The id of a GPU, the same in processes that see other devices."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "uuid"):  # torch 2.4
        return str(properties.uuid)
    return f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{device}"
