"""Ranks that are processes of this host: started by a launcher's variables, or in a group."""

import contextlib
import os
import pathlib
import random
import socket
import textwrap
import time

import pytest
from error_texts import rank_failed
from rank_processes import run_programs

import waybill

pytestmark = pytest.mark.xdist_group("processes")  # free ports are looked for one after another

LAUNCHERS = ("OMPI_", "SLURM_", "PMI_", "MPI_", "MASTER_", "WAYBILL_")
PREAMBLE = """
    import os, sys
    import numpy as np
    import waybill

    plan = waybill.QkvPlan(3, [0, 2, 3, 3], [4, 2, 3], [1, 2, 0], [0, 2, 3], [0, 1, 2])
    metadata = plan.to_metadata()
    rows = [np.arange(n * 5).reshape(n, 5) + 100 * r for r, n in enumerate((6, 3, 0))]

    def check(world):
        with waybill.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((metadata.fwd_kv, rows[0]))
            (got,) = dispatcher.dispatch(there, rows[world.rank])
            want = waybill.simulate_communication(rows, metadata.fwd_kv)[world.rank]
            assert (got == want).all() and got.shape == want.shape
            gradient = np.ones(got.shape, np.float32)
            back = dispatcher.plan_kv_gradient((metadata.fwd_kv, gradient))
            (sums,) = dispatcher.kv_gradient(back, gradient)
            assert sums.shape == rows[world.rank].shape and (sums >= 1).all()
        world.barrier()
        print("rank", world.rank, "of", world.world_size, "is well")
"""


def run_ranks(tmp_path, program, world_size=3, environment=None):
    """(exit status, output) of each rank's process."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(program)
    programs = []
    for rank in range(world_size):
        variables = {
            "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": world_size, "WAYBILL_RENDEZVOUS": f"file://{tmp_path}/meet",
            **(environment or {}),
        }  # fmt: skip
        programs.append((code, [], base | {k: str(v) for k, v in variables.items()}))
    return run_programs(tmp_path, programs)


def free_port():
    """One that the system gives to no caller."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def expect_all_well(results):
    for rank, (status, output) in enumerate(results):
        assert status == 0 and f"rank {rank} of {len(results)} is well" in output, output


def test_a_launchers_variables(tmp_path):
    expect_all_well(run_ranks(tmp_path, "check(waybill.World.from_environment(timeout_s=60))"))


def test_the_callers_all_gather(tmp_path):
    """Here through files; MPI has one."""
    program = f"""
        import pathlib, time

        folder, count = pathlib.Path({str(tmp_path)!r}), 0
        rank = int(os.environ["RANK"])

        def all_gather(mine):
            global count
            count += 1
            part = folder / f"part_{{count}}_{{rank}}"
            part.write_bytes(mine)
            part.rename(folder / f"{{count}}_{{rank}}")
            places = [folder / f"{{count}}_{{r}}" for r in range(3)]
            while not all(place.exists() for place in places):
                time.sleep(0.005)
            return [place.read_bytes() for place in places]

        check(waybill.World.from_all_gather(rank, 3, all_gather))
        assert count > 2
    """
    expect_all_well(run_ranks(tmp_path, program))


def test_a_group_of_torch_distributed(tmp_path):
    pytest.importorskip("torch")
    program = f"""
        from torch import distributed

        distributed.init_process_group(
            "gloo", init_method="file://{tmp_path}/torch", rank=int(os.environ["RANK"]),
            world_size=3,
        )
        check(waybill.World.from_process_group())
        distributed.destroy_process_group()
    """
    expect_all_well(run_ranks(tmp_path, program))


@pytest.mark.gpu
def test_gpus_of_this_host(tmp_path):
    torch = pytest.importorskip("torch")
    if not (waybill.num_gpus() and torch.cuda.is_available()):
        pytest.skip("no GPU, or an installation without CUDA")
    program = """
        import torch
        import waybill.torch as wt

        world = wt.World.from_environment(device="cuda", timeout_s=60)
        torch.cuda.set_device(world.device)
        mine = torch.from_numpy(rows[world.rank]).cuda().double()
        with wt.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((plan.to_routing().fwd_q, mine))
            (received,) = dispatcher.dispatch(there, mine)
            want = waybill.simulate_communication(rows, metadata.fwd_q)[world.rank]
            assert torch.equal(received.cpu(), torch.from_numpy(want).double())
        q = mine[:, None].clone().requires_grad_()
        attention = wt.ContextParallelAttention(
            world, 1, 1, mine.shape[1], dtype=torch.float64, in_place=False,
            kernel=lambda q, k, v, *_: q + 0 * (k.sum() + v.sum()),
        )
        out = attention(attention.plan(plan), q, q, q)
        out.sum().backward()
        assert torch.equal(out, q) and q.grad.eq(1).all()
        assert q.grad.device == torch.device(world.device)
        attention.close()
        world.barrier()
        print("rank", world.rank, "of", world.world_size, "is well")
    """
    expect_all_well(run_ranks(tmp_path, program))


@pytest.mark.gpu
def test_gpus_over_nvshmem(tmp_path):
    torch = pytest.importorskip("torch")
    gpus = waybill.num_gpus() if torch.cuda.is_available() else 0
    library = pathlib.Path(waybill._core.__file__).with_name("libwaybill_nvshmem.so")
    if gpus == 0 or not (library.exists() or "WAYBILL_NVSHMEM_LIBRARY" in os.environ):
        pytest.skip("no GPU, or an installation without NVSHMEM")
    world_size = min(gpus, 4)
    program = """
        import torch
        import waybill.torch as wt

        world = wt.World.from_environment(device="cuda", nvshmem=True, timeout_s=60)
        torch.cuda.set_device(world.device)
        size = world.world_size
        plan = waybill.plan([300, 41, 7, 90, 200], size, 0, block_tokens=8)
        home = plan.home_tokens.tolist()
        rows = [np.arange(n * 8, dtype=np.float32).reshape(n, 8) + 1e4 * r
                for r, n in enumerate(home)]
        routing, metadata = plan.to_routing(), plan.to_metadata()
        mine = torch.from_numpy(rows[world.rank]).cuda()
        with wt.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_kv, mine))
            for _ in range(3):
                (got,) = dispatcher.dispatch(there, mine)
                want = waybill.simulate_communication(rows, metadata.fwd_kv)[world.rank]
                assert torch.equal(got.cpu(), torch.from_numpy(want))
            back = dispatcher.plan_kv_gradient((routing.fwd_kv, mine))
            (sums,) = dispatcher.kv_gradient(back, torch.ones_like(got))
            dispatcher.synchronize()
            assert sums.shape == mine.shape and (sums >= 1).all()
        world.barrier()
        print("rank", world.rank, "of", world.world_size, "is well")
    """
    expect_all_well(run_ranks(tmp_path, program, world_size))


def test_a_rank_that_dies_is_named(tmp_path):
    program = """
        world = waybill.World.from_environment(timeout_s=60)
        if world.rank == 1:
            os._exit(7)
        try:
            check(world)
        except waybill.PeerFailed as error:
            print("rank", world.rank, "says:", error)
    """
    results = run_ranks(tmp_path, program)
    assert [status for status, _ in results] == [0, 7, 0], results
    for rank in (0, 2):
        assert f"rank {rank} says: SequenceDispatcher: rank 1 " in results[rank][1], results


FORK = """
    import gc, time

    world = waybill.World.from_environment(timeout_s=20)
    layer = waybill.EPAll2AllLayer(
        world, 4, 8, 1, world.rank, 2, 2, 2, dtype="float32", fixed_rows=8
    )
    ids = np.array([[0], [1]])

    def dispatched(value):
        rows, _, _ = layer.dispatch(np.full((2, 8), value, np.float32), ids)
        return rows[:, 0].tolist()

    def in_the_child(call):
        try:
            call()
            print("child", call, "was not refused")
        except waybill.TransportError as error:
            print(str(error))

    world.barrier()
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            in_the_child(lambda: dispatched(9))
            in_the_child(world.barrier)
            del layer, world
            gc.collect()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1.5)  # rank 0 waits, and asks whether this rank is there
    print(dispatched(world.rank)[:2])
    world.barrier()
"""


@pytest.mark.parametrize("place", ("file", "tcp"))
def test_a_child_that_a_rank_forks_has_no_part_in_its_world(tmp_path, place):
    """Its calls would put rows in place of the rank's, and its end would look like the rank's."""
    meet = {} if place == "file" else {"WAYBILL_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}"}
    (first, said), (second, told) = run_ranks(tmp_path, FORK, world_size=2, environment=meet)
    assert (first, second) == (0, 0), (said, told)
    assert said.splitlines() == ["[0.0, 1.0]"]
    refused = "belongs to the process from which this one was forked, and no call of it can be made"
    lines = told.splitlines()
    assert lines[0] == f"dispatch: the layer {refused} here", told
    assert lines[1] == f"World::barrier: the world {refused} here", told
    assert lines[2:] == ["[0.0, 1.0]"], told


def test_a_rank_that_cannot_start_is_named_at_once(tmp_path):
    program = """
        device = "cuda:x" if os.environ["RANK"] == "1" else "cpu"
        try:
            waybill.World.from_environment(device=device, timeout_s=100)
        except waybill.TransportError as error:
            print(error)
    """
    for place in (f"file://{tmp_path}/meet", f"tcp://127.0.0.1:{free_port()}"):
        start = time.monotonic()
        results = run_ranks(tmp_path, program, environment={"WAYBILL_RENDEZVOUS": place})
        assert time.monotonic() - start < 30
        assert results[1][0] != 0 and "InvalidArgument" in results[1][1]
        for rank in (0, 2):
            assert rank_failed(1, "World.from_environment: device = 'cuda:x'") in results[rank][1]


def test_ranks_of_another_job_or_without_the_secret_are_refused(tmp_path):
    program = """
        rank = os.environ["RANK"]
        if rank == "2":  # comes before rank 1 of the job, with its number
            os.environ |= {"RANK": "1", "LOCAL_RANK": "1", **strangers}
            try:
                waybill.World.from_environment(timeout_s=100)
            except waybill.TransportError as error:
                print(error)
            open(done, "x").close()
            sys.exit()
        while rank == "1" and not os.path.exists(done):
            time.sleep(0.01)
        world = waybill.World.from_environment(timeout_s=100)
        world.barrier()
        print("rank", world.rank, "of", world.world_size, "is well")
    """
    for name, value, reason in [
        ("WAYBILL_JOB_ID", "b", 'job id = "b", expected "a"'),
        ("WAYBILL_RENDEZVOUS_SECRET", "x", "WAYBILL_RENDEZVOUS_SECRET differs"),
    ]:
        known = f"import time\nstrangers = {{{name!r}: {value!r}}}\n"
        known += f"done = {str(tmp_path / name)!r}\n"
        results = run_ranks(
            tmp_path,
            known + textwrap.dedent(program),
            environment={
                "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "WAYBILL_JOB_ID": "a",
                "WAYBILL_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}",
                "WAYBILL_RENDEZVOUS_SECRET": "secret",
            },
        )  # fmt: skip
        assert reason in results[2][1], results
        expect_all_well(results[:2])
        assert "hung up on 127.0.0.1:" in results[0][1] and reason in results[0][1]


def test_alone_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    world = waybill.World.from_environment()
    assert (world.rank, world.world_size, world.device) == (0, 1, "cpu")
    world.barrier()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 2, list), "rank = 2 of world_size = 2"),
        ((0, 1, None), "all_gather is a NoneType"),
        ((0, 0, list), "world_size = 0"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(waybill.InvalidArgument, match=text):
        waybill.World.from_all_gather(*arguments)


def test_wrong_devices():
    for options, text in [
        ({"device": "tpu"}, "device = 'tpu', expected \"cpu\""),
        ({"device": "cuda:x"}, "device = 'cuda:x'"),
        ({"nvshmem": True}, 'nvshmem with device = "cpu"'),
    ]:
        with pytest.raises(waybill.InvalidArgument, match=text):
            waybill.World.from_all_gather(0, 1, lambda mine: [mine], **options)
    if not waybill._core.has_cuda:
        with pytest.raises(waybill.Unsupported, match="built without CUDA"):
            waybill.World.from_environment(device="cuda:0")


def test_errors_of_the_callers_all_gather():
    def broken(mine):
        raise ConnectionError("the network is gone")

    with pytest.raises(ConnectionError, match="the network is gone"):
        waybill.World.from_all_gather(0, 2, broken)
    with pytest.raises(waybill.TransportError, match=r"1 .*expected 2"):
        waybill.World.from_all_gather(0, 2, lambda mine: [mine])
    with pytest.raises(waybill.InvalidArgument, match=r"all_gather returned .*, expected bytes"):
        waybill.World.from_all_gather(0, 2, lambda mine: [1, 2])
