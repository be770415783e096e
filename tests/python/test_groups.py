"""Process groups and device meshes: the ranks of a world or a layer, their hosts and devices."""

import pytest
from test_process_worlds import expect_all_well, run_ranks

import waybill

torch = pytest.importorskip("torch")

from waybill._process_group import node_size, refuse_shared_gpus  # noqa: E402

pytestmark = pytest.mark.xdist_group("processes")

START = """
    import torch
    from torch import distributed
    from waybill.moe import simulate_dispatch
    from waybill.torch.moe import BarrierAllContext, DispatchCombineContext
    from waybill.torch.moe import EPAll2AllLayer, EPConfig

    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    H, K, E = 8, 2, 4

    def layer_on(group, rank, size, per_node=None, **options):
        return EPAll2AllLayer(
            group, 6, H, K, rank, E, per_node or size, size, torch.float32, **options
        )

    def steps(layer, seed, count=4):
        rank, size = layer.rank, layer.world_size
        for step in range(count):
            g = torch.Generator().manual_seed(100 * seed + step)
            counts = torch.randint(0, 7, (size,), generator=g).tolist()
            tokens = [torch.randn(n, H, generator=g) for n in counts]
            ids = [torch.randint(0, E + 1, (n, K), generator=g) for n in counts]
            want = simulate_dispatch(
                layer.ep_config, [t.numpy() for t in tokens], [i.numpy() for i in ids]
            )
            sums = want.combine([rows * 2 for rows in want.recv_tokens])[rank]
            x = tokens[rank].requires_grad_()
            rows, _, layout = layer.dispatch(x, ids[rank])
            assert np.array_equal(rows.detach().numpy(), want.recv_tokens[rank])
            back = layer.combine(rows * 2, layout)
            assert np.array_equal(back.detach().numpy(), sums)
            back.sum().backward()

    def check_rows(world, seed):
        lengths = [7 + seed, 3, 11, 5]
        plan = waybill.plan(lengths, world.world_size, 0, block_tokens=4)
        table, offset = plan.to_metadata().fwd_q, 1000.0 * seed
        rows = [np.arange(n * 4, dtype=np.float32).reshape(n, 4) + offset + 100 * r
                for r, n in enumerate(plan.home_tokens.tolist())]
        with waybill.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((table, rows[0]))
            (got,) = dispatcher.dispatch(there, rows[world.rank])
            assert (got == waybill.simulate_communication(rows, table)[world.rank]).all()
"""
END = """
    distributed.barrier()
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


def run_group(tmp_path, program, world_size=4, environment=None):
    code = START.replace("{folder}", str(tmp_path)) + program + END
    return run_ranks(tmp_path, code, world_size, environment)


def test_subgroups(tmp_path):
    """The last two of four, every second one, and two groups at a time."""
    program = """
    from waybill.errors import InvalidArgument

    last, even, odd = (distributed.new_group(ranks) for ranks in ([2, 3], [0, 2], [1, 3]))
    if me >= 2:
        world = waybill.World.from_process_group(last)
        assert (world.rank, world.world_size) == (me - 2, 2) and world.device == "cpu"
        assert world.topology.ranks_per_node == 2
        check_rows(world, 3)
        steps(layer_on(last, me - 2, 2), 1)
    else:
        for call in (waybill.World.from_process_group, lambda g: layer_on(g, 0, 2)):
            try:
                call(last)
                raise AssertionError("not refused")
            except InvalidArgument as error:
                assert "this process is not in the group" in str(error)

    strided = odd if me % 2 else even
    mine, everyone = layer_on(strided, me // 2, 2), layer_on(None, me, 4)
    worlds = [waybill.World.from_process_group(group) for group in (strided, None)]
    for turn in range(3):
        steps(mine, 2 + me % 2, 1)
        steps(everyone, 5, 1)
        for seed, world in enumerate(worlds):
            check_rows(world, seed)
    mine.finalize()
    everyone.finalize()
"""
    expect_all_well(run_group(tmp_path, program))


def test_device_mesh(tmp_path):
    program = """
    from torch.distributed.device_mesh import init_device_mesh
    from waybill.errors import InvalidArgument

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for name, rank in (("cp", me % 2), ("dp", me // 2)):
        world = waybill.World.from_process_group(mesh[name])
        assert (world.rank, world.world_size) == (rank, 2)
        check_rows(world, me // 2 if name == "cp" else me % 2)
        layer = layer_on(mesh[name], rank, 2)
        assert layer.ep_group is mesh[name].get_group()
        steps(layer, 7)
    layer = layer_on(mesh["cp"], me % 2, 2)
    config = EPConfig(4, 8, 2, 2, me % 2, 2, 2, torch.float32)
    context = DispatchCombineContext.create(config, world=mesh["cp"])
    context.finalize()
    for call in (waybill.World.from_process_group, lambda g: layer_on(g, 0, 4)):
        try:
            call(mesh)
            raise AssertionError("not refused")
        except InvalidArgument as error:
            assert 'DeviceMesh of 2 dimensions, expected one, such as mesh["cp"]' in str(error)
    for wrong in (5, "cp"):
        try:
            waybill.World.from_process_group(wrong)
            raise AssertionError("not refused")
        except InvalidArgument as error:
            assert f"group is {wrong!r}, expected a process group" in str(error)
"""
    expect_all_well(run_group(tmp_path, program))


def test_layers_of_a_group_share_a_world(tmp_path):
    """Also while another thread calls one of them, in another order on each rank."""
    program = """
    import gc, threading, weakref

    one, two = layer_on(None, me, 2), layer_on(distributed.group.WORLD, me, 2)
    assert one.world is two.world
    nodes = layer_on(None, me, 2, per_node=1)
    assert nodes.world is not one.world and nodes.world.topology.num_nodes == 2
    barrier = BarrierAllContext()
    assert waybill.World.from_process_group() is not one.world

    def work(layer, seed):
        try:
            steps(layer, seed, 12)
        except BaseException as error:
            errors.append(error)

    errors = []
    calls = [(one, 1), (two, 2), (nodes, 3)]
    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in reversed(threads) if me else threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    barrier.barrier_all()
    for layer in (one, two, nodes):
        layer.finalize()
    try:
        layer_on(None, me, 2, device="cuda:7")
        raise AssertionError("not refused")
    except (waybill.InvalidArgument, waybill.Unsupported) as error:
        assert "cuda:7" in str(error)
    group = weakref.ref(one.ep_group)
    kept = one.world
    distributed.barrier()
    distributed.destroy_process_group()
    gc.collect()
    assert group() is None and one.ep_group is None, "the layer keeps the group"
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/again", rank=me, world_size=W
    )
    again = layer_on(None, me, 2)
    assert again.world is not kept
    steps(again, 9)
"""
    program = program.replace("{folder}", str(tmp_path))
    expect_all_well(run_group(tmp_path, program, 2))


def test_nodes_are_the_hosts_of_the_group(tmp_path):
    """Simulated: four ranks, two on each host; and groups that lie otherwise."""
    program = """
    os.environ["NCCL_HOSTID"] = f"host-{me // 2}"
    world = waybill.World.from_process_group()
    assert world.topology.ranks_per_node == 2
    barrier = BarrierAllContext()
    barrier.barrier_all()
    pairs = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    for pair, per_node in ((pairs[me // 2], 2), (pairs[2 + me % 2], 1)):
        assert waybill.World.from_process_group(pair).topology.ranks_per_node == per_node
    for ranks in ([0, 1, 2], [0, 2, 3]):
        uneven = distributed.new_group(ranks)
        if me not in ranks:
            continue
        try:
            waybill.World.from_process_group(uneven)
            raise AssertionError("not refused")
        except waybill.InvalidArgument as error:
            assert "2 hosts as 0" in str(error) and "ranks_per_node = 1" in str(error), error
        alone = waybill.World.from_process_group(uneven, ranks_per_node=1)
        assert alone.topology.num_nodes == 3
"""
    expect_all_well(run_group(tmp_path, program))


def test_a_rank_that_cannot_have_its_device_is_told_at_once(tmp_path):
    program = """
    try:
        waybill.World.from_process_group(device="tpu" if me else None, timeout_s=60)
        raise AssertionError("not refused")
    except waybill.InvalidArgument as error:
        assert me == 1 and "'tpu'" in str(error)
    except waybill.PeerFailed as error:
        assert me == 0 and "rank 1 failed" in str(error) and "tpu" in str(error)
"""
    expect_all_well(run_group(tmp_path, program, 2))


def test_a_wrong_argument_of_one_rank_is_told_and_the_group_can_be_used_again(tmp_path):
    """Worlds of a group are numbered: a rank that fails before the others is counted, too."""
    program = """
    import time

    for wrong in ({"timeout_s": float("nan")}, {"ranks_per_node": 3}, {"nvshmem": True}):
        start = time.monotonic()
        try:
            waybill.World.from_process_group(**(wrong if me else {"timeout_s": 60}))
            raise AssertionError("not refused")
        except waybill.InvalidArgument as error:
            assert me == 1, error
        except waybill.PeerFailed as error:
            assert me == 0 and "rank 1 failed" in str(error), error
        assert time.monotonic() - start < 20
        world = waybill.World.from_process_group(timeout_s=60)
        world.barrier()
"""
    expect_all_well(run_group(tmp_path, program, 2))


def test_a_rank_that_comes_when_the_others_have_given_up(tmp_path):
    """What they have left in the store is not taken for their presence."""
    program = """
    try:
        if me == 0:
            waybill.World.from_process_group(timeout_s=0.3)
        else:
            distributed.barrier()
            BarrierAllContext()
        raise AssertionError("not refused")
    except waybill.Timeout as error:
        assert me == 0 and error.peer == 1, error
        distributed.barrier()
    except waybill.PeerFailed as error:
        assert me == 1 and "BarrierAllContext: rank 0 failed: " in str(error), error
"""
    expect_all_well(run_group(tmp_path, program, 2))


def test_hosts_of_ranks():
    assert node_size(["a"], "w") == 1
    assert node_size(["a", "a", "b", "b"], "w") == 2
    assert node_size(["a", "b", "c"], "w") == 1
    for hosts in ("aab", "aba", "abab", "abba"):
        with pytest.raises(waybill.InvalidArgument, match="w: the ranks of the group lie on 2"):
            node_size(list(hosts), "w")


def test_two_ranks_on_one_gpu_are_refused_with_the_hint():
    apart = [("a", "x"), ("a", "y"), ("b", "x"), ("a", ""), ("a", "")]  # host and GPU
    refuse_shared_gpus(apart, "w")
    with pytest.raises(waybill.InvalidArgument, match=r"ranks 1 and 3 have the same GPU .*set_dev"):
        refuse_shared_gpus([*apart[:3], ("a", "y")], "w")


def test_the_launchers_variables(tmp_path):
    program = """
    import torch
    from torch import distributed
    from waybill.torch import initialize_distributed

    me = int(os.environ["RANK"])
    if me == 1:  # as another launcher says it
        os.environ |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert initialize_distributed(device="cpu") == (me, 2)
    assert initialize_distributed(device="cpu") == (me, 2)
    assert waybill.World.from_process_group().device == "cpu"
    distributed.barrier()
    distributed.destroy_process_group()
    print("rank", me, "of", 2, "is well")
"""
    from test_process_worlds import free_port

    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    expect_all_well(run_ranks(tmp_path, program, 2, variables))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            (0, 0),
            "RANK = 0 of two processes or more, expected 0..1, one process for each: none has 1",
        ),
        ((0, 1, 1), "RANK = 1 of two processes or more, expected 0..2, one process for each: none"),
        ((1, 1), "RANK = 1 of WORLD_SIZE = 2, but no process with RANK = 0 answered"),
    ],
    ids=str,
)
def test_a_rank_that_is_given_twice(tmp_path, ranks, text):
    program = """
    import time
    from waybill.torch import initialize_distributed

    os.environ["RANK"] = os.environ["GIVEN"].split(",")[int(os.environ["LOCAL_RANK"])]
    begin = time.monotonic()
    try:
        initialize_distributed(device="cpu", timeout_s=LIMIT)
    except waybill.Error as error:
        print("SAYS", type(error).__name__, error)
        assert time.monotonic() - begin < LIMIT + 10
    """
    from test_process_worlds import free_port

    limit = 60 if 0 in ranks else 3  # the others are told at once
    variables = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GIVEN": ",".join(map(str, ranks)),
    }  # fmt: skip
    ends = run_ranks(tmp_path, program.replace("LIMIT", str(limit)), len(ranks), variables)
    kind = "InvalidArgument" if 0 in ranks else "Timeout"
    for status, output in ends:
        assert status == 0 and f"SAYS {kind} initialize_distributed: {text}" in output, output


def test_a_process_that_does_not_come_is_named(tmp_path):
    program = """
    from waybill.torch import initialize_distributed

    if os.environ["RANK"] != "1":
        try:
            initialize_distributed(device="cpu", timeout_s=2)
        except waybill.Timeout as error:
            print("SAYS", error)
    """
    from test_process_worlds import free_port

    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ends = run_ranks(tmp_path, program, 3, variables)
    for status, output in (ends[0], ends[2]):
        assert status == 0 and "no process with RANK = 1 came" in output, output


def test_without_a_launcher(tmp_path):
    program = """
    import contextlib
    from torch import distributed
    from waybill.torch import initialize_distributed

    @contextlib.contextmanager
    def refused(text, **variables):
        os.environ |= variables
        try:
            yield
            raise AssertionError("not refused")
        except waybill.InvalidArgument as error:
            assert text in str(error), error
        for name in variables:
            del os.environ[name]

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with refused("RANK = 'x', expected a number", RANK="x"):
        initialize_distributed(device="cpu")
    with refused("WORLD_SIZE = None, expected a number", RANK="0"):
        initialize_distributed(device="cpu")
    with refused("MASTER_ADDR is not set", RANK="0", WORLD_SIZE="2"):
        initialize_distributed(device="cpu")
    with refused('device = "tpu"'):
        initialize_distributed(device="tpu")
    with refused("waybill.torch.initialize_distributed()"):
        waybill.World.from_process_group()
    assert initialize_distributed(device="cpu") == (0, 1)
    world = waybill.World.from_process_group()
    assert (world.rank, world.world_size) == (0, 1)
    world.barrier()
    del world
    distributed.destroy_process_group()
    print("rank", 0, "of", 1, "is well")
"""
    expect_all_well(run_ranks(tmp_path, program, 1))
