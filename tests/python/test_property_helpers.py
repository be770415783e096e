"""The helpers on integer arrays, and the generators, against their definitions."""

import numpy as np
import pytest
from compare import expect_same_array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import waybill

dtypes = st.sampled_from(
    ["int64", "int32", "int16", "int8", "uint32", "uint8", "bool", "float64", "float32", "float16"]
)
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


@st.composite
def arrays(draw, shape=shapes, dtypes=dtypes):
    """Random whole numbers, sometimes of a transposed or stepped view."""
    dtype = draw(dtypes)
    low, high = (0 if dtype[0] in "bu" else -100), (1 if dtype == "bool" else 100)
    elements = st.integers(low, high)
    elements = st.booleans() if dtype == "bool" else elements.map(np.dtype(dtype).type)
    array = draw(hnp.arrays(dtype, draw(shape), elements=elements))
    return draw(st.sampled_from([array, array.T, array.repeat(2, axis=0)[::2]]))


@given(array=arrays(), data=st.data())
def test_exclusive_cumsum(face, array, data):
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    floats = array.dtype.kind == "f"  # of which sums of few small whole numbers are exact
    want = np.zeros(array.shape, array.dtype if floats else np.int64)
    for at in np.ndindex(array.shape):
        before = tuple(slice(0, i) if a == dim % array.ndim else i for a, i in enumerate(at))
        want[at] = array[before].astype(np.int64).sum()
    expect_same_array(
        face, "sums", face.module.exclusive_cumsum(given_view(face, array), dim), want
    )


@given(array=arrays(), data=st.data())
def test_prepend_zero(face, array, data):
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    zero_shape = list(array.shape)
    zero_shape[dim] = 1
    want = np.concatenate([np.zeros(zero_shape, array.dtype), array], axis=dim)
    expect_same_array(face, "result", face.module.prepend_zero(given_view(face, array), dim), want)


@given(data=st.data(), shape=shapes)
def test_mask_by_neg(face, data, shape):
    array = data.draw(arrays(st.just(shape)))
    fewer = data.draw(st.integers(0, array.ndim - 1))
    extents = [data.draw(st.sampled_from([1, extent])) for extent in array.shape[fewer:]]
    bits = data.draw(hnp.arrays(np.int64, tuple(extents), elements=st.integers(0, 1)))
    mask = bits.astype(data.draw(dtypes))
    kept = np.dtype(np.int64) if array.dtype.kind in "bu" else array.dtype
    want = np.where(np.broadcast_to(mask != 0, array.shape), array.astype(kept), kept.type(-1))
    expect_same_array(
        face, "result", face.module.mask_by_neg(given_view(face, array), face.array(mask)), want
    )


def test_mask_by_neg_takes_any_number_but_0_as_true(face):
    array, mask = np.array([5, 6, 7, 8]), np.array([2, 0, -1, 1])
    got = face.module.mask_by_neg(face.array(array), face.array(mask))
    assert face.host(got).tolist() == [5, -1, 7, 8]


@given(data=st.data(), array=arrays(), count=st.integers(0, 12), one_source=st.booleans())
def test_index_put_with_neg_padding_1d(face, data, array, count, one_source):
    index = data.draw(hnp.arrays(np.int64, count, elements=st.integers(-1, array.size - 1)))
    low, high = (0 if array.dtype.kind in "bu" else -99), (1 if array.dtype.kind == "b" else 99)
    numbers = hnp.arrays(np.int64, 1 if one_source else count, elements=st.integers(low, high))
    src = data.draw(numbers)
    if data.draw(st.booleans()):
        src = src.astype(array.dtype)
    flat = array.flatten()
    for i, place in enumerate(index):
        if place != -1:
            flat[place] = src[0 if one_source else i]
    tensor = given_view(face, array)
    got = face.module.index_put_with_neg_padding_1d(tensor, face.array(src), face.array(index))
    expect_same_array(face, "result", got, flat.reshape(array.shape))
    np.testing.assert_array_equal(face.host(tensor), array)


def test_the_larger_mask_gives_the_shape(face):
    got = face.module.mask_by_neg(
        face.array(np.array([5, 6], np.int32)), face.array(np.array([[True], [False]]))
    )
    assert face.host(got).tolist() == [[5, 6], [-1, -1]] and face.dtype_name(got) == "int32"


PUT_ERRORS = [
    ("int32", np.array([2**31]), "src has 2147483648, which int32, that of tensor, cannot hold"),
    ("uint8", np.array([-3]), "src has -3, which uint8, that of tensor, cannot hold"),
    ("bool", np.array([2]), "src has 2, which bool, that of tensor, cannot hold"),
    ("int64", np.array([0.5]), "src has dtype float64, expected int64, that of tensor"),
]


@pytest.mark.parametrize(("dtype", "src", "text"), PUT_ERRORS)
def test_what_the_tensor_cannot_hold_is_not_put(face, dtype, src, text):
    put = face.module.index_put_with_neg_padding_1d
    tensor = face.array(np.zeros(3, dtype))
    with pytest.raises(waybill.InvalidArgument, match=text):
        put(tensor, face.array(src), face.array(np.array([1])))
    if src.dtype.kind != "f":  # it is dropped
        got = put(tensor, face.array(src), face.array(np.array([-1])))
        assert not face.host(got).any() and face.dtype_name(got) == dtype


def test_floats_that_are_not_whole(face):
    values = face.array(np.array([0.25, 1.5, -2.125], np.float32))
    module = face.module
    assert face.host(module.exclusive_cumsum(values)).tolist() == [0, 0.25, 1.75]
    assert face.host(module.prepend_zero(values)).tolist() == [0, 0.25, 1.5, -2.125]
    nan = face.array(np.array([0.0, np.nan, 0.5]))
    assert face.host(module.mask_by_neg(values, nan)).tolist() == [-1, 1.5, -2.125]
    put = module.index_put_with_neg_padding_1d(
        values, face.array(np.array([7, 8.5], np.float64)), face.array(np.array([2, -1], np.int16))
    )
    assert face.host(put).tolist() == [0.25, 1.5, 7] and face.dtype_name(put) == "float32"


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_floats_that_numpy_lacks(name):
    torch = pytest.importorskip("torch")
    import waybill.torch as wt

    dtype = getattr(torch, name)
    values = torch.tensor([0.5, 3.0, -2.0]).to(dtype)
    results = {
        "exclusive_cumsum": (wt.exclusive_cumsum(values), [0, 0.5, 3.5]),
        "prepend_zero": (wt.prepend_zero(values), [0, 0.5, 3, -2]),
        "mask_by_neg": (wt.mask_by_neg(values, values), [0.5, 3, -2]),
        "put": (
            wt.index_put_with_neg_padding_1d(values, values[:1], torch.tensor([2])),
            [0.5, 3, 0.5],
        ),
    }
    for what, (got, want) in results.items():
        assert got.dtype == dtype and got.float().tolist() == want, what


def test_torch_gives_the_same_sums():
    torch = pytest.importorskip("torch")
    import waybill.torch as wt

    for dtype in (torch.float64, torch.float32, torch.int16, torch.uint8, torch.bool):
        values = (torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
        sums = values.cumsum(1)[:, :-1]
        got = wt.exclusive_cumsum(values, 1)
        assert got.dtype == sums.dtype and torch.equal(got[:, 1:], sums)


def given_view(face, array):
    """The array with its strides, where the face can have them."""
    if face.name == "numpy":
        return array
    return face.torch.from_numpy(array.copy(order="K"))


@given(lens=hnp.arrays(np.int64, st.integers(1, 9), elements=st.integers(0, 99)))
def test_mlp_layout_packed_params(face, lens):
    params = face.module.mlp_layout_packed_params(face.array(lens))
    want = np.array([0, *np.cumsum(lens)])
    expect_same_array(face, "q", params.cu_seqlens_q, want)
    expect_same_array(face, "kv", params.cu_seqlens_kv, want)
    assert int(params.max_seqlen_q) == int(params.max_seqlen_kv) == lens.max()
    assert params.qkv_format == "thd"


sizes = {"world_size": st.integers(1, 6), "num_seqs": st.integers(1, 20)}


@given(**sizes, total=st.integers(0, 10_000), seed=st.integers(0, 2**64 - 1))
def test_gen_seq_lens_with_a_seed(face, world_size, num_seqs, total, seed):
    lens = face.module.gen_seq_lens(world_size, num_seqs, total, seed=seed)
    assert isinstance(lens, face.array_type) and face.dtype_name(lens) == "int32"
    host = face.host(lens)
    assert host.shape == (world_size, num_seqs)
    assert (host.sum(axis=1) == total).all()
    assert host.min() >= (1 if total >= num_seqs else 0)
    again = face.module.gen_seq_lens(world_size, num_seqs, total, seed=seed)
    np.testing.assert_array_equal(face.host(again), host)
    np.testing.assert_array_equal(
        waybill.gen_seq_lens(world_size, num_seqs, total, seed=seed), host
    )


@given(**sizes, total=st.integers(0, 10_000), data=st.data())
def test_gen_seq_lens_of_given_draws(face, world_size, num_seqs, total, data):
    draw = st.floats(0, 1, exclude_max=True, width=32)
    draws = data.draw(hnp.arrays(np.float32, (world_size, num_seqs), elements=draw))
    got = face.host(
        face.module.gen_seq_lens(world_size, num_seqs, total, uniforms=face.array(draws))
    )
    share = draws.astype(np.float64) + 0.25 / num_seqs
    exact = share / share.sum(axis=1, keepdims=True) * total
    want = np.round(exact)  # half to even
    want[:, -1] = total - want[:, :-1].sum(axis=1)
    tie = np.abs(exact - np.floor(exact) - 0.5) < 1e-6  # may fall to either side
    for row in range(world_size):
        if want[row].min() >= 0 and not tie[row].any():
            np.testing.assert_array_equal(got[row], want[row])
        assert got[row].sum() == total and got[row].min() >= 0


def test_other_seeds_give_other_lengths(face):
    seen = {
        face.module.gen_seq_lens(2, 8, 1000, seed=seed).tolist().__repr__() for seed in range(9)
    }
    assert len(seen) == 9


plan_sizes = {
    "world_size": st.integers(1, 6),
    "rows": st.integers(0, 40),
    "num_seqs": st.integers(1, 5),
    "seed": st.integers(0, 2**64 - 1),
}


@given(**plan_sizes, data=st.data())
def test_create_qkv_dispatch_with_a_seed(face, world_size, rows, num_seqs, seed, data):
    degree = data.draw(st.integers(1, world_size))
    sizes = world_size, rows * degree, num_seqs, degree
    raw = face.module.create_raw_qkv_dispatch(*sizes, True, seed)
    lens, num_shards, dst, *tables, (seq_lens,) = raw
    assert (face.host(seq_lens).sum(axis=1) == rows * degree).all()
    assert (face.host(lens).sum(axis=1) == rows * degree).all()
    counts, shards = face.host(num_shards), face.host(lens).shape[1]
    np.testing.assert_array_equal(face.host(dst) >= 0, np.arange(shards) < counts[:, None])
    *five, inside, whole = face.module.create_qkv_dispatch(*sizes, True, True, seed=seed)
    *four, fa_params, want_inside = face.module.compute_e2e_metadata(
        lens, num_shards, dst, *tables, return_intermediate=True
    )
    assert five[:4] == four and whole.tolist() == seq_lens.tolist()
    assert [t.tolist() for t in inside] == [t.tolist() for t in want_inside]
    for got, want in zip(five[4], fa_params):
        assert [t.tolist() for t in got] == [t.tolist() for t in want]
    assert face.module.validate(*five) == []


def test_seeds_are_the_same_in_both_faces():
    torch = pytest.importorskip("torch")
    import waybill.torch as wt

    ours = waybill.create_raw_qkv_dispatch(4, 64, 3, 4, seed=5)
    theirs = wt.create_raw_qkv_dispatch(4, 64, 3, 4, seed=5)
    for a, b in zip(ours[:-1], theirs[:-1]):
        assert torch.equal(torch.from_numpy(a), b)


def test_verbose_prints_the_plan(face, capsys):
    one = face.array(np.array([[4]]))
    shard = face.array(np.array([[[4]]]))
    face.module.create_qkv_dispatch_with_custom_mapping(
        1, one, face.array(np.array([[1]])), face.array(np.array([[[0]]])), shard, verbose=True
    )
    printed = capsys.readouterr().out
    assert "cp_seq_lens" in printed and "kv_to_q_mapping" in printed


def test_sample_documents_fill_the_tokens_exactly():
    names = waybill.length_distributions()
    assert names and len(set(names)) == len(names)
    for name in names:
        lens = waybill.sample_documents(name, 100_000, seed=3)
        assert lens.dtype == np.int64 and lens.sum() == 100_000 and lens.min() >= 1
        assert lens.tolist() == waybill.sample_documents(name, 100_000, 3).tolist()
