"""Golden records: metadata, layouts, small helpers, the simulation; and that none goes untested."""

import hashlib

import numpy as np
import pytest
import records as golden
from error_texts import WRITTEN_TWICE
from records import (
    KV_TABLES,
    array,
    every_record,
    expect_array,
    expect_layout,
    expect_metadata,
    given,
    metadata,
    records,
)

import waybill


@every_record("compute_metadata")
def test_compute_metadata(face, record):
    seq_len, dispatch = given(face, record["inputs"], "seq_len", "global_dispatch")
    want = record["outputs"]
    if record["inputs"]["return_intermediate"]:
        fwd, rev, intermediates = face.module.compute_metadata(
            seq_len, dispatch, return_intermediate=True
        )
        names = ("tokens_to_dst_per_dispatch", "seq_to_dst", "num_received_seqs")
        assert isinstance(intermediates, tuple) and len(intermediates) == len(names)
        for name, value in zip(names, intermediates):
            expect_array(face, name, value, want["intermediates"][name])
    else:
        fwd, rev = face.module.compute_metadata(seq_len, dispatch)
    expect_metadata(face, "fwd", fwd, want["fwd"])
    expect_metadata(face, "rev", rev, want["rev"])


@every_record("compute_metadata_kv")
def test_compute_metadata_kv(face, record):
    tables = given(
        face, record["inputs"], *KV_TABLES, "q_to_num_kv_token", "seq_len", "num_seqs",
        "q_dispatch", "q_seq_to_dst", "max_num_local_seqs",
    )  # fmt: skip
    fwd, rev, intermediates = face.module.compute_metadata_kv(*tables, return_intermediate=True)
    want = record["outputs"]
    expect_metadata(face, "fwd", fwd, want["fwd"])
    expect_metadata(face, "rev", rev, want["rev"])
    (ids,) = intermediates
    expect_array(face, "kv_dst_global_seq_id", ids, want["kv_dst_global_seq_id"])
    assert face.module.compute_metadata_kv(*tables) == (fwd, rev)


@every_record("compute_attn_layout_seqlens")
def test_compute_attn_layout_seqlens(face, record):
    inputs = record["inputs"]
    tables = given(face, inputs, "seq_shard_len", "seq_shard_cumsum", "dispatch")
    options = {name: inputs[name] for name in ("prepend_zero", "shard_to_tuple")}
    layout = face.module.compute_attn_layout_seqlens(*tables, **options)
    expect_layout(face, layout, record["outputs"])
    if options == {"prepend_zero": True, "shard_to_tuple": False}:
        layout = face.module.compute_attn_layout_seqlens(*tables)
        expect_layout(face, layout, record["outputs"])


@every_record("compute_e2e_metadata")
def test_compute_e2e_metadata(face, record):
    tables = given(
        face, record["inputs"], "mlp_seq_len", "mlp_num_seqs", "mlp_q_dispatch", *KV_TABLES,
        "q_to_num_kv_token",
    )  # fmt: skip
    *four, fa_params = face.module.compute_e2e_metadata(*tables)
    for name, got in zip(("fwd_q", "rev_q", "fwd_kv", "rev_kv"), four):
        expect_metadata(face, name, got, record["outputs"][name])
    expect_layout(face, fa_params, record["outputs"]["fa_params"])


@every_record("mlp_layout_packed_params")
def test_mlp_layout_packed_params(face, record):
    (lens,) = given(face, record["inputs"], "seq_lens")
    params = face.module.mlp_layout_packed_params(lens)
    want = record["outputs"]
    assert params.qkv_format == want["qkv_format"]
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"):
        expect_array(face, name, getattr(params, name), want[name])


@every_record("Metadata.get_slice")
def test_get_slice(face, record):
    table = metadata(face, record["inputs"]["metadata"])
    ranks = record["inputs"]["ranks"]
    assert len(ranks) == len(record["outputs"]["slices"])
    for rank, want in zip(ranks, record["outputs"]["slices"]):
        expect_metadata(face, f"slice of rank {rank}", table.get_slice(rank), want)


@every_record("Metadata.normalize_dtype")
def test_normalize_dtype(face, record):
    table = metadata(face, record["inputs"]["metadata"])
    want = record["outputs"]["metadata"]
    expect_metadata(face, "normalized", table.normalize_dtype(), want)
    expect_metadata(face, "the argument", table, record["inputs"]["metadata"])


@every_record("create_qkv_dispatch_with_custom_mapping")
def test_create_qkv_dispatch_with_custom_mapping(face, record, capsys):
    inputs, want = record["inputs"], record["outputs"]
    arguments = given(face, inputs, "world_size", "seq_lens", "cp_num", "cp_dst", "seq_shard_lens")
    create = face.module.create_qkv_dispatch_with_custom_mapping
    *five, intermediates, lens = create(*arguments, True, True)
    expect_dispatch(face, five, want, array(inputs["cp_query_dst"]))
    expect_array(face, "seq_lens", lens, inputs["seq_lens"])
    assert len(intermediates) == 4
    if want["kv_dst_global_seq_id"] is not None:
        expect_array(face, "ids", intermediates[3], want["kv_dst_global_seq_id"])
    expect_dispatch(face, create(*arguments), want, array(inputs["cp_query_dst"]))
    assert capsys.readouterr().out == ""


@every_record("create_qkv_dispatch")
def test_create_qkv_dispatch_from_the_recorded_plan(face, record):
    inputs, want = record["inputs"], record["outputs"]
    tables = given(
        face, inputs, "cp_seq_lens", "num_cp_shards", "cp_query_dst", *KV_TABLES,
        "q_to_num_kv_tokens",
    )  # fmt: skip
    *four, fa_params, intermediates = face.module.compute_e2e_metadata(*tables, True)
    layout = face.module.compute_attn_layout_seqlens(
        tables[0], tables[7], tables[2], shard_to_tuple=True
    )
    for part, whole in zip(fa_params, layout):
        assert all((a == b).all() for a, b in zip(part, whole, strict=True))
    expect_dispatch(face, (*four, layout), want, array(inputs["cp_query_dst"]))
    if want["kv_dst_global_seq_id"] is not None:
        expect_array(face, "ids", intermediates[3], want["kv_dst_global_seq_id"])


@every_record("create_qkv_dispatch")
def test_create_qkv_dispatch_draws_what_the_original_drew(record):
    """After the same torch.manual_seed the torch face equals DistCA, number for number."""
    torch = pytest.importorskip("torch")
    from faces import torch_face

    face, inputs = torch_face(), record["inputs"]
    sizes = [inputs[n] for n in ("world_size", "total_seq_len", "num_seqs", "max_cp_degree")]
    torch.manual_seed(record["seed"])
    raw = face.module.create_raw_qkv_dispatch(*sizes)
    assert len(raw) == 9 and raw.seq_lens == ()
    for name, got in zip(waybill.RawQkvDispatch._fields[:-1], raw):
        expect_array(face, name, got, inputs[name])
    torch.manual_seed(record["seed"])
    *five, lens = face.module.create_qkv_dispatch(*sizes, return_mlp_no_shard_seq_lens=True)
    expect_array(face, "seq_lens", lens, inputs["seq_lens"])
    expect_dispatch(face, five, record["outputs"], array(inputs["cp_query_dst"]))


def expect_dispatch(face, got, want, dispatch):
    """(fwd_q, rev_q, fwd_k, rev_k, attention layout)"""
    assert isinstance(got, (tuple, list)) and len(got) == 5
    for name, table in zip(("fwd_q", "rev_q", "fwd_k", "rev_k"), got):
        expect_metadata(face, name, table, want[name])
    if want["attention"] is None:
        expect_empty_ranks_are_empty(face, got[4], dispatch)
    else:
        expect_layout(face, got[4], want["attention"])


def expect_empty_ranks_are_empty(face, layout, dispatch):
    """Where DistCA is wrong about a rank that receives nothing (R3), it is not recorded."""
    received = [int((dispatch == rank).sum()) for rank in range(len(dispatch))]
    assert 0 in received, "the record has no attention layout without need"
    assert face.host(layout.num_local_seqs_recv).tolist() == received
    for rank, count in enumerate(received):
        assert len(layout.cu_seqlens_q[rank]) == len(layout.cu_seqlens_kv[rank]) == count + 1
        if count == 0:
            assert layout.cu_seqlens_q[rank].tolist() == layout.cu_seqlens_kv[rank].tolist() == [0]
            assert int(layout.max_seqlen_q[rank]) == int(layout.max_seqlen_kv[rank]) == 0


@every_record("exclusive_cumsum")
def test_exclusive_cumsum(face, record):
    tensor, dim = given(face, record["inputs"], "tensor", "dim")
    got = face.module.exclusive_cumsum(tensor, dim=dim)
    expect_array(face, "result", got, record["outputs"]["result"])
    if dim == 0:
        got = face.module.exclusive_cumsum(tensor)
        expect_array(face, "result", got, record["outputs"]["result"])


@every_record("prepend_zero_fn")
@pytest.mark.parametrize("name", ["prepend_zero", "prepend_zero_fn"])
def test_prepend_zero(face, record, name):
    tensor, dim = given(face, record["inputs"], "tensor", "dim")
    got = getattr(face.module, name)(tensor, dim)
    expect_array(face, "result", got, record["outputs"]["result"])


@every_record("mask_by_neg")
def test_mask_by_neg(face, record):
    got = face.module.mask_by_neg(*given(face, record["inputs"], "tensor", "mask"))
    expect_array(face, "result", got, record["outputs"]["result"])


@every_record("index_put_with_neg_padding_1d")
def test_index_put_with_neg_padding_1d(face, record):
    arguments = given(face, record["inputs"], "tensor", "src", "index")
    got = face.module.index_put_with_neg_padding_1d(*arguments)
    expect_array(face, "result", got, record["outputs"]["result"])
    expect_array(face, "the argument", arguments[0], record["inputs"]["tensor"])


@every_record("gen_seq_lens")
def test_gen_seq_lens(face, record):
    inputs = record["inputs"]
    arguments = given(face, inputs, "world_size", "num_seqs", "total_len")
    (uniforms,) = given(face, inputs, "uniforms")
    got = face.module.gen_seq_lens(*arguments, uniforms=uniforms)
    expect_array(face, "seq_len", got, record["outputs"]["seq_len"])


@every_record("gen_seq_lens")
def test_gen_seq_lens_draws_what_the_original_drew(record):
    torch = pytest.importorskip("torch")
    from faces import torch_face

    face, inputs = torch_face(), record["inputs"]
    world_size, num_seqs, total_len = given(face, inputs, "world_size", "num_seqs", "total_len")
    torch.manual_seed(record["seed"])
    drawn = torch.rand(world_size, num_seqs).numpy()
    assert (drawn == array(inputs["uniforms"])).all(), "torch's generator is another than then"
    torch.manual_seed(record["seed"])
    got = face.module.gen_seq_lens(world_size, num_seqs, total_len)
    expect_array(face, "seq_len", got, record["outputs"]["seq_len"])


_ERRORS = {
    "RuntimeError": (RuntimeError, waybill.ShapeMismatch),
    "IndexError": (IndexError, waybill.RankOutOfRange),
    "AssertionError": (AssertionError, waybill.NotThreeAxes),
}


@every_record("orchestrate_simulate")
def test_orchestrate_simulate(face, record):
    tensor, output = given(face, record["inputs"], "tensor", "output_tensor")
    table = metadata(face, record["inputs"]["metadata"])
    error = record["outputs"].get("error")
    if error is None:
        got = face.module.orchestrate_simulate(tensor, output, table)
        assert got is output
        expect_array(face, "output", output, record["outputs"]["output_tensor"])
    else:
        recorded, ours = _ERRORS[error]
        with pytest.raises(recorded) as caught:
            face.module.orchestrate_simulate(tensor, output, table)
        assert type(caught.value) is ours and isinstance(caught.value, waybill.InvalidArgument)
        assert str(caught.value).startswith("orchestrate_simulate: ")
        expect_array(face, "output", output, record["inputs"]["output_tensor"])
    expect_array(face, "tensor", tensor, record["inputs"]["tensor"])


def test_the_records_have_every_kind_of_error():
    seen = {record["outputs"].get("error") for record in records("orchestrate_simulate")}
    assert seen == {None, *_ERRORS}


def test_overlapping_writers_can_be_refused(face):
    (record,) = [
        r for r in records("orchestrate_simulate") if r["case"] == "ok-overlap-last-writer-wins"
    ]
    tensor, output = given(face, record["inputs"], "tensor", "output_tensor")
    table = metadata(face, record["inputs"]["metadata"])
    with pytest.raises(waybill.ShapeMismatch, match=WRITTEN_TWICE):
        face.module.orchestrate_simulate(tensor, output, table, overlap="reject")
    expect_array(face, "output", output, record["inputs"]["output_tensor"])


@every_record("simulate_communication")
def test_simulate_communication(face, record):
    tensors = [face.array(array(entry)) for entry in record["inputs"]["tensors"]["ragged"]]
    table = metadata(face, record["inputs"]["metadata"])
    got = face.module.simulate_communication(tensors, table)
    want = record["outputs"]["tensors"]["ragged"]
    assert isinstance(got, list) and len(got) == len(want)
    for rank, (rows, entry) in enumerate(zip(got, want)):
        expect_array(face, f"rank {rank}", rows, entry)


@every_record("simulate_communication")
def test_source_rows_is_the_same_as_a_gather(record):
    tensors = [array(entry) for entry in record["inputs"]["tensors"]["ragged"]]
    from faces import NumpyFace

    table = metadata(NumpyFace(), record["inputs"]["metadata"])
    most, hidden = max(map(len, tensors)), tensors[0].shape[1]
    padded = np.zeros((len(tensors), most, hidden), np.float32)
    for row, tensor in zip(padded, tensors):
        row[: len(tensor)] = tensor
    received = int(table.num_recv_tokens.max())
    rows = waybill.source_rows(padded.shape, (len(tensors), received, hidden), table)
    gathered = np.where(rows[..., None] >= 0, padded.reshape(-1, hidden)[rows], 0)
    for rank, entry in enumerate(record["outputs"]["tensors"]["ragged"]):
        want = array(entry)
        np.testing.assert_array_equal(gathered[rank, : len(want)], want)
        assert (rows[rank, len(want) :] == -1).all()


def test_every_function_of_the_index_has_a_test():
    assert golden.functions_with_tests == set(golden.index())


def test_files_are_what_the_index_says():
    for function, entry in golden.index().items():
        content = (golden.FOLDER / entry["file"]).read_bytes()
        assert len(golden.records(function)) == entry["cases"] > 0, function
        assert len(content) == entry["bytes"], function
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], function


def test_no_file_is_outside_the_index():
    in_index = {entry["file"] for entry in golden.index().values()}
    assert {path.name for path in golden.FOLDER.glob("*.jsonl")} == in_index


def test_records_belong_to_the_function_of_their_file():
    for function in golden.index():
        assert {record["fn"] for record in golden.records(function)} == {function}


def test_every_field_of_metadata_is_compared():
    (record, *_) = golden.records("compute_metadata")
    assert set(record["outputs"]["fwd"]) == set(golden.METADATA_FIELDS)
