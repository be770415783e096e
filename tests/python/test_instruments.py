"""The instruments in scripts/ find what is planted for them."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def instrument(monkeypatch, tmp_path):
    """instrument(name of a script, {path: text}): the script, over a project of these files."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name, files=()):
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "ROOT", tmp_path)
        for path, text in dict(files).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return script

    return load


def test_the_files_that_kernels_include(instrument):
    script = instrument(
        "trace_call",
        {
            "src/cuda/experts/rows.cu": '#include "../device/signal.cuh"\n#include <vector>\n',
            "src/cuda/device/signal.cuh": '#include "fault.h"\n#include "core/to_size.h"\n',
            "src/cuda/device/fault.h": '#include "waybill/core/rank.h"\n',
            "src/cuda/device/other.h": "",
            "src/core/to_size.h": "",
            "include/waybill/core/rank.h": "",
        },
    )
    assert script.closure(["src/cuda/experts/rows.cu"]) == [
        "src/cuda/device/fault.h",
        "src/cuda/device/signal.cuh",
        "src/cuda/experts/rows.cu",
    ]
    with pytest.raises(SystemExit, match=r"src/cuda/experts/gone\.cu is not there"):
        script.closure(["src/cuda/experts/gone.cu"])


def test_the_functions_of_a_call(instrument, tmp_path, monkeypatch):
    package = tmp_path / "package"
    script = instrument(
        "trace_call",
        {
            "package/a.py": "from b import inner\nimport os.path\n\n\ndef outer():\n"
            "    os.path.join('a')\n    return [inner(i) for i in range(2)]\n",
            "package/b.py": "def inner(i):\n    return i\n\n\ndef unused():\n    pass\n",
        },
    )
    monkeypatch.syspath_prepend(str(package))
    a = importlib.import_module("a")
    with script.PythonTrace(package) as trace:
        a.outer()
    assert trace.functions == {"a.py": ["outer"], "b.py": ["inner"]}


COUNTED = "int f(int a) {\n  if (a > 1) {\n    return 1;\n  }\n  return 2;\n}\n"


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("gcov")), reason="no g++ or gcov")
def test_the_lines_that_ran(instrument, tmp_path, monkeypatch):
    script = instrument(
        "trace_call",
        {
            "src/a.cpp": f"{COUNTED}int g() {{ return 3; }}\nint main() {{ return f(1) - 2; }}\n",
            "src/b.cpp": "int h() { return 3; }\n",
        },
    )
    flags = ["--coverage", "-fprofile-abs-path", "-O0", "-o", "a.out"]
    sources = [str(tmp_path / "src" / name) for name in ("a.cpp", "b.cpp")]
    subprocess.run(["g++", *flags, *sources], check=True, cwd=tmp_path)
    counters = tmp_path / "counters"
    env = {**os.environ, "GCOV_PREFIX": str(counters)}
    subprocess.run([tmp_path / "a.out"], check=True, env=env)
    monkeypatch.setattr(importlib.import_module("coverage_table"), "ROOT", tmp_path)
    assert script.lines_of(counters) == {"src/a.cpp": 4}


@pytest.mark.parametrize(
    "call, files",
    [
        ("experts", ["python/waybill/torch/moe/", "src/cuda/experts/rows.cu"]),
        ("sequences", ["sequence_dispatcher.py", "src/cuda/sequence/dispatch_tma.cu"]),
        ("attention", ["python/waybill/torch/", "src/cuda/sequence/kv_gradient.cu"]),
    ],
)
def test_the_way_of_each_call(call, files):
    pytest.importorskip("torch")
    program = [sys.executable, SCRIPTS / "trace_call.py", call]
    text = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert text.startswith(f"{call}: ") and all(file in text for file in files), text


def test_the_share_of_lines_that_tests_run(instrument, tmp_path, capsys):
    python = {"executed_lines": [1, 2, 4], "missing_lines": [6]}
    script = instrument(
        "coverage_table",
        {
            "python/waybill/moe/a.py": "",
            "scripts/x": "",
            "python.json": json.dumps({"files": {"/tmp/site/waybill/moe/a.py": python}}),
        },
    )
    (tmp_path / "build").mkdir()
    assert script.main([str(tmp_path / "build"), str(tmp_path / "python.json")]) == 0
    table = json.loads((tmp_path / "scripts/coverage.json").read_text())
    assert table == {"python/waybill/moe": {"lines": 4, "run": 3, "percent": 75.0}}

    other = tmp_path / "old.json"
    for percent, status in ((75.2, 0), (80.0, 1)):
        table["python/waybill/moe"]["percent"] = percent
        other.write_text(json.dumps(table))
        assert script.main(["--compare", str(other)]) == status
    assert "python/waybill/moe: 75.0 % of its lines run, before 80.0 %" in capsys.readouterr().out
