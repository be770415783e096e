"""ContextParallelAttention on GPUs: chunks, prefixes, and ranks that forward, the same bits."""

import pytest
from packed import leaves_of, tensors_of
from test_context_parallel_chunks import chunked
from test_context_parallel_gpu import HEADS, WAYS, batch, expect, on_device, run
from test_context_parallel_prefix import dense
from ways import captured

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

pytestmark = pytest.mark.skipif(
    waybill.num_gpus() < 1 or not torch.cuda.is_available(),
    reason="no GPU, or an installation without CUDA",
)
CHUNK = 64
#: Attention that takes next to no time: forwarding then pays in small batches.
FAST = waybill.AttentionCosts(1e15)
#: Of rank 0 all attend to the long document; then nobody forwards.
ONE_LONG = [[(0, 0, 2800)], *([(d, 0, 80)] for d in range(1, 4))]
EVEN = [[(4 * r + d, 0, 120) for d in range(4)] for r in range(4)]


def steps(attend, plans, given):
    """Output and gradients of each batch."""
    results = []
    for plan, mine in zip(plans, given):
        q, k, v = leaves_of(mine)
        out = attend(plan, q, k, v)
        out.backward(mine[3])
        results.append([out.detach(), q.grad, k.grad, v.grad])
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_chunks(way):
    batches = [batch(120 + seed) for seed in range(6)]

    def body(world):
        options = {"block_tokens": 16, "chunk": CHUNK, **WAYS[way]}
        attend = wt.ContextParallelAttention(world, *HEADS, **options)
        plans = [attend.plan(attend.gather(pieces[world.rank])) for pieces, _ in batches]
        return steps(attend, plans, on_device(world, batches))

    ranks = run(body)
    for i, (pieces, tensors) in enumerate(batches):
        expect([results[i] for results in ranks], chunked(pieces, CHUNK), tensors)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_prefixes(way):
    """Two calls of the kernel: sequences of prefixes under a full mask, the others causal."""
    batches = [batch(140 + seed) for seed in range(6)]
    with_prefixes = [
        [[(d, o, n, (0, 1, 30, 200, 9999)[d % 5]) for d, o, n in held] for held in pieces]
        for pieces, _ in batches
    ]

    def body(world):
        options = {"block_tokens": 16, "mask": "prefix", **WAYS[way]}
        attend = wt.ContextParallelAttention(world, *HEADS, **options)
        plans = [attend.plan(attend.gather(pieces[world.rank])) for pieces in with_prefixes]
        return steps(attend, plans, on_device(world, batches))

    ranks = run(body)
    for i, (_, tensors) in enumerate(batches):
        wide = [[t.double() for t in mine] for mine in tensors]
        for rank, expected in enumerate(dense(with_prefixes[i], wide)):
            for a, b in zip(ranks[rank][i], expected[:4]):
                torch.testing.assert_close(a.cpu().double(), b, rtol=0.05, atol=0.05)


@pytest.fixture
def deterministic():
    """Kernels that add up in one order: gradients can then be compared bit for bit."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.usefixtures("deterministic")
def test_forwarding_gives_the_same_bits(in_place):
    """Four ranks: output and gradients, as relay="never"."""
    pieces = [ONE_LONG, EVEN, ONE_LONG]
    batches = [(p, tensors_of(p, *HEADS, seed=i, dtype=torch.bfloat16))
               for i, p in enumerate(pieces)]  # fmt: skip

    def of(relay):
        def body(world):
            attend = wt.ContextParallelAttention(
                world, *HEADS, block_tokens=16, in_place=in_place, relay=relay, costs=FAST
            )
            plans = [attend.plan(p) for p in pieces]
            results = steps(attend, plans, on_device(world, batches))
            ways = [attend._step(plan)._moves._plans["qkv"].way for plan in (plans[0], plans[2])]
            return [[t.cpu() for t in one] for one in results], ways

        return run(body, 4)

    for (got, ways), (expected, were) in zip(of("auto"), of("never")):
        assert ways == ["relay"] * 2 and were == ["direct"] * 2
        for mine, other in zip(got, expected):
            assert all(torch.equal(a, b) for a, b in zip(mine, other))


def test_a_graph_forwards_and_goes_straight():
    """One graph of four ranks replays both kinds of plans: output of the same bits as "never"."""
    pieces = [EVEN, ONE_LONG, EVEN, ONE_LONG]
    batches = [(p, tensors_of(p, *HEADS, seed=i, dtype=torch.bfloat16))
               for i, p in enumerate(pieces)]  # fmt: skip

    def of(relay):
        def body(world):
            attend = wt.ContextParallelAttention(
                world, *HEADS, block_tokens=16, in_place=True, relay=relay, costs=FAST
            )
            plans = [attend.plan(p) for p in pieces]
            room = wt.Capacities.of(*plans)
            fixed = attend.fixed_plan(plans[0], room)
            given = [[fixed.padded(t) for t in mine] for mine in on_device(world, batches)]
            held = [t.clone() for t in given[0]]
            inputs = [t.requires_grad_() for t in held[:3]]

            def step():
                out = attend(fixed, *inputs)
                return [out.detach(), *torch.autograd.grad(out, inputs, held[3])]

            for _ in range(2):
                step()
            torch.cuda.current_stream().synchronize()
            world.barrier()
            graph, results = torch.cuda.CUDAGraph(), []
            with captured(graph):
                found = step()
            world.barrier()
            for plan, tensors in zip(plans, given):
                fixed.replace(plan)
                with torch.no_grad():
                    for place, new in zip(held, tensors):
                        place.copy_(new)
                graph.replay()
                torch.cuda.current_stream().synchronize()
                results.append([t[: plan.home_tokens[world.rank]].clone() for t in found])
                world.barrier()
            del graph
            return [[t.cpu() for t in one] for one in results], room.max_batches

        return run(body, 4)

    forwarded, straight = of("auto"), of("never")
    for (got, batched), (expected, none) in zip(forwarded, straight):
        assert batched > 0 == none
        assert all(torch.equal(a[0], b[0]) for a, b in zip(got, expected))
    for i, (p, tensors) in enumerate(batches):
        expect([results[i] for results, _ in forwarded], p, tensors)
