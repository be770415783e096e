"""Whom the others name when a rank is killed, stopped or slowed around each call, see the table."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import faults_table

pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("processes")]


def test_every_case():
    """63 cases, each of six processes, six at a time: about 20 s, of which most is deadlines."""
    program = pathlib.Path(faults_table.__file__)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 7 * 3 * 3, done.stdout


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
