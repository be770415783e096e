"""Whom the others name when a rank is killed, stopped or slowed around each call, see the table."""

import pytest
from rank_processes import run_file

pytest.importorskip("torch")

import faults_table

pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("processes")]


def test_every_pair(tmp_path):
    """21 cases, each of six processes, six at a time: most of it is deadlines. Any two of a call,
    a phase and a fault meet; all 63 are in the program's own run, which writes the page.
    """
    ((status, printed),) = run_file(tmp_path, faults_table.__file__, ["--pairs"])
    assert status == 0, printed[-6000:]
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 7 * 3, printed


def result(fault, named=1, seconds=0.1, ranks=(0, 2), **changed):
    errors = {rank: {"named": named, "text": ""} for rank in ranks}
    return {
        "case": ("barrier", "before", fault), "fell": True, "errors": errors,
        "seconds": dict.fromkeys(ranks, seconds), "statuses": [0, 0, 0], "next_job": True,
        **changed,
    }  # fmt: skip


def test_what_is_wrong_is_found():
    assert faults_table.wrong(result("killed")) == []
    assert faults_table.wrong(result("stopped", seconds=3.1)) == []
    assert faults_table.wrong(result("slowed", ranks=())) == []
    for bad in (
        result("killed", named=2), result("killed", ranks=(0,)), result("killed", seconds=20),
        result("stopped", seconds=20), result("slowed"), result("slowed", ranks=(), fell=False),
        result("killed", next_job=False), result("slowed", ranks=(), statuses=[0, 256, 0]),
    ):  # fmt: skip
        assert len(faults_table.wrong(bad)) == 1, bad
