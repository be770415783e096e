"""The scripts that check sources find a fault put before them, and nothing in what is right."""

import json
import shutil
import subprocess
import sys

import pytest

CONFIG = "#pragma once\nnamespace waybill {\nstruct EPConfig {\n  int topk;\n};\n}\n"
NUMBER = "#pragma once\nnamespace waybill::%s {\nstruct Float32 {};\n}\n"
RIGHT = {
    "include/waybill/moe/ep_config.h": CONFIG,
    "src/core/number.h": NUMBER % "detail",
    "src/cuda/device/number.cuh": NUMBER % "cuda",
    # Of a file alone, of a function, declared, and in a comment.
    "src/moe/a.cpp": "namespace waybill {\nnamespace {\nstruct EPConfig {};\n}\n}\n",
    "src/moe/b.cpp": '#include "core/a.h"\nint max_rows;  // rows of a call, per lane\n',
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
    "src/moe/CMakeLists.txt": "waybill_add_module(moe DEPENDS core SOURCES combine.cpp)",
    "src/cuda/device/signal.cuh": '#pragma once\n#include "fault.h"\n',
    "src/cuda/device/fault.h": "#pragma once\n",
    "src/cuda/experts/rows.cu": '#include "../device/signal.cuh"\n',
    "src/cuda/experts/params.h": "#pragma once\n",
    "src/cuda/experts/nodes/nodes.cu": '#include "../../device/fault.h"\n#include "../params.h"\n',
    "src/cuda/CMakeLists.txt": "",
    "docs/architecture.md": "| `moe` | experts | core |\n| `core` | errors | std |\n",
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
        ("src/cuda/experts/nodes/nodes.cu", '#include "../executor/a.h"\n', "nodes may not"),
        ("src/cuda/experts/rows.cu", '#include "nodes/a.h"\n', "experts may not include nodes"),
        ("include/waybill/core/dtype.h", '#pragma once\n#include "core/to_size.h"\n', "public"),
        ("include/waybill/core/dtype.h", "#pragma once\n#include <CLI/CLI.hpp>\n", "belongs to"),
        ("include/waybill/moe/alone.h", "#pragma once\n", "comes with none of waybill/plan.h"),
        ("docs/architecture.md", "| `moe` | experts | core, cuda |\n", "moe may include core"),
    ],
)
def test_includes(project, capsys, monkeypatch, path, text, said):
    def status(files):
        script = project("check_includes", files)
        return script.main()

    others = {
        "src/moe/CMakeLists.txt": INCLUDES["src/moe/CMakeLists.txt"].replace(")", " alone.h)"),
        "src/moe/a.h": "#pragma once\n",
    }
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


def function_of(lines):
    return 'def f(\n    a,\n):\n    """Says\n\n    what."""\n' + "    a += 1\n" * lines


@pytest.mark.parametrize(
    "path, right, wrong, said",
    [
        ("src/a.h", "\n" * 700, "\n" * 701, "src/a.h:1: 701 lines"),
        ("python/a.py", function_of(60), function_of(61), "python/a.py:1: f: 61 lines"),
        (
            "tests/a.py",
            "class A:\n    def f(self):\n" + "        self.a()\n" * 60,
            "class A:\n    def f(self):\n" + "        self.a()\n" * 61,
            "tests/a.py:2: A.f: 61 lines",
        ),
    ],
)
def test_sizes(project, capsys, path, right, wrong, said):
    assert project("check_sizes", {path: right}).main() == 0, capsys.readouterr().out
    assert project("check_sizes", {path: wrong}).main() == 1
    assert said in capsys.readouterr().out


LIMITED = {
    "src/core/a.h": "#pragma once\nstruct A {};\ninline int a() { return to_size(1); }\n",
    "src/core/a.cpp": '#include "a.h"\n',
    "src/moe/b.cpp": '#include "core/a.h"\nint max_rows;  // rows of a call, per lane\n',
    "src/moe/c.cpp": '#include "../core/a.h"\nconst char* c = "// What most_rows meet()";\n',
    "python/waybill/__init__.py": '"""Routes tokens."""\n\nfrom waybill import _plan\n',
    "python/waybill/_plan.py": "class Plan:\n    pass\n",
    "python/waybill/torch/__init__.py": "import numpy\n",
}


@pytest.mark.parametrize(
    "path, added, said",
    [
        ("src/core/d.cpp", "", "src/core: files: 3, at most 2"),
        ("src/core/a.cpp", "\n" * 60, "src/core: lines: 64, at most 50"),
        ("src/core/a.cpp", "namespace { enum class B { c }; }\n", "src/core: types: 2"),
        ("src/moe/own.h", "#pragma once\n", "src/moe: one_user: 1, at most 0"),
        ("src/moe/b.cpp", "int b = to_size(2);\n", "src/moe: to_size: 1, at most 0"),
        ("src/moe/b.cpp", "int most_rows;\n", "src/moe: most_least: 1, at most 0"),
        ("src/moe/b.cpp", "class TcpGreeter;\n", "src/moe: dialect: 1, at most 0"),
        ("src/moe/b.cpp", "int words_a_lane;\n", "src/moe: dialect: 1, at most 0"),
        ("src/moe/b.cpp", "int d;  ///< 8 elements a lane\n", "src/moe: comments: 1"),
        ("src/moe/b.cpp", "// The rows\n// behind it.\n", "src/moe: comments: 1"),
        ("src/moe/b.cpp", "\n/// Of what is sent of a token.\n", "src/moe: comments: 1"),
        ("src/core/a.cpp", '#include "moe/own.h"\n', "src/core: to src/moe: 1, at most 0"),
        ("src/schedule/e.cpp", "", "src/schedule: files: 1, at most 0"),
        ("python/waybill/_plan.py", "\n\nclass Other:\n    pass\n", "waybill: types: 2"),
        ("python/waybill/_plan.py", 'T = """Who may know."""\n', "python/waybill: comments: 1"),
        ("python/waybill/_plan.py", "from . import torch\n", "to python/waybill/torch"),
        ("python/waybill/torch/__init__.py", "from .. import _plan\n", "to python/waybill: 1"),
        ("python/waybill/_plan.py", "from waybill._core import A\n", "to python/bindings"),
        ("python/waybill/_plan.py", "most_tokens = 'loans'\n", "waybill: most_least: 1"),
    ],
)
def test_limits(project, capsys, path, added, said):
    others = {} if path == "src/moe/own.h" else {"src/moe/own.h": "#pragma once\n"}
    script = project("check_limits", {**LIMITED, "scripts/x": "", **others})
    assert script.main(["--update"]) == 0, capsys.readouterr().out
    own = {"src/moe/c.cpp": LIMITED["src/moe/c.cpp"] + '#include "own.h"\n'} if not others else {}
    text = LIMITED.get(path, others.get(path, "")) + added
    script = project("check_limits", {**own, path: text})
    assert script.main([]) == 1
    out = capsys.readouterr().out
    assert said in out, out


def committed(folder):
    """Commits all files of a folder."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_limit_is_raised_with_a_reason_only(project, capsys, tmp_path):
    script = project("check_limits", {**LIMITED, "scripts/x": ""})
    limits = tmp_path / "scripts/limits.json"
    two = "class Plan:\n    pass\n\n\nclass Other:\n    pass\n"
    assert script.main(["--update"]) == 0
    committed(tmp_path)

    # Neither --update nor an editor raises it.
    project("check_limits", {"python/waybill/_plan.py": two})
    assert script.main(["--update"]) == 1
    written = json.loads(limits.read_text())
    assert written["rooms"]["python/waybill"]["types"] == 1
    written["rooms"]["python/waybill"]["types"] = 2
    limits.write_text(json.dumps(written))
    capsys.readouterr()
    assert script.main([]) == 1
    assert "types: raised from 1 to 2 without a reason" in capsys.readouterr().out
    committed(tmp_path)
    assert script.main([]) == 1, "not even in a commit"

    assert script.main(["--update", "--reason", "a second plan"]) == 0, capsys.readouterr().out
    reasons = json.loads(limits.read_text())["reasons"]
    assert reasons == {"python/waybill types": {"to": 2, "reason": "a second plan"}}
    committed(tmp_path)

    # With the type the limit goes, and a later rise has to be reasoned anew.
    project("check_limits", {"python/waybill/_plan.py": LIMITED["python/waybill/_plan.py"]})
    assert script.main(["--update"]) == 0
    assert json.loads(limits.read_text())["rooms"]["python/waybill"]["types"] == 1


USED = {
    "python/waybill/__init__.py": "from . import _common\nfrom ._common import *\n"
    "from ._core import version as __version__\n\n__all__ = ['__version__']\n"
    "__all__ += _common.__all__\n",
    "python/waybill/_common.py": "from .plans import Plan, Way, plan\n"
    "\nOldPlan = Plan\n\n__all__ = ['OldPlan', 'Plan', 'Way', 'plan']\n",
    "python/waybill/plans.py": "from dataclasses import dataclass\n"
    "\n\nclass _Base:\n    def ranks(self, of: int = 0) -> int:\n        return of\n"
    "\n\nclass Plan(_Base):\n    def __init__(self, rows: int) -> None:\n        self.rows = rows\n"
    "\n    def _inner(self) -> None:\n        pass\n"
    "\n\n@dataclass\nclass Way:\n    hops: int\n    rows: int = 0\n"
    "\n\ndef plan(rows: int, *, relay: bool = True) -> Plan:\n    return Plan(rows)\n",
    "include/waybill/moe/config.h": "#pragma once\nnamespace waybill {\n"
    "struct Config {\n  int hidden = 0;  ///< elements\n  Options options = {1, 2};\n"
    "  int rows() const { return hidden; }\n};\n"
    "class Layer {\n public:\n  explicit Layer(const Config& config = {});\n"
    " private:\n  int state_ = 0;\n};\n"
    "enum class Rows : int { grouped, compact };\n"
    "[[nodiscard]] inline int rows_of(const Config& config,\n                   int rank = 0) {\n"
    "  return config.hidden;\n}\nnamespace detail {\nint hidden();\n}\n}\n",
}
PLANS, CONFIG_H = "python/waybill/plans.py", "include/waybill/moe/config.h"


@pytest.mark.parametrize(
    "path, old, new, said",
    [
        (PLANS, "relay: bool = True", "relay: bool = False", "+waybill.plan(rows: int, *, relay"),
        (PLANS, "of: int = 0", "of: int", "-waybill.Plan.ranks(self, of: int=0) -> int"),
        (PLANS, "self.rows = rows", "self.number = rows", "-waybill.Plan.rows: attribute"),
        (PLANS, "hops: int\n    rows: int = 0", "rows: int\n    hops: int = 0", "fields rows"),
        ("python/waybill/_common.py", "['OldPlan', ", "[", "-waybill.OldPlan = "),
        (CONFIG_H, "rank = 0", "rank = 1", "+waybill: int rows_of(const Config& config, int rank"),
        (CONFIG_H, "= {1, 2}", "= {1, 3}", "-waybill::Config: Options options = {1, 2}"),
        (CONFIG_H, "config = {}", "config", "-waybill::Layer: explicit Layer(const Config& conf"),
        (CONFIG_H, "grouped, compact", "compact, grouped", "enum class Rows : int { compact, g"),
        (CONFIG_H, " rows() const", " rows()", "-waybill::Config: int rows() const"),
    ],
)
def test_contract(project, capsys, path, old, new, said):
    assert old in USED[path]
    assert project("contract", USED).main(["--write"]) == 0, capsys.readouterr().out
    script = project("contract", {path: USED[path].replace(old, new)})
    assert script.main([]) == 1
    assert said in capsys.readouterr().out
    assert script.main(["--write"]) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {
            PLANS: "from ._moved import Plan, Way, plan\n",
            "python/waybill/_moved.py": USED[PLANS],
        },
        {PLANS: USED[PLANS].replace("_inner", "_within").replace("_Base", "_Root")},
        {CONFIG_H: USED[CONFIG_H].replace("state_", "number_").replace("///< elements", "")},
        {CONFIG_H: "#pragma once\n", "include/waybill/core/config.h": USED[CONFIG_H]},
        {
            CONFIG_H: USED[CONFIG_H].replace("enum class Rows : int { grouped, compact };\n", ""),
            "include/waybill/core/rows.h": "namespace waybill {\n"
            "enum class Rows : int { grouped, compact };\n}\n",
        },
        {CONFIG_H: USED[CONFIG_H].replace("int hidden();", "int width();")},
    ],
    ids=["moved", "private", "private in C++", "moved in C++", "moved alone", "detail"],
)
def test_the_contract_is_of_what_users_see(project, capsys, changed):
    assert project("contract", USED).main(["--write"]) == 0
    script = project("contract", changed)
    assert script.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "path, text",
    [
        (
            "python/waybill/_old.py",
            'import warnings\nwarnings.warn("use plan%s", DeprecationWarning, 2)\n',
        ),
        ("include/waybill/core/old.h", '#pragma once\n[[deprecated("use plan%s")]] int old();\n'),
    ],
)
def test_a_deprecation_names_a_version(project, capsys, path, text):
    script = project("contract", {**USED, path: text % "; goes in 0.3"})
    assert script.main(["--write"]) == 0, capsys.readouterr().out
    assert project("contract", {path: text % "; goes soon"}).main(["--write"]) == 1
    assert f"{path}:2: a deprecation says" in capsys.readouterr().out
