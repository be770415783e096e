"""Metadata as programs for DistCA have it: only what a function reads must be there."""

import numpy as np
import pytest

import waybill

LENS = np.array([[3, 2], [4, 0]])
DISPATCH = np.array([[[1, 0], [0, -1]], [[0, 1], [-1, -1]]])


def tables(face):
    return face.module.compute_metadata(face.array(LENS), face.array(DISPATCH))


def payload(face):
    tensor = np.arange(2 * 9 * 3, dtype=np.float32).reshape(2, 9, 3)
    return face.array(tensor), face.array(np.zeros((2, 12, 3), np.float32))


def changed(face, metadata, **fields):
    """The same with other arrays, or dtypes by name, in some fields."""
    values = {}
    for name, value in fields.items():
        old = getattr(metadata, name)
        values[name] = face.array(face.host(old).astype(value)) if isinstance(value, str) else value
    kept = {name: value for name, value in vars(metadata).items() if name not in values}
    return face.module.Metadata(**kept, **values)


def moved(face, metadata):
    return face.host(face.module.orchestrate_simulate(*payload(face), metadata)).tolist()


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "int32", "uint64"])
def test_integers_of_any_size(face, dtype):
    forward, reverse = tables(face)
    lens = changed(face, forward, seq_len=dtype, num_recv_tokens=dtype, num_seqs=dtype)
    assert moved(face, lens) == moved(face, forward)
    both = changed(face, lens, dst_offset=dtype)
    if dtype[0] == "i":
        both = changed(face, both, dst_rank=dtype)
    assert moved(face, both) == moved(face, forward)
    assert str(both) == str(forward)
    assert both.normalize_dtype() == forward.normalize_dtype()
    assert (both.traffic() == forward.traffic()).all() and both._repr_html_()
    for rank in range(2):
        got, want = both.get_slice(rank), forward.get_slice(rank)
        for name in ("seq_len", "num_recv_tokens", "dst_offset", "dst_rank"):
            array = getattr(got, name)
            assert face.dtype_name(array) == face.dtype_name(getattr(both, name)), name
            assert face.host(array).tolist() == face.host(getattr(want, name)).tolist(), name
    back = changed(face, reverse, recv_seq_lens=dtype)
    assert back.normalize_dtype() == reverse.normalize_dtype()
    assert face.host(back.get_slice(0).recv_seq_lens).tolist() == [3, 2]


@pytest.mark.parametrize("dtype", ["bool", "float32", "float64", "int64", "uint8"])
def test_masks_of_any_dtype(face, dtype):
    _, reverse = tables(face)
    other = changed(face, reverse, seq_recv_mask=dtype)
    assert moved(face, other) == moved(face, reverse)
    part = other.get_slice(1)
    assert face.dtype_name(part.seq_recv_mask) == dtype
    assert face.host(part.seq_recv_mask).tolist() == [[1, 1], [0, 0]]
    assert other.normalize_dtype() == reverse.normalize_dtype()
    assert str(other) == str(reverse)
    planes = face.array(np.arange(2 * 5 * 3, dtype=np.float32).reshape(10, 3))
    sums = [face.module.sum_kv_copies(planes, table, 0) for table in (other, reverse)]
    assert face.host(sums[0]).tolist() == face.host(sums[1]).tolist()


def test_a_mask_that_is_not_whole(face):
    _, reverse = tables(face)
    half = changed(face, reverse, seq_recv_mask=face.array(np.full((2, 2, 2), 0.5)))
    assert moved(face, half) == moved(face, reverse)  # it does not read it
    with pytest.raises(waybill.InvalidArgument, match=r"seq_recv_mask\[0, 0, 0\] = 0.5, expected"):
        half.normalize_dtype()
    huge = changed(face, reverse, seq_recv_mask=face.array(np.full((2, 2, 2), np.inf)))
    with pytest.raises(waybill.InvalidArgument, match=r"seq_recv_mask\[0, 0, 0\] = inf, expected"):
        huge.normalize_dtype()


def test_one_count_a_rank(face):
    forward, _ = tables(face)
    totals = face.array(np.array([[9], [7]]))
    other = changed(face, forward, num_recv_tokens=totals)
    assert moved(face, other) == moved(face, forward)
    assert face.host(other.get_slice(1).num_recv_tokens).tolist() == [7]
    assert face.host(other.normalize_dtype().num_recv_tokens).tolist() == [[9], [7]]
    assert "  receives [9] rows\n" in str(other) and "the last" not in str(other)
    assert (other.traffic() == forward.traffic()).all()
    assert other._repr_html_() == forward._repr_html_()
    rows = [payload(face)[0][rank] for rank in range(2)]
    for got, want in zip(
        face.module.simulate_communication(rows, other),
        face.module.simulate_communication(rows, forward),
    ):
        assert face.host(got).tolist() == face.host(want).tolist()


def test_no_counts(face):
    forward, _ = tables(face)
    other = changed(face, forward, num_recv_tokens=None)
    assert moved(face, other) == moved(face, forward)
    part = other.get_slice(1)
    assert part.num_recv_tokens is None
    assert face.host(part.seq_len).tolist() == [4]
    assert other.normalize_dtype().num_recv_tokens is None
    assert part.normalize_dtype().num_recv_tokens is None
    for text in (str(other), str(part)):
        assert "shard 0: rows 0..4 -> rank 0 at" in text and "receives" not in text
    assert repr(other) and part._repr_html_()
    assert (other.traffic() == forward.traffic()).all()
    assert other == other and other != forward
    rows = [payload(face)[0][rank] for rank in range(2)]
    for needs in (lambda: face.module.simulate_communication(rows, other), other.to_json):
        with pytest.raises(waybill.InvalidArgument, match="num_recv_tokens is missing, expected"):
            needs()
    # All the rest is checked.
    assert [found.text for found in face.module.validate(other)] == [
        "metadata.num_recv_tokens: got none, expected counts of shape [2, 3] (shape)"
    ]
    wrong = changed(face, other, dst_offset=face.array(face.host(other.dst_offset) + 1))
    assert len(face.module.validate(wrong)) > 1


def test_no_tables(face):
    forward, _ = tables(face)
    for name in ("dst_rank", "dst_offset", "seq_len"):
        other = changed(face, forward, **{name: None})
        for needs in (other.to_json, lambda other=other: face.module.validate(other)):
            with pytest.raises(waybill.InvalidArgument, match=f"Metadata: {name} is missing"):
                needs()


def test_only_what_is_read_is_looked_at(face):
    forward, _ = tables(face)
    names = ("seq_recv_mask", "recv_seq_lens", "num_seqs", "num_total_recv_tokens", "world_size")
    other = changed(face, forward, num_recv_tokens=object(), **dict.fromkeys(names, object()))
    assert moved(face, other) == moved(face, forward)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16"])
def test_any_negative_rank_is_none(face, dtype):
    forward, _ = tables(face)
    ranks = DISPATCH.copy()
    ranks[0, 1, 1], ranks[1, 1] = -2, [np.iinfo(dtype).min, -7]
    other = changed(face, forward, dst_rank=face.array(ranks.astype(dtype)))
    assert moved(face, other) == moved(face, forward)
    rows = [payload(face)[0][rank] for rank in range(2)]
    got, want = (face.module.simulate_communication(rows, m) for m in (other, forward))
    assert [face.host(r).tolist() for r in got] == [face.host(r).tolist() for r in want]
    where = waybill.source_rows([2, 9, 3], [2, 12, 3], changed_numpy(face, other))
    assert (where == waybill.source_rows([2, 9, 3], [2, 12, 3], changed_numpy(face, forward))).all()
    ranks[0, 0, 0] = 2
    other = changed(face, forward, dst_rank=face.array(ranks.astype(dtype)))
    with pytest.raises(waybill.RankOutOfRange, match=r"destination rank = 2, expected -1 .*0\.\.1"):
        moved(face, other)


def changed_numpy(face, metadata):
    return metadata if face.name == "numpy" else metadata.numpy()


def test_tables_that_are_not_whole_numbers(face):
    forward, _ = tables(face)
    for name in ("dst_rank", "dst_offset", "seq_len"):
        other = changed(face, forward, **{name: "float32"})
        with pytest.raises(waybill.InvalidArgument, match=f"{name} has dtype float32, expected"):
            moved(face, other)


def test_arrays_of_any_strides_and_byte_order():
    """Also on their way to torch."""
    forward, _ = waybill.compute_metadata(LENS, DISPATCH)
    backwards = np.ascontiguousarray(forward.dst_rank[:, ::-1])[:, ::-1]
    other = waybill.Metadata(
        backwards, forward.dst_offset.astype(">i8"), np.asfortranarray(forward.seq_len),
        forward.num_recv_tokens.astype(">i4"), num_seqs=forward.num_seqs,
    )  # fmt: skip
    assert str(other) == str(forward)
    part = other.get_slice(0)
    assert part.dst_offset.tolist() == forward.get_slice(0).dst_offset.tolist()
    pytest.importorskip("torch")
    import waybill.torch as wt

    there = wt.Metadata.from_numpy(other)
    assert there.numpy() == other and there.get_slice(1).seq_len.tolist() == [4]
