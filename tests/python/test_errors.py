"""What a caller's mistake says: function, argument, what was got, what was expected."""

import re

import numpy as np
import pytest
from error_texts import a_multiple, an_integer

import waybill

LENS, DISPATCH = [[4, 2], [3, 0]], [[1, 0], [1, -1]]
KV = {
    "kv_to_q_mapping": [[[[0, 0]]]], "kv_to_q_rank": [[[0]]], "kv_context_size": [[0]],
    "q_to_num_kv_seq": [[1]], "q_to_num_kv_token": [[5]], "seq_len": [[5]], "num_seqs": [1],
    "q_dispatch": [[0]],
}  # fmt: skip
ONE_SHARD = [1, [[4]], [[1]], [[[0]]], [[[4]]]]
NAMES = ("seq_lens", "cp_num", "cp_dst", "seq_shard_lens")


def ints(face, *values):
    """Nested lists of integers as the face's arrays; what is no list stays."""
    return [face.array(np.array(v, np.int64)) if isinstance(v, list) else v for v in values]


def kv_call(face, **changes):
    arguments = {**KV, **changes}
    names = list(arguments)
    return face.module.compute_metadata_kv(**dict(zip(names, ints(face, *arguments.values()))))


def custom(face, **changes):
    arguments = [changes.get(name, value) for name, value in zip(NAMES, ONE_SHARD[1:])]
    world = changes.get("world_size", 1)
    return face.module.create_qkv_dispatch_with_custom_mapping(world, *ints(face, *arguments))


CASES = [
    # compute_metadata
    ("compute_metadata", [[4, 2], DISPATCH], "seq_len has shape [2], expected [W, S]"),
    ("compute_metadata", [LENS, [[1, 0]]], "global_dispatch has shape [1, 2], expected [2, 2]"),
    ("compute_metadata", [LENS, [[2, 0], [1, -1]]],
     "global_dispatch of rank 0, entry 0 = 2, expected -1 (none) or 0..1"),
    ("compute_metadata", [LENS, [[1, 0], [1, -2]]],
     "global_dispatch of rank 1, entry 1 = -2, expected -1 (none) or 0..1"),
    ("compute_metadata", [[[4, -2], [3, 0]], DISPATCH],
     "seq_len of rank 0, entry 1 = -2, expected 0..2^40 rows"),
    ("compute_metadata", [LENS, [[1, 0], [-1, -1]]],
     "seq_len of rank 1, shard 0 = 3 rows, but global_dispatch has no destination for it"),
    ("compute_metadata", [[[2**40, 1]], [[0, 0]]],
     "the sum of seq_len exceeds 2^40 rows; no such buffer exists"),
    # the attention and the MLP layout
    ("compute_attn_layout_seqlens", [LENS, LENS, [[1], [1]]],
     "dispatch has shape [2, 1], expected [2, 2]"),
    ("compute_attn_layout_seqlens", [LENS, [[4, -1], [3, 0]], DISPATCH],
     "seq_shard_cumsum of rank 0, entry 1 = -1, expected 0..2^40 rows"),
    ("mlp_layout_packed_params", [LENS], "seq_lens has shape [2, 2], expected [n]"),
    # helpers
    ("exclusive_cumsum", [LENS, 2], "dim = 2, expected -2..1 for an array of 2 dimensions"),
    ("prepend_zero", [LENS, -3], "dim = -3, expected -2..1 for an array of 2 dimensions"),
    ("exclusive_cumsum", [[2**62, 2**62, 1]],
     f"the sum up to element 1 does not fit int64 (value {2**62})"),
    ("mask_by_neg", [LENS, [1, 0, 1]],
     "mask has shape [3], expected [2, 2], or one that can be broadcast with it"),
    ("index_put_with_neg_padding_1d", [[1, 2, 3], [9], [3]],
     "index[0] = 3, expected -1 (dropped) or 0..2"),
    ("index_put_with_neg_padding_1d", [[1, 2, 3], [9], [-2]],
     "index[0] = -2, expected -1 (dropped) or 0..2"),
    ("index_put_with_neg_padding_1d", [[1, 2, 3], [9, 9], [0, 1, -1]],
     "src has 2 elements, expected 3 (as index) or 1"),
    # generators
    ("gen_seq_lens", [0, 1, 1], "world_size = 0, expected 1..1048576"),
    ("gen_seq_lens", [2**40, 1, 1], f"world_size = {2**40}, expected 1..1048576"),
    ("gen_seq_lens", [1, 0, 1], "num_seqs = 0, expected 1..2^31 / world_size"),
    ("gen_seq_lens", [1, 1, -1], "total_len = -1, expected 0..2^31 - 1"),
    ("gen_seq_lens", [1, 1, 2**31], "total_len = 2147483648, expected 0..2^31 - 1"),
    ("gen_seq_lens", [1, 1, 1, -1], "seed = -1, expected 0..2^64 - 1"),
    ("gen_seq_lens", [1, 1, 1, 1, [1]], "got seed and uniforms, expected one of them"),
    ("create_raw_qkv_dispatch", [2, 9, 2, 2],
     a_multiple("total_seq_len", 9, "max_cp_degree = 2")),
    ("create_raw_qkv_dispatch", [2, 9, 2, 3],
     "max_cp_degree = 3, expected 1..world_size = 2: the shards of a sequence go to different"),
    ("create_raw_qkv_dispatch", [2, 8, 0, 2], "num_seqs = 0, expected 1..2^31 / world_size"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "text"), CASES)
def test_texts(face, name, arguments, text):
    with pytest.raises(waybill.InvalidArgument, match="^" + re.escape(f"{name}: {text}")) as caught:
        getattr(face.module, name)(*ints(face, *arguments))
    assert isinstance(caught.value, ValueError)


KV_CASES = [
    ("kv_to_q_mapping", [[[0, 0]]], "has shape [1, 1, 2], expected [W, S, C, 2]"),
    ("kv_to_q_mapping", [[[[0, 1]]]], "of rank 0, shard 0, copy 0 = (0, 1), expected a query"),
    ("kv_to_q_rank", [[0]], "has shape [1, 1], expected [1, 1, 1]"),
    ("kv_to_q_rank", [[[1]]], "of rank 0, shard 0, copy 0 = 1, expected 0..0"),
    ("kv_context_size", [[1]], "of rank 0, shard 0 = 1, expected 0 (KV shard 0 of the query of"),
    ("q_to_num_kv_seq", [[2]], "of rank 0, entry 0 = 2, expected 0..number of shards"),
    ("q_to_num_kv_token", [[6]], "of rank 0, shard 0 = 6, expected 5, the rows of its KV shards"),
    ("seq_len", [5], "has shape [1], expected [W, S]"),
    ("num_seqs", [2], "of rank 0, entry 0 = 2, expected 0..S"),
    ("q_dispatch", [[1]], "of rank 0, entry 0 = 1, expected -1 (none) or 0..0"),
    ("max_num_local_seqs", 3, "= 3, expected 1, that of q_dispatch [1, 1]"),
    ("q_seq_to_dst", [[[0, 0]]], "has shape [1, 1, 2], expected [1, 1, 1]"),
]


@pytest.mark.parametrize(("name", "value", "text"), KV_CASES)
def test_texts_of_compute_metadata_kv(face, name, value, text):
    assert len(kv_call(face)) == 2
    with pytest.raises(waybill.InvalidArgument) as caught:
        kv_call(face, **{name: value})
    assert str(caught.value).startswith(f"compute_metadata_kv: {name} {text}")


CUSTOM_CASES = [
    ({"seq_shard_lens": [[[3]]]}, "seq_shard_lens of rank 0, sequence 0 sums to 3, expected 4"),
    ({"cp_dst": [[[1]]]}, "cp_dst of rank 0, sequence 0, shard 0 = 1, expected 0..0"),
    ({"cp_num": [[2]]}, "cp_num of rank 0, sequence 0 = 2, expected 1..1"),
    ({"cp_num": [1]}, "cp_num has shape [1], expected [1, 1]"),
    ({"world_size": 2}, "seq_lens has 1 rows, expected world_size = 2"),
]


@pytest.mark.parametrize(("changes", "text"), CUSTOM_CASES)
def test_texts_of_a_custom_mapping(face, changes, text):
    assert len(custom(face)) == 5
    with pytest.raises(waybill.InvalidArgument) as caught:
        custom(face, **changes)
    assert str(caught.value).startswith(f"create_qkv_dispatch_with_custom_mapping: {text}")


def test_dtypes_of_tables(face):
    for dtype, expected in (("float32", "int64"), ("bool", "integers")):
        lens = face.array(np.array(LENS).astype(dtype))
        text = f"compute_metadata: seq_len has dtype {dtype}, expected {expected}"
        with pytest.raises(waybill.InvalidArgument, match=re.escape(text)):
            face.module.compute_metadata(lens, face.array(np.array(DISPATCH)))


def test_metadata(face):
    fwd, _ = face.module.compute_metadata(*ints(face, LENS, DISPATCH))
    for rank, got in ((2, "2, expected 0..1"), (-1, "-1, expected 0..1"), (2**40, f"{2**40},")):
        with pytest.raises(waybill.InvalidArgument, match=rf"^get_slice: rank = {re.escape(got)}"):
            fwd.get_slice(rank)
    for rank in ("1", 1.0, None):
        with pytest.raises(waybill.InvalidArgument, match=an_integer("rank", ".*")):
            fwd.get_slice(rank)
    with pytest.raises(waybill.InvalidArgument, match=r"^get_slice: this is the slice of one"):
        fwd.get_slice(0).get_slice(0)
    with pytest.raises(waybill.InvalidArgument, match=r"Metadata.traffic: a slice knows one rank"):
        fwd.get_slice(0).traffic()
    for value in (2**32, -1):
        fwd.dst_offset[0, 1] = value
        text = f"normalize_dtype: dst_offset[0, 1] = {value} does not fit uint32"
        with pytest.raises(waybill.InvalidArgument, match=f"^{re.escape(text)}$"):
            fwd.normalize_dtype()


def test_simulation(face):
    fwd, _ = face.module.compute_metadata(*ints(face, LENS, DISPATCH))
    floats = [face.array(np.zeros((2, n, 3), np.float32)) for n in (6, 9)]
    run = face.module.orchestrate_simulate
    with pytest.raises(waybill.ShapeMismatch, match=r'overlap = "x", expected "reject" or "last'):
        run(*floats, fwd, overlap="x")
    with pytest.raises(waybill.ShapeMismatch, match="num_threads = -1, expected >= 0"):
        run(*floats, fwd, num_threads=-1)
    for dtype in ("float64", "int32"):
        other = face.array(np.zeros((2, 9, 3), dtype))
        with pytest.raises(
            waybill.ShapeMismatch, match=f"output_tensor has dtype {dtype}, expected float32"
        ):
            run(floats[0], other, fwd)
    with pytest.raises(waybill.ShapeMismatch, match=r"seq_len has shape \[2\].*not the slice"):
        run(*floats, fwd.get_slice(0))
    with pytest.raises(waybill.ShapeMismatch, match="shares memory with source 0"):
        run(floats[1][:, :6], floats[1], fwd)
    with pytest.raises(waybill.InvalidArgument, match="metadata is a NoneType, expected a waybill"):
        run(*floats, None)
    wide = face.array(np.zeros((2, 6, 3), np.complex128))
    with pytest.raises(waybill.Unsupported, match="complex128 of 16 bytes, expected elements of 1"):
        run(wide, wide, fwd)
    fwd.dst_offset[1, 0] = 7
    place = "source rank 1, destination rank 1, shard 0, copy 0, offset 7, length 3"
    with pytest.raises(RuntimeError, match=f"offset .* length exceeds the 9 rows .*{place}"):
        run(*floats, fwd)


def test_communication_and_sums(face):
    fwd, rev = face.module.compute_metadata(*ints(face, LENS, [[[1], [0]], [[1], [-1]]]))
    rows = [face.array(np.zeros((6, 3), np.float32)), face.array(np.zeros((3, 3), np.int64))]
    with pytest.raises(waybill.ShapeMismatch, match=r"tensors have dtypes .*float32.*int64"):
        face.module.simulate_communication(rows, fwd)
    with pytest.raises(
        waybill.ShapeMismatch, match=r"num_recv_tokens has shape \[2, 3\], expected"
    ):
        face.module.simulate_communication(rows[:1], fwd)
    with pytest.raises(waybill.ShapeMismatch, match="got a scalar, expected tensors"):
        face.module.simulate_communication([face.array(np.float32(1))] * 2, fwd)
    for rank in (2, -1, 2**40):
        with pytest.raises(
            waybill.InvalidArgument, match=f"sum_kv_copies: rank = {rank}, expected 0"
        ):
            face.module.sum_kv_copies(rows[0], rev, rank)
    with pytest.raises(waybill.InvalidArgument, match="no seq_recv_mask or recv_seq_lens"):
        face.module.sum_kv_copies(rows[0], fwd, 0)
    with pytest.raises(
        waybill.InvalidArgument, match=r"planes has shape \[6, 3\], expected \[1 \* 3"
    ):
        face.module.sum_kv_copies(rows[0], rev, 1)
    with pytest.raises(
        waybill.InvalidArgument, match="planes of int64 and output of int64, expected"
    ):
        face.module.sum_kv_copies(rows[1], rev, 1)


def test_the_check_refuses_unknown_arguments(face):
    with pytest.raises(waybill.InvalidArgument, match=r"got \['tokens'\], expected some of"):
        face.module.test_qkv_dispatch(tokens=4)
    with pytest.raises(waybill.InvalidArgument, match="world_size = 0"):
        face.module.test_qkv_dispatch(world_size=0)


def test_json():
    for text, message in (
        ("{}", r'JSON: /: the key "dst_rank" is missing'),
        ("{", "JSON: line 1, column 2: syntax error"),
        ('{"dst_rank": 1}', "JSON: /"),
    ):
        with pytest.raises(waybill.IoError, match=message) as caught:
            waybill.Metadata.from_json(text)
        assert isinstance(caught.value, OSError)
        with pytest.raises(waybill.IoError, match="JSON: "):
            waybill.QkvPlan.from_json(text)
    for kind in (waybill.Metadata, waybill.QkvPlan):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
            kind.from_json("nowhere.json")
        with pytest.raises(
            waybill.InvalidArgument, match="got a NoneType, expected a JSON text or a"
        ):
            kind.from_json(None)


def test_distributions_and_plans():
    with pytest.raises(waybill.InvalidArgument, match='name = "nope", expected one of'):
        waybill.sample_documents("nope", 10)
    with pytest.raises(waybill.InvalidArgument, match="num_tokens = -1, expected 0"):
        waybill.sample_documents(waybill.length_distributions()[0], -1)
    good = [2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2], None]
    with pytest.raises(waybill.InvalidArgument, match='kv_layout = "x", expected "per_rank" or'):
        waybill.QkvPlan(*good, "x")
    with pytest.raises(waybill.InvalidArgument, match="QkvPlan: shard_len has dtype float64"):
        waybill.QkvPlan(2, [0, 2, 3], [4, 2.5, 3], *good[3:])
    with pytest.raises(waybill.InvalidArgument, match="QkvPlan: shard_len is no array"):
        waybill.QkvPlan(2, [0, 2, 3], [[4], [2, 3]], *good[3:])
    with pytest.raises(
        waybill.InvalidArgument, match=r"validate: got \['NoneType'\], expected a pl"
    ):
        waybill.validate(None)
