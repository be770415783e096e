"""EPAll2AllLayer in float64: sums and gradients exact enough for torch.autograd.gradcheck."""

import numpy as np
import pytest

import waybill
from waybill.moe import simulate_dispatch

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, EPConfig  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 2, 3, 2, 4, 3
DOUBLE = torch.float64


def layer_on(world, per_node, weight_dtype=DOUBLE, dtype=DOUBLE, **options):
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, per_node, WORLD, dtype, weight_dtype,
        **options,
    )  # fmt: skip


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(MAX, HIDDEN, generator=generator, dtype=DOUBLE)
    ids = torch.randint(0, EXPERTS + 1, (MAX, TOPK), generator=generator)
    weights = torch.rand(MAX, TOPK, generator=generator, dtype=DOUBLE)
    return tokens, ids, weights


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("rows", ["grouped", "compact"])
@pytest.mark.parametrize("local_combine", [False, True])
def test_gradcheck(per_node, rows, local_combine):
    """All ranks check at once: a rank's sums depend on its own tokens and weights alone."""

    def body(world):
        layer = layer_on(world, per_node, rows=rows, enable_local_combine=local_combine)
        tokens, ids, weights = inputs(world.rank)
        bias = torch.ones(MAX, HIDDEN, dtype=DOUBLE)

        def experts(tokens, weights, bias):
            got, arrived, layout = layer.dispatch(tokens, ids, weights)
            if rows == "grouped":
                out = got.sin() * arrived[:, None]
            else:
                out = got.sin() * (arrived * (layout.recv_topk_indices >= 0)).sum(1)[:, None]
            return layer.combine(out, layout, biases=(bias,))

        given = [x.requires_grad_() for x in (tokens, weights, bias)]
        assert torch.autograd.gradcheck(experts, given)
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node)


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("weight_dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_simulation(per_node, weight_dtype, weighted):
    rounds = [inputs(r) for r in range(WORLD)]
    config = EPConfig(
        MAX, HIDDEN, TOPK, EXPERTS, 0, WORLD, per_node, DOUBLE, weight_dtype
    )  # fmt: skip
    weights = [w.to(weight_dtype) for _, _, w in rounds]
    want = simulate_dispatch(
        config, [t.numpy() for t, _, _ in rounds], [i.numpy() for _, i, _ in rounds],
        [w.numpy() for w in weights],
    )  # fmt: skip
    assert want.recv_tokens[0].dtype == np.float64
    sums = want.combine([rows / 3 for rows in want.recv_tokens], weighted=weighted)

    def body(world):
        layer = layer_on(world, per_node, weight_dtype)
        tokens, ids, _ = rounds[world.rank]
        rows, row_weights, layout = layer.dispatch(tokens, ids, weights[world.rank])
        assert row_weights.dtype == weight_dtype
        assert np.array_equal(row_weights.numpy(), want.recv_weights[world.rank])
        home = layer.combine(rows / 3, layout, weighted=weighted)
        assert home.dtype == DOUBLE and np.array_equal(home.detach().numpy(), sums[world.rank])
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node)


def test_sums_have_the_digits_of_float64():
    """numpy's float64 in, as it comes from lists of numbers."""
    config = EPConfig(1, 1, 2, 2, 0, 1, 1, "float64", "float64")
    there = simulate_dispatch(config, [[[1.0]]], [[[0, 1]]], [[[1.0, 1e-12]]])
    assert there.combine(there.recv_tokens, weighted=True)[0] == 1 + 1e-12


def test_a_quantized_payload_has_no_float64():
    with pytest.raises(waybill.InvalidArgument, match="token_dtype = float64"):
        simulate_dispatch(
            EPConfig(1, 128, 1, 1, 0, 1, 1, "float64"), [np.zeros((1, 128))], [[[0]]],
            payload="quantized",
        )  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtypes", [(DOUBLE, torch.float32), (torch.float32, DOUBLE)])
def test_gpus_say_that_they_have_none(dtypes):
    def body(world):
        dtype, weight_dtype = dtypes
        with pytest.raises(waybill.Unsupported, match=r"float64 on GPUs.*ranks in host memory"):
            EPAll2AllLayer(world, 4, 8, 2, 0, 2, 1, 1, dtype, weight_dtype)

    run_threads(1, body, device="cuda")
