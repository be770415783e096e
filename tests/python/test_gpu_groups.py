"""Process groups whose ranks lie on two GPUs, and barriers of a layer on a stream."""

import pytest
from test_groups import END, START
from test_process_worlds import expect_all_well, free_port, run_ranks

import waybill

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(
        waybill.num_gpus() < 2 or not torch.cuda.is_available(),
        reason="needs two GPUs, and an installation with CUDA",
    ),
]

LAYER = """
    import time

    def sums_of(layer):
        x = torch.full((3, H), 1.0 + layer.rank, device=layer.device)
        ids = torch.tensor([[0, 3], [1, 2], [0, 2]], device=layer.device)
        rows, _, layout = layer.dispatch(x, ids)
        back = layer.combine(rows * 2, layout)
        layer.synchronize()
        assert back.device == torch.device("cuda", torch.cuda.current_device())
        assert bool((back == 4 * x).all())
"""


def run_on_gpus(tmp_path, program, world_size=4, environment=None):
    code = START.replace("{folder}", str(tmp_path)) + LAYER + program + END
    return run_ranks(tmp_path, code, world_size, environment)


def test_torchs_current_device(tmp_path):
    """Of two ranks, the other way round; then the last two of four, and two groups at a time."""
    program = """
    torch.cuda.set_device(1 - me % 2)
    last, even, odd = (distributed.new_group(ranks) for ranks in ([2, 3], [0, 3], [1, 2]))
    if me >= 2:
        world = waybill.World.from_process_group(last, device="cuda")
        assert world.device == f"cuda:{1 - me % 2}" and world.rank == me - 2
        sums_of(layer_on(last, me - 2, 2, device="cuda"))
    group = even if me in (0, 3) else odd
    layer = layer_on(group, int(me >= 2), 2, device="cuda")
    for _ in range(3):
        sums_of(layer)
    layer.finalize()
"""
    expect_all_well(run_on_gpus(tmp_path, program))


def test_device_mesh(tmp_path):
    program = """
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(me % 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    world = waybill.World.from_process_group(mesh["cp"], device="cuda")
    assert (world.rank, world.world_size, world.device) == (me % 2, 2, f"cuda:{me % 2}")
    layers = [layer_on(mesh["cp"], me % 2, 2, device="cuda") for _ in range(2)]
    assert layers[0].world is layers[1].world
    for layer in layers:
        sums_of(layer)
        layer.finalize()
"""
    expect_all_well(run_on_gpus(tmp_path, program))


def test_without_set_device_ranks_are_refused(tmp_path):
    program = """
    for make in (waybill.World.from_process_group, lambda **o: layer_on(None, me, 2, **o)):
        try:
            make(device="cuda")
            raise AssertionError("not refused")
        except waybill.InvalidArgument as error:
            assert "ranks 0 and 1 have the same GPU" in str(error)
            assert "torch.cuda.set_device(local_rank)" in str(error)
    world = waybill.World.from_process_group(device="cuda:0")  # said so
    world.barrier()
"""
    expect_all_well(run_on_gpus(tmp_path, program, 2))


def test_each_process_sees_one_gpu(tmp_path):
    """All of them have a cuda:0, and no two the same GPU; a driver may refuse to map the other."""
    program = """
    try:
        world = waybill.World.from_process_group(device="cuda")
        assert world.device == "cuda:0"
    except waybill.Error as error:
        assert "same GPU" not in str(error)
"""
    code = START.replace("{folder}", str(tmp_path)) + LAYER + program + END
    hide = '    import os; os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]\n'
    expect_all_well(run_ranks(tmp_path, hide + code, 2))


def test_a_group_over_nccl(tmp_path):
    program = """
    import torch
    from torch import distributed
    from waybill.torch import initialize_distributed
    from waybill.torch.moe import EPAll2AllLayer

    rank, size = initialize_distributed()
    assert torch.cuda.current_device() == rank
    assert waybill.World.from_process_group().device == f"cuda:{rank}"
    layer = EPAll2AllLayer(distributed.group.WORLD, 4, 8, 1, rank, 2, size, size)
    assert layer.device == torch.device("cuda", rank)
    tokens = torch.ones(4, 8, dtype=torch.bfloat16, device="cuda")
    rows, _, layout = layer.dispatch(tokens, torch.tensor([[0], [1], [0], [1]], device="cuda"))
    assert torch.equal(layer.combine(rows, layout), tokens)
    total = torch.ones(3, device="cuda")
    distributed.all_reduce(total)
    assert total.tolist() == [2, 2, 2]
    layer.finalize()
    distributed.destroy_process_group()
    print("rank", rank, "of", size, "is well")
"""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    expect_all_well(run_ranks(tmp_path, program, 2, variables))


BARRIERS = """
    torch.cuda.set_device(me)
    layer = layer_on(None, me, 2, {per_node}, device="cuda")
    sums_of(layer)

    def late(call, stream, seconds=0.6):
        # rank 1 comes late: rank 0's host goes on, and its stream waits
        if me == 1:
            time.sleep(seconds)
        begin = time.monotonic()
        call()
        assert time.monotonic() - begin < 0.3, "the host waited"
        if me == 0:
            assert not stream.query(), "nothing waits"
        stream.synchronize()
        if me == 0:
            assert time.monotonic() - begin > seconds - 0.2, "it did not wait"
        distributed.barrier()

    for node_only in {node_onlys}:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        layer.ep_barrier_all(intra_node_only=node_only)
        torch.cuda.synchronize()
        distributed.barrier()
        late(lambda: layer.ep_barrier_all(intra_node_only=node_only), current)
        late(lambda: layer.ep_barrier_all(side, node_only), side)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.ep_barrier_all(intra_node_only=node_only)
        distributed.barrier()
        for turn in range(3):  # a graph of one; calls beside it
            late(graph.replay, torch.cuda.current_stream(), 0.4)
            layer.ep_barrier_all(intra_node_only=node_only)
        sums_of(layer)
        torch.cuda.synchronize()
        distributed.barrier()
        del graph
    layer.finalize()
"""


@pytest.mark.parametrize(("per_node", "node_onlys"), [(2, (True, False)), (1, (False,))])
def test_barriers_of_a_layer_are_on_the_stream(tmp_path, per_node, node_onlys):
    program = BARRIERS.replace("{per_node}", str(per_node))
    program = program.replace("{node_onlys}", str(node_onlys))
    expect_all_well(run_on_gpus(tmp_path, program, 2))


def test_a_barrier_to_which_a_rank_does_not_come(tmp_path):
    program = """
    torch.cuda.set_device(me)
    world = waybill.World.from_process_group(device="cuda", timeout_s=2)
    layer = layer_on(world, me, 2)
    sums_of(layer)
    distributed.barrier()
    if me == 0:
        layer.ep_barrier_all()
        try:
            layer.synchronize()
            raise AssertionError("it came back")
        except waybill.Timeout as error:
            assert "ep_barrier_all: rank 0 waited" in str(error) and "from rank 1" in str(error)
    distributed.barrier()
    print("rank", me, "of", W, "is well", flush=True)
    os._exit(0)
"""
    expect_all_well(run_on_gpus(tmp_path, program, 2))
