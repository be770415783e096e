"""scripts/check_stale_docs.py finds what it is there for, and nothing else."""

import importlib
import pathlib
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def check(monkeypatch, tmp_path):
    """The problems of a page with a text, in a project of one function."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("extract_doc_examples", "check_stale_docs"):
        sys.modules.pop(name, None)
    script = importlib.import_module("check_stale_docs")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name in ("CMakeLists.txt", "CMakePresets.json", "pyproject.toml", "Makefile"):
        (tmp_path / name).write_text("", encoding="utf-8")
    for name in (".clang-tidy", ".clang-format"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text("void send_rows() {\n  copy();\n}\n", encoding="utf-8")

    def problems(text, page="docs/page.md"):
        path = tmp_path / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return list(script.check_page(path, script.source_words()))

    return problems


@pytest.mark.parametrize(
    "sentence",
    [
        "A Python face does not exist yet.",
        "This is not implemented yet.",
        "Nodes will be supported.",
        "TODO: say more",
        "It comes in a future version.",
    ],
)
def test_sentences(check, sentence):
    (problem,) = check(f"# Page\n\n{sentence}\n")
    assert problem.startswith("docs/page.md:3: ") and "pages say what there is" in problem
    assert check(f"```text\n{sentence}\n```\n") == []


def test_sentences_about_now(check):
    text = "Rows that nobody has sent yet. A rank will be told. A plan was planned for 8 ranks.\n"
    assert check(text) == []


def test_names(check):
    assert check("Call `send_rows(q)` and `copy`, not `else`.\n") == []
    (problem,) = check("One\n\nCall `World::recv_rows(q)`.\n")
    assert problem == "docs/page.md:3: `recv_rows` is in no source, script or test"
    (problem,) = check("```python no-test\nx = send_rows(new_name)\ny = recvRows(x)\n```\n")
    assert problem == "docs/page.md:3: recvRows is in no source, script or test"


def test_files(check, tmp_path):
    (tmp_path / "include" / "waybill").mkdir(parents=True)
    (tmp_path / "include" / "waybill" / "b.h").touch()
    assert (
        check("See `src/a.cpp`, `waybill/b.h`, `include/waybill/b.h`, `other/src/c.cpp`.\n") == []
    )
    assert check("Name it `src/MODULE/OPERATION.cpp`.\n") == []
    for file in ("src/b.cpp", "waybill/a.h"):
        (problem,) = check(f"See\n`{file}`.\n")
        assert problem == f"docs/page.md:2: there is no file {file}"


def test_headers_of_blocks(check, tmp_path):
    (tmp_path / "include" / "waybill").mkdir(parents=True)
    (tmp_path / "include" / "waybill" / "b.h").touch()
    assert check('```cpp no-test\n#include "waybill/b.h"\n#include <vector>\n```\n') == []
    (problem,) = check('```cpp no-test\n#include "waybill/a.h"\n```\n')
    assert problem == "docs/page.md:2: there is no header waybill/a.h"


@pytest.mark.parametrize(
    "figure", ["takes 27 us", "1,5 ms", "at 339 GB/s", "94 %", "2 times faster"]
)
def test_figures(check, figure):
    linked = f"It {figure} ([measured](performance/x.md)).\n"
    assert check(linked) == []
    assert check(f"It {figure},\nas [measured](../docs/performance/x.md).\n") == []
    (problem,) = check(f"It {figure}.\n\nSee [there](performance/x.md).\n")
    assert problem.startswith("docs/page.md:1: ") and "no page of docs/performance" in problem
    assert check(f"It {figure}.\n", "docs/performance/x.md") == []


def test_excerpts(check):
    good = "```python excerpt src/a.cpp\nvoid send_rows() {\n    copy();\n```\n"
    assert check(good) == []
    (problem,) = check(good.replace("copy", "move"))
    assert problem == "docs/page.md:1: src/a.cpp does not have these lines"
    (problem,) = check(good.replace("a.cpp", "b.cpp"))
    assert "with a file that is there" in problem


def test_pictures(check):
    (problem,) = check("![a picture](nowhere.svg)\n")
    assert problem == "docs/page.md:1: there is no picture nowhere.svg"
