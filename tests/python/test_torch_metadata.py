"""Metadata of torch tensors: dtypes, shared memory, conversions; routing functions on tensors."""

import numpy as np
import pytest
from records import METADATA_FIELDS

torch = pytest.importorskip("torch")

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402

LENS = [[4, 2], [3, 0]]
DISPATCH = [[[1, 0], [0, -1]], [[1, -1], [-1, -1]]]


def both():
    return wt.compute_metadata(torch.tensor(LENS), torch.tensor(DISPATCH))


def tensors_of(metadata):
    values = ((name, getattr(metadata, name)) for name in METADATA_FIELDS)
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def test_forward_metadata_holds_the_callers_tensors():
    lens, dispatch = torch.tensor(LENS), torch.tensor(DISPATCH)
    fwd, rev = wt.compute_metadata(lens, dispatch)
    assert fwd.seq_len is lens and fwd.dst_rank is dispatch and rev.recv_seq_lens is lens


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        torch.tensor,
        lambda table: torch.tensor(table, dtype=torch.int32),
        lambda table: torch.tensor(table, dtype=torch.int8),
        lambda table: torch.tensor(table).repeat_interleave(2, 1)[:, ::2],
        np.array,
        list,
    ],
    ids=["int64", "int32", "int8", "strided", "numpy", "list"],
)
def test_results_are_those_of_numpy_for_every_kind_of_table(given, copies):
    dispatch = DISPATCH if copies else [[1, 0], [1, 1]]
    want = waybill.compute_metadata(np.array(LENS), np.array(dispatch), True)
    lens, ranks = given(LENS), given(dispatch)
    *got, intermediates = wt.compute_metadata(lens, ranks, True)
    assert [metadata.numpy() for metadata in got] == list(want[:2])
    for metadata, numpys in zip(got, want):
        assert type(metadata.num_total_recv_tokens) is list
        for name in METADATA_FIELDS:
            value, expected = getattr(metadata, name), getattr(numpys, name)
            if isinstance(expected, np.ndarray):
                assert isinstance(value, torch.Tensor), name
                assert (value.numpy().dtype, value.shape) == (expected.dtype, expected.shape), name
                assert value.tolist() == expected.tolist(), name
    assert [t.tolist() for t in intermediates] == [a.tolist() for a in want[2]]
    if not isinstance(lens, torch.Tensor):
        got[0].seq_len += 1
        got[0].dst_rank += 1
        assert np.array_equal(lens, LENS) and np.array_equal(ranks, dispatch)


def test_results_are_int64_and_masks_bool():
    for metadata in both():
        assert type(metadata) is wt.Metadata and metadata.device.type == "cpu"
        for name, tensor in tensors_of(metadata).items():
            assert tensor.dtype == (torch.bool if name == "seq_recv_mask" else torch.int64), name
            assert tensor.is_contiguous()
        assert type(metadata.num_total_recv_tokens) is list


def test_normalized_dtypes():
    want = {
        "dst_rank": torch.int32, "dst_offset": torch.uint32, "seq_len": torch.uint32,
        "num_recv_tokens": torch.uint64, "seq_recv_mask": torch.uint32,
        "recv_seq_lens": torch.uint32, "num_seqs": torch.int32,
    }  # fmt: skip
    for metadata in both():
        normal = metadata.normalize_dtype()
        assert normal.normalized and not metadata.normalized
        for name, tensor in tensors_of(normal).items():
            assert tensor.dtype == want[name], name
            assert tensor.tolist() == tensors_of(metadata)[name].to(torch.int64).tolist()
        assert "normalized" in str(normal) and wt.Metadata.from_json(normal.to_json()) == normal


def test_numpy_and_back_share_memory():
    fwd, _ = both()
    there = fwd.numpy()
    assert type(there) is waybill.Metadata and there == fwd
    for name, tensor in tensors_of(fwd).items():
        assert getattr(there, name).__array_interface__["data"][0] == tensor.data_ptr(), name
    back = wt.Metadata.from_numpy(there)
    assert type(back) is wt.Metadata and back == fwd
    for name, tensor in tensors_of(back).items():
        assert tensor.data_ptr() == tensors_of(fwd)[name].data_ptr(), name


def test_results_are_writable_and_their_own():
    first, second = both()[0], both()[0]
    first.dst_offset += 1
    assert second.dst_offset.tolist() == both()[0].dst_offset.tolist() != first.dst_offset.tolist()


def test_to_makes_every_tensor_contiguous():
    fwd, _ = both()
    fwd.dst_rank = fwd.dst_rank.transpose(0, 1).contiguous().transpose(0, 1)
    assert not fwd.dst_rank.is_contiguous()
    for moved in (fwd.cpu(), fwd.to("cpu")):
        assert type(moved) is wt.Metadata and moved == fwd
        assert all(tensor.is_contiguous() for tensor in tensors_of(moved).values())
        assert moved.world_size == 2 and moved.num_total_recv_tokens == fwd.num_total_recv_tokens


def test_slices():
    fwd, rev = both()
    for metadata in (fwd, rev):
        for rank in range(2):
            part = metadata.get_slice(rank)
            assert type(part) is wt.Metadata and part.is_slice
            assert part.num_seqs is None and part.world_size is None
            assert type(part.num_total_recv_tokens) is int
            assert part == metadata.numpy().get_slice(rank)


def test_texts_are_those_of_numpy():
    for metadata in both():
        assert str(metadata) == str(metadata.numpy())
        assert metadata.to_json() == metadata.numpy().to_json()
        assert metadata._repr_html_() == metadata.numpy()._repr_html_()
        assert repr(metadata).startswith("Metadata(dst_rank=tensor(")
        np.testing.assert_array_equal(metadata.traffic(), metadata.numpy().traffic())


def test_tensors_that_are_not_contiguous():
    lens = torch.tensor(LENS).T.contiguous().T
    dispatch = torch.tensor(DISPATCH).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not lens.is_contiguous() and not dispatch.is_contiguous()
    assert wt.compute_metadata(lens, dispatch) == both()


def test_numpy_face_takes_torch_tensors_of_the_cpu():
    lens, dispatch = torch.tensor(LENS), torch.tensor(DISPATCH)
    fwd, rev = waybill.compute_metadata(lens, dispatch)
    assert type(fwd.dst_rank) is np.ndarray and (fwd, rev) == both()
    source, output = torch.rand(2, 6, 3), np.zeros((2, 9, 3), np.float32)
    waybill.orchestrate_simulate(source, output, fwd)
    want = wt.orchestrate_simulate(source, torch.zeros(2, 9, 3), both()[0])
    np.testing.assert_array_equal(output, want.numpy())


def test_numpy_face_writes_to_a_torch_tensor():
    source, output = torch.rand(2, 6, 3), torch.zeros(2, 9, 3)
    assert waybill.orchestrate_simulate(source, output, both()[0].numpy()) is output
    assert torch.equal(output, wt.orchestrate_simulate(source, torch.zeros(2, 9, 3), both()[0]))


def test_plan_metadata():
    plan = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2])
    for layout in ("per_rank", "per_query"):
        plan = waybill.QkvPlan(
            2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2], None, layout
        )
        got, want = wt.plan_metadata(plan), plan.to_metadata()
        assert type(got) is wt.QkvMetadata and got[:4] == want[:4]
        assert type(got.attention) is type(want.attention)
        for a, b in zip(got.attention, want.attention):
            both_parts = zip(a, b) if isinstance(a, tuple) else [(a, b)]
            assert all(
                isinstance(x, torch.Tensor) and x.tolist() == y.tolist() for x, y in both_parts
            )
        assert wt.validate(plan, got) == []


def test_mlp_layout_packed_params():
    lens = torch.tensor([5, 2, 9], dtype=torch.int32)
    params = wt.mlp_layout_packed_params(lens)
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 5, 7, 16]
    assert params.cu_seqlens_q.dtype == torch.int64
    assert params.max_seqlen_q.ndim == 0 and params.max_seqlen_q.dtype == torch.int32
    assert int(params.max_seqlen_q) == int(params.max_seqlen_kv) == 9


@pytest.mark.parametrize("rank", [1, np.int64(1), torch.tensor(1)])
def test_ranks_may_be_any_integer(rank):
    assert both()[0].get_slice(rank) == both()[0].get_slice(1)
