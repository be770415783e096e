"""bench/expert_step_times.py at the size of a toy: both tables are whole."""

import pathlib
import runpy
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench" / "expert_step_times.py"
TOY = ("--ranks", "4", "--experts", "16", "--tokens", "64", "--tile", "8", "--sizes", "32", "16",
       "--min-rows", "8")  # fmt: skip


def rows_of(capsys, monkeypatch, *arguments):
    """The cells of a table without its two first lines."""
    monkeypatch.setattr(sys, "argv", [BENCH.name, *TOY, *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(BENCH), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_predicted(capsys, monkeypatch):
    table = rows_of(capsys, monkeypatch)
    assert len(table) == 13
    for _, ranks, without, copies, _ in table:
        fullest, after = (float(cell.split(", ")[-1]) for cell in (without, copies))
        assert ranks == "4" and 1 <= after <= fullest


def test_measured(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no _grouped_mm")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table = rows_of(capsys, monkeypatch, "--measure", "cpu", "--steps", "1", "--warm", "0")
    finally:
        torch.set_num_threads(threads)
    assert len(table) == 6
    for _, _, rows, before, after, measured, predicted in table:
        fewer = [int(count) for count in rows.split(", ")]
        assert fewer[1] < fewer[0]
        # Products of whole tiles: predicted is their ratio.
        assert float(predicted) == pytest.approx(fewer[1] / fewer[0], abs=1e-3)
        spent = [sum(float(one) for one in cell.split(", ")) for cell in (before, after)]
        assert min(spent) > 0 and float(measured) > 0
