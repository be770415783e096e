"""What notebooks show: HTML that is well formed, and drawings where matplotlib is installed."""

import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import waybill

VOID = {"br", "hr", "img", "input", "meta", "link"}


class Checker(HTMLParser):
    """Notes the cells of the table; every element must be closed in its place."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.rows, self.caption = [], [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        assert tag != "script" and all(not name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "caption" in self.open:
            self.caption += data
        elif self.rows:
            assert self.open[-1] in ("td", "th"), f"text outside cells: {data!r}"
            self.rows[-1][-1] += data


def parsed(value):
    checker = Checker()
    checker.feed(value._repr_html_())
    checker.close()
    assert checker.open == [] and checker.caption
    assert len({len(row) for row in checker.rows}) == 1, "rows of different lengths"
    return checker


def random_metadata(face, world, copies=0):
    rng = np.random.default_rng(world)
    shape = (world, 4, copies) if copies else (world, 4)
    seq_len = rng.integers(1, 2000, (world, 4))
    dispatch = rng.integers(0, world, shape)
    return (
        face.module.compute_metadata(face.array(seq_len), face.array(dispatch)),
        seq_len,
        dispatch,
    )


@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("world", [1, 3, 16])
def test_metadata(face, world, copies):
    (fwd, rev), seq_len, dispatch = random_metadata(face, world, copies)
    for table in (fwd, rev):
        page = parsed(table)
        assert [row[0] for row in page.rows] == ["rank", *map(str, range(world))]
        assert f"{world} rank" in page.caption
        traffic = table.traffic()
        stay = np.diagonal(traffic)
        assert page.rows[1][-1] == f"{stay[0]:,}"
        assert page.rows[1][2] == f"{traffic[0].sum() - stay[0]:,}"
        assert page.rows[1][4] == f"{traffic[:, 0].sum() - stay[0]:,}"
    slots = dispatch if copies else dispatch[:, :, None]
    want = sum(int(n) for n, d in zip(seq_len[0], slots[0]) for r in d if r == 0)
    assert fwd.traffic()[0, 0] == want


def test_of_100_ranks_the_first_the_last_and_the_busiest(face):
    (fwd, _), *_ = random_metadata(face, 100)
    page = parsed(fwd)
    shown = [int(row[0]) for row in page.rows[1:]]
    assert 8 < len(shown) <= 16 and shown == sorted(shown)
    assert {0, 1, 2, 3, 96, 97, 98, 99} <= set(shown) and "of 100 ranks" in page.caption
    traffic = fwd.traffic()
    wire = traffic.sum(axis=0) + traffic.sum(axis=1) - 2 * np.diagonal(traffic)
    assert int(wire.argmax()) in shown


def test_slices(face):
    (fwd, rev), seq_len, _ = random_metadata(face, 3, 2)
    page = parsed(fwd.get_slice(1))
    assert [row[2] for row in page.rows[1:]] == [f"{n:,}" for n in seq_len[1]]
    assert [row[1] for row in page.rows[1:]] == [
        f"{n:,}" for n in np.cumsum(seq_len[1]) - seq_len[1]
    ]
    parsed(rev.get_slice(2))
    parsed(fwd.get_slice(0).normalize_dtype())


def test_long_slices_are_cut():
    lens = np.ones((1, 50), np.int64)
    fwd, _ = waybill.compute_metadata(lens, np.zeros_like(lens))
    page = parsed(fwd.get_slice(0))
    assert len(page.rows) == 33 and "50 lines, the first 32" in page.caption


def test_empty_tables(face):
    for seq_len, dispatch in (([[]], [[]]), ([[0, 0]], [[-1, -1]])):
        arrays = (face.array(np.array(a, np.int64).reshape(1, -1)) for a in (seq_len, dispatch))
        for table in face.module.compute_metadata(*arrays):
            parsed(table)
            parsed(table.get_slice(0))


@pytest.mark.parametrize("layout", ["per_rank", "per_query"])
def test_plans(layout):
    plan = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2], None, layout)
    page = parsed(plan)
    assert len(page.rows) == 3 and layout in page.caption and "2 documents" in page.caption
    assert [row[1] for row in page.rows[1:]] == [f"{work:,}" for work in plan.work]
    assert layout in repr(plan)


@pytest.fixture
def agg():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def drawn(face):
    (fwd, _), *_ = random_metadata(face, 5)
    plan = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2])
    return fwd, plan


def test_plot_traffic(face, agg):
    for value in drawn(face):
        axes = value.plot_traffic()
        assert axes.get_xlabel() == "receiving rank" and axes.get_ylabel() == "sending rank"
        axes.figure.canvas.draw()
        own = agg.subplots()[1]
        assert value.plot_traffic(own) is own and value.plot_traffic(ax=own) is own
    fwd, plan = drawn(face)
    np.testing.assert_array_equal(fwd.plot_traffic().images[0].get_array(), fwd.traffic())
    np.testing.assert_array_equal(plan.plot_traffic().images[0].get_array(), sum(plan.traffic()))


def test_plot_load(face, agg):
    for value in drawn(face):
        axes = value.plot_load()
        assert axes.get_xlabel() == "rank" and axes.get_legend() is not None
        axes.figure.canvas.draw()
        own = agg.subplots()[1]
        assert value.plot_load(own) is own
    fwd, plan = drawn(face)
    rows = fwd.traffic() - np.diag(np.diagonal(fwd.traffic()))
    heights = [bar.get_height() for bar in fwd.plot_load().patches]
    assert heights == [*rows.sum(axis=1), *rows.sum(axis=0)]
    assert [bar.get_height() for bar in plan.plot_load().patches] == plan.work.tolist()


def test_without_matplotlib(face, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    text = r"matplotlib is not installed.*pip install 'waybill\[plot\]'"
    for value in drawn(face):
        for method in (value.plot_traffic, value.plot_load):
            with pytest.raises(waybill.Unsupported, match=text) as caught:
                method()
            assert isinstance(caught.value, NotImplementedError)


def test_slices_have_no_traffic_to_draw(face):
    fwd, _ = drawn(face)
    for method in (fwd.get_slice(0).plot_traffic, fwd.get_slice(0).plot_load):
        with pytest.raises(waybill.InvalidArgument, match="a slice knows one rank"):
            method()


def test_summary_and_page_of_a_plan(tmp_path):
    plan = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2])
    assert len(plan.summary().splitlines()) > 5
    page = plan.to_html(tmp_path / "page.html", title="A <title>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert "A &lt;title&gt;" in page and "A <title>" not in page
    assert page.lstrip().lower().startswith("<!doctype html>")
