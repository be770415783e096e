"""torch.compile and ranks: collective calls end a graph cleanly, forward and backward."""

import numpy as np
import pytest

import waybill

torch = pytest.importorskip("torch")
dynamo = pytest.importorskip("torch._dynamo")

from compiling import MARKS, Graphs, same  # noqa: E402

import waybill.torch as wt  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

pytestmark = MARKS
ROWS, HIDDEN = 20, 8
PLAN = waybill.plan([30, 8, 2], world_size=2, tokens_per_rank=ROWS)


def leaves(rank, dtype=torch.float32, count=3):
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randint(-4, 5, (ROWS, 1, HIDDEN), generator=generator).to(dtype).requires_grad_()
        for _ in range(count)
    ]


def attention(q, k, v, sequences, shape):
    """A kernel. Small whole numbers in, and out: sums are exact in any order."""
    sums = [(k_.sum(0) - v_.sum(0)) for k_, v_ in zip(*(t.split(sequences.k_lens) for t in (k, v)))]
    parts = zip(q.split(sequences.q_lens), sums)
    return torch.cat([q_ * 2 + added for q_, added in parts])


def step_program(attend, plan):
    def program(q, k, v):
        return attend(plan, q * 2, k + 1, v * 3) * 2

    return program


def attention_on(world, dtype):
    return wt.ContextParallelAttention(
        world, 1, 1, HIDDEN, dtype=dtype, kernel=attention, in_place=False, block_tokens=4
    )


def on_two_ranks(body):
    return wt.run_threads(2, body, timeout_s=60)


def run_step(compiler, dtype):
    """Output and gradients of each rank."""

    def body(world):
        given = leaves(world.rank, dtype)
        attend = attention_on(world, dtype)
        program = compiler(step_program(attend, attend.plan(PLAN)))
        for _ in range(3):  # the second and third take the graphs of the first
            out = program(*given)
            out.sum().backward()
        return (out.detach(), *(tensor.grad for tensor in given))

    return on_two_ranks(body)


def test_attention(backend):
    kind = torch.float32 if backend == "eager" else torch.bfloat16
    got = run_step(lambda f: torch.compile(f, backend=backend), kind)
    for ours, theirs in zip(got, run_step(lambda f: f, kind)):
        for a, b in zip(ours, theirs):
            assert a.dtype == kind
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)


def test_the_graphs_of_attention():
    """One before and one after, on each rank: nothing of Waybill is compiled."""
    graphs = Graphs()
    run_step(lambda f: torch.compile(f, backend=graphs), torch.float32)
    assert graphs.count in (2, 4)  # ranks may share them


def test_sequence_dispatcher(backend):
    """Also made and planned in a compiled function; views of the window are real tensors there."""
    routing = PLAN.to_routing()

    def body(world):
        (q,) = leaves(world.rank, torch.bfloat16, 1)
        q = q.detach()

        def program(q):
            with wt.SequenceDispatcher(world) as dispatcher:
                there = dispatcher.plan_dispatch((routing.fwd_q, q))
                back = dispatcher.plan_dispatch((routing.rev_q, q))
                gradient = dispatcher.plan_kv_gradient((routing.fwd_kv, q))
                kv = dispatcher.plan_dispatch((routing.fwd_kv, q))
                (received,) = dispatcher.dispatch(there, q * 2)
                copy = received + 1
                (home,) = dispatcher.dispatch(back, copy - 1)
                home = home * 1
                (view,) = dispatcher.dispatch(kv, q)
                (sums,) = dispatcher.kv_gradient(gradient, view * 1, dtype=torch.float32)
                dispatcher.synchronize()
                return copy, home, sums + 0, world.rank, dispatcher.window_bytes

        got, want = torch.compile(program, backend=backend)(q), program(q)
        assert got[3:] == want[3:]
        for a, b in zip(got[:3], want[:3]):
            same(a, b)
        same(got[1], q * 2)

    on_two_ranks(body)


def layer_program(layer, ids):
    def program(x, weight):
        rows, weights, layout = layer.dispatch(x * 2, ids, weight)
        counts = layout.recv_expert_counts.tolist()
        parts = rows.split(counts)
        rows = torch.cat([part * (e + 1) for e, part in enumerate(parts)])
        home = layer.combine(rows * weights[:, None].to(rows.dtype), layout)
        return home * 2

    return program


def run_layer(compiler, dtype, dynamic=False):
    def body(world):
        layer = EPAll2AllLayer(world, 16, HIDDEN, 2, world.rank, 4, 2, 2, dtype)
        results = []
        for tokens in (5, 9, 0, 12) if dynamic else (5, 5):
            generator = torch.Generator().manual_seed(10 * world.rank + tokens)
            ids = torch.randint(0, 4, (tokens, 2), generator=generator)
            x = torch.randint(-4, 5, (tokens, HIDDEN), generator=generator).to(dtype)
            weight = torch.randint(1, 3, (tokens, 2), generator=generator).float()
            x.requires_grad_(), weight.requires_grad_()
            out = compiler(layer_program(layer, ids))(x, weight)
            out.sum().backward()
            results += [out.detach(), x.grad, weight.grad]
        layer.finalize()
        return results

    return on_two_ranks(body)


def test_expert_layer(backend):
    kind = torch.float32 if backend == "eager" else torch.bfloat16
    got = run_layer(lambda f: torch.compile(f, backend=backend), kind)
    for ours, theirs in zip(got, run_layer(lambda f: f, kind)):
        for a, b in zip(ours, theirs):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dynamic", [None, True])
def test_another_number_of_tokens_in_each_call(dynamic):
    """Also none."""
    got = run_layer(
        lambda f: torch.compile(f, backend="aot_eager", dynamic=dynamic), torch.float32, True
    )
    for ours, theirs in zip(got, run_layer(lambda f: f, torch.float32, True)):
        for a, b in zip(ours, theirs):
            same(a, b)


def test_a_whole_module():
    """Compiled in place, checkpointed within."""

    class Block(torch.nn.Module):
        def __init__(self, world):
            super().__init__()
            self.gate = torch.nn.Linear(HIDDEN, 4, bias=False)
            torch.nn.init.constant_(self.gate.weight, 0.5)
            self.layer = EPAll2AllLayer(world, 16, HIDDEN, 2, world.rank, 4, 2, 2, torch.float32)

        def inside(self, x):
            weight, ids = self.gate(x).softmax(-1).topk(2)
            rows, weights, layout = self.layer.dispatch(x, ids, weight)
            return self.layer.combine(torch.relu(rows) * weights[:, None], layout)

        def forward(self, x):
            inside = torch.utils.checkpoint.checkpoint(self.inside, x * 1, use_reentrant=False)
            return inside + x

    def body(world):
        results = []
        for compiled in (False, True):
            block = Block(world)
            if compiled:
                block.compile(backend="aot_eager")
            x = torch.arange(6.0 * HIDDEN).reshape(6, HIDDEN).requires_grad_()
            block(x).sum().backward()
            results.append((x.grad, block.gate.weight.grad))
            block.layer.finalize()
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)

    on_two_ranks(body)


def test_compiled_autograd():
    """Backward as a graph of its own ends where a backward call is collective."""

    def body(world):
        given = leaves(0)
        attend = attention_on(world, torch.float32)
        plan = attend.plan([[ROWS]])
        with dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            step_program(attend, plan)(*given).sum().backward()
        return [tensor.grad for tensor in given]

    (grads,) = wt.run_threads(1, body)
    q, k, v = leaves(0)
    whole = wt.kernels.Sequences.of([ROWS], [ROWS])
    (attention(q * 2, k + 1, v * 3, whole, None) * 2).sum().backward()
    for got, tensor in zip(grads, (q, k, v)):
        same(got, tensor.grad)


def test_a_whole_graph_is_refused_with_the_reason():
    def body(world):
        layer = EPAll2AllLayer(world, 16, HIDDEN, 2, world.rank, 4, 1, 1, torch.float32)
        ids = torch.zeros(3, 2, dtype=torch.int64)
        program = torch.compile(
            lambda x: layer.dispatch(x * 2, ids)[0], backend="eager", fullgraph=True
        )
        with pytest.raises(Exception, match="disable") as error:
            program(torch.ones(3, HIDDEN))
        layer.finalize()
        return str(error.value)

    (text,) = wt.run_threads(1, body)
    assert "dispatch" in text and "FakeTensor" not in text and "dlpack" not in text.lower()


def test_ranks_in_a_compiled_function():
    """What a rank knows of itself, and a barrier."""

    def program(world, x):
        world.barrier()
        return x * (world.rank + 1) + world.world_size

    def body(world):
        x = torch.ones(3)
        same(torch.compile(program, backend="eager")(world, x), program(world, x))

    on_two_ranks(body)


def test_a_world_made_in_a_compiled_function():
    def program(x):
        return sum(wt.run_threads(2, lambda world: x * (world.rank + 1)))

    same(torch.compile(program, backend="eager")(torch.ones(3)), torch.full((3,), 3.0))


def test_a_dispatcher_of_arrays():
    routing = PLAN.to_routing()

    def body(world):
        rows = np.arange(ROWS * 4.0).reshape(ROWS, 4) + 100 * world.rank
        with waybill.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_q, rows))
            back = dispatcher.plan_dispatch((routing.rev_q, rows))

            def program(x):
                (received,) = dispatcher.dispatch(there, rows)
                (home,) = dispatcher.dispatch(back, received.copy())
                return x + float((home == rows).all())

            same(torch.compile(program, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))

    on_two_ranks(body)
