"""What carries no gradients says so; dtypes under autocast; what ranks that are threads share."""

import warnings

import pytest

import waybill

torch = pytest.importorskip("torch")

import waybill.torch as wt  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

LENS, DISPATCH = torch.tensor([[3], [2]]), torch.tensor([[[1]], [[0]]])


def quietly(function, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments, **options)


def says(who, function, *arguments, **options):
    text = f"^{who}: got a tensor that requires gradients, and carries none: .*detach"
    with pytest.warns(UserWarning, match=text) as caught:
        result = function(*arguments, **options)
    assert [w.filename for w in caught] == [__file__]  # where it was called
    return result


def test_a_simulation_carries_none():
    forward, _ = wt.compute_metadata(LENS, DISPATCH)
    q, output = torch.ones(2, 3, 4, requires_grad=True), torch.zeros(2, 3, 4)
    got = says("orchestrate_simulate", wt.orchestrate_simulate, q, output, forward)
    assert got is output and not got.requires_grad and got[1].eq(1).all()
    with torch.no_grad():
        quietly(wt.orchestrate_simulate, q, output, forward)
    quietly(wt.orchestrate_simulate, q.detach(), output, forward)
    leaf = torch.zeros(2, 3, 4, requires_grad=True)
    assert says("orchestrate_simulate", wt.orchestrate_simulate, q.detach(), leaf, forward) is leaf
    rows = [q[0], q[1, :2]]
    got = says("simulate_communication", wt.simulate_communication, rows, forward)
    assert not got[0].requires_grad
    quietly(wt.simulate_communication, [r.detach() for r in rows], forward)


def test_a_dispatch_carries_none():
    """Threads share Python's filters: one rank is enough."""
    routing = waybill.QkvPlan(1, [0, 1], [3], [0], [0, 1], [0]).to_routing()

    def body(world):
        q = torch.ones(3, 4, requires_grad=True)
        with wt.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_q, q))
            (view,) = says("dispatch", dispatcher.dispatch, there, q)
            assert not view.requires_grad
            quietly(dispatcher.dispatch, there, q.detach())
            with torch.no_grad():
                quietly(dispatcher.dispatch, there, q)
        attend = quietly(wt.ContextParallelAttention, world, 1, 1, 4, dtype=torch.float32)
        rows = q[:, None]
        out = quietly(attend, attend.plan([[3]]), rows, rows, rows)
        quietly(out.sum().backward)
        assert q.grad is not None

    wt.run_threads(1, body)


def test_a_quantized_dispatch_refuses_gradients():
    def body(world):
        layer = EPAll2AllLayer(
            world, 4, 128, 1, 0, 2, 1, 1, torch.bfloat16, payload="quantized"
        )  # fmt: skip
        x = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(wt.InvalidArgument, match=r"^dispatch: got a tensor that requires grad"):
            layer.dispatch(x, ids)
        quietly(layer.dispatch, x.detach(), ids)
        layer.finalize()

    wt.run_threads(1, body)


@pytest.mark.parametrize("layer_dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_under_autocast(layer_dtype):
    """Weights as a gate under autocast gives them, tokens and outputs as they come."""
    ids = torch.tensor([[0, 1], [1, 2], [3, 0]])

    def body(world):
        layer = EPAll2AllLayer(world, 4, 16, 2, world.rank, 4, 2, 2, layer_dtype, torch.float32)
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(3, 16, generator=generator).to(layer_dtype)
        gate = torch.rand(3, 2, generator=generator).bfloat16().requires_grad_()
        mix = torch.eye(16, requires_grad=True)
        grads = []
        for other in (torch.bfloat16, torch.float32):
            gate.grad = mix.grad = None
            tokens = x.to(other, copy=True).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                rows, weights, layout = layer.dispatch(tokens, ids, gate)
                assert rows.dtype == layer_dtype and weights.dtype == torch.float32
                out = rows @ mix  # bfloat16, whatever the layer's
                assert out.dtype == torch.bfloat16
                home = layer.combine(out * weights[:, None], layout)
            assert home.dtype == layer_dtype
            home.sum().backward()
            assert tokens.grad.dtype == other and gate.grad.dtype == torch.bfloat16
            assert mix.grad is not None
            grads.append(gate.grad)
        with pytest.raises(waybill.InvalidArgument, match="weight"):
            layer.dispatch(x, ids, gate)  # by mistake, without autocast

    wt.run_threads(2, body)


def test_ranks_that_are_threads_have_a_grad_mode_of_their_own():
    with torch.no_grad():
        modes = wt.run_threads(2, lambda _: torch.is_grad_enabled())
    assert modes == [True, True]

    def body(world):
        torch.set_grad_enabled(world.rank == 0)
        world.barrier()
        return torch.is_grad_enabled()

    assert wt.run_threads(2, body) == [True, False] and torch.is_grad_enabled()


def test_ranks_that_are_threads_share_the_generator():
    torch.manual_seed(5)
    want = {float(torch.rand(())) for _ in range(2)}
    torch.manual_seed(5)
    drawn = wt.run_threads(2, lambda _: float(torch.rand(())))
    assert set(drawn) == want  # in either order

    def body(world):
        return float(torch.rand((), generator=torch.Generator().manual_seed(world.rank)))

    assert wt.run_threads(2, body) == wt.run_threads(2, body)
