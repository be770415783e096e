"""EPAll2AllLayer on the CPU and on GPUs, on one node and on two: as the simulation says."""

import numpy as np
import pytest
from ways import captured

import waybill
from waybill.moe import EPConfig, simulate_dispatch

torch = pytest.importorskip("torch")

from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 2, 128, 3, 8, 40
TABLES = (
    "num_input_tokens_per_rank", "topk_indices_tensor", "recv_expert_counts",
    "recv_expert_offsets", "recv_topk_indices", "compact_to_grouped", "grouped_to_compact",
)  # fmt: skip


@pytest.fixture(autouse=True)
def a_gpu_for_each_rank(torch_way):
    if torch_way.device == "cuda" and waybill.num_gpus() < WORLD:
        pytest.skip("needs two GPUs")


def inputs(seed, dtype=torch.bfloat16):
    """Small whole numbers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most, *shape):
        return torch.randint(0, most, shape, generator=generator)

    counts = draw(MAX + 1, WORLD).tolist() if seed else [MAX, 0]
    tokens = [draw(8, n, HIDDEN).to(dtype) for n in counts]
    ids = [draw(EXPERTS + 1, n, TOPK) for n in counts]  # EXPERTS: dropped
    weights = [(1 + draw(4, n, TOPK)).float() for n in counts]
    return tokens, ids, weights


def expected(per_node, given, dtype, **options):
    config = EPConfig(MAX, HIDDEN, TOPK, EXPERTS, 0, WORLD, per_node, dtype, torch.float32)
    tokens, ids, weights = given
    return simulate_dispatch(
        config, [t.float().numpy() for t in tokens], [i.numpy() for i in ids],
        [w.numpy() for w in weights], **options,
    )  # fmt: skip


def layer_on(world, per_node, dtype=torch.bfloat16, **options):
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, per_node, WORLD, dtype, **options
    )


def moved(given, world):
    return [tensors[world.rank].to(world.device) for tensors in given]


def same(tensor, array):
    """Of arrays and tensors whose rows may go on behind those of the array."""
    if tensor.is_cuda:  # nothing copies to pageable memory behind a kernel that waits
        torch.cuda.current_stream().synchronize()
    got = tensor.detach().cpu()[: len(array)].float().numpy()
    return got.shape == array.shape and np.array_equal(got, np.asarray(array, np.float32))


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("options", [{}, {"rows": "compact"}, {"expert_alignment": 4}])
def test_rounds_equal_the_simulation(torch_way, per_node, options):
    rounds = [inputs(seed) for seed in range(10)]
    wanted = [expected(per_node, given, torch.bfloat16, **options) for given in rounds]
    sums = [w.combine([rows * 2 for rows in w.recv_tokens]) for w in wanted]

    def body(world):
        layer, r = layer_on(world, per_node, **options), world.rank
        for given, want, total in zip(rounds, wanted, sums):
            x, ids, weights = moved(given, world)
            rows, row_weights, layout = layer.dispatch(x, ids, weights)
            assert same(rows, want.recv_tokens[r]) and same(row_weights, want.recv_weights[r])
            for name in TABLES:
                table = getattr(want.layout[r], name)
                assert table is None or same(getattr(layout, name), table), name
            assert same(layer.combine(rows * 2, layout), total[r])
            place = layer.combine_input(len(rows))
            torch.mul(rows, 2, out=place)
            assert same(layer.combine(place, layout), total[r])
            again, _, _ = layer.dispatch(x, ids, weights, layout_desc=layout)
            assert same(again, want.recv_tokens[r])
        layer.ep_barrier_all(intra_node_only=True)
        layer.ep_barrier_all()
        layer.finalize()

    torch_way.run(WORLD, body, ranks_per_node=per_node)


@pytest.mark.parametrize("per_node", [2, 1])
def test_float8_equals_the_simulation(torch_way, per_node):
    given = inputs(1)
    want = expected(per_node, given, torch.bfloat16, payload="quantized")

    def body(world):
        layer, r = layer_on(world, per_node, payload="quantized"), world.rank
        rows, _, layout = layer.dispatch(*moved(given, world))
        assert rows.dtype == torch.float8_e4m3fn
        assert same(rows.float(), want.recv_tokens[r].astype(np.float32))
        assert same(layout.recv_scales, want.recv_scales[r])
        layer.finalize()

    torch_way.run(WORLD, body, ranks_per_node=per_node)


@pytest.mark.parametrize("per_node", [2, 1])
def test_gradients(torch_way, per_node):
    """Of the sum of all sums, where each row is multiplied by its weight."""
    rounds = [inputs(seed, torch.float32) for seed in range(4)]

    def body(world):
        layer = layer_on(world, per_node, torch.float32)
        for given in rounds:
            x, ids, weights = moved(given, world)
            x.requires_grad_()
            weights.requires_grad_()
            rows, row_weights, layout = layer.dispatch(x, ids, weights)
            layer.combine(rows * row_weights[:, None], layout).sum().backward()
            live = ids < EXPERTS
            token_sums = (weights.detach() * live).sum(1, keepdim=True)
            assert torch.equal(x.grad, token_sums.expand(-1, HIDDEN))
            assert torch.equal(weights.grad, x.detach().sum(1, keepdim=True) * live)
        layer.finalize()

    torch_way.run(WORLD, body, ranks_per_node=per_node)


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("receiver", [0, 1])
def test_experts_alone_require_gradients(torch_way, per_node, receiver):
    """A rank without rows takes part in backward; plain inference requires nothing."""

    def body(world):
        layer = layer_on(world, per_node, torch.float32)
        scale = torch.full((HIDDEN,), 2.0, device=world.device, requires_grad=True)
        x = torch.ones(5, HIDDEN, device=world.device)
        ids = torch.full((5, TOPK), receiver * EXPERTS // WORLD, device=world.device)
        made = [layer.dispatch(x, ids) for _ in range(3)]  # before their combines
        sums = [layer.combine(rows * scale if len(rows) else rows, to) for rows, _, to in made]
        assert all(total.requires_grad and not rows.requires_grad
                   for total, (rows, _, _) in zip(sums, made))  # fmt: skip
        rows, _, layout = layer.dispatch(x, ids)
        assert not layer.combine(rows, layout).requires_grad
        sum(sums).sum().backward()
        layer.finalize()
        return None if scale.grad is None else scale.grad.tolist()

    grads = torch_way.run(WORLD, body, ranks_per_node=per_node)
    assert grads[receiver] == [5.0 * 3 * TOPK * WORLD] * HIDDEN and grads[1 - receiver] is None


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("local", [False, True])
def test_old_descriptors_keep_their_weights(torch_way, per_node, local):
    rounds = [inputs(seed) for seed in range(4)]
    wanted = [expected(per_node, given, torch.bfloat16) for given in rounds]
    sums = [w.combine(w.recv_tokens, local and per_node == 2, weighted=True) for w in wanted]

    def body(world):
        layer, r = layer_on(world, per_node, enable_local_combine=local), world.rank
        for given, total in zip(rounds, sums):
            x, ids, weights = moved(given, world)
            rows, _, layout = layer.dispatch(x, ids, weights)
            assert same(layer.combine(rows, layout, weighted=True), total[r])
            _, _, other = layer.dispatch(x, ids, weights + 1, layout_desc=layout)
            layer.dispatch(x, ids, layout_desc=other)
            for _ in range(2):
                assert same(layer.combine(rows, layout, weighted=True), total[r])
        layer.synchronize()
        layer.finalize()

    torch_way.run(WORLD, body, ranks_per_node=per_node)


@pytest.mark.gpu
@pytest.mark.parametrize("per_node", [2, 1])
def test_a_graph_replays_with_new_tokens_and_ids(torch_way, per_node):
    if torch_way.device == "cpu":
        pytest.skip("for GPUs")
    rounds = [inputs(seed) for seed in range(6)]
    for tokens, ids, weights in rounds:  # of one size: a dropped token has no rows
        for tensors, value in ((tokens, 0), (ids, EXPERTS), (weights, 0)):
            for r, t in enumerate(tensors):
                rest = t.new_full((MAX - len(t), t.shape[1]), value)
                tensors[r] = torch.cat((t, rest))
    wanted = [expected(per_node, given, torch.bfloat16) for given in rounds]
    sums = [w.combine(w.recv_tokens) for w in wanted]

    def body(world):
        layer, r = layer_on(world, per_node, fixed_rows=MAX * TOPK * WORLD), world.rank
        x, ids, weights = moved(rounds[0], world)
        rows, _, layout = layer.dispatch(x, ids, weights)
        layer.combine(rows, layout)
        torch.cuda.current_stream().synchronize()
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            for _ in range(WORLD // per_node):  # over nodes an even number
                rows, _, layout = layer.dispatch(x, ids, weights)
                back = layer.combine(rows, layout)
        world.barrier()
        for given, want, total in zip(rounds, wanted, sums):
            for kept, new in zip((x, ids, weights), moved(given, world)):
                kept.copy_(new)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert same(rows, want.recv_tokens[r]) and same(back, total[r])
            layer.check_overflow()
        world.barrier()
        del graph
        layer.finalize()

    torch_way.run(WORLD, body, ranks_per_node=per_node)
