"""The helpers on integer arrays, and the generators, against their definitions."""

import numpy as np
import pytest
from compare import expect_same_array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import waybill

index_dtypes = st.sampled_from(["int64", "int32", "uint32", "bool"])
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


@st.composite
def arrays(draw, shape=shapes, dtypes=index_dtypes):
    """Random integers, sometimes of a transposed or stepped view."""
    dtype = draw(dtypes)
    low = 0 if dtype in ("bool", "uint32") else -1000
    elements = st.booleans() if dtype == "bool" else st.integers(low, 1000)
    array = draw(hnp.arrays(dtype, draw(shape), elements=elements))
    return draw(st.sampled_from([array, array.T, array.repeat(2, axis=0)[::2]]))


@given(array=arrays(), data=st.data())
def test_exclusive_cumsum(face, array, data):
    dim = data.draw(st.integers(-array.ndim, array.ndim - 1))
    want = np.zeros(array.shape, np.int64)
    for at in np.ndindex(array.shape):
        before = tuple(slice(0, i) if a == dim % array.ndim else i for a, i in enumerate(at))
        want[at] = array[before].sum(dtype=np.int64)
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
    mask = data.draw(hnp.arrays(data.draw(index_dtypes), array.shape, elements=st.integers(0, 1)))
    want = np.where(mask != 0, array.astype(np.int64), -1)
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
    src = data.draw(hnp.arrays(np.int64, 1 if one_source else count, elements=st.integers(-99, 99)))
    flat = array.astype(np.int64).flatten()
    for i, place in enumerate(index):
        if place != -1:
            flat[place] = src[0 if one_source else i]
    tensor = given_view(face, array)
    got = face.module.index_put_with_neg_padding_1d(tensor, face.array(src), face.array(index))
    expect_same_array(face, "result", got, flat.reshape(array.shape))
    np.testing.assert_array_equal(face.host(tensor), array)


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
