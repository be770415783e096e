"""bench/python/expert_step.py at the size of a toy: all ways agree, and the table is whole."""

import json
import pathlib

import pytest
from rank_processes import launched, run_file

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

BENCH = pathlib.Path(__file__).parents[2] / "bench" / "python" / "expert_step.py"


def test_all_ways_agree(tmp_path):
    arguments = ["--device", "cpu", "--workload", "12:1.5", "--sizes", "32", "16", "4", "2"]
    arguments += ["--steps", "1", "--warm", "1", "--profile"]
    ends = run_file(tmp_path, BENCH, arguments, launched(2))
    assert [status for status, _ in ends] == [0, 0], ends
    lines = ends[0][1].splitlines()
    result = json.loads(next(line for line in lines if line.startswith('{"workload"')))
    ways = set(result["step / alone"])
    assert {"all_to_all", "all_gather", "deduplicated", "waybill"} <= ways
    assert ways == set(result["differences"]) and ways == set(result["moves ms"])
    for differences in result["differences"].values():
        assert all(difference < 1e-4 for difference in differences.values())
    assert any(line.startswith("| 12:1.5 |") for line in lines)
    headings = [line for line in lines if line.startswith("12 tokens, skew 1.5: ")]
    assert [line.split(": ")[1] for line in headings] == list(result["step / alone"])
    assert lines.count("host, operations of torch:") == len(headings)
    assert any(line.endswith(" x  step") for line in lines)
