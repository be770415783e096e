"""Moving torch tensors: in place, in the caller's own memory, every dtype bit for bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import waybill.torch as wt  # noqa: E402

DTYPES = [
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64", "int32", "bool",
    "int8", "uint8", "int16", "int64", "complex64", "uint16", "uint32", "uint64",
]  # fmt: skip
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def table():
    """Rank 0: 3 rows to rank 1, 1 stays; rank 1: 2 rows to rank 0."""
    lens, dispatch = torch.tensor([[3, 1], [2, 0]]), torch.tensor([[1, 0], [0, -1]])
    return wt.compute_metadata(lens, dispatch)


def payload(dtype, shape=(2, 4, 6), seed=0):
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    high = 2 if dtype == "bool" else 2 ** (8 * size - 1)
    numbers = np.random.default_rng(seed).integers(0 if high == 2 else -high, high, shape)
    return torch.from_numpy(numbers).to(BITS[size]).view(kind)


def bits(tensor):
    return tensor.detach().view(BITS[tensor.element_size()])


def expected(source, output):
    want = bits(output).clone()
    want[1, :3], want[0, 0], want[0, 1:3] = (
        bits(source)[0, :3],
        bits(source)[0, 3],
        bits(source)[1, :2],
    )
    return want


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_bit_for_bit(dtype):
    source, output = payload(dtype), payload(dtype, seed=1)
    want, where = expected(source, output), output.data_ptr()
    got = wt.orchestrate_simulate(source, output, table()[0])
    assert got is output and output.data_ptr() == where and output.dtype == source.dtype
    assert torch.equal(bits(output), want)
    assert torch.equal(bits(source), bits(payload(dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "complex64"])
def test_writes_through_views_that_are_not_contiguous(dtype):
    memory = payload(dtype, (6, 2, 8), seed=2)
    output = memory.permute(1, 2, 0)[:, ::2]  # (2, 4, 6)
    source = payload(dtype, (2, 6, 4)).transpose(1, 2)
    assert not output.is_contiguous() and not source.is_contiguous()
    want, untouched = expected(source, output), bits(memory)[:, :, 1::2].clone()
    assert wt.orchestrate_simulate(source, output, table()[0]) is output
    assert torch.equal(bits(output), want)
    assert torch.equal(bits(memory).permute(1, 2, 0)[:, ::2], want)
    assert torch.equal(bits(memory)[:, :, 1::2], untouched)


# A warning says so: test_torch_gradients.py.
without_gradients = pytest.mark.filterwarnings("ignore:.*requires gradients:UserWarning")


@without_gradients
@pytest.mark.parametrize("source_grad", [False, True])
@pytest.mark.parametrize("output_grad", [False, True])
def test_tensors_that_require_grad(source_grad, output_grad):
    source, output = torch.rand(2, 4, 6), torch.rand(2, 4, 6)
    want = expected(source, output)
    source.requires_grad_(source_grad)
    output.requires_grad_(output_grad)
    got = wt.orchestrate_simulate(source, output, table()[0])
    assert got is output and got.requires_grad == output_grad and got.grad_fn is None
    assert torch.equal(bits(got), want)


@without_gradients
def test_a_result_of_autograd_can_be_sent():
    leaf = torch.rand(2, 4, 6, requires_grad=True)
    hidden = leaf * 2
    output = torch.zeros(2, 4, 6)
    wt.orchestrate_simulate(hidden, output, table()[0])
    assert not output.requires_grad
    hidden.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2))


def test_wider_metadata_of_numpy_and_device_dtypes_do_too():
    fwd = table()[0]
    source = torch.rand(2, 4, 6)
    want = expected(source, torch.zeros(2, 4, 6)).view(torch.float32)
    for metadata in (fwd, fwd.normalize_dtype(), fwd.numpy(), fwd.normalize_dtype().numpy()):
        assert torch.equal(wt.orchestrate_simulate(source, torch.zeros(2, 4, 6), metadata), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_simulate_communication_keeps_the_dtype(dtype):
    fwd, _ = table()
    tensors = [payload(dtype, (4, 6)), payload(dtype, (2, 6), seed=1)]
    got = wt.simulate_communication(tensors, fwd)
    assert [t.dtype for t in got] == [t.dtype for t in tensors]
    first = torch.cat([bits(tensors[0])[3:], bits(tensors[1])])
    assert torch.equal(bits(got[0]), first)
    assert torch.equal(bits(got[1]), bits(tensors[0])[:3])


@without_gradients
def test_simulate_communication_takes_any_view_and_number_of_axes():
    fwd, _ = table()
    tensors = [torch.rand(3, 2, 4).permute(2, 1, 0), torch.rand(2, 2, 3, requires_grad=True)]
    got = wt.simulate_communication(tensors, fwd)
    assert torch.equal(got[0], torch.cat([tensors[0][3:], tensors[1].detach()]))
    assert torch.equal(got[1], tensors[0][:3]) and not got[0].requires_grad
    empty = wt.simulate_communication([torch.rand(4, 0, 3), torch.rand(2, 0, 3)], fwd)
    assert [tuple(t.shape) for t in empty] == [(3, 0, 3), (3, 0, 3)]


def kv_reverse():
    """One rank, two shards of 2 and 1 rows; the first comes back twice."""
    mapping = torch.tensor([[[[0, 0], [0, 1]], [[0, 1], [-1, -1]]]])
    place = torch.tensor([[[0, 0], [1, -1]]])
    tables = [[0, 2]], [[1, 2]], [[2, 3]], [[2, 1]], [2], [[0, 0]]
    return wt.compute_metadata_kv(mapping, place, *map(torch.tensor, tables))[1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_sum_kv_copies(dtype):
    planes = torch.arange(18).reshape(6, 3).to(getattr(torch, dtype))
    want = planes[:3].clone()
    want[:2] += planes[3:5]
    rev = kv_reverse()
    for metadata in (rev, rev.get_slice(0), rev.normalize_dtype(), rev.numpy()):
        got = wt.sum_kv_copies(planes, metadata, 0)
        assert got.dtype == planes.dtype and torch.equal(got, want)
    output = torch.empty(3, 6, dtype=planes.dtype)[:, ::2]
    assert wt.sum_kv_copies(planes, rev, 0, output) is output
    assert torch.equal(output, want)


def test_sum_kv_copies_of_gradients_in_float32():
    planes = torch.full((6, 3), 256.0, dtype=torch.bfloat16)
    planes[3:5] = 1.0  # 257 is no bfloat16
    output = torch.empty(3, 3, requires_grad=True)
    got = wt.sum_kv_copies(planes.requires_grad_(), kv_reverse(), 0, output)
    assert got is output and output[:2].tolist() == [[257.0] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overlap", ["reject", "last_wins"])
def test_the_gather_of_a_gpu_on_the_cpu(dtype, overlap):
    """What tensors of a GPU go through, here with tensors of the CPU."""
    from waybill.torch.functions import _on_device

    memory = payload(dtype, (6, 2, 8), seed=2)
    output = memory.permute(1, 2, 0)[:, ::2]
    source = payload(dtype, (2, 6, 4)).transpose(1, 2)
    want = expected(source, output)
    _on_device(source, output, table()[0], overlap)
    assert torch.equal(bits(output), want)


@pytest.mark.parametrize("shapes", [((2, 0, 6), (2, 0, 6)), ((2, 4, 0), (2, 5, 0))])
def test_the_gather_of_a_gpu_with_nothing_to_move(shapes):
    from waybill.torch.functions import _on_device

    lens = torch.tensor([[3, 1], [2, 0]]) if shapes[0][1] else torch.zeros(2, 2, dtype=torch.long)
    fwd, _ = wt.compute_metadata(lens, torch.tensor([[1, 0], [0, -1]]))
    _on_device(torch.rand(shapes[0]), torch.rand(shapes[1]), fwd, "reject")
    output = torch.rand(shapes[1])
    assert wt.orchestrate_simulate(torch.rand(shapes[0]), output, fwd) is output


def test_payloads_must_be_tensors():
    fwd, _ = table()
    for bad in (None, [[0.0]], np.zeros((2, 4, 6), np.float32), "text"):
        with pytest.raises(wt.InvalidArgument, match=r"tensor is a .*, expected a torch.Tensor"):
            wt.orchestrate_simulate(bad, torch.zeros(2, 4, 6), fwd)
        with pytest.raises(wt.InvalidArgument, match=r"output_tensor is a .*, expected a torch.T"):
            wt.orchestrate_simulate(torch.zeros(2, 4, 6), bad, fwd)
        with pytest.raises(wt.InvalidArgument, match=r"planes is a .*, expected a torch.Tensor"):
            wt.sum_kv_copies(bad, kv_reverse(), 0)


def test_test_qkv_dispatch_runs():
    assert wt.test_qkv_dispatch() is None
    assert wt.test_qkv_dispatch(world_size=4, num_seqs=3, max_seq_shard=4, num_tokens=64) is None
