"""Tensors on a GPU: tables in and out, rows moved there bit for bit, errors as on the CPU."""

import numpy as np
import pytest
from error_texts import lies_on
from records import METADATA_FIELDS

torch = pytest.importorskip("torch")

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64", "int32", "int64",
    "bool",
]  # fmt: skip
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LENS = [[40, 7, 0, 90], [3, 0, 61, 5], [0, 0, 0, 0]]
COPIES = [
    [[1, 2], [0, -1], [-1, -1], [2, 2]],
    [[0, 1], [1, -1], [2, 0], [0, 1]],
    [[-1, -1], [-1, -1], [-1, -1], [-1, -1]],
]


def tables(device, copies=True):
    dispatch = torch.tensor(COPIES) if copies else torch.tensor(COPIES)[:, :, 0]
    return torch.tensor(LENS).to(device), dispatch.contiguous().to(device)


def payload(dtype, shape, seed=0):
    """Random bits, on the CPU."""
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    high = 2 if dtype == "bool" else 2 ** (8 * size - 1)
    numbers = np.random.default_rng(seed).integers(0 if high == 2 else -high, high, shape)
    return torch.from_numpy(numbers).to(BITS[size]).view(kind)


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(BITS[tensor.element_size()])


def on_gpu(tensor):
    return tensor.is_cuda and tensor.is_contiguous()


def tensors_of(metadata):
    values = (getattr(metadata, name) for name in METADATA_FIELDS)
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("copies", [False, True])
def test_metadata_to_the_gpu_and_back(copies):
    for metadata in wt.compute_metadata(*tables("cpu", copies)):
        metadata.dst_rank = metadata.dst_rank.repeat_interleave(2, 1)[:, ::2]
        moved = metadata.cuda()
        assert type(moved) is wt.Metadata and all(map(on_gpu, tensors_of(moved)))
        assert moved.device.type == "cuda" and len(tensors_of(moved)) == len(tensors_of(metadata))
        assert (
            moved.world_size == 3 and moved.num_total_recv_tokens == metadata.num_total_recv_tokens
        )
        assert moved == metadata and moved.cpu() == metadata
        assert all(map(on_gpu, tensors_of(metadata.cuda(0)))) and metadata.numpy().cuda() == moved
        small = moved.get_slice(1).normalize_dtype()
        assert all(map(on_gpu, tensors_of(small))) and small.seq_len.dtype == torch.uint32
        assert small.cpu() == metadata.get_slice(1).normalize_dtype()
        assert wt.validate(moved) == []


@pytest.mark.parametrize("copies", [False, True])
def test_compute_metadata_of_tables_on_the_gpu(copies):
    lens, dispatch = tables("cuda", copies)
    *both, inside = wt.compute_metadata(lens, dispatch, return_intermediate=True)
    *want, want_inside = wt.compute_metadata(*tables("cpu", copies), return_intermediate=True)
    assert both == want
    for metadata in both:
        assert all(map(on_gpu, tensors_of(metadata)))
    assert both[0].seq_len is lens and both[0].dst_rank is dispatch
    for got, expected in zip(inside, want_inside):
        assert got.is_cuda and torch.equal(got.cpu(), expected)


def test_every_table_function_keeps_the_device():
    torch.manual_seed(1)
    lens, counts, dst, *kv, _ = wt.create_raw_qkv_dispatch(4, 64, 3, 4)
    gpu = [table.cuda() for table in (lens, counts, dst, *kv)]
    for inside in (False, True):
        got = wt.compute_e2e_metadata(*gpu, inside)
        want = wt.compute_e2e_metadata(lens, counts, dst, *kv, inside)
        assert got[:4] == want[:4]
        for a, b in zip(flat(got), flat(want), strict=True):
            assert a.is_cuda and torch.equal(a.cpu(), b)
    kv_gpu = wt.compute_metadata_kv(*gpu[3:], gpu[0], gpu[1], gpu[2], None, None, True)
    assert kv_gpu[:2] == want[2:4] and kv_gpu[2][0].is_cuda
    for ragged in (False, True):
        layout = wt.compute_attn_layout_seqlens(gpu[0], gpu[7], gpu[2], True, ragged)
        assert all(t.is_cuda for t in flat(tuple(layout)))
    params = wt.mlp_layout_packed_params(gpu[0][0])
    assert params.cu_seqlens_q.is_cuda and params.max_seqlen_q.is_cuda


def flat(value):
    """All tensors inside."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, wt.Metadata):
        return tensors_of(value)
    return [tensor for item in value for tensor in flat(item)]


def test_helpers_keep_the_device():
    values, mask = torch.tensor([[3, 1], [4, 1]]), torch.tensor([[True, False], [False, True]])
    index = torch.tensor([3, -1])
    calls = [
        (wt.exclusive_cumsum, values, 1), (wt.prepend_zero, values, 1),
        (wt.mask_by_neg, values, mask),
        (wt.index_put_with_neg_padding_1d, values, index, index),
    ]  # fmt: skip
    for function, *arguments in calls:
        got = function(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments))
        assert got.is_cuda and torch.equal(got.cpu(), function(*arguments))


@pytest.mark.parametrize("metadata_on_gpu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_orchestrate_simulate_is_the_cpu_bit_for_bit(dtype, metadata_on_gpu):
    for copies in (False, True):
        fwd, rev = wt.compute_metadata(*tables("cuda" if metadata_on_gpu else "cpu", copies))
        there = payload(dtype, (3, max(fwd.num_total_recv_tokens) + 2, 16), seed=1)
        source, back = payload(dtype, (3, 140, 16)), payload(dtype, (3, 2 * 140, 16), seed=2)
        for table, given, output in ((fwd, source, there), (rev, there, back)):
            gpu = output.cuda()
            where = gpu.data_ptr()
            assert wt.orchestrate_simulate(given.cuda(), gpu, table) is gpu
            assert gpu.data_ptr() == where
            wt.orchestrate_simulate(given, output, table)
            assert torch.equal(bits(gpu), bits(output))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_are_not_contiguous(dtype):
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    m = max(fwd.num_total_recv_tokens)
    memory, source = payload(dtype, (8, 3, 2 * m), seed=3), payload(dtype, (3, 16, 140))[:, ::2]
    gpu_memory, gpu_source = memory.cuda(), payload(dtype, (3, 16, 140)).cuda()[:, ::2]
    output, gpu = (whole.permute(1, 2, 0)[:, ::2] for whole in (memory, gpu_memory))
    assert not gpu.is_contiguous() and not gpu_source.is_contiguous()
    wt.orchestrate_simulate(source.transpose(1, 2), output, fwd)
    assert wt.orchestrate_simulate(gpu_source.transpose(1, 2), gpu, fwd) is gpu
    assert torch.equal(bits(gpu_memory), bits(memory))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_of_overlapping_copies_the_last_wins(dtype):
    rng = np.random.default_rng(5)
    lens = torch.from_numpy(rng.integers(0, 30, (3, 6)))
    fwd, _ = wt.compute_metadata(lens, torch.from_numpy(rng.integers(0, 3, (3, 6, 2))))
    fwd.dst_offset = torch.from_numpy(rng.integers(0, 40, (3, 6, 2)))
    source, output = payload(dtype, (3, 180, 32)), payload(dtype, (3, 70, 32), seed=1)
    gpu = wt.orchestrate_simulate(source.cuda(), output.cuda(), fwd)
    assert torch.equal(bits(gpu), bits(wt.orchestrate_simulate(source, output.clone(), fwd)))
    expect_same_error(source, output, fwd, overlap="reject")


def expect_same_error(tensor, output, metadata, **options):
    """The same class and text as on the CPU; the output is left alone on both."""
    errors = []
    for device in ("cpu", "cuda"):
        target = output.to(device, copy=True)
        with pytest.raises(waybill.InvalidArgument) as caught:
            wt.orchestrate_simulate(tensor.to(device), target, metadata, **options)
        assert torch.equal(bits(target), bits(output))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def _wrong_rank(m):
    m.dst_rank[0, 0] = 9


def _past_the_end(m):
    m.dst_offset[1, 0] = 10**9


def _too_long(m):
    m.seq_len[0, 1] = 1000


@pytest.mark.parametrize("damage", [_wrong_rank, _past_the_end, _too_long])
def test_wrong_tables_are_refused_as_on_the_cpu(damage):
    fwd, _ = wt.compute_metadata(*tables("cpu", copies=False))
    damage(fwd)
    expect_same_error(torch.rand(3, 140, 4), torch.rand(3, 300, 4), fwd)


@pytest.mark.parametrize("shapes", [((3, 140, 4), (3, 300, 5)), ((3, 140, 4), (2, 300, 4))])
def test_wrong_shapes_are_refused_as_on_the_cpu(shapes):
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    expect_same_error(*map(torch.rand, shapes), fwd)


def test_tensors_without_three_axes_and_other_dtypes():
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    with pytest.raises(AssertionError, match="orchestrate_simulate: tensor has shape"):
        wt.orchestrate_simulate(torch.rand(3, 140).cuda(), torch.rand(3, 300).cuda(), fwd)
    expect_same_error(torch.rand(3, 140, 4).half(), torch.rand(3, 300, 4).bfloat16(), fwd)
    with pytest.raises(wt.ShapeMismatch, match="output_tensor has dtype"):
        wt.orchestrate_simulate(
            torch.rand(3, 140, 4).half().cuda(), torch.rand(3, 300, 4).cuda(), fwd
        )


def test_memory_of_ones_own_and_one_device():
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    both = torch.rand(3, 300, 4).cuda()
    with pytest.raises(waybill.InvalidArgument, match="shares"):
        wt.orchestrate_simulate(both[:, :140], both, fwd)
    with pytest.raises(wt.ShapeMismatch, match=lies_on("output_tensor", "cpu", "cuda:0")):
        wt.orchestrate_simulate(both, torch.rand(3, 300, 4), fwd)
    with pytest.raises(wt.ShapeMismatch, match="expected one device"):
        wt.simulate_communication([both[0], both[1], both[2].cpu()], fwd)


@pytest.mark.filterwarnings("ignore:.*requires gradients:UserWarning")
def test_tensors_that_require_grad():
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    source = torch.rand(3, 140, 4)
    output = torch.zeros(3, 300, 4, device="cuda", requires_grad=True)
    got = wt.orchestrate_simulate(source.cuda().requires_grad_(), output, fwd)
    assert got is output and got.grad_fn is None and got.requires_grad
    want = wt.orchestrate_simulate(source, torch.zeros(3, 300, 4), fwd)
    assert torch.equal(got.detach().cpu(), want)


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_to_move(rows):
    lens = torch.zeros(2, 2, dtype=torch.int64)
    fwd, _ = wt.compute_metadata(lens, lens)
    output = torch.full((2, rows, 3), 7.0, device="cuda")
    assert wt.orchestrate_simulate(torch.rand(2, rows, 3).cuda(), output, fwd) is output
    assert (output == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_simulate_communication(dtype):
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    tensors = [payload(dtype, (int(rows), 8), seed) for seed, rows in enumerate(fwd.seq_len.sum(1))]
    got = wt.simulate_communication([tensor.cuda() for tensor in tensors], fwd)
    for a, b in zip(got, wt.simulate_communication(tensors, fwd), strict=True):
        assert a.is_cuda and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def test_numpy_face_refuses_tensors_of_a_gpu():
    lens, dispatch = tables("cuda")
    with pytest.raises(
        waybill.InvalidArgument, match=r"seq_len lies on a CUDA device.*waybill\.torch"
    ):
        waybill.compute_metadata(lens, dispatch)
    fwd, _ = waybill.compute_metadata(LENS, COPIES)
    with pytest.raises(waybill.InvalidArgument, match="output_tensor lies on a CUDA device"):
        waybill.orchestrate_simulate(np.zeros((3, 140, 4)), torch.zeros(3, 300, 4).cuda(), fwd)


def test_plan_metadata_on_the_gpu():
    plan = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2])
    got = wt.plan_metadata(plan, "cuda")
    assert all(tensor.is_cuda for tensor in flat(tuple(got)))
    assert got[:4] == wt.plan_metadata(plan)[:4] and wt.validate(*got[:4]) == []
    assert wt.validate(plan, got) == []


def test_an_h2d_copy_that_is_still_under_way_is_waited_for():
    """The gather runs on the current stream, after what stands there already."""
    fwd, _ = wt.compute_metadata(*tables("cpu"))
    source = torch.rand(3, 140, 4096)
    pinned, gpu = source.pin_memory(), torch.empty(3, 140, 4096, device="cuda")
    output = torch.zeros(3, 300, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gpu.copy_(pinned, non_blocking=True)
        wt.orchestrate_simulate(gpu, output, fwd)
    stream.synchronize()
    want = wt.orchestrate_simulate(source, torch.zeros(3, 300, 4096), fwd)
    assert torch.equal(output.cpu(), want)
