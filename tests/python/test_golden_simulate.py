"""Golden records of the simulation: results, errors by class, and what errors leave untouched."""

import numpy as np
import pytest
from records import array, every_record, expect_array, given, metadata, records

import waybill

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
    with pytest.raises(waybill.ShapeMismatch, match="also written by source rank"):
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
