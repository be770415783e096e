"""A planted fault is found by its test, or said not to be; the tree stays as it is."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"

FAULT = {
    "name": "an offset is one too large",
    "file": "python/waybill",
    "find": "return first + row",
    "replace": "return first + row + 1",
    "test": "tests/python/test_places.py::test_place",
}
PLACES = "python/waybill/places.py"
TREE = {
    PLACES: "def place(first, row):\n    return first + row\n",
    "python/waybill/__init__.py": "",
    "tests/python/test_places.py": "from waybill.places import place\n\n\n"
    "def test_place():\n    assert place(2, 3) == 5\n\n\ndef test_little():\n    assert place\n",
    "pyproject.toml": "",
    "CMakePresets.json": "{}",
}


@pytest.mark.parametrize(
    "changed, status, said",
    [
        ({}, 0, "all 1 found"),
        ({"test": "tests/python/test_places.py::test_little"}, 1, "NOT FOUND"),
        ({"test": "tests/python/test_places.py::test_gone"}, 1, "without the fault: broken"),
        ({"replace": "return first + ("}, 1, "NOT FOUND"),  # no fault but a broken file
        ({"find": "return"}, 0, "all 1 found"),
        ({"find": "return first * row"}, 1, "occurs 0 times"),
        ({"file": "."}, 1, "occurs 2 times"),
        ({"test": "waybill_tests_cuda GpuExpert.one_rank"}, 0, "needs a GPU"),
    ],
)
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_planted_fault_is_found(project, tmp_path, monkeypatch, capsys, changed, status, said):
    fault = FAULT | changed
    if changed.get("find") == "return":
        fault["replace"] = "return 1 +"
    files = {"scripts/planted_faults.json": json.dumps([fault]), "python/twice.py": TREE[PLACES]}
    script = project("planted_faults", {**TREE, **files})
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of a second each, 15 times
    monkeypatch.setattr(script.Workshop, "site", lambda self: self.tree / "python")
    assert script.main([]) == status
    assert said in capsys.readouterr().out
    # The tree is as it was, and so is the copy.
    for root in (tmp_path, tmp_path / "build/faults/tree"):
        if (root / PLACES).is_file():
            assert (root / PLACES).read_text() == TREE[PLACES]


def test_the_faults_fit_the_code(capsys):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "planted_faults.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) fit, and (\d+) that need a GPU", done.stdout)
    assert int(found[1]) >= 60 and int(found[2]) >= 10
