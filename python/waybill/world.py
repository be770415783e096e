"""The ranks: how they reach each other, how they run as threads, what they must agree on."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Optional, TypeVar, Union

from . import _core
from ._arrays import choice, flag, int64, within
from ._errors import said_by, shown
from ._graphs import explain_at_exit, outside_graphs
from ._lifetime import Made, OfThisProcess, forwarded
from ._rank_threads import run_ranks
from .costs import LinkSpeeds
from .errors import Error, InvalidArgument, Unsupported

_W = TypeVar("_W", bound="World")


def agree(
    world: World, who: str, facts: Mapping[str, Any], wrong: Optional[Exception] = None
) -> None:
    """Collective, on the host. Raises on all ranks where ranks have other facts, naming a rank and
    the fact, or where one has found something ``wrong``, which it passes: nobody waits for it.
    """
    state = "right" if wrong is None else f"wrong ({str(wrong).removeprefix(f'{who}: ')})"
    says = [("arguments", state), *((name, str(fact)) for name, fact in facts.items())]
    try:
        world._world.require_same(who, says)
    except InvalidArgument:
        if wrong is None:
            raise
    if wrong is not None:
        raise wrong


def agree_on(world: World, who: str, check: Callable[[], Mapping[str, Any]]) -> None:
    """Agrees on the facts that ``check`` returns, or on the error that it raises."""
    agreed_world(lambda: world, who, check)


def agreed_world(make: Callable[[], _W], who: str, check: Callable[[], Mapping[str, Any]]) -> _W:
    """A world whose ranks agree. Wrong arguments come before why there is no world."""
    facts: Mapping[str, Any] = {}
    wrong: Optional[Exception] = None
    try:
        facts = check()
    except Exception as error:
        wrong = error
    try:
        world = make()
    except Exception:
        if wrong is not None:
            raise wrong from None
        raise
    agree(world, who, facts, wrong)
    return world


_LOADING, _QUEUES = "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"
_ENOUGH_QUEUES = 32
_LAZY_LOADING = 2  # a value of CUmoduleLoadingMode


def load_eagerly() -> None:
    """For contexts that this process makes from now on, unless the user has said how."""
    os.environ.setdefault(_LOADING, "EAGER")


def separate_queues(num_gpus: int, who: str) -> None:
    """Sets the number of hardware queues, and warns where that or eager loading comes too late."""
    driver = _driver()
    late = [f"{_LOADING}=EAGER"] if _loads_lazily(driver) else []
    unset = _QUEUES not in os.environ
    queues = os.environ.setdefault(_QUEUES, str(_ENOUGH_QUEUES))
    few = not queues.isdigit() or int(queues) < _ENOUGH_QUEUES
    if few or (unset and _has_context(driver, num_gpus)):
        late.append(f"{_QUEUES}={_ENOUGH_QUEUES}")
    if late:
        warnings.warn(
            f"{who}: ranks share a GPU, and CUDA began in this process without"
            f" {' and '.join(late)}: a kernel's first use, or a copy, may wait for"
            " another rank's call until its deadline; set that in the environment before the"
            " program starts",
            RuntimeWarning,
            stacklevel=5,
        )


def _driver() -> Optional[Any]:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _loads_lazily(driver: Optional[Any]) -> bool:
    """Whether CUDA has begun in this process and loads lazily."""
    mode = ctypes.c_int(0)
    if driver is None or driver.cuModuleGetLoadingMode(ctypes.byref(mode)) != 0:
        return False
    return mode.value == _LAZY_LOADING


def _has_context(driver: Optional[Any], num_gpus: int) -> bool:
    """Whether any of these devices has its primary context, which torch and Waybill use."""
    flags, active = ctypes.c_uint(0), ctypes.c_int(0)
    return driver is not None and any(
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        and active.value != 0
        for device in range(num_gpus)
    )


_T = TypeVar("_T")


def end_waits() -> None:
    """Ends the waits of the library that have begun on threads other than the main one, and the
    next call of threads that make calls all the time: they raise Interrupted. For handlers of
    signals, which Python runs on the main thread; there a handler ends a wait by raising.
    """
    _core.end_waits()


_ORDINAL = re.compile(r"cuda(?::(\d{1,4}))?")
_FAREWELL_S = 5.0  # for telling the other ranks why this one does not come
_BUILD = "pip install . -C cmake.define.WAYBILL_CUDA=ON, with CUDA 13"


class Topology(NamedTuple):
    """How the ranks lie on nodes: consecutive ranks share a node."""

    world_size: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes (hosts, or logical hosts) of the world."""
        return self.world_size // self.ranks_per_node

    def node(self, rank: int) -> int:
        """The node that a rank lies on."""
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """A rank's index inside its node."""
        return rank % self.ranks_per_node


class World(OfThisProcess, Made):
    """One rank's view of the ranks: who it is, how many there are, where their memory lies.

    ``run_threads`` makes one for each rank, where ranks are threads; ``from_environment``,
    ``from_process_group`` and ``from_all_gather`` make one where ranks are processes of one host.
    Calls of several threads come one after another; one that waits for other ranks lets calls of
    other dispatchers and layers go on. Calls that wait release the GIL, have a deadline, and end on
    Ctrl-C.
    """

    __slots__ = ("_layers", "_world")
    _why_not_copied = (
        "one rank's connections to the others: make one in each process with"
        " World.from_environment(), or in each thread with waybill.run_threads"
    )
    _world: _core.World
    _layers: Union[OrderedDict[str, Any], weakref.ref[OrderedDict[str, Any]]]
    _made_by = "waybill.run_threads(...) or World.from_environment()"

    @classmethod
    def _wrap(cls, world: _core.World) -> World:
        return cls._with(_world=world, _layers=OrderedDict())

    @property
    def _expert_layers(self) -> OrderedDict[str, Any]:
        """Those that modules of a model share, by their options."""
        layers = self._layers if isinstance(self._layers, OrderedDict) else self._layers()
        return OrderedDict() if layers is None else layers

    def _for_its_layers(self: _W) -> _W:
        """The same ranks, for what ``_expert_layers`` holds: with this object it would be a cycle,
        which Python's collector ends at any time, and freeing memory waits for the device.
        """
        return self._with(_world=self._world, _layers=weakref.ref(self._expert_layers))

    @classmethod
    @outside_graphs
    def from_environment(
        cls, *, device: Any = "cpu", nvshmem: bool = False, timeout_s: float = 60.0
    ) -> World:
        """Collective: the rank that torchrun, Open MPI, Slurm or PMI say this process is; alone
        without any of them.

        Ranks meet where WAYBILL_RENDEZVOUS says ("tcp://HOST:PORT" or "file:///FOLDER"), else at
        MASTER_ADDR and the port after MASTER_PORT. Ranks of another WAYBILL_JOB_ID (else the id of
        torchrun or Slurm) and, over TCP, those without the WAYBILL_RENDEZVOUS_SECRET of the others
        are refused. A rank that cannot start is named by the others at once.

        Args:
            device: "cpu" for shared memory of one host; "cuda:1" for that GPU, "cuda" for the one
                of the local rank (modulo their number), whose memory the ranks of its host map;
                hosts reach each other over NCCL (WAYBILL_NCCL_LIBRARY, unless torch has loaded it).
            nvshmem: ranks on GPUs reach each other through NVSHMEM instead, on one host or many.
            timeout_s: deadline of every wait for another rank.

        Raises:
            InvalidArgument naming the variable; Timeout naming a rank that did not come;
            TransportError naming one that failed, or saying why this one was refused; Unsupported
            for "cpu" ranks on other hosts, and without what the device needs.
        """
        who = "World.from_environment"
        seconds = seconds_of(timeout_s, who)
        try:
            make = _process_engine(device, nvshmem, who)
        except Error as error:
            _core.report_failed_start(str(error), min(seconds, _FAREWELL_S))
            raise
        with said_by(who):
            bootstrap, per_node, local_rank = _core.environment_bootstrap(seconds)
        return cls._wrap(make(bootstrap, per_node, local_rank))

    @classmethod
    @outside_graphs
    def from_all_gather(
        cls,
        rank: int,
        world_size: int,
        all_gather: Callable[[bytes], Sequence[bytes]],
        *,
        device: Any = "cpu",
        nvshmem: bool = False,
        ranks_per_node: Optional[int] = None,
        timeout_s: float = 60.0,
    ) -> World:
        """Collective: this rank of processes that can already exchange some bytes, as MPI does.

        Args:
            all_gather: gets this rank's bytes and returns those of all ranks, by rank. It answers
                for its own deadline and for interrupts; it is called where worlds and windows are
                made or freed, and by barrier(), never on the way of the data.
            device, nvshmem, timeout_s: as in from_environment.
            ranks_per_node: None is all ranks on one node.
        """
        return cls._from_exchange(
            "World.from_all_gather", rank, world_size, all_gather, None, device, nvshmem,
            ranks_per_node, timeout_s,
        )  # fmt: skip

    @classmethod
    def _from_exchange(
        cls, who: str, rank: int, world_size: int, all_gather: Callable[[bytes], Sequence[bytes]],
        report_failure: Optional[Callable[[str], None]], device: Any, nvshmem: bool,
        ranks_per_node: Optional[int], timeout_s: float,
    ) -> World:  # fmt: skip
        rank, world_size = int64(rank, f"{who}: rank"), int64(world_size, f"{who}: world_size")
        if not 0 <= rank < world_size <= 2**20:
            raise InvalidArgument(
                f"{who}: rank = {rank} of world_size = {world_size}, expected 0..world_size-1"
            )
        per_node = _per_node(ranks_per_node, world_size, who)
        if not callable(all_gather):
            raise InvalidArgument(
                f"{who}: all_gather is a {type(all_gather).__name__}, expected a function"
            )
        make = _process_engine(device, nvshmem, who)
        seconds = seconds_of(timeout_s, who)
        bootstrap = _core.callable_bootstrap(rank, world_size, all_gather, report_failure, seconds)
        return cls._wrap(make(bootstrap, per_node, rank % (per_node or world_size)))

    @classmethod
    @outside_graphs
    def from_process_group(
        cls,
        group: Any = None,
        *,
        device: Any = None,
        nvshmem: bool = False,
        ranks_per_node: Optional[int] = None,
        timeout_s: float = 60.0,
    ) -> World:
        """Collective: the rank that this process has in a group of torch.distributed, the default
        one unless given.

        Ranks meet in the group's store, so a rank that does not come is a Timeout after timeout_s,
        whatever the group's own timeout; a group without a store meets by all_gather_object. The
        world does not keep the group: ``destroy_process_group`` ends it, best after the world's
        last collective call.

        Args:
            group: a process group, or a DeviceMesh of one dimension: ``mesh["cp"]``.
            device: "cuda" for torch's current device, which is another one on every rank
                (``torch.cuda.set_device``); "cuda:1" for that one, which ranks may share; "cpu".
                None is "cuda" where the group's backend is NCCL, else "cpu".
            ranks_per_node: None is what the group's hosts say: consecutive ranks of the group, as
                many on each host.
            nvshmem, timeout_s: as in from_environment.

        Raises:
            InvalidArgument on all ranks where two would lie on one GPU, or hosts have unequal
            numbers of them; and as from_all_gather.
        """
        return cls._of_group(
            "World.from_process_group", group, device, nvshmem, ranks_per_node, timeout_s
        )

    @classmethod
    def _of_group(
        cls, who: str, group: Any, device: Any, nvshmem: bool, ranks_per_node: Optional[int],
        timeout_s: float,
    ) -> World:  # fmt: skip
        """from_process_group, whose errors begin with ``who``."""
        from ._process_group import place_group  # needs torch, which the package does not

        def check(name: str, world_size: int) -> float:
            _process_engine(name, nvshmem, who)
            _per_node(ranks_per_node, world_size, who)
            return seconds_of(timeout_s, who)

        exchange, named, per_node = place_group(group, device, ranks_per_node, who, check)
        return cls._from_exchange(
            who, exchange.rank, exchange.world_size, exchange.all_gather, exchange.report_failure,
            named, nvshmem, per_node, timeout_s,
        )  # fmt: skip

    rank: int = forwarded("_world.rank", "This rank, 0..world_size-1.")
    world_size: int = forwarded("_world.world_size", "Number of ranks.")

    @property
    def topology(self) -> Topology:
        """How the ranks lie on nodes."""
        return Topology(self._world.world_size, self._world.ranks_per_node)

    timeout_s: float = forwarded(
        "_world.timeout_s", "Seconds that a wait for another rank may last."
    )

    @property
    def device(self) -> str:
        """Where the rank's tensors lie: "cpu", or "cuda:0"."""
        ordinal = self._world.device
        return "cpu" if ordinal < 0 else f"cuda:{ordinal}"

    @outside_graphs
    def barrier(self) -> None:
        """Returns when all ranks have called. Raises Timeout."""
        self._world.barrier()

    @outside_graphs
    def use_links(self, links: LinkSpeeds) -> None:
        """How fast this machine's links are (``read_links``), for dispatchers and layers that are
        made from now on. Collective: all ranks give the same, otherwise all get InvalidArgument.
        One line on stderr says so where they were measured on other GPUs than this world's.
        """
        if not isinstance(links, LinkSpeeds):
            wrong = InvalidArgument(f"links is a {type(links).__name__}, expected LinkSpeeds")
            with said_by("World.use_links"):
                agree(self, "World::use_links", {}, wrong)  # the others compare under this name
        self._world.use_links(
            float(links.nvlink_bytes_per_second),
            float(links.network_bytes_per_second),
            float(links.block_bytes_per_second),
            links.device,
        )

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, world_size={self.world_size}, device={self.device!r},"
            f" ranks_per_node={self._world.ranks_per_node}, timeout_s={self.timeout_s:g})"
        )


def cuda_version() -> Optional[str]:
    """ "13.0": the CUDA with which this installation was built; None where it was without."""
    return _core.cuda_version


def num_gpus() -> int:
    """GPUs on which ranks may lie: 0 also where this installation was built without CUDA."""
    return _core.num_gpus()


@outside_graphs
def run_threads(
    world_size: int,
    body: Callable[[World], _T],
    *,
    device: str = "cpu",
    ranks_per_node: Optional[int] = None,
    timeout_s: float = 60.0,
) -> list[_T]:
    """Runs ``body(world)`` on one thread per rank and returns what each returned, by rank.

    Args:
        device: "cpu" for ranks in host memory; "cuda" for rank r on GPU r modulo their number,
            which must reach each other's memory. Ranks with a GPU each queue every call together,
            see world.md.
        ranks_per_node: less than world_size makes logical nodes; None is one node.
        timeout_s: deadline of every wait for another rank.

    A body that raises releases the others from what they wait for, with PeerFailed; Ctrl-C all of
    them, those that do not wait by a KeyboardInterrupt after a second, and KeyboardInterrupt is
    raised when they have ended (a second Ctrl-C does not wait).

    Where torch was imported before, it works on the rank's GPU. Ranks that share a GPU get a stream
    each, and backward runs in the rank's thread, as they would wait for each other in one queue.
    They also share torch's generator: what a rank draws depends on the others, unless it has a
    ``torch.Generator``. Each has its own grad mode, and begins with gradients enabled.

    Raises:
        what a body raised: of several the first by rank that is neither PeerFailed nor Timeout,
            else a Timeout. Unsupported without CUDA, GPUs, or access from one to another.
    """
    who = "run_threads"
    world_size = within(world_size, 1, 2**20, f"{who}: world_size", "2^20")
    per_node = _per_node(ranks_per_node, world_size, who)
    gpus = _gpus_for(device, world_size, who)
    if not callable(body):
        raise InvalidArgument(f"{who}: body = {shown(body)}, expected a function")

    def rank_main(rank: int) -> _T:
        bootstrap = bootstraps[rank]
        if gpus == 0:
            return body(World._wrap(_core.thread_world(bootstrap, per_node)))
        made = _core.gpu_thread_world(bootstrap, rank % gpus, per_node, world_size <= gpus)
        with _torch_on(rank % gpus, world_size > gpus):
            return body(World._wrap(made))

    bootstraps, scope = _core.thread_bootstraps(world_size, seconds_of(timeout_s, who))
    if 0 < gpus < world_size:  # memory that goes meanwhile waits for kernels that wait for its rank
        gc.collect()
    return run_ranks(world_size, rank_main, scope)


@contextmanager
def _torch_on(gpu: int, is_shared: bool) -> Iterator[None]:
    """Makes torch use the GPU in this thread. If others share the GPU, with a stream of the rank,
    and with backward in this thread: autograd has one thread per GPU, where a rank's backward would
    wait for that of another rank.
    """
    torch: Any = sys.modules.get("torch")
    with ExitStack() as of_rank:
        if torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(gpu)
            if is_shared:
                of_rank.enter_context(torch.cuda.stream(torch.cuda.Stream(gpu)))
                of_rank.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def seconds_of(timeout_s: Any, who: str) -> float:
    """Every wait has a deadline."""
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{who}: timeout_s = {shown(timeout_s)}, expected seconds") from None
    if not 0 < seconds <= _core.max_timeout_s:
        raise InvalidArgument(
            f"{who}: timeout_s = {seconds:g}, expected more than 0 and at most"
            f" {_core.max_timeout_s:g} seconds, as every wait has a deadline"
        )
    return seconds


def _per_node(ranks_per_node: Optional[int], world_size: int, who: str) -> int:
    """None is all ranks on one node, which the compiled part writes as 0."""
    if ranks_per_node is None:
        return 0
    number = int64(ranks_per_node, f"{who}: ranks_per_node")
    if not 1 <= number <= world_size or world_size % number != 0:
        raise InvalidArgument(
            f"{who}: ranks_per_node = {number}, expected a divisor of world_size = {world_size}"
        )
    return number


def _gpus_for(device: Any, world_size: int, who: str) -> int:
    """GPUs to spread the ranks over; 0 for host memory."""
    name = str(device) if type(device).__module__ == "torch" else device  # also torch.device
    if choice(name, f"{who}: device", "cpu", "cuda") == "cpu":
        return 0
    if _core.has_cuda and world_size > 1:  # CUDA begins where the GPUs are counted
        load_eagerly()
    gpus = _require_gpus("cuda", who)
    if gpus < world_size:
        separate_queues(gpus, who)
    return gpus


def _require_gpus(device: str, who: str) -> int:
    if not _core.has_cuda:
        raise Unsupported(
            f'{who}: device = "{device}", but this installation was built without CUDA and has'
            f" ranks in host memory only; to build it with CUDA: {_BUILD}"
        )
    gpus = num_gpus()
    if gpus == 0:
        why = _core.driver_trouble() or "there is no GPU"
        raise Unsupported(f'{who}: device = "{device}", but {why}')
    return gpus


def _process_engine(device: Any, nvshmem: bool, who: str) -> Callable[[Any, int, int], Any]:
    """Makes the world of a process rank from (bootstrap, ranks_per_node, local rank)."""
    is_name = isinstance(device, str) or type(device).__module__ == "torch"
    name = str(device) if is_name else shown(device)
    ordinal = _ORDINAL.fullmatch(name)
    nvshmem = flag(nvshmem, f"{who}: nvshmem")
    if name != "cpu" and ordinal is None:
        raise InvalidArgument(
            f'{who}: device = {shown(device)}, expected "cpu", "cuda" or "cuda:0"'
        )
    if ordinal is None:
        if nvshmem:
            raise InvalidArgument(f'{who}: nvshmem with device = "cpu", expected "cuda"')
        return lambda bootstrap, per_node, _: _core.process_world(bootstrap, per_node)
    gpus = _require_gpus(name, who)
    chosen = ordinal.group(1)
    engine = _core.nvshmem_world if nvshmem else _core.gpu_process_world

    def make(bootstrap: Any, per_node: int, local_rank: int) -> Any:
        explain_at_exit()
        return engine(bootstrap, local_rank % gpus if chosen is None else int(chosen), per_node)

    return make
