"""What scripts/site holds the site to, without building it."""

import importlib
import pathlib
import subprocess
import sys

import pytest

SITE = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "site"


@pytest.fixture
def places(monkeypatch, tmp_path):
    """The problems of navigation.py in a project with some pages and sections."""
    monkeypatch.syspath_prepend(str(SITE))
    sys.modules.pop("navigation", None)
    navigation = importlib.import_module("navigation")

    def problems(pages, sections):
        for page in pages:
            (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / page).write_text("# Page\n", encoding="utf-8")
        monkeypatch.setattr(navigation, "SECTIONS", sections)
        return navigation.problems(tmp_path)

    return problems


def test_every_page_of_the_project_has_a_place(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    sys.modules.pop("navigation", None)
    navigation = importlib.import_module("navigation")
    assert navigation.problems(SITE.parents[1]) == []


def test_pages_and_places(places):
    pages = ["README.md", "docs/a.md", "docs/b/README.md", "docs/b/c.md", "docs/b/d.md"]
    sections = {"Start": ["docs/a.md", "docs/b/d.md"], "Other": ["docs/b/"]}
    assert places(pages, sections) == []
    (problem,) = places([*pages, "docs/new.md"], sections)
    assert problem.startswith("docs/new.md:1: stands in no section")
    sections["Other"] += ["docs/new.md", "docs/a.md", "docs/gone.md"]
    twice, gone = places([], sections)
    assert gone.endswith("there is no docs/gone.md") and twice.endswith("docs/a.md stands twice")


GOOD = '<html lang="en"><title>T</title><h1 id="a">A</h1><h2>B</h2><a href="#a">a</a></html>'


def check(folder, page, **files):
    (folder / "index.html").write_text(page, encoding="utf-8")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, SITE / "check.py", folder], capture_output=True, text=True, check=False
    )
    assert (run.returncode == 0) == run.stdout.startswith("site: ")
    return run.stdout


def test_a_site_that_holds(tmp_path):
    css = "@font-face { src: url(data:font/woff2;base64,AA) } /* https://a.example */"
    assert "1 pages hold" in check(tmp_path, GOOD, a_css=css)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("#a", "#b", "index.html:1: the link #b leads to no place of its page"),
        ("#a", "b.html#a", "the link b.html#a leads nowhere"),
        ("<h2", "<h3", "a heading of level 3 follows one of level 1"),
        ("<h2", "<h1", "2 first headings, expected 1"),
        ("<title>T</title>", "", "expected a title and a language"),
        ("<h2", '<img src="index.html"><h2', "has no text"),
        ("<h2", '<script src="//cdn.example/x.js"></script><h2', "comes from outside"),
        ("<h2", "<style>@import 'https://x.example/a.css'</style><h2", "comes from outside"),
        ("<h2", '<p id="a"><h2', "the id a is there twice"),
    ],
)
def test_offences(tmp_path, old, new, expected):
    assert expected in check(tmp_path, GOOD.replace(old, new, 1))


def test_styles_and_scripts_from_outside(tmp_path):
    css = "a { background: url('https://x.example/a.png') }"
    assert "a.css:1: https://x.example/a.png comes" in check(tmp_path, GOOD, a_css=css)
    (tmp_path / "a.css").unlink()
    assert "comes from outside" in check(tmp_path, GOOD, a_js='fetch("https://x.example/a")')


def test_no_pages(tmp_path):
    run = subprocess.run([sys.executable, SITE / "check.py", tmp_path], capture_output=True)
    assert run.returncode == 1


def test_pictures_are_those_of_the_tables():
    draw = SITE.parents[1] / "docs" / "pictures" / "draw.py"
    run = subprocess.run(
        [sys.executable, draw, "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_picture_that_is_not_of_its_table_is_found(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(SITE.parents[1] / "docs" / "pictures"))
    draw = importlib.import_module("draw")
    monkeypatch.setattr(draw, "PICTURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["draw.py"])
    assert draw.main() == 0
    file = tmp_path / "latency.svg"
    file.write_text(file.read_text(encoding="utf-8").replace("22 Nov", "23 Nov"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["draw.py", "--check"])
    assert draw.main() == 1 and "latency.svg" in capsys.readouterr().out
