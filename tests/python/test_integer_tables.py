"""Tables may have any type of integers, and what holds a value per rank may be a column."""

import numpy as np
import pytest
from error_texts import a_multiple, an_integer

import waybill

LENS = np.array([[3, 2], [4, 0]])
DISPATCH = np.array([[1, 0], [1, -1]])
TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def tables(face, dtype):
    """The arguments of compute_metadata, of a dtype; -1 needs a sign."""
    ranks = DISPATCH.astype(dtype if dtype[0] == "i" else "int32")
    return face.array(LENS.astype(dtype)), face.array(ranks)


def raw(face, dtype=None):
    """The eight tables of a plan; the lists of counts as they are, the others of a dtype."""
    found = [
        face.host(table) for table in face.module.create_raw_qkv_dispatch(2, 16, 2, 2, seed=3)[:8]
    ]
    return [face.array(table if dtype is None else table.astype(dtype)) for table in found]


def same(face, got, expected):
    """Whether two results have the same tables, dtypes too."""
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            same(face, one, other)
    elif isinstance(expected, waybill.Metadata):
        assert got == expected
    elif expected is not None:
        assert face.dtype_name(got) == face.dtype_name(expected)
        assert face.host(got).tolist() == face.host(expected).tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_compute_metadata(face, dtype):
    expected = face.module.compute_metadata(*tables(face, "int64"), True)
    got = face.module.compute_metadata(*tables(face, dtype), True)
    same(face, got, expected)
    assert not waybill.validate(*(t if face.name == "numpy" else t.numpy() for t in got[:2]))


def test_lengths_as_they_are_generated(face):
    """gen_seq_lens returns int32."""
    lens = face.module.gen_seq_lens(4, 3, 100, seed=1)
    assert face.dtype_name(lens) == "int32"
    ranks = face.array(np.arange(12).reshape(4, 3) % 4)
    fwd, _ = face.module.compute_metadata(lens, ranks)
    assert face.host(fwd.seq_len).tolist() == face.host(lens).tolist()
    assert face.dtype_name(fwd.seq_len) == "int64"


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_all_tables_of_a_plan(face, dtype):
    for function in (face.module.compute_e2e_metadata,):
        same(face, function(*raw(face, dtype)), function(*raw(face)))
    lens, _, ranks, *kv = raw(face)
    narrow_lens, narrow_counts, narrow_ranks, *narrow_kv = raw(face, dtype)
    same(
        face,
        face.module.compute_metadata_kv(*narrow_kv, narrow_lens, narrow_counts, narrow_ranks),
        face.module.compute_metadata_kv(*kv, lens, raw(face)[1], ranks),
    )
    same(
        face,
        face.module.compute_attn_layout_seqlens(narrow_lens, narrow_kv[-1], narrow_ranks),
        face.module.compute_attn_layout_seqlens(lens, kv[-1], ranks),
    )
    given = (np.array([[6], [4]]), np.array([[2], [1]]), np.array([[[1, 0]], [[0, -1]]]))
    shards = np.array([[[4, 2]], [[4, 0]]])
    custom = face.module.create_qkv_dispatch_with_custom_mapping
    same(
        face,
        custom(2, *(face.array(table.astype(dtype)) for table in (*given, shards))),
        custom(2, *(face.array(table) for table in (*given, shards))),
    )


def test_what_is_no_table_of_integers(face):
    for dtype in ("bool", "float32"):
        with pytest.raises(waybill.InvalidArgument, match=f"seq_len has dtype {dtype}, expected"):
            face.module.compute_metadata(face.array(LENS.astype(dtype)), face.array(DISPATCH))
    huge = face.array(np.full((2, 2), 2**64 - 1, np.uint64))
    with pytest.raises(waybill.InvalidArgument, match="compute_metadata: seq_len has 18446744"):
        face.module.compute_metadata(huge, face.array(DISPATCH))


def test_num_seqs_as_a_column(face):
    fwd, _ = face.module.compute_metadata(*tables(face, "int64"))
    column = face.module.Metadata(**vars(fwd))
    column.num_seqs = face.array(face.host(fwd.num_seqs).reshape(2, 1))
    assert str(column) == str(fwd)
    assert column.get_slice(1) == fwd.get_slice(1)
    assert face.module.validate(column) == []
    assert face.host(column.normalize_dtype().num_seqs).tolist() == [[2], [1]]
    back = face.module.Metadata.from_json(column.to_json())
    assert back == column
    found = raw(face)
    expected = face.module.compute_e2e_metadata(*found)
    found[1] = face.array(face.host(found[1]).reshape(2, 1))
    same(face, face.module.compute_e2e_metadata(*found), expected)
    lens, counts, ranks, *kv = found
    fwd_kv, _ = face.module.compute_metadata_kv(*kv, lens, counts, ranks)
    assert fwd_kv == expected[2]


def test_errors_name_the_function_that_was_called(face):
    calls = {
        "max_cp_degree = 4, expected 1..world_size = 2": (2, 16, 2, 4),
        a_multiple("total_seq_len", 9, "max_cp_degree = 2"): (2, 9, 2, 2),
        "total_seq_len = -2, expected a multiple": (2, -2, 2, 2),
        "num_seqs = 0, expected 1": (2, 8, 0, 2),
        "world_size = 0, expected 1": (0, 8, 2, 1),
        "total_seq_len = 9223372036854775806, expected at most": (2, 2**63 - 2, 2, 2),
        an_integer("num_seqs", "'x'"): (2, 8, "x", 2),
    }
    for name in ("create_qkv_dispatch", "create_raw_qkv_dispatch"):
        for text, sizes in calls.items():
            for seed in (None, 3):
                with pytest.raises(waybill.InvalidArgument) as caught:
                    getattr(face.module, name)(*sizes, seed=seed)
                assert str(caught.value).startswith(f"{name}: {text}"), str(caught.value)
