"""Reading the golden records of tests/golden, and comparing with them."""

import json
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "golden"
METADATA_FIELDS = (
    "dst_rank",
    "dst_offset",
    "seq_len",
    "num_recv_tokens",
    "seq_recv_mask",
    "recv_seq_lens",
    "num_seqs",
    "world_size",
    "normalized",
    "num_total_recv_tokens",
)
KV_TABLES = ("kv_to_q_mapping", "kv_to_q_rank", "kv_context_size", "q_to_num_kv_seq")

#: Functions whose records some test has asked for; the completeness test looks at it.
functions_with_tests = set()


@lru_cache(maxsize=1)
def index():
    return json.loads((FOLDER / "index.json").read_text())


@cache
def records(function):
    """All records of a function, in the order of its file."""
    with open(FOLDER / index()[function]["file"], encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def every_record(function):
    """Decorator: the test runs once a record."""
    functions_with_tests.add(function)
    marks = [
        pytest.param(record, id=f"{number}-{record['case']}")
        for number, record in enumerate(records(function))
    ]
    return pytest.mark.parametrize("record", marks)


def array(entry):
    """The numpy array of a record's entry; None stays None."""
    if entry is None:
        return None
    return np.array(entry["data"], dtype=entry["dtype"]).reshape(entry["shape"])


def given(face, inputs, *names):
    """The named inputs as a user of the face has them: arrays, or plain values."""
    return [
        face.array(array(inputs[name])) if isinstance(inputs[name], dict) else inputs[name]
        for name in names
    ]


def metadata(face, entry):
    """Through the constructor, with the fields that the record has."""
    fields = {
        name: face.array(array(value)) if isinstance(value, dict) else value
        for name, value in entry.items()
    }
    return face.module.Metadata(**fields)


def expect_array(face, what, got, entry):
    """Same kind, dtype, shape and elements."""
    if entry is None:
        assert got is None, what
        return
    want = array(entry)
    if want.ndim == 0 and face.is_scalar(got):
        assert int(got) == int(want), what
    else:
        assert isinstance(got, face.array_type), what
        assert tuple(got.shape) == want.shape, what
        np.testing.assert_array_equal(face.host(got), want, err_msg=what)
    assert face.dtype_name(got) == want.dtype.name, what


def expect_arrays(face, what, got, entry):
    """One array, or a tuple of arrays where the record is ragged."""
    if "ragged" not in entry:
        expect_array(face, what, got, entry)
        return
    assert isinstance(got, tuple) and len(got) == len(entry["ragged"]), what
    for number, (one, want) in enumerate(zip(got, entry["ragged"])):
        expect_array(face, f"{what}[{number}]", one, want)


def expect_metadata(face, what, got, entry):
    """Every field: arrays as arrays, numbers and lists as Python's own."""
    assert type(got) is face.module.Metadata, what
    assert set(entry) == set(METADATA_FIELDS)
    for name in METADATA_FIELDS:
        value, want = getattr(got, name), entry[name]
        if isinstance(want, dict):
            expect_array(face, f"{what}.{name}", value, want)
        else:
            assert type(value) is type(want) and value == want, f"{what}.{name}: {value!r}"


def expect_layout(face, got, entry):
    """The attention layout: tuple in DistCA's order, or its first four."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    if "num_local_seqs_recv" in entry:
        names += ("num_local_seqs_recv",)
    assert isinstance(got, tuple) and len(got) == len(names) and set(entry) == set(names)
    for name, value in zip(names, got):
        expect_arrays(face, name, value, entry[name])
