"""That no golden record goes untested."""

import hashlib

import records
import test_golden_helpers  # noqa: F401  (each asks for the records that it tests)
import test_golden_metadata  # noqa: F401
import test_golden_simulate  # noqa: F401


def test_every_function_of_the_index_has_a_test():
    assert records.functions_with_tests == set(records.index())


def test_files_are_what_the_index_says():
    for function, entry in records.index().items():
        content = (records.FOLDER / entry["file"]).read_bytes()
        assert len(records.records(function)) == entry["cases"] > 0, function
        assert len(content) == entry["bytes"], function
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], function


def test_no_file_is_outside_the_index():
    in_index = {entry["file"] for entry in records.index().values()}
    assert {path.name for path in records.FOLDER.glob("*.jsonl")} == in_index


def test_records_belong_to_the_function_of_their_file():
    for function in records.index():
        assert {record["fn"] for record in records.records(function)} == {function}


def test_every_field_of_metadata_is_compared():
    (record, *_) = records.records("compute_metadata")
    assert set(record["outputs"]["fwd"]) == set(records.METADATA_FIELDS)
