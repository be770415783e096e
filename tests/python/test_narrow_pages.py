"""The report can be read on a screen of 400 pixels."""

import re
import subprocess
import sys

import pytest
from narrow import NarrowPage

import waybill

LONG = "a_name_without_any_place_to_break_it_" * 4


def page_of(world_size, **options):
    lengths = waybill.sample_documents("wlbllm", world_size * 4096, seed=3)
    plan = waybill.plan(lengths, world_size, 4096, ranks_per_node=world_size)
    return plan.to_html(gb_per_s=345.0, **options)


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory):
    """The longest page: with checks, inputs, a command and timelines."""
    path = tmp_path_factory.mktemp("report") / f"{LONG}.html"
    options = ("--world-size", "16", "--tokens-per-rank", "4096", "--html", str(path))
    command = [sys.executable, "-m", "waybill", "demo", *options, "--gb-per-s", "345"]
    subprocess.run(command, check=True, capture_output=True)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("world_size", [1, 64, 300])
def test_of_plans(world_size):
    for title in ("Report", LONG):
        assert NarrowPage(page_of(world_size, title=title)).trouble() == []


def test_of_a_demo(demo_page):
    for viewport in (360, 400, 561, 1400):
        assert NarrowPage(demo_page, viewport).trouble() == [], viewport
    assert "timeline" in demo_page and "All ranks as a table" in demo_page


@pytest.mark.parametrize(
    ("rule", "other", "text"),
    [
        ("overflow-x:auto", "color:red", r"needs \d+ of \d+ pixels"),
        ("width=device-width, ", "", "no viewport"),
        (".heat text{font-size:17px}", "", r"text of svg.heat has \d.\d pixels"),
        (".time text{font-size:30px}", "", r"text of svg.time has \d.\d pixels"),
        (".badge{white-space:normal}", ".badge{padding:2px 200px}", "header needs"),
        ("minmax(270px,1fr)", "minmax(500px,1fr)", r"section needs"),
        ("white-space:pre-wrap;overflow-wrap:anywhere", "white-space:nowrap", "pre needs"),
        (".78rem}", ".5rem}", r"div.doc has 8.0 pixels"),
    ],
)
def test_finds_what_is_wrong(demo_page, rule, other, text):
    assert rule in demo_page
    assert re.search(text, "\n".join(NarrowPage(demo_page.replace(rule, other)).trouble()))
