"""The scripts that check sources find a fault put before them, and nothing in what is right."""

import importlib
import json
import pathlib
import shutil
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def project(monkeypatch, tmp_path):
    """project(name of a script, {path: text}): the script, over a project of these files."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name, files):
        sys.modules.pop(name, None)
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "ROOT", tmp_path)
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return script

    return load


CONFIG = "#pragma once\nnamespace waybill {\nstruct EPConfig {\n  int topk;\n};\n}\n"
NUMBER = "#pragma once\nnamespace waybill::%s {\nstruct Float32 {};\n}\n"
RIGHT = {
    "include/waybill/moe/ep_config.h": CONFIG,
    "src/core/number.h": NUMBER % "detail",
    "src/cuda/device/number.cuh": NUMBER % "cuda",
    # Of a file alone, of a function, declared, and in a comment.
    "src/moe/a.cpp": "namespace waybill {\nnamespace {\nstruct EPConfig {};\n}\n}\n",
    "src/moe/b.cpp": "namespace waybill {\nstruct Holder {\n  struct EPConfig {};\n};\n}\n",
    "src/moe/c.h": "namespace waybill::detail {\nstruct EPConfig;\n// struct EPConfig {\n}\n",
    "tests/moe/moe_test.cpp": "namespace waybill::test {\nstruct Case {};\n}\n",
    "tests/core/core_test.cpp": "namespace waybill::test {\nstruct Case {\n  int other;\n};\n}\n",
}


@pytest.mark.parametrize(
    "path, text, names",
    [
        ("src/cuda/experts/ep_config.h", CONFIG, ["waybill::EPConfig", "ep_config.h:3"]),
        (
            "src/cuda/experts/ep_config.h",
            CONFIG.replace("waybill", "waybill::cuda"),
            ["waybill::EPConfig", "waybill::cuda::EPConfig", "src/cuda/experts/ep_config.h:3"],
        ),
        (
            "tests/support/ep_config.h",
            "namespace waybill {\nnamespace test {\nenum class EPConfig { a };\n}\n}\n",
            ["waybill::EPConfig", "waybill::test::EPConfig", "tests/support/ep_config.h:3"],
        ),
        ("src/moe/number.h", NUMBER % "moe", ["Float32", "waybill::moe::Float32"]),
    ],
    ids=["one name", "another namespace", "a test's", "a third of twins"],
)
def test_types(project, capsys, path, text, names):
    script = project("check_types", RIGHT)
    assert script.main() == 0, capsys.readouterr().out
    assert project("check_types", {path: text}).main() == 1
    (said,) = capsys.readouterr().out.splitlines()[1:]
    assert all(name in said for name in names), said


SOURCES = {
    "include/waybill/core/dtype.h": "#pragma once\nenum class DType : int { a };\n",
    "src/core/dtype.cpp": '#include "waybill/core/dtype.h"\nint f() { return 1; }\n',
    "src/core/first.h": "#pragma once\n#include <string>\ninline std::string a() { return {}; }\n",
    "src/core/first.cpp": '#include "first.h"\n#include <vector>\nstd::vector<int> b;\n',
}
NEEDY = "#pragma once\ninline std::vector<int> rows() { return {}; }\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    "wrong",
    [
        {"include/waybill/core/rows.h": NEEDY},
        {"src/core/rows.h": NEEDY},
        # Behind another header it compiles, which is what a joined build sees.
        {
            "src/core/rows.h": NEEDY,
            "src/core/first.cpp": '#include <vector>\n\n#include "rows.h"\n',
        },
        # The first that its source includes.
        {
            "src/core/first.h": NEEDY,
            "src/core/first.cpp": '#include "first.h"\n#include <vector>\n',
        },
        {"src/core/first.cpp": "std::string name() { return {}; }\n"},
        # A public header sees none of src.
        {"include/waybill/core/rows.h": '#pragma once\n#include "core/first.h"\n'},
    ],
    ids=["public", "private", "hidden", "first", "source", "public of private"],
)
def test_alone(project, capfd, monkeypatch, tmp_path, wrong):
    flags = f"-std=c++20 -I{tmp_path}/include -I{tmp_path}/src -Wall"

    def status(files):
        script = project("check_alone", files)
        build = tmp_path / "build"
        build.mkdir(exist_ok=True)
        commands = [
            {
                "directory": str(build),
                "file": str(source),
                "command": f"g++ {flags} -o x.o -c {source}",
            }
            for source in sorted((tmp_path / "src").rglob("*.cpp"))
        ]
        (build / "compile_commands.json").write_text(json.dumps(commands), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["check_alone.py", str(build)])
        try:
            script.main()
        except SystemExit as stop:
            return stop.code
        return 0

    assert status(SOURCES) == 0, capfd.readouterr()
    assert status(wrong) == 1
    assert "error" in capfd.readouterr().err


INCLUDES = {
    "include/waybill/plan.h": '#pragma once\n#include "waybill/core/dtype.h"\n',
    "include/waybill/core/dtype.h": "#pragma once\n#include <cstdint>\n",
    "src/core/dtype.cpp": '#include "waybill/core/dtype.h"\n',
    "src/core/to_size.h": "#pragma once\n",
    "src/core/CMakeLists.txt": "dtype.cpp dtype.h",
    "src/moe/combine.cpp": '#include "core/to_size.h"\n',
    "src/moe/CMakeLists.txt": "combine.cpp",
    "src/cuda/device/signal.cuh": '#pragma once\n#include "fault.h"\n',
    "src/cuda/device/fault.h": "#pragma once\n",
    "src/cuda/experts/rows.cu": '#include "../device/signal.cuh"\n',
    "src/cuda/experts/params.h": "#pragma once\n",
    "src/cuda/experts/nodes/nodes.cu": '#include "../../device/fault.h"\n#include "../params.h"\n',
    "src/cuda/CMakeLists.txt": "",
}


@pytest.mark.parametrize(
    "path, text, said",
    [
        ("src/core/dtype.cpp", '#include "moe/a.h"\n', '"moe/a.h"'),
        ("src/core/dtype.cpp", '#include "../moe/a.h"\n', '"../moe/a.h"'),
        ("src/core/dtype.cpp", "#include <gtest/gtest.h>\n", "<gtest/gtest.h> belongs to"),
        ("src/core/to_size.h", "#pragma once\n#include <unistd.h>\n", "a system header"),
        ("src/core/to_size.h", "\n", "no #pragma once"),
        ("src/core/other.cpp", "\n", "not named in src/core/CMakeLists.txt"),
        ("src/cuda/device/fault.h", '#pragma once\n#include "../experts/a.h"\n', "may not"),
        (
            "src/cuda/experts/nodes/nodes.cu",
            '#include "../../sequence/a.h"\n',
            "not include sequence",
        ),
        ("src/cuda/experts/nodes/nodes.cu", '#include "../../../moe/a.h"\n', "may not include"),
        ("src/cuda/experts/nodes/nodes.cu", '#include "../a.h"\n', "does not exist"),
        ("include/waybill/core/dtype.h", '#pragma once\n#include "core/to_size.h"\n', "public"),
        ("include/waybill/core/dtype.h", "#pragma once\n#include <CLI/CLI.hpp>\n", "belongs to"),
        ("include/waybill/moe/alone.h", "#pragma once\n", "comes with none of waybill/plan.h"),
    ],
)
def test_includes(project, capsys, monkeypatch, path, text, said):
    def status(files):
        script = project("check_includes", files)
        modules = {name: script.MODULES[name] for name in ("core", "moe", "cuda")}
        monkeypatch.setattr(script, "MODULES", modules)
        return script.main()

    others = {"src/moe/CMakeLists.txt": "combine.cpp alone.h", "src/moe/a.h": "#pragma once\n"}
    assert status(INCLUDES | others) == 0, capsys.readouterr().out
    assert status({path: text}) == 1
    (problem,) = capsys.readouterr().out.splitlines()[1:]
    assert problem.startswith(f"{path}:") and said in problem


LANES = "bulk_load_to_read(stage, row, bytes, barrier);\nsum(stage);\n"
COPIES = "bulk_load_to_copy(stage, row, bytes, barrier);\nbulk_store(to, stage, bytes);\n"
BULK = {"src/cuda/experts/sums.cu": LANES + "release_stage();\n", "src/cuda/ring.cuh": COPIES}


@pytest.mark.parametrize(
    "path, text, words",
    [
        ("src/cuda/experts/sums.cu", LANES, "release_stage() is missing"),
        ("src/cuda/experts/sums.cu", LANES + "// release_stage();\n", "release_stage() is missing"),
        ("src/cuda/ring.cuh", COPIES.split(";")[0] + ";\nsum(stage);\n", "without bulk_store()"),
        ("src/cuda/b.cu", 'asm volatile("fence.proxy.async;");', "fence.proxy stands in"),
        ("src/cuda/b.cu", 'asm volatile(\n"cp.async.bulk.commit_group;");', "cp.async.bulk stands"),
    ],
)
def test_bulk_fences(project, path, text, words):
    script = project("check_bulk_fences", BULK)
    assert script.check_sources()[0] == []
    project("check_bulk_fences", {path: text})
    offences, _ = project("check_bulk_fences", {path: text}).check_sources()
    assert len(offences) == 1 and path in offences[0] and words in offences[0]


SASS = """
arch = sm_100
        Function : _ZN7waybill4cuda40_GLOBAL__N__0a_14combine_kernelI8BFloat16EEv
        /*0000*/                   UBLKCP.S.G [UR4], [UR8], UR6 ;  /* 0x000 */
        /*0010*/                   MEMBAR.ALL.CTA ;
        /*0020*/              @!P0 FENCE.VIEW.ASYNC.S ;
        Function : _ZN7waybill4cuda11rows_kernelEv
        /*0000*/                   UBLKCP.S.G [UR4], [UR8], UR6 ;
"""


def test_bulk_fences_in_machine_code(project):
    script = project("check_bulk_fences", {})
    assert script.machine_code_offences(SASS) == ([], 1)
    apart = SASS.replace("/*0020*/              @!P0", "/*0020*/ NOP ;\n        /*0028*/")
    for text in (SASS.replace("FENCE.VIEW.ASYNC.S", "FENCE.VIEW.ASYNC.G"), apart):
        offences, looked_at = script.machine_code_offences(text)
        assert looked_at == 1 and "14combine_kernel" in offences[0] and "sm_100" in offences[0]
