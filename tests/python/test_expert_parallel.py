"""ExpertParallel: a layer of experts spread over ranks, against one process that has them all."""

import pytest

pytest.importorskip("torch")

import torch

import waybill
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts, grouped_mm

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

WORLD, HIDDEN, INNER, EXPERTS, TOPK, MOST = 2, 16, 32, 6, 3, 9
LOCAL = EXPERTS // WORLD
SIZES = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": MOST}


def all_experts(dtype=torch.float32):
    draws = torch.Generator().manual_seed(4)
    experts = SwiGLUExperts(EXPERTS, HIDDEN, INNER, dtype)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draws) / 4)
    return experts


def own_experts(rank, device, dtype=torch.float32):
    experts, everything = SwiGLUExperts(LOCAL, HIDDEN, INNER, dtype), all_experts(dtype)
    for mine, whole in zip(experts.parameters(), everything.parameters()):
        mine.data.copy_(whole.data[rank * LOCAL : (rank + 1) * LOCAL])
    return experts.to(device)


def batch(rank, seed=0, tokens=(9, 4)):
    """(tokens, scores, ids, gradient): another number on every rank, some choices none."""
    draws = torch.Generator().manual_seed(10 * seed + rank)
    count = tokens[rank]
    x = torch.randn(count, HIDDEN, generator=draws)
    scores, ids = torch.rand(count, EXPERTS, generator=draws).topk(TOPK)
    ids[torch.rand(ids.shape, generator=draws) < 0.2] = -1
    return x, scores, ids, torch.randn(count, HIDDEN, generator=draws)


def shared_expert(x):
    return x * 0.5


def alone(batches):
    """(outputs, gradients of x and of scores by rank, gradients of the experts), by one process."""
    experts = all_experts()
    outputs, inputs = [], []
    for x, scores, ids, gradient in batches:
        x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
        out = shared_expert(x)
        for k in range(ids.shape[1]):
            here = ids[:, k].clamp(min=0)
            gate, up, down = (weight[here] for weight in experts.parameters())
            inside = torch.nn.functional.silu(torch.einsum("th,thi->ti", x, gate))
            inside = inside * torch.einsum("th,thi->ti", x, up)
            row = torch.einsum("ti,tih->th", inside, down)
            out = out + (scores[:, k] * (ids[:, k] >= 0))[:, None] * row
        out.backward(gradient)
        outputs.append(out.detach())
        inputs.append((x.grad, scores.grad))
    return outputs, inputs, [weight.grad for weight in experts.parameters()]


def expect_close(got, want):
    torch.testing.assert_close(got.detach().cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize("fixed_rows", [None, WORLD * MOST * TOPK])
@pytest.mark.parametrize(("tokens", "chunks"), [((9, 4), 1), ((5, 0), 1), ((9, 0), 3), ((9, 4), 2)])
def test_as_one_process(torch_way, gradients, fixed_rows, tokens, chunks):
    if torch_way.device == "cuda":
        pytest.skip("torch._grouped_mm takes bfloat16 alone there")
    batches = [batch(rank, tokens=tokens) for rank in range(WORLD)]
    outputs, inputs, weights = alone(batches)

    def body(world):
        layer = ExpertParallel(
            own_experts(world.rank, world.device), group=world, dtype=torch.float32,
            shared=shared_expert, gradients=gradients, fixed_rows=fixed_rows, chunks=chunks,
            **SIZES,
        )  # fmt: skip
        assert layer.layer.max_tokens == -(-MOST // chunks)
        x, scores, ids, gradient = batches[world.rank]
        for _ in range(2):  # gradients of the experts accumulate
            x, scores = (one.detach().clone().requires_grad_() for one in (x, scores))
            out = layer(x, scores, ids)
            out.backward(gradient)
            expect_close(out, outputs[world.rank])
            expect_close(x.grad, inputs[world.rank][0])
            expect_close(scores.grad, inputs[world.rank][1])
        ranks = WORLD if gradients == "mean" else 1
        first = world.rank * LOCAL
        for mine, whole in zip(layer.experts.parameters(), weights):
            expect_close(mine.grad * ranks, 2 * whole[first : first + LOCAL])
        layer.finalize()

    torch_way.run(WORLD, body)


@pytest.mark.parametrize("fixed_rows", [None, WORLD * MOST * 9])
def test_more_slots_than_experts(fixed_rows):
    """Choices may be dropped, and be the same twice."""
    slots, batches = 9, []
    assert slots > EXPERTS
    for rank in range(WORLD):
        draws = torch.Generator().manual_seed(70 + rank)
        x, _, _, gradient = batch(rank)
        ids = torch.randint(-1, EXPERTS, (len(x), slots), generator=draws)
        batches.append((x, torch.rand(ids.shape, generator=draws), ids, gradient))
    outputs, inputs, _ = alone(batches)

    def body(world):
        layer = ExpertParallel(
            own_experts(world.rank, "cpu"), group=world, dtype=torch.float32, shared=shared_expert,
            gradients="sum", fixed_rows=fixed_rows, **{**SIZES, "topk": slots},
        )  # fmt: skip
        x, scores, ids, gradient = batches[world.rank]
        x, scores = (one.clone().requires_grad_() for one in (x, scores))
        out = layer(x, scores, ids)
        out.backward(gradient)
        expect_close(out, outputs[world.rank])
        expect_close(x.grad, inputs[world.rank][0])
        expect_close(scores.grad, inputs[world.rank][1])
        layer.finalize()

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize("chunks", [1, 3])
def test_bfloat16(torch_way, chunks):
    """As models have it; of three dimensions; without gradients."""
    batches = [batch(rank, tokens=(8, 8)) for rank in range(WORLD)]
    outputs, _, weights = alone(batches)

    def body(world):
        experts = own_experts(world.rank, world.device, torch.bfloat16)
        layer = ExpertParallel(
            experts, group=world, shared=shared_expert, gradients="mean", chunks=chunks, **SIZES
        )
        x, scores, ids, gradient = (one.to(world.device) for one in batches[world.rank])
        x, gradient = x.bfloat16(), gradient.bfloat16()
        shaped = (one.unflatten(0, (2, 4)) for one in (x, scores, ids))
        with torch.no_grad():
            out = layer(*shaped)
        assert out.shape == (2, 4, HIDDEN) and out.dtype == torch.bfloat16
        if world.device != "cpu":
            torch.cuda.current_stream().synchronize()
        error = out.flatten(0, 1).float().cpu() - outputs[world.rank]
        assert error.norm() < 0.03 * outputs[world.rank].norm()
        layer(x.requires_grad_(), scores, ids).backward(gradient)
        first = world.rank * LOCAL
        if world.device != "cpu":
            torch.cuda.current_stream().synchronize()
        for mine, whole in zip(experts.parameters(), weights):
            want = whole[first : first + LOCAL] / WORLD
            assert (mine.grad.float().cpu() - want).norm() < 0.03 * want.norm()
        layer.finalize()

    torch_way.run(WORLD, body)


def test_rows_that_are_none_do_not_matter():
    """With fixed rows: what experts make of them may be NaN, forward and backward."""
    batches = [batch(rank) for rank in range(WORLD)]
    outputs, inputs, weights = alone(batches)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, count):
            ctx.count = int(count)
            return Poison.spoilt(rows, ctx.count)

        @staticmethod
        def backward(ctx, gradient):
            return Poison.spoilt(gradient, ctx.count), None

        @staticmethod
        def spoilt(rows, count):
            rows = rows.clone()
            rows[count:] = float("nan")
            return rows

    def body(world):
        own = own_experts(world.rank, world.device)

        def experts(rows, offsets):
            return Poison.apply(own(Poison.apply(rows, offsets[-1]), offsets), offsets[-1])

        layer = ExpertParallel(
            experts, group=world, dtype=torch.float32, shared=shared_expert, gradients="sum",
            fixed_rows=WORLD * MOST * TOPK, **SIZES,
        )  # fmt: skip
        x, scores, ids, gradient = batches[world.rank]
        x.requires_grad_(), scores.requires_grad_()
        out = layer(x, scores, ids)
        out.backward(gradient)
        expect_close(out, outputs[world.rank])
        expect_close(x.grad, inputs[world.rank][0])
        expect_close(scores.grad, inputs[world.rank][1])
        first = world.rank * LOCAL
        for mine, whole in zip(own.parameters(), weights):
            expect_close(mine.grad, whole[first : first + LOCAL])

    waybill.run_threads(WORLD, body)


def test_layers_of_a_model_share_memory():
    """Four of them, two microbatches in flight, checkpoints."""

    def body(world):
        first, *others = range(4)
        made = {}
        for number in (first, *others):
            made[number] = ExpertParallel(
                own_experts(world.rank, world.device), group=world, dtype=torch.float32,
                gradients="sum", layer=None if number == first else made[first].layer, **SIZES,
            )  # fmt: skip
        model = torch.nn.ModuleList(made.values())
        assert len({id(module.layer) for module in model}) == 1
        assert len(list(model.parameters())) == 12

        def run(x, scores, ids, checkpointed):
            for module in model:
                if checkpointed:
                    again = torch.utils.checkpoint.checkpoint
                    x = x + again(module, x, scores, ids, use_reentrant=False)
                else:
                    x = x + module(x, scores, ids)
            return x

        grads = []
        for checkpointed in (False, True):
            model.zero_grad()
            halves = [batch(world.rank, seed) for seed in (1, 2)]
            sums = [run(x.requires_grad_(), s, i, checkpointed) for x, s, i, _ in halves]
            for out, (_, _, _, gradient) in zip(sums, halves):
                out.backward(gradient)
            grads.append([weight.grad.clone() for weight in model.parameters()])
        for one, other in zip(*grads):
            assert torch.equal(one, other)

    waybill.run_threads(WORLD, body)


def test_grouped_mm_of_no_rows():
    weights = torch.randn(3, 16, 32, requires_grad=True)
    rows = torch.zeros(0, 16, requires_grad=True)
    out = grouped_mm(rows, weights, torch.zeros(3, dtype=torch.int32))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert rows.grad.shape == (0, 16) and not weights.grad.any()


def test_bad_input():
    def body(world):
        def make(experts=lambda rows, ends: rows, **options):
            return ExpertParallel(experts, group=world, **{**SIZES, "gradients": "sum", **options})

        with pytest.raises(waybill.InvalidArgument, match='expected "sum" or "mean"'):
            make(gradients="total")
        with pytest.raises(waybill.InvalidArgument, match="chunks = 0, expected"):
            make(chunks=0)
        with pytest.raises(waybill.InvalidArgument, match="at most max_tokens = 9, in 2 chunks"):
            make(chunks=2, dtype=torch.float32)(*(torch.cat([one] * 3) for one in batch(0)[:3]))
        with pytest.raises(waybill.InvalidArgument, match="layer is a int"):
            make(layer=3)
        layer = EPAll2AllLayer(world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD)
        with pytest.raises(
            waybill.InvalidArgument, match=r"expected .6, 2, 16, 'grouped', 'plain'."
        ):
            make(layer=layer, topk=2)
        with pytest.raises(waybill.InvalidArgument, match="capacity are those of the layer"):
            make(layer=layer, capacity=3)
        made = make(lambda rows, offsets: rows[:, :2], dtype=torch.float32)
        with pytest.raises(waybill.InvalidArgument, match=r"experts of rank . gave"):
            made(*batch(world.rank)[:3])

    waybill.run_threads(WORLD, body)
