"""torch.compile: Waybill's calls end a graph cleanly; results and gradients are those without."""

import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import waybill

torch = pytest.importorskip("torch")
dynamo = pytest.importorskip("torch._dynamo")

import waybill.torch as wt  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not dynamo.is_dynamo_supported(), reason="torch.compile does not run here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # The compiler itself causes it, and hides it where warnings are no errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
HAS_COMPILER = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
ROWS, HIDDEN = 20, 8
PLAN = waybill.plan([30, 8, 2], world_size=2, tokens_per_rank=ROWS)
FORWARD, REVERSE = wt.compute_metadata(
    torch.tensor([[3, 1], [2, 0]]), torch.tensor([[[1, 0], [0, -1]], [[0, 1], [-1, -1]]])
)


@pytest.fixture(autouse=True)
def no_graphs_left():
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def backend(request):
    if request.param == "inductor" and not HAS_COMPILER:
        pytest.skip("no C++ compiler")
    return request.param


class Graphs:
    """A backend that counts graphs; those without an operation of tensors do not come here."""

    def __init__(self):
        self.count, self.lock = 0, threading.Lock()

    def __call__(self, module, inputs):
        with self.lock:
            self.count += 1
        return module.forward


def same(got, want):
    assert got.dtype == want.dtype and torch.equal(got, want)


HELPERS = {
    "exclusive_cumsum": lambda x: wt.exclusive_cumsum(x),
    "exclusive_cumsum of rows": lambda x: wt.exclusive_cumsum(x.reshape(2, 2), 1),
    "prepend_zero": lambda x: wt.prepend_zero(x),
    "prepend_zero_fn": lambda x: wt.prepend_zero_fn(x),
    "mask_by_neg": lambda x: wt.mask_by_neg(x, x > 3),
    "index_put": lambda x: wt.index_put_with_neg_padding_1d(x, x, torch.tensor([3, -1, 0, 1])),
}


@pytest.mark.parametrize("dtype", ["int32", "bfloat16"])
@pytest.mark.parametrize("name", HELPERS)
def test_helpers(name, dtype):
    """Graphs before and behind."""
    values = torch.tensor([1, 2, 3, 0]).to(getattr(torch, dtype))

    def program(x):
        return HELPERS[name](x * 2) + 1

    graphs = Graphs()
    same(torch.compile(program, backend=graphs)(values), program(values))
    assert graphs.count >= 2


def test_helpers_by_a_compiler(backend):
    def program(x, mask):
        tables = wt.exclusive_cumsum(x * 2, 1), wt.mask_by_neg(x + 1, mask)
        return tables[0] + tables[1].sum(), wt.prepend_zero(tables[1] * 3)

    given = torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.tensor([1, 0, 1])
    for got, want in zip(torch.compile(program, backend=backend)(*given), program(*given)):
        same(got, want)


def test_orchestrate_simulate(backend):
    kind = torch.bool if backend == "eager" else torch.bfloat16

    def program(x, output):
        moved = wt.orchestrate_simulate(x.roll(1, 0), output, FORWARD)
        assert moved is output
        return moved.flip(0)

    x = (torch.arange(2 * 4 * 3).reshape(2, 4, 3) % 5).to(kind)
    outputs = [torch.zeros(2, 6, 3, dtype=kind) for _ in range(2)]
    got = torch.compile(program, backend=backend)(x, outputs[0])
    same(got, program(x, outputs[1]))
    same(outputs[0], outputs[1])
    assert got.any()


def test_a_simulation_says_here_too_that_it_carries_no_gradients():
    def program(x):
        output = torch.zeros(2, 6, 3)
        return wt.orchestrate_simulate(x * 2, output, FORWARD)

    with pytest.warns(UserWarning, match="carries none") as caught:
        got = torch.compile(program, backend="eager")(torch.ones(2, 4, 3, requires_grad=True))
    assert not got.requires_grad
    assert [w.filename for w in caught if "carries none" in str(w.message)] == [__file__]


def test_routing():
    """Tables, slices, device forms, layouts and generators, made from tensors of a graph."""

    def program(lens, dispatch):
        forward, reverse = wt.compute_metadata(lens + 1, dispatch * 1)
        part = forward.get_slice(1).normalize_dtype()
        layout = wt.compute_attn_layout_seqlens(lens + 1, lens + 1, dispatch, True, False)
        packed = wt.mlp_layout_packed_params(lens[0] + 1)
        drawn = wt.gen_seq_lens(2, 3, 40, seed=1)
        moved = wt.simulate_communication([lens[0][:, None].float() + 1, lens[1][:2, None] * 1.0],
                                          FORWARD)  # fmt: skip
        return (
            forward.dst_offset + 1, reverse.num_recv_tokens * 2, part.seq_len,
            layout.cu_seqlens_q + 0, packed.cu_seqlens_q * 1, drawn + 1, moved[0] * 1,
        )  # fmt: skip

    lens, dispatch = torch.tensor([[4, 2, 1, 3], [1, 3, 2, 5]]), torch.tensor([[1, 0] * 2] * 2)
    for got, want in zip(
        torch.compile(program, backend="eager")(lens, dispatch), program(lens, dispatch)
    ):
        same(got, want)


def leaves(rank, dtype=torch.float32, count=3):
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randint(-4, 5, (ROWS, HIDDEN), generator=generator).to(dtype).requires_grad_()
        for _ in range(count)
    ]


def attention(q, k, v):
    """Small whole numbers in, and out: sums are exact in any order."""
    return q * 2 + k.sum(0) - v.sum(0)


def step_program(step):
    def program(q, k, v):
        there = step.dispatch_qkv(q * 2, k + 1, v * 3)
        return step.return_outputs(attention(*there)) * 2

    return program


def on_two_ranks(body):
    return wt.run_threads(2, body, timeout_s=60)


def run_step(compiler, dtype):
    """Output and gradients of each rank."""

    def body(world):
        given = leaves(world.rank, dtype)
        with wt.SequenceDispatcher(world) as dispatcher:
            step = wt.AttentionStep(dispatcher, PLAN.to_routing(), *given)
            program = compiler(step_program(step))
            for _ in range(3):  # the second and third take the graphs of the first
                out = program(*given)
                out.sum().backward()
            return (out.detach(), *(tensor.grad for tensor in given))

    return on_two_ranks(body)


def test_attention_step(backend):
    kind = torch.float32 if backend == "eager" else torch.bfloat16
    got = run_step(lambda f: torch.compile(f, backend=backend), kind)
    for ours, theirs in zip(got, run_step(lambda f: f, kind)):
        for a, b in zip(ours, theirs):
            assert a.dtype == kind
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)


def test_the_graphs_of_a_step():
    """One before, one between, one behind, on each rank: nothing of Waybill is compiled."""
    graphs = Graphs()
    run_step(lambda f: torch.compile(f, backend=graphs), torch.float32)
    assert graphs.count in (3, 6)  # ranks may share them


def test_recomputed_attention():
    def body(world):
        results = []
        for compiler in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
            given = leaves(world.rank)
            with wt.SequenceDispatcher(world) as dispatcher:
                step = wt.AttentionStep(dispatcher, PLAN.to_routing(), *given)

                def attend(_, q, k, v):
                    return attention(q, k, v)

                def program(q, k, v, step=step, attend=attend):
                    return wt.recomputed_attention(attend, step, step, q * 2, k, v) * 2

                compiler(program)(*given).sum().backward()
            results.append([tensor.grad for tensor in given])
        for a, b in zip(*results):
            same(a, b)

    on_two_ranks(body)


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
    alone = waybill.QkvPlan(1, [0, 1], [ROWS], [0], [0, 1], [0]).to_routing()

    def body(world):
        given = leaves(0)
        with wt.SequenceDispatcher(world) as dispatcher:
            step = wt.AttentionStep(dispatcher, alone, *given)
            with dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                step_program(step)(*given).sum().backward()
            return [tensor.grad for tensor in given]

    (grads,) = wt.run_threads(1, body)
    q, k, v = leaves(0)
    (attention(q * 2, k + 1, v * 3) * 2).sum().backward()
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


def test_functions_for_arrays():
    """numpy's, in a compiled function: arrays stay arrays."""

    def program(x):
        forward, _ = waybill.compute_metadata([[3, 1], [2, 0]], [[1, 0], [0, -1]])
        output = np.zeros((2, 5, 2), np.float32)
        waybill.orchestrate_simulate(np.ones((2, 4, 2), np.float32), output, forward)
        return x + float(output.sum())

    same(torch.compile(program, backend="eager")(torch.ones(2)), torch.full((2,), 13.0))


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


def test_the_compiler_is_not_imported_with_waybill():
    code = "import sys, torch\nimport waybill.torch.moe\nsys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
