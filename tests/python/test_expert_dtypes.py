"""ExpertParallel and its experts: no dtype changes in silence, and float64 works in host memory."""

import pytest

torch = pytest.importorskip("torch")

import waybill  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts, grouped_mm  # noqa: E402

DOUBLE = torch.float64
WORLD, HIDDEN, INNER, EXPERTS, TOPK, MOST = 2, 3, 5, 4, 2, 3
LOCAL = EXPERTS // WORLD
SIZES = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": MOST}
OPERATIONS = [
    {},
    pytest.param(
        {"fixed_rows": 1.0, "operations": True},
        marks=pytest.mark.skipif(not hasattr(torch.library, "custom_op"), reason="no custom_op"),
    ),
]


def module(world, experts, **options):
    return ExpertParallel(experts, group=world, gradients="sum", **{**SIZES, **options})


def experts_of(rank, dtype=DOUBLE):
    experts = SwiGLUExperts(LOCAL, HIDDEN, INNER, dtype)
    draws = torch.Generator().manual_seed(rank)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draws, dtype=DOUBLE))
    return experts


def batch(rank, dtype=DOUBLE):
    draws = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(MOST, HIDDEN, generator=draws, dtype=DOUBLE).to(dtype)
    scores, ids = torch.rand(MOST, EXPERTS, generator=draws, dtype=DOUBLE).topk(TOPK)
    return x, scores.to(dtype), ids


def plain_loop(x, scores, ids):
    """Sums of one process, a token and a topk slot at a time."""
    ranks = [experts_of(rank) for rank in range(WORLD)]
    out = []
    for t in range(x.shape[0]):
        total = 0
        for score, expert in zip(scores[t], ids[t].tolist()):
            own, e = ranks[expert // LOCAL], expert % LOCAL
            inside = torch.nn.functional.silu(x[t] @ own.gate[e]) * (x[t] @ own.up[e])
            total = total + score * (inside @ own.down[e])
        out.append(total)
    return torch.stack(out)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weights", ["combine", "experts"])
@pytest.mark.parametrize("options", OPERATIONS)
def test_float64_of_a_plain_loop(options, weights):
    def body(world):
        own = experts_of(world.rank)
        made = module(world, own, dtype=DOUBLE, weight_dtype=DOUBLE, weights=weights, **options)
        x, scores, ids = batch(world.rank)
        given = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        sums = made(*given, ids)
        wanted = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        want = plain_loop(*wanted, ids)
        assert sums.dtype == DOUBLE
        close(sums, want)
        sums.square().sum().backward()
        want.square().sum().backward()
        for got, one in zip(given, wanted):
            close(got.grad, one.grad)
        assert own.gate.grad.dtype == DOUBLE
        made.finalize()

    waybill.run_threads(WORLD, body)


def test_gradcheck():
    """Of tokens, scores, and what a rank's experts are made of, all ranks at once."""

    def body(world):
        made = module(world, experts_of(world.rank), dtype=DOUBLE, weight_dtype=DOUBLE)
        x, scores, ids = batch(world.rank)
        call = lambda x, scores: made(x, scores, ids)
        assert torch.autograd.gradcheck(call, (x.requires_grad_(), scores.requires_grad_()))
        made.finalize()

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 0], [1, 3, 7]])
def test_grouped_mm_in_float64(ends):
    rows = torch.randn(7, 3, dtype=DOUBLE, requires_grad=True)
    weights = torch.randn(3, 3, 4, dtype=DOUBLE, requires_grad=True)
    offsets = torch.tensor(ends, dtype=torch.int32)
    out = grouped_mm(rows, weights, offsets)
    assert out.shape == (7, 4)
    for expert, (begin, end) in enumerate(zip([0, *ends], ends)):
        assert torch.equal(out[begin:end], rows[begin:end] @ weights[expert])
    filled = lambda rows, weights: grouped_mm(rows, weights, offsets)[: ends[-1]]
    assert torch.autograd.gradcheck(filled, (rows, weights))
    none = grouped_mm(rows[:0], weights, torch.zeros(3, dtype=torch.int32))
    none.sum().backward()
    assert none.shape == (0, 4) and torch.equal(weights.grad, torch.zeros_like(weights))


@pytest.mark.parametrize("options", OPERATIONS)
@pytest.mark.parametrize(
    ("scores", "weight_dtype", "right"),
    [
        (DOUBLE, None, False),
        (DOUBLE, DOUBLE, True),
        (torch.float32, DOUBLE, True),
        (torch.bfloat16, None, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
    ],
)
def test_scores_are_never_rounded(scores, weight_dtype, right, options):
    def body(world):
        made = module(
            world,
            lambda rows, ends: rows,
            dtype=torch.float32,
            weight_dtype=weight_dtype,
            **options,
        )
        assert made.layer.weight_dtype == (weight_dtype or torch.float32)
        x, weights, ids = batch(world.rank, torch.float32)
        weights = weights.to(scores)
        if right:
            want = (x * weights.sum(1, keepdim=True, dtype=DOUBLE)).float()
            torch.testing.assert_close(made(x, weights, ids), want)
        else:
            text = rf"scores is {scores}, expected torch.*weight_dtype.*on rank {world.rank}"
            with pytest.raises(waybill.InvalidArgument, match=f"^ExpertParallel: {text}"):
                made(x, weights, ids)
        made.finalize()

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize("options", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, DOUBLE])
def test_experts_of_another_dtype(dtype, options):
    """Outputs would be rounded, or were before they came; so of shared experts."""

    def body(world):
        x, scores, ids = batch(world.rank, torch.float32)
        other = lambda rows, *_: rows.to(dtype)
        same = lambda rows, *_: rows
        for experts, shared, text in (
            (other, None, rf"what the experts of rank {world.rank} gave is {dtype}"),
            (same, other, rf"what shared gave on rank {world.rank} is {dtype}"),
        ):
            made = module(world, experts, shared=shared, dtype=torch.float32, **options)
            with pytest.raises(
                waybill.InvalidArgument, match=f"{text}, expected torch.float32, or autocast"
            ):
                made(x, scores, ids)
            with torch.autocast("cpu", torch.bfloat16):
                made(x, scores, ids)
            made.finalize()

    waybill.run_threads(WORLD, body)


def test_parameters_with_fewer_digits_than_rows():
    rows, ends = torch.ones(4, 8), torch.tensor([2, 4], dtype=torch.int32)
    experts = SwiGLUExperts(2, 8, 8, torch.bfloat16)
    text = "^SwiGLUExperts: parameters are torch.bfloat16, expected torch.float32 as the rows, or"
    with pytest.raises(waybill.InvalidArgument, match=text):
        experts(rows, ends)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(rows, ends).dtype == torch.float32
    assert experts(rows.bfloat16(), ends).dtype == torch.bfloat16
    assert SwiGLUExperts(2, 8, 8, torch.float32)(rows.bfloat16(), ends).dtype == torch.bfloat16


def test_the_dtypes_of_a_given_layer():
    """They are the layer's: others are refused, none are needed."""

    def body(world):
        layer = EPAll2AllLayer(
            world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD, DOUBLE, torch.float32
        )
        same = lambda rows, ends: rows
        for wrong in ({"dtype": torch.float32}, {"weight_dtype": DOUBLE}):
            name, value = next(iter(wrong.items()))
            text = rf"^ExpertParallel: {name} = {value}, expected torch\..*that of the layer"
            with pytest.raises(waybill.InvalidArgument, match=text):
                ExpertParallel(same, gradients="sum", layer=layer, **SIZES, **wrong)
        for right in ({}, {"dtype": DOUBLE, "weight_dtype": "float32"}):
            ExpertParallel(same, gradients="sum", layer=layer, **SIZES, **right)
        layer.finalize()

    waybill.run_threads(WORLD, body)
