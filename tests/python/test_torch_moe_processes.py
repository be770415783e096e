"""EPAll2AllLayer on ranks that are processes: from a launcher's variables, and from a group."""

import pytest
from test_process_worlds import expect_all_well, run_ranks

import waybill

pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("processes")

PROGRAM = """
    import torch
    from waybill.moe import EPConfig, simulate_dispatch
    from waybill.torch.moe import EPAll2AllLayer

    W, PER_NODE, H, K, E = 2, {per_node}, 16, 3, 8

    def rounds(seed):
        g = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, 8, (W,), generator=g).tolist()
        return (
            [torch.randn(n, H, generator=g) for n in counts],
            [torch.randint(0, E + 1, (n, K), generator=g) for n in counts],
            [torch.rand(n, K, generator=g) for n in counts],
        )

    def run(group, rank):
        layer = EPAll2AllLayer(group, 7, H, K, rank, E, PER_NODE, W, torch.float32)
        config = EPConfig(7, H, K, E, rank, W, PER_NODE, "float32")
        for seed in range(20):
            tokens, ids, weights = rounds(seed)
            arrays = [[t.numpy() for t in x] for x in (tokens, ids, weights)]
            want = simulate_dispatch(config, *arrays)
            sums = want.combine([rows * 2 for rows in want.recv_tokens])[rank]
            x = tokens[rank].requires_grad_()
            rows, row_weights, layout = layer.dispatch(x, ids[rank], weights[rank])
            assert np.array_equal(rows.detach().numpy(), want.recv_tokens[rank])
            assert np.array_equal(row_weights.numpy(), want.recv_weights[rank])
            back = layer.combine(rows * 2, layout)
            assert np.array_equal(back.detach().numpy(), sums)
            back.sum().backward()
            live = (ids[rank] < E).sum(1, keepdim=True).float()
            assert torch.equal(x.grad, (2 * live).expand(-1, H))
        layer.finalize()
        print("rank", rank, "of", W, "is well")
"""


def test_a_launchers_variables(tmp_path):
    end = """
    world = waybill.World.from_environment(timeout_s=110)
    run(world, world.rank)
    """
    program = PROGRAM.replace("{per_node}", "2") + end
    expect_all_well(run_ranks(tmp_path, program, world_size=2))


def test_a_process_group_over_two_nodes(tmp_path):
    end = f"""
    from torch import distributed

    rank = int(os.environ["RANK"])
    distributed.init_process_group(
        "gloo", init_method="file://{tmp_path}/group", rank=rank, world_size=W
    )
    run(None, rank)
    run(distributed.group.WORLD, rank)
    distributed.destroy_process_group()
    """
    program = PROGRAM.replace("{per_node}", "1") + end
    expect_all_well(run_ranks(tmp_path, program, world_size=2))


@pytest.mark.gpu
def test_a_graph_of_one_dispatch_and_one_combine(tmp_path):
    """As torch.cuda.graph takes it, on two GPUs, replayed with other tokens and experts."""
    if waybill.num_gpus() < 2:
        pytest.skip("needs two GPUs, and an installation with CUDA")
    program = """
    import torch
    from waybill.torch.moe import EPAll2AllLayer

    W, MAX, H, K, E = 2, 8, 256, 3, 8

    world = waybill.World.from_environment(device="cuda", timeout_s=60)
    torch.cuda.set_device(world.device)
    layer = EPAll2AllLayer(world, MAX, H, K, world.rank, E, W, W, fixed_rows=W * MAX * K)
    x = torch.zeros(MAX, H, dtype=torch.bfloat16, device=world.device)
    ids = torch.zeros(MAX, K, dtype=torch.int64, device=world.device)

    def step():
        rows, _, layout = layer.dispatch(x, ids)
        return layer.combine(rows * 2, layout)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = step()
    draws = torch.Generator().manual_seed(world.rank)
    for number in range(9):
        x.copy_(torch.randint(0, 9, x.shape, generator=draws))
        ids.copy_(torch.randint(0, E + 1, ids.shape, generator=draws))
        wanted = x * 2 * (ids < E).sum(1, keepdim=True)
        if number % 3 == 2:  # without the graph
            assert torch.equal(step(), wanted), number
        else:
            graph.replay()
            assert torch.equal(sums, wanted), number
        layer.check_overflow()
    world.barrier()
    del graph
    layer.finalize()
    print("rank", world.rank, "of", W, "is well")
    """
    expect_all_well(run_ranks(tmp_path, program, world_size=2))


def test_a_wrong_combine_of_one_rank_is_told_to_all(tmp_path):
    program = """
    from waybill.torch.moe import EPAll2AllLayer

    world = waybill.World.from_environment(timeout_s=60)
    combine = "push" if world.rank == 1 else "pull"
    try:
        EPAll2AllLayer(world, 7, 16, 3, world.rank, 8, 2, 2, combine=combine)
    except waybill.InvalidArgument as error:
        print("rank", world.rank, "of 2 is well, as it was told:", error)
    """
    results = run_ranks(tmp_path, program, world_size=2)
    expect_all_well(results)
    for _, output in results:
        assert 'combine = "push", expected "pull"' in output, results
    assert "rank 1 with arguments = wrong" in results[0][1], results
