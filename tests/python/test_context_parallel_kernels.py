"""Kernels by themselves: the same sequences, with and without gaps."""

import numpy as np
import pytest
from packed import attention

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

from waybill.torch.attention.moves import home_lens  # noqa: E402

# (queries, keys) of each sequence
PLAIN = [(5, 5), (200, 300), (1, 140), (7, 7)]
GAPS = [(9, 0), (5, 5), (200, 300), (0, 33), (1, 140), (3, 0), (0, 2)]
#: FlashAttention takes sequences of one query another way.
ONE_QUERY = [(1, 3), (0, 2), (1, 1), (1, 140), (0, 4)]
MASKS = [{}, {"window": 6}, {"mask": "full"}]
CPU_KERNELS = ["dot_product", "flex"]
GPU_KERNELS = ["varlen", "flash_attn", "flash_attn_3", "flex", "dot_product"]


def kernel_named(name, device):
    try:
        return wt.kernels.choose_kernel(name, torch.device(device), "test")
    except wt.Unsupported as error:
        pytest.skip(str(error))


def inputs(lengths, shape, device):
    generator = torch.Generator().manual_seed(0)
    q_rows, k_rows = (sum(pair[i] for pair in lengths) for i in range(2))
    sizes = (
        (q_rows, shape.heads, shape.head_dim), (k_rows, shape.kv_heads, shape.head_dim),
        (k_rows, shape.kv_heads, shape.v_head_dim),
    )  # fmt: skip
    return [torch.randn(*s, generator=generator).to(device, shape.dtype) for s in sizes]


def plain(q, k, v, lengths, shape):
    """In float64, one sequence after the other."""
    outs, lses = [], []
    for q_, k_, v_ in zip(
        q.split([a for a, _ in lengths]), k.split([b for _, b in lengths]),
        v.split([b for _, b in lengths]),
    ):  # fmt: skip
        if len(k_) == 0 or len(q_) == 0:
            outs.append(q_.new_zeros(len(q_), shape.heads, shape.v_head_dim))
            lses.append(q_.new_full((len(q_), shape.heads), float("inf")))
            continue
        longer = torch.cat([q_.new_zeros(len(k_) - len(q_), *q_.shape[1:]), q_])
        out, lse = attention(longer, k_, v_, shape.mask, shape.window, shape.scale)
        outs.append(out[len(k_) - len(q_) :])
        lses.append(lse[len(k_) - len(q_) :])
    return torch.cat(outs), torch.cat(lses)


def compare(name, lengths, device, dtype, tolerance, head_dims=(32, 32), backward=True, **mask):
    kernel = kernel_named(name, device)
    shape = wt.BatchPlanner(1, 4, 2, *head_dims, dtype=dtype, **mask).shape
    kernel.check(shape, torch.device(device), "test")
    q, k, v = inputs(lengths, shape, device)
    sequences = wt.kernels.Sequences.of([a for a, _ in lengths], [b for _, b in lengths], device)
    out, lse = kernel.forward(q, k, v, sequences, shape, True)
    wide = [t.cpu().double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = plain(*wide, lengths, shape)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.cpu().double(), expected.detach(), **close)
    met = expected_lse.isfinite()
    got = lse.t().cpu().double()
    torch.testing.assert_close(got[met], expected_lse.detach()[met], **close)
    if not backward:
        return
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = kernel.backward(weights.to(device), q, k, v, out, lse, sequences, shape)
    for got, want in zip(grads, torch.autograd.grad(expected, wide, weights.double())):
        torch.testing.assert_close(got.cpu().double(), want, **close)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [PLAIN, GAPS, ONE_QUERY])
@pytest.mark.parametrize("name", CPU_KERNELS)
def test_on_the_cpu(name, lengths, mask):
    compare(name, lengths, "cpu", torch.float32, 1e-4, backward=name != "flex", **mask)


def test_heads_of_v_may_be_smaller():
    compare("dot_product", PLAIN, "cpu", torch.float32, 1e-4, (24, 16))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what flex's compiler imports
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [PLAIN, GAPS, ONE_QUERY])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_on_a_gpu(name, lengths, mask):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    compare(name, lengths, "cuda", torch.bfloat16, 0.06, (64, 64), **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "flash_attn", "flash_attn_3"])
def test_heads_of_v_may_be_smaller_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    compare(name, GAPS, "cuda", torch.bfloat16, 0.06, (192, 128))


def test_a_block_mask_names_the_blocks_that_meet():
    from waybill.torch.kernels.backends import block_mask

    shape = wt.BatchPlanner(1, 2, 2, 16, dtype=torch.float32).shape
    q_lens, k_lens = [100, 20, 0, 180], [150, 0, 30, 220]
    mask = block_mask(wt.kernels.Sequences.of(q_lens, k_lens), shape, "cpu")
    visible = torch.zeros(300, 400, dtype=torch.bool)
    row = first = 0
    for rows, keys in zip(q_lens, k_lens):
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        visible[row : row + rows, first : first + keys] = seen
        row, first = row + rows, first + keys
    rows, keys = torch.meshgrid(torch.arange(300), torch.arange(400), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, rows, keys), visible)
    met = torch.nn.functional.pad(visible, (0, 512 - 400, 0, 384 - 300))
    met = met.unflatten(1, (4, 128)).unflatten(0, (3, 128)).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), met)


def test_runs_of_own_rows_are_one_call_as_far_as_no_row_lies_between():
    """Sequences (first query, queries, first key, keys): of keys that touch, of keys that do not,
    and of queries that do not.
    """
    table = np.array([[0, 4, 0, 4], [4, 3, 4, 3], [7, 2, 9, 2], [12, 1, 11, 3]])
    calls = home_lens(table, 14, takes_gaps=False)
    assert [call[2:] for call in calls] == [
        ([4, 3], [4, 3]), ([2], [2]), ([1], [3]),
    ]  # fmt: skip
    assert [call[:2] for call in calls] == [
        (slice(0, 7), slice(0, 7)), (slice(7, 9), slice(9, 11)), (slice(12, 13), slice(11, 14)),
    ]  # fmt: skip
    (whole,) = home_lens(table, 14, takes_gaps=True)
    assert whole[:2] == (slice(0, 14), slice(0, 14))
    assert sum(whole[2]) == sum(whole[3]) == 14
