"""Worlds of threads: who is there, waiting, deadlines, errors of a rank."""

import pickle
import threading
import time

import numpy as np
import pytest
from error_texts import a_divisor, an_integer, rank_failed, waited

import waybill


def test_each_rank_knows_itself(way):
    def body(world):
        world.barrier()
        return world.rank, world.world_size, world.topology, world.timeout_s, repr(world)

    for rank, (r, size, topology, timeout, text) in enumerate(way.run(4, body, ranks_per_node=2)):
        assert (r, size, timeout) == (rank, 4, 20.0) and type(r) is int
        assert topology == waybill.Topology(4, 2) and topology.num_nodes == 2
        assert (topology.node(rank), topology.local_rank(rank)) == divmod(rank, 2)
        assert text.startswith(f"World(rank={rank}, world_size=4, device='{way.device}")


def test_without_ranks_per_node_there_is_one_node():
    topology = waybill.run_threads(3, lambda world: world.topology)[0]
    assert topology == waybill.Topology(3, 3) and topology.num_nodes == 1


def test_nobody_passes_a_barrier_before_all_have_come():
    arrived = []

    def body(world):
        time.sleep(0.02 * world.rank)
        arrived.append(world.rank)
        world.barrier()
        return len(arrived)

    assert waybill.run_threads(5, body) == [5] * 5


def test_a_rank_that_waits_lets_python_run():
    """Otherwise rank 1 could never come."""

    def body(world):
        if world.rank == 1:
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                sum(range(1000))  # needs the interpreter's lock
        world.barrier()
        return threading.current_thread().name

    assert waybill.run_threads(2, body, timeout_s=10) == ["rank 0", "rank 1"]


def test_a_late_rank_is_named():
    def body(world):
        if world.rank != 2:
            world.barrier()

    with pytest.raises(waybill.Timeout) as caught:
        waybill.run_threads(3, body, timeout_s=0.1)
    error = caught.value
    assert isinstance(error, (TimeoutError, waybill.Error))
    assert (error.operation, error.what, error.peer) == ("World::barrier", "exchange", 2)
    assert error.rank in (0, 1) and error.wanted == error.seen + 1
    assert 0.1 <= error.seconds < 5
    assert str(error).startswith(f"World::barrier: {waited(error.rank, 0.1)}")
    again = pickle.loads(pickle.dumps(error))
    assert (again.peer, str(again)) == (2, str(error))


def test_what_a_rank_raised_is_raised_and_not_that_others_waited():
    def body(world):
        if world.rank == 1:
            raise KeyError("mine")
        world.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        waybill.run_threads(3, body, timeout_s=0.1)
    if hasattr(caught.value, "__notes__"):
        raised, *others = caught.value.__notes__
        assert raised == "raised by rank 1 of 3"
        assert others == [
            f"rank {rank}: PeerFailed: World::barrier: " + rank_failed(1, "KeyError: 'mine'")
            for rank in (0, 2)
        ]


def test_calls_of_several_threads_come_one_after_the_other():
    def body(world):
        if world.rank == 1:
            time.sleep(0.3)
            world.barrier()
            world.barrier()
            return None
        other = threading.Thread(target=world.barrier)
        other.start()
        time.sleep(0.1)
        world.barrier()
        other.join()
        return True

    assert waybill.run_threads(2, body, timeout_s=20)[0]


def test_a_call_from_within_a_call_is_refused():
    """The caller's all_gather is asked by barrier(), in which it cannot call barrier()."""
    worlds = []

    def all_gather(mine):
        if worlds:
            with pytest.raises(waybill.InvalidArgument, match="is in a call of this thread"):
                worlds[0].barrier()
        return [mine]

    worlds.append(waybill.World.from_all_gather(0, 1, all_gather))
    worlds[0].barrier()


def test_a_thread_that_waits_for_its_turn_can_be_interrupted():
    def body(world):
        if world.rank == 1:
            time.sleep(0.4)
            raise KeyError("mine")

        def wait():
            with pytest.raises(waybill.PeerFailed):
                world.barrier()

        other = threading.Thread(target=wait)
        other.start()
        time.sleep(0.1)
        start = time.monotonic()
        with pytest.raises(waybill.PeerFailed):
            world.barrier()
        other.join()
        assert time.monotonic() - start < 5

    with pytest.raises(KeyError, match="mine"):
        waybill.run_threads(2, body, timeout_s=30)


def test_worlds_are_made_by_functions():
    with pytest.raises(waybill.InvalidArgument, match="run_threads"):
        waybill.World()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "world_size = 0"),
        ({"world_size": 2**40}, "world_size = 1099511627776"),
        ({"world_size": "2"}, an_integer("world_size", "'2'")),
        ({"world_size": 4, "ranks_per_node": 3}, a_divisor("ranks_per_node", 3, "world_size = 4")),
        ({"world_size": 4, "ranks_per_node": 0}, a_divisor("ranks_per_node", 0, "world_size = 4")),
        ({"world_size": 2, "timeout_s": 0}, "timeout_s"),
        ({"world_size": 2, "timeout_s": None}, "timeout_s = None, expected seconds"),
        ({"world_size": 2, "body": 5}, "body = 5, expected a function"),
        ({"world_size": 2, "device": "tpu"}, 'device = "tpu", expected "cpu" or "cuda"'),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(waybill.InvalidArgument, match=text):
        waybill.run_threads(**{"body": lambda world: None, **arguments})


@pytest.mark.skipif(waybill._core.has_cuda, reason="built with CUDA")
def test_without_cuda_it_says_how_to_build():
    assert waybill.num_gpus() == 0
    with pytest.raises(waybill.Unsupported, match="build it with CUDA: pip install"):
        waybill.run_threads(2, lambda world: None, device="cuda")


@pytest.mark.gpu
def test_torch_knows_the_gpu_of_its_rank(torch_way):
    if torch_way.device == "cpu":
        pytest.skip("for GPUs")
    torch = torch_way.torch

    def body(world):
        return world.device, torch.empty(1, device="cuda").device, torch.cuda.current_stream()

    gpus = waybill.num_gpus()
    got = torch_way.run(gpus + 1, body)
    for rank, (device, where, _) in enumerate(got):
        assert device == f"cuda:{rank % gpus}" and where == torch.device(device)
    assert got[0][2] != got[gpus][2]  # ranks that share a GPU do not wait in one queue
    with pytest.raises(waybill.Unsupported, match="numpy has host memory only"):
        waybill.run_threads(1, waybill.SequenceDispatcher, device="cuda")


def test_many_worlds_leave_no_threads_and_no_memory():
    before = threading.active_count()
    for _ in range(20):
        waybill.run_threads(4, lambda world: world.barrier())
    assert threading.active_count() == before


def test_results_are_by_rank():
    got = waybill.run_threads(4, lambda world: np.full(2, world.rank))
    assert [array.tolist() for array in got] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_more_threads_than_the_host_allows_are_an_error_of_ours(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "rank 3":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(waybill.Unsupported, match="3 of 5 ranks have one"):
        waybill.run_threads(5, lambda world: world.barrier())
