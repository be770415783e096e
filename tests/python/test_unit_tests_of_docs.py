"""docs/unit_tests: each file runs alone with plain Python, and all of them by run_all_tests.py."""

import pathlib
import shutil
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
FILES = sorted(file.name for file in (DOCS / "unit_tests").glob("test_*.py"))


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_the_documents_names():
    assert FILES == [
        "test_compute_metadata.py",
        "test_create_qkv_dispatch.py",
        "test_gen_seq_lens.py",
        "test_orchestrate_simulate.py",
        "test_test_qkv_dispatch.py",
    ]


@pytest.mark.parametrize("name", FILES)
def test_one_by_one(name):
    result = run(DOCS, f"unit_tests/{name}")
    assert result.returncode == 0, result.stdout + result.stderr
    written = (DOCS / "unit_tests" / name).read_text(encoding="utf-8").count("\ndef test_")
    assert result.stdout.count("ok      ") == written >= 7


def test_all_and_one_that_fails(tmp_path):
    shutil.copytree(DOCS / "unit_tests", tmp_path / "unit_tests")
    shutil.copy(DOCS / "run_all_tests.py", tmp_path)
    for name in FILES[1:]:  # the others have run above
        (tmp_path / "unit_tests" / name).unlink()
    assert run(tmp_path, "run_all_tests.py").returncode == 0
    file = tmp_path / "unit_tests" / FILES[0]
    file.write_text(file.read_text(encoding="utf-8").replace("[18, 14, 22]", "[18, 14, 23]"))
    result = run(tmp_path, "run_all_tests.py")
    assert result.returncode == 1
    assert f"FAILED: {FILES[0]}" in result.stdout and "FAILED  test_counts" in result.stdout
