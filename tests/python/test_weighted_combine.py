"""EPAll2AllLayer.combine(weighted=True) with gradients: of rows, of weights; agreement of ranks."""

import threading

import pytest
from error_texts import NO_WEIGHTS

import waybill

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 2, 300, 3, 6, 7
LOCAL = EXPERTS // WORLD
DOUBLE = torch.float64


def layer_on(world, dtype=torch.float32, per_node=WORLD, hidden=HIDDEN, **options):
    weight_dtype = DOUBLE if dtype == DOUBLE else torch.float32
    return EPAll2AllLayer(
        world, MAX, hidden, TOPK, world.rank, EXPERTS, per_node, WORLD, dtype, weight_dtype,
        dropped_id=-1, **options,
    )  # fmt: skip


def inputs(rank, count, dtype, hidden=HIDDEN, seed=0):
    draws = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(count, hidden, generator=draws).to(dtype)
    weights, ids = torch.rand(count, EXPERTS, generator=draws).topk(TOPK)
    ids[torch.rand(ids.shape, generator=draws) < 0.2] = -1
    weights = weights.to(DOUBLE if dtype == DOUBLE else torch.float32)
    return x, ids, weights, torch.randn(count, hidden, generator=draws).to(dtype)


def settle(world):
    """Nothing copies to pageable memory behind a kernel that waits for a rank of the same GPU."""
    if world.device != "cpu":
        torch.cuda.current_stream().synchronize()


def dot_product(rows, gradients):
    """In the written order: 256 partial sums, then neighbours."""
    sums = torch.zeros(rows.shape[0], 256)
    products = rows.float() * gradients.float()
    for first in range(0, products.shape[1], 256):
        part = products[:, first : first + 256]
        sums[:, : part.shape[1]] += part
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


@pytest.mark.parametrize("local_combine", [False, True])
@pytest.mark.parametrize("fixed_rows", [None, WORLD * MAX * TOPK])
@pytest.mark.parametrize(("copy_out", "counts"), [(True, (7, 4)), (False, (7, 4)), (True, (5, 0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch(torch_way, dtype, local_combine, fixed_rows, copy_out, counts):
    """Rows' gradients bit for bit as autograd's; weights' in the written order."""
    gathered, meeting = {}, threading.Barrier(WORLD)

    def body(world):
        layer = layer_on(
            world, dtype, enable_local_combine=local_combine, fixed_rows=fixed_rows,
            copy_out=copy_out,
        )  # fmt: skip
        x, ids, weights, gradient = (
            t.to(world.device) for t in inputs(world.rank, counts[world.rank], dtype)
        )
        found = []
        for weighted in (False, True):
            a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
            rows, row_weights, layout = layer.dispatch(a, ids, w)
            settle(world)
            count = int(layout.num_recv_tokens_per_rank[world.rank])
            outputs = (rows[:count] * 1.5).detach().requires_grad_()
            kept = outputs
            if not weighted:
                kept = (outputs.float() * row_weights[:count, None].detach()).to(dtype)
            if fixed_rows is not None:  # what lies behind is anything
                kept = torch.cat([kept, kept.new_full((fixed_rows - count, HIDDEN), float("nan"))])
            sums = layer.combine(kept, layout, weighted=weighted)
            sums.backward(gradient)
            settle(world)
            found.append((sums.detach(), outputs.grad, w.grad))
            if weighted:
                arrived, _, _ = layer.dispatch(gradient, None, layout_desc=layout)
                settle(world)
                want = dot_product(outputs.detach().cpu(), arrived[:count].cpu())
                home = torch.zeros(counts[world.rank], TOPK)
                gathered[world.rank] = (layout.recv_tags[:count].cpu(), want)
                meeting.wait()
                for tags, values in gathered.values():
                    mine = tags[:, 0] == world.rank
                    home[tags[mine, 1].long(), tags[mine, 2].long()] = values[mine]
                assert torch.equal(w.grad.cpu(), home)
        (one, rows_one, _), (other, rows_other, _) = found
        tolerance = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(one, other, **tolerance)
        assert torch.equal(rows_one, rows_other)
        layer.finalize()

    torch_way.run(WORLD, body)


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("local_combine", [False, True])
@pytest.mark.parametrize("given", ["all", "weights", "tokens"])
def test_gradcheck(per_node, local_combine, given):
    def body(world):
        layer = layer_on(world, DOUBLE, per_node, hidden=3, enable_local_combine=local_combine)
        x, ids, weights, _ = inputs(world.rank, 3, DOUBLE, hidden=3)
        bias = torch.ones(3, 3, dtype=DOUBLE)

        def experts(x, weights, bias):
            rows, _, layout = layer.dispatch(x, ids, weights)
            return layer.combine(rows.sin(), layout, weighted=True, biases=(bias,))

        x.requires_grad_(given != "weights")
        weights.requires_grad_(given != "tokens")
        assert torch.autograd.gradcheck(experts, (x, weights, bias.requires_grad_()))
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node)


def test_only_experts_need_gradients():
    """Frozen tokens and weights; one rank gets no rows and skips its experts."""

    def body(world):
        layer = layer_on(world)
        x, ids, weights, gradient = inputs(world.rank, 4, torch.float32)
        ids = ids.clamp(0, LOCAL - 1)  # all to rank 0
        scale = torch.ones((), requires_grad=True)
        rows, row_weights, layout = layer.dispatch(x, ids, weights)
        outputs = rows * scale if len(rows) else rows
        sums = layer.combine(outputs, layout, weighted=True)
        sums.backward(gradient)
        if world.rank == 0:
            arrived, _, _ = layer.dispatch(gradient, None, layout_desc=layout)
            want = (arrived * row_weights[:, None] * rows).sum()
            torch.testing.assert_close(scale.grad, want)
        else:
            layer.dispatch(gradient, None, layout_desc=layout)
            assert scale.grad is None and sums.requires_grad
        layer.finalize()

    run_threads(WORLD, body)


def test_a_rank_that_weighs_and_one_that_does_not():
    def body(world):
        layer = layer_on(world)
        x, ids, weights, _ = inputs(world.rank, 4, torch.float32)
        rows, _, layout = layer.dispatch(x.requires_grad_(), ids, weights)
        layer.combine(rows, layout, weighted=world.rank == 0)

    with pytest.raises(waybill.Disagreement, match="weighted"):
        run_threads(WORLD, body)


def test_checkpoint():
    def body(world):
        layer = layer_on(world)
        x, ids, weights, gradient = inputs(world.rank, 5, torch.float32)
        found = []

        def block(x, weights):
            rows, _, layout = layer.dispatch(x, ids, weights)
            return layer.combine(rows.tanh(), layout, weighted=True)

        for again in (False, True):
            a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
            if again:
                out = torch.utils.checkpoint.checkpoint(block, a, w, use_reentrant=False)
            else:
                out = block(a, w)
            out.backward(gradient)
            found.append((out.detach(), a.grad, w.grad))
        assert all(torch.equal(one, other) for one, other in zip(*found))
        layer.finalize()

    run_threads(WORLD, body)


def test_rows_in_a_window_that_was_needed_again():
    """Without copies: autograd refuses what a later dispatch has overwritten."""

    def body(world):
        layer = layer_on(world, copy_out=False)
        x, ids, weights, gradient = inputs(world.rank, 4, torch.float32)
        x.requires_grad_()
        rows, _, layout = layer.dispatch(x, ids, weights)
        sums = layer.combine(rows * rows, layout, weighted=True)
        for _ in range(2):
            with torch.no_grad():
                layer.dispatch(x, ids, weights)
        with pytest.raises(waybill.InvalidArgument, match="has overwritten rows of dispatch 1"):
            sums.backward(gradient)

    run_threads(WORLD, body)


def test_no_weights():
    def body(world):
        layer = layer_on(world)
        x, ids, _, _ = inputs(world.rank, 4, torch.float32)
        rows, _, layout = layer.dispatch(x.requires_grad_(), ids)
        with pytest.raises(waybill.InvalidArgument, match=NO_WEIGHTS):
            layer.combine(rows, layout, weighted=True)

    run_threads(WORLD, body)


def test_float8_has_no_gradients():
    def body(world):
        layer = EPAll2AllLayer(
            world, MAX, 128, TOPK, world.rank, EXPERTS, WORLD, WORLD, payload="quantized",
            dropped_id=-1,
        )  # fmt: skip
        x, ids, weights, _ = inputs(world.rank, 4, torch.bfloat16, hidden=128)
        for needs in (x, weights):
            needs.requires_grad_()
            with pytest.raises(waybill.InvalidArgument, match="payload = 'quantized' has none"):
                layer.dispatch(x, ids, weights)
            needs.requires_grad_(False)
        rows, _, layout = layer.dispatch(x, ids, weights)
        outputs = rows.to(torch.bfloat16).requires_grad_()
        with pytest.raises(waybill.InvalidArgument, match="combine: got a tensor that requires"):
            layer.combine(outputs, layout)
        with torch.no_grad():
            layer.combine(outputs, layout)
        layer.finalize()

    run_threads(WORLD, body)


def test_the_flag_of_an_overflow_is_on_the_device_of_all_ranks():
    def body(world):
        layer = layer_on(world, fixed_rows=5)
        x, ids, weights, _ = inputs(world.rank, 4, torch.float32)
        _, _, layout = layer.dispatch(x, ids.clamp(0, LOCAL - 1), weights)
        assert layout.required_rows.tolist() == [2 * 4 * TOPK] and layout.overflow.tolist() == [
            True
        ]
        assert layer.take_overflow() == 2 * 4 * TOPK and layer.take_overflow() == 0
        _, _, layout = layer.dispatch(x[:1], ids[:1] * 0 - 1, weights[:1])
        assert layout.overflow.tolist() == [False] and layer.take_overflow() == 0
        layer.finalize()

    run_threads(WORLD, body)
