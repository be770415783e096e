"""ContextParallelAttention on GPUs: varlen_attn, two streams, graphs of work in flight."""

import pytest
from packed import leaves_of, random_pieces, rng_of, tensors_of, whole
from ways import TorchWay, captured

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

pytestmark = pytest.mark.skipif(
    waybill.num_gpus() < 1 or not torch.cuda.is_available(),
    reason="no GPU, or an installation without CUDA",
)
a_gpu_each = pytest.mark.skipif(waybill.num_gpus() < 2, reason="needs two GPUs")
HEADS = (8, 2, 64, 64)
WAYS = [
    {"in_place": True},
    {"in_place": True, "overlap": False},
    {"in_place": False},
    {"in_place": True, "relay": "always"},  # a graph then has batches
]


def batch(seed, factor=7):
    """Pieces of documents that are long enough for several blocks of the kernel."""
    pieces = random_pieces(rng_of(seed), 2)
    pieces = [[(d, factor * o, factor * n) for d, o, n in held] for held in pieces]
    return pieces, tensors_of(pieces, *HEADS, seed=seed, dtype=torch.bfloat16)


def expect(got, pieces, tensors, **mask):
    wide = [[t.double() for t in mine] for mine in tensors]
    for mine, expected in zip(got, whole(pieces, wide, **mask)):
        for a, b in zip(mine, expected):
            torch.testing.assert_close(a.cpu().double(), b, rtol=0.05, atol=0.05)


def run(body, size=2):
    """On ranks that may share a GPU."""
    return TorchWay("cuda").run(size, body)


def on_device(world, batches):
    """This rank's tensors, before any call: nothing is copied from pageable memory behind a kernel
    that waits for a rank on the same GPU.
    """
    mine = [[t.to(world.device) for t in tensors[world.rank]] for _, tensors in batches]
    torch.cuda.current_stream().synchronize()
    world.barrier()
    return mine


@pytest.mark.parametrize("mask", [{}, {"window": 40}, {"mask": "full"}])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_batches_one_after_the_other(way, mask):
    """Twelve plans through one module: memory of both streams is used again and again."""
    batches = [batch(seed) for seed in range(12)]

    def body(world):
        attend = wt.ContextParallelAttention(
            world, *HEADS, block_tokens=16, **WAYS[way], **mask
        )  # fmt: skip
        results = []
        for (pieces, _), mine in zip(batches, on_device(world, batches)):
            q, k, v = leaves_of(mine)
            out = attend(attend.plan(attend.gather(pieces[world.rank])), q, k, v)
            out.backward(mine[3])
            results.append((out.detach(), q.grad, k.grad, v.grad))
        torch.cuda.synchronize()
        return results

    ranks = run(body)
    for i, (pieces, tensors) in enumerate(batches):
        expect([results[i] for results in ranks], pieces, tensors, **mask)


@pytest.mark.parametrize("order", ["f0 f1 f2 b0 b1 b2", "f0 f1 b0 f2 b1 b2", "f0 f1 f2 b2 b1 b0"])
def test_microbatches_in_flight(order):
    batches = [batch(20 + seed) for seed in range(3)]

    def body(world):
        attend = wt.ContextParallelAttention(world, *HEADS, block_tokens=16, in_place=True)
        inputs, outs, grads = [], {}, {}
        for mine in on_device(world, batches):
            inputs.append(leaves_of(mine))
            grads[len(grads)] = mine[3]
        for step in order.split():
            i = int(step[1])
            if step[0] == "f":
                outs[i] = attend(attend.plan(batches[i][0]), *inputs[i])
            else:
                outs[i].backward(grads[i])
        torch.cuda.synchronize()
        return [(outs[i].detach(), *(t.grad for t in inputs[i])) for i in range(3)]

    ranks = run(body)
    for i, (pieces, tensors) in enumerate(batches):
        expect([results[i] for results in ranks], pieces, tensors)


def test_log_sum_exp_and_a_smaller_v():
    pieces, _ = batch(31)
    tensors = tensors_of(pieces, 8, 2, 64, 32, dtype=torch.bfloat16)

    def body(world):
        attend = wt.ContextParallelAttention(
            world, 8, 2, 64, 32, block_tokens=16, in_place=True
        )  # fmt: skip
        (mine,) = on_device(world, [(pieces, tensors)])
        q, k, v = leaves_of(mine)
        out, lse = attend(attend.plan(pieces), q, k, v, return_lse=True)
        out.backward(mine[3])
        torch.cuda.synchronize()
        return out.detach(), q.grad, k.grad, v.grad, lse

    expect(run(body), pieces, tensors)


def test_two_runs_are_equal_bit_for_bit():
    """Output, and under deterministic algorithms gradients."""
    pieces, tensors = batch(40)

    def body(world):
        attend = wt.ContextParallelAttention(world, *HEADS, block_tokens=16, in_place=True)
        plan, (mine,) = attend.plan(pieces), on_device(world, [(pieces, tensors)])
        results = []
        for _ in range(3):
            q, k, v = leaves_of(mine)
            out = attend(plan, q, k, v)
            out.backward(mine[3])
            results.append((out.detach(), q.grad, k.grad, v.grad))
        torch.cuda.synchronize()
        return all(
            torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other)
        )  # fmt: skip

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # to warn only would leave the kernel as it is
    try:
        assert run(body) == [True, True]
    finally:
        torch.use_deterministic_algorithms(before)


@a_gpu_each
def test_memory_of_a_step_is_bounded():
    """Beside q, k, v, the output and their gradients: what travels, a few times."""
    pieces = [[(0, 0, 6000), (1, 0, 2000)], [(2, 0, 8000)]]

    def body(world):
        attend = wt.ContextParallelAttention(world, 32, 8, 128, in_place=True)
        plan = attend.plan(pieces)
        q, k, v = (
            torch.randn(8000, n, 128, device=world.device, dtype=torch.bfloat16).requires_grad_()
            for n in (32, 8, 8)
        )
        grad = torch.randn_like(q)
        attend(plan, q, k, v).backward(grad)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(plan, q, k, v).backward(grad)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (8000 * 32 * 128 * 2)

    # Of rows of Q: output, its float32 accumulator of dQ, dq and dk, dv, and what came.
    assert max(run(body)) < 9


@a_gpu_each
def test_layers_keep_what_is_said():
    pieces, layers = [[(0, 0, 6000), (1, 0, 2000)], [(2, 0, 8000)]], 8

    def body(world):
        attend = wt.ContextParallelAttention(world, 32, 8, 128, in_place=True)
        plan = attend.plan(pieces)
        q, k, v = (
            torch.randn(8000, n, 128, device=world.device, dtype=torch.bfloat16).requires_grad_()
            for n in (32, 8, 8)
        )
        attend(plan, q, k, v)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        outs = [attend(plan, q, k, v) for _ in range(layers)]
        torch.cuda.synchronize()
        kept = (torch.cuda.memory_allocated() - before) / layers - outs[0].nbytes
        return kept / attend.memory(plan).kept

    assert all(abs(ratio - 1) < 0.1 for ratio in run(body))


def test_tables_of_the_next_batch_beside_a_step():
    """Uploads wait for nothing of the step that runs, and nothing reads them early."""
    batches = [batch(50 + seed) for seed in range(8)]

    def body(world):
        attend = wt.ContextParallelAttention(world, *HEADS, block_tokens=16, in_place=True)
        plan, results = attend.plan(batches[0][0]), []
        attend.prepare(plan)
        for i, mine in enumerate(on_device(world, batches)):
            q, k, v = leaves_of(mine)
            out = attend(plan, q, k, v)
            out.backward(mine[3])
            results.append((out.detach(), q.grad, k.grad, v.grad))
            plan = attend.plan(batches[(i + 1) % 8][0])  # the old one's memory is free for it
            attend.prepare(plan)
        torch.cuda.synchronize()
        return results

    ranks = run(body)
    for i, (pieces, tensors) in enumerate(batches):
        expect([results[i] for results in ranks], pieces, tensors)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_graph_replays_other_plans(way, layers):
    """Forward and backward of one graph, with plans that follow each other in its tables."""
    batches = [batch(70 + seed) for seed in range(6)]

    def body(world):
        attend = wt.ContextParallelAttention(world, *HEADS, block_tokens=16, **WAYS[way])
        plans = [attend.plan(pieces) for pieces, _ in batches]
        fixed = attend.fixed_plan(plans[0], wt.Capacities.of(*plans))
        given = [[fixed.padded(t) for t in mine] for mine in on_device(world, batches)]
        held = [t.clone() for t in given[0]]
        inputs = [t.requires_grad_() for t in held[:3]]

        def step():
            out = sum(attend(fixed, *inputs) for _ in range(layers))
            return [out.detach(), *torch.autograd.grad(out, inputs, held[3])]

        for _ in range(2):
            step()
        torch.cuda.current_stream().synchronize()
        world.barrier()
        graph, results = torch.cuda.CUDAGraph(), []
        with captured(graph):
            found = step()
        world.barrier()
        for plan, tensors in [*zip(plans, given)][::-1]:
            fixed.replace(plan)
            with torch.no_grad():
                for place, new in zip(held, tensors):
                    place.copy_(new)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            rows = plan.home_tokens[world.rank]
            assert not any(t[rows:].any().item() for t in found)
            results.append([t[:rows] / layers for t in found])
            world.barrier()
        del graph
        return results[::-1]

    ranks = run(body)
    for i, (pieces, tensors) in enumerate(batches):
        expect([results[i] for results in ranks], pieces, tensors)


def test_what_a_graph_cannot_replay_is_refused():
    pieces, _ = batch(80)

    def body(world):
        for options in ({"kernel": "dot_product"}, {"num_sms": 0}):
            attend = wt.ContextParallelAttention(world, *HEADS, **options)
            plan = attend.plan(pieces)
            with pytest.raises(waybill.Unsupported, match=r"lengths on the host|num_sms = 0"):
                attend.fixed_plan(plan, wt.Capacities.of(plan))

    run(body)


def test_calibration():
    costs = wt.calibrate_attention(32, 8, rows=4096, repeats=2)
    assert costs.pairs_per_second > 5e9 and costs.error < 0.5 and costs.about["kernel"] == "varlen"
