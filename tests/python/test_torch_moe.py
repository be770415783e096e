"""EPAll2AllLayer on ranks that are threads: equal to the simulation, and its gradients."""

import gc
import inspect
import weakref

import numpy as np
import pytest
from error_texts import waited

import waybill
from waybill.moe import simulate_dispatch

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import (  # noqa: E402
    BarrierAllContext,
    DispatchCombineContext,
    EPAll2AllLayer,
    EPConfig,
)

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 4, 16, 3, 8, 7


def config(per_node=WORLD, rank=0, dtype=torch.float32):
    return EPConfig(MAX, HIDDEN, TOPK, EXPERTS, rank, WORLD, per_node, dtype, torch.float32)


def layer_on(world, per_node=WORLD, dtype=torch.float32, **options):
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, per_node, WORLD, dtype, **options
    )


def inputs(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, MAX + 1, (WORLD,), generator=generator).tolist()
    tokens = [torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in counts]
    ids = [torch.randint(0, EXPERTS + 1, (n, TOPK), generator=generator) for n in counts]
    weights = [torch.rand(n, TOPK, generator=generator) for n in counts]
    return tokens, ids, weights


def numpy_of(tensors):
    return [t.detach().to(torch.float32).numpy() for t in tensors]


def expected(per_node, dtype, given, **options):
    tokens, ids, weights = given
    return simulate_dispatch(
        config(per_node, 0, dtype), numpy_of(tokens), [i.numpy() for i in ids], numpy_of(weights),
        **options,
    )  # fmt: skip


def same(tensor, array):
    got = tensor.detach().to(torch.float32).numpy()
    return got.shape == array.shape and np.array_equal(got, array)


@pytest.mark.parametrize("per_node", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"rows": "compact"}, {"expert_alignment": 4}])
def test_equals_the_simulation(per_node, dtype, options):
    rounds = [inputs(seed, dtype) for seed in range(12)]
    wanted = [expected(per_node, dtype, given, **options) for given in rounds]
    sums = [w.combine([rows * 2 for rows in w.recv_tokens]) for w in wanted]

    def body(world):
        layer = layer_on(world, per_node, dtype, **options)
        for (tokens, ids, weights), want, total in zip(rounds, wanted, sums):
            r = world.rank
            chosen = ids[r] if r % 2 else ids[r].to(torch.int32)
            rows, row_weights, layout = layer.dispatch(tokens[r], chosen, weights[r])
            assert same(rows, want.recv_tokens[r]) and same(row_weights, want.recv_weights[r])
            for name in vars(want.layout[r]):
                table = getattr(want.layout[r], name)
                if name in ("recv_tags", "num_recv_tokens_per_rank", "recv_scales"):
                    continue
                got = getattr(layout, name)
                if table is None or isinstance(table, int):
                    assert got == table, name
                else:
                    assert np.array_equal(got.numpy(), table), name
                    assert str(got.dtype).removeprefix("torch.") == table.dtype.name, name
            back = layer.combine(rows * 2, layout)
            assert back.dtype == dtype and same(back, total[r])
            again, _, _ = layer.dispatch(tokens[r], chosen, weights[r], layout_desc=layout)
            assert torch.equal(again, rows)
        layer.ep_barrier_all(intra_node_only=True)
        layer.ep_barrier_all()
        layer.finalize()
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node)


def experts(rows, counts_at, scale):
    """Expert e multiplies by scale[e], in each rank's part of the table."""
    return rows * scale[counts_at][:, None]


@pytest.mark.parametrize("per_node", [4, 2])
@pytest.mark.parametrize("rows", ["grouped", "compact"])
def test_gradients_equal_those_without_ranks(per_node, rows):
    tokens, ids, weights = inputs(3)
    tokens[2], ids[2], weights[2] = tokens[2][:0], ids[2][:0], weights[2][:0]  # none here
    for i in ids:
        i[i == 5] = 8  # and nothing arrives at one expert
    mix = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9))

    def alone():
        x = [t.clone().requires_grad_() for t in tokens]
        w = [t.clone().requires_grad_() for t in weights]
        loss = torch.zeros(())
        for t, i, k in zip(x, ids, w):
            live = (i < EXPERTS).float() * k * (1 + i)
            loss = loss + ((live.sum(1, keepdim=True) * t) @ mix).square().sum()
        loss.backward()
        return loss.detach(), [t.grad for t in x], [t.grad for t in w]

    loss, token_grads, weight_grads = alone()

    def body(world):
        r = world.rank
        layer = layer_on(world, per_node, rows=rows)
        x, w = tokens[r].clone().requires_grad_(), weights[r].clone().requires_grad_()
        plain, _, _ = layer.dispatch(tokens[r], ids[r], w)
        assert not plain.requires_grad
        _, plain_weights, _ = layer.dispatch(x, ids[r], weights[r])
        assert not plain_weights.requires_grad
        received, row_weights, layout = layer.dispatch(x, ids[r], w)
        per_rank = EXPERTS // WORLD
        if rows == "grouped":
            expert = torch.repeat_interleave(
                torch.arange(per_rank), layout.recv_expert_counts.long()
            )
            out = received * (row_weights * (1 + expert + r * per_rank))[:, None]
        else:
            local = layout.recv_topk_indices
            factor = (row_weights * (local >= 0) * (1 + local + r * per_rank)).sum(1)
            out = received * factor[:, None]
        own = (layer.combine(out, layout) @ mix).square().sum()
        own.backward()
        layer.finalize()
        return own.detach(), x.grad, w.grad

    results = run_threads(WORLD, body, ranks_per_node=per_node)
    torch.testing.assert_close(sum(own for own, _, _ in results), loss)
    for r, (_, x_grad, w_grad) in enumerate(results):
        torch.testing.assert_close(x_grad, token_grads[r], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w_grad, weight_grads[r], rtol=1e-4, atol=1e-3)


def test_a_rank_without_rows_takes_part_in_backward():
    """Its experts compute nothing that autograd would see; tokens need no gradient."""

    def body(world):
        layer = layer_on(world)
        scale = torch.ones(HIDDEN, requires_grad=True)
        ids = torch.zeros(3, TOPK, dtype=torch.int64)  # all to rank 0
        rows, _, layout = layer.dispatch(torch.ones(3, HIDDEN), ids)
        out = rows * scale if len(rows) else torch.empty(0, HIDDEN)
        layer.combine(out, layout).sum().backward()
        layer.finalize()
        return scale.grad

    first, *others = run_threads(WORLD, body, timeout_s=5)
    assert torch.equal(first, torch.full((HIDDEN,), 3.0 * TOPK * WORLD))
    assert others == [None] * 3


@pytest.mark.parametrize("backward", [True, False])
def test_what_a_step_keeps_is_free_without_a_search_for_circles(backward):
    """Such a search comes by count of objects: memory of a GPU would be full before."""

    def body(world):
        layer = layer_on(world)
        x = torch.ones(3, HIDDEN, requires_grad=True)
        ids = torch.zeros(3, TOPK, dtype=torch.int64)
        rows, _, layout = layer.dispatch(x, ids, torch.ones(3, TOPK))
        back = layer.combine(rows * 2, layout)
        if backward:
            back.sum().backward()
        kept = [weakref.ref(value) for value in (layout, rows, back)]
        del rows, layout, back
        left = [ref() is not None for ref in kept]
        world.barrier()
        layer.finalize()
        return left

    gc.disable()
    try:
        assert run_threads(WORLD, body, timeout_s=5) == [[False] * 3] * WORLD
    finally:
        gc.enable()


def test_views_last_until_the_second_dispatch_after():
    def body(world):
        layer = layer_on(world, copy_out=False)
        ids = torch.zeros(2, TOPK, dtype=torch.int64)
        views = []
        for step in range(4):
            rows, _, _ = layer.dispatch(torch.full((2, HIDDEN), float(step)), ids)
            views.append(rows)
            assert bool((rows == step).all())
            if step > 0:
                assert bool((views[step - 1] == step - 1).all())
        layer.finalize()

    run_threads(WORLD, body)


@pytest.mark.parametrize("payload", ["plain", "quantized"])
def test_a_call_that_copies_copies_all(payload):
    """Rows, weights and scales stay as they are, though the layer itself gives views."""
    hidden = 128

    def body(world):
        layer = EPAll2AllLayer(
            world, MAX, hidden, TOPK, world.rank, EXPERTS, WORLD, WORLD, copy_out=False,
            payload=payload,
        )  # fmt: skip
        ids, kept = torch.zeros(2, TOPK, dtype=torch.int64), []
        for step in range(1, 5):
            tokens = torch.full((2, hidden), float(step), dtype=torch.bfloat16)
            weights = torch.full((2, TOPK), float(step))
            found = layer.dispatch(tokens, ids, weights, copy_out=True)
            scales = found[2].recv_scales
            kept.append([found[0].float(), found[1], *([] if scales is None else [scales])])
        for step, found in enumerate(kept, 1):
            assert bool((found[1] == step).all())
            assert all(bool((one == kept[0][2] * step).all()) for one in found[2:])
        layer.finalize()

    run_threads(WORLD, body)


@pytest.mark.parametrize("rows", ["grouped", "compact"])
def test_gradients_of_weights_with_room_for_more_rows(rows):
    """Results have fixed_rows rows, tables those that have come; on GPUs it may be otherwise."""
    tokens, ids, weights = inputs(3)

    def gradients(world, **options):
        r = world.rank
        layer = layer_on(world, rows=rows, **options)
        x, w = tokens[r].clone().requires_grad_(), weights[r].clone().requires_grad_()
        received, row_weights, layout = layer.dispatch(x, ids[r], w)
        come = int(layout.num_recv_tokens_per_rank[r])
        assert len(received) == options.get("fixed_rows", come)
        factor = row_weights[:come]
        if rows == "compact":
            factor = torch.where(layout.recv_topk_indices[:come] >= 0, factor, 0.0).sum(1)
        else:
            factor = factor.clone()
        out = torch.zeros_like(received)
        out[:come] = received[:come] * factor[:, None]
        layer.combine(out, layout).square().sum().backward()
        layer.finalize()
        return x.grad, w.grad

    wide = run_threads(WORLD, lambda world: gradients(world, fixed_rows=MAX * WORLD * TOPK))
    for got, want in zip(wide, run_threads(WORLD, gradients)):
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        assert len(got[1]) == 0 or got[1].abs().sum() > 0


def test_fixed_rows_and_float8():
    tokens = [torch.randn(4, 128) for _ in range(WORLD)]
    ids = [torch.zeros(4, TOPK, dtype=torch.int32) for _ in range(WORLD)]

    def body(world):
        r = world.rank
        layer = EPAll2AllLayer(
            world, MAX, 128, TOPK, r, EXPERTS, WORLD, WORLD, torch.float32, payload="quantized",
            fixed_rows=40,
        )  # fmt: skip
        rows, _, layout = layer.dispatch(tokens[r], ids[r])
        assert rows.shape == (40, 128) and rows.dtype == torch.float8_e4m3fn
        assert layout.recv_scales.shape == (40, 1)
        with pytest.raises(waybill.InvalidArgument, match=r"dispatch 1: .* 48 rows, .* fixed_rows"):
            layer.check_overflow()
        layer.check_overflow()
        if r == 0:
            back = rows[:4].to(torch.float32) * layout.recv_scales[:4]
            assert (back[0] - tokens[0][0]).abs().max() < tokens[0][0].abs().max() / 16
        layer.finalize()

    run_threads(WORLD, body)


def test_context_and_barrier():
    def body(world):
        context = DispatchCombineContext.create(config(rank=world.rank), capacity=2, world=world)
        assert context.dispatch_output_buf.shape == (MAX * TOPK * 2, HIDDEN)
        assert context.weight_recv_buf.shape == (MAX * TOPK * 2,)
        rows, weights = context.reallocate_dispatch_output_buf(100)
        assert rows.shape == (100, HIDDEN) and weights.shape == (100,)
        assert context.reallocate_dispatch_output_buf(5)[0].shape == (100, HIDDEN)
        barrier = BarrierAllContext(world=world)
        barrier.barrier_all()
        barrier.finalize()
        context.finalize()
        context.finalize()

    run_threads(WORLD, body)


def test_the_signature_is_the_original_one():
    names = list(inspect.signature(EPAll2AllLayer).parameters.values())
    assert [p.name for p in names if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "ep_group", "max_tokens", "hidden", "topk", "rank", "num_tot_experts", "local_world_size",
        "world_size", "dtype", "weight_dtype", "num_sm", "enable_local_combine", "use_aot",
    ]  # fmt: skip
    assert list(inspect.signature(EPAll2AllLayer.dispatch).parameters)[1:5] == [
        "input", "exp_indices", "weight", "full_scatter_indices",
    ]  # fmt: skip
    assert list(inspect.signature(EPAll2AllLayer.combine).parameters)[1:3] == [
        "input", "ep_a2a_layout_desc",
    ]  # fmt: skip


def test_wrong_arguments_are_named_and_the_call_may_be_repeated():
    def body(world):
        refuses = pytest.raises
        with refuses(waybill.InvalidArgument, match="world_size = 2|rank = "):
            EPAll2AllLayer(world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, 2, 2)
        with refuses(waybill.InvalidArgument, match="num_sm = 0"):
            layer_on(world, num_sm=0)
        with refuses(waybill.InvalidArgument, match="dtype"):
            layer_on(world, dtype="float33")
        with refuses(waybill.InvalidArgument, match="fixed_rows = 0"):
            layer_on(world, fixed_rows=0)
        layer = layer_on(world)
        x, ids = torch.zeros(2, HIDDEN), torch.zeros(2, TOPK, dtype=torch.int64)
        for bad, text in (
            ((x[:, :3], ids), r"input has shape \[2, 3\]"),
            ((x.double(), ids), "input is float64"),
            ((torch.zeros(9, HIDDEN), torch.zeros(9, TOPK, dtype=torch.int64)), "max_tokens = 7"),
            ((x, ids - 1), r"exp_indices\[0\]\[0\] = -1"),
            ((x, ids.float()), "exp_indices is float32"),
            ((x, None), "exp_indices is None"),
            ((x.numpy(), ids), "input is a ndarray"),
            ((x, ids, torch.zeros(2, 1)), "weight has shape"),
        ):
            with refuses(waybill.InvalidArgument, match=text):
                layer.dispatch(*bad)
        with refuses(waybill.InvalidArgument, match="descriptor is a dict"):
            layer.combine(x, {})
        rows, _, layout = layer.dispatch(x, ids)
        with refuses(waybill.InvalidArgument, match="combine: input has shape"):
            layer.combine(torch.zeros(len(rows) + 1, HIDDEN), layout)
        assert torch.equal(layer.combine(rows, layout), x)
        layer.finalize()
        with refuses(waybill.Error, match="finalized"):
            layer.dispatch(x, ids)

    run_threads(WORLD, body)


def test_a_rank_that_never_calls_is_named():
    def body(world):
        layer = layer_on(world)
        if world.rank == 2:
            return "silent"
        with pytest.raises(waybill.Timeout, match="dispatch: " + waited(".", peer=2)):
            layer.dispatch(torch.zeros(0, HIDDEN), torch.zeros(0, TOPK, dtype=torch.int64))
        return "named"

    assert run_threads(WORLD, body, timeout_s=1) == ["named", "named", "silent", "named"]
