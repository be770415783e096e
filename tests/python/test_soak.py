"""tests/soak/soak.py: a few seconds of it, and what it says when something grows."""

import importlib.util
import os
import pathlib
import random
import re

import pytest
from rank_processes import run_file

pytest.importorskip("torch")

FILE = pathlib.Path(__file__).parent.parent / "soak" / "soak.py"
GREW = "soak: (memory|heap in use) grew by "
pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture
def soak():
    spec = importlib.util.spec_from_file_location("soak", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("how", [["--ranks", "3"], ["--processes"]])
def test_a_few_seconds(tmp_path, how):
    arguments = ["--minutes", "0.05", "--world-seconds", "0.3", "--allow-mib", "300", *how]
    ((status, printed),) = run_file(tmp_path, FILE, arguments)
    assert status == 0, printed
    on_its_way, head, _, *rows, last = printed.splitlines()
    assert on_its_way.startswith("| 1 | ")
    assert head == (
        "| minute | steps | memory, MiB | heap in use, MiB | descriptors | threads | shared memory"
        " files |"
    )
    assert rows[0].startswith("| 1 | ") and rows[0].endswith(" | 0 |")
    kind = "processes" if "--processes" in how else "threads"
    assert last.startswith("soak: passed: ") and f" ranks ({kind}, cpu) in 0." in last


def test_what_stays_is_noticed(soak, monkeypatch, capsys):
    """Descriptors, and memory, of which each world leaves some."""
    correct, kept = soak.make_layers, []

    def leaking(world, model, draw):
        if world.rank == 0:
            kept.append((os.dup(0), bytearray(os.urandom(64 << 20))))
        return correct(world, model, draw)

    monkeypatch.setattr(soak, "make_layers", leaking)
    for minutes in ("0.1", "1"):  # a busy machine makes too few worlds in six seconds
        how = ["--minutes", minutes, "--world-seconds", "0.1", "--allow-mib", "60"]
        status = soak.soak(soak.parsed(how))
        shown = capsys.readouterr().out
        if "soak: descriptors grew by " in shown and re.search(GREW, shown):
            break
    for descriptor, _ in kept:
        os.close(descriptor)
    assert status == 1 and "soak: FAILED: " in shown, shown
    assert "soak: descriptors grew by " in shown and re.search(GREW, shown), shown


def notes(values, name="memory"):
    return [(10.0 * i, {name: value, "steps": i}) for i, value in enumerate(values)]


def test_the_verdict_looks_after_the_first_third_and_past_outliers(soak):
    draws = random.Random(0)
    mib = 1 << 20
    noise = [700 * mib + draws.randint(-5 * mib, 5 * mib) for _ in range(180)]
    assert soak.verdict(notes(noise)) == []
    warming = [value - max(0, 60 - i) * 5 * mib for i, value in enumerate(noise)]
    assert soak.verdict(notes(warming)) == []
    outliers = [value + (500 * mib if i % 5 == 0 else 0) for i, value in enumerate(noise)]
    assert soak.verdict(notes(outliers)) == []
    leaking = [value + i * mib // 4 for i, value in enumerate(noise)]
    assert soak.verdict(notes(leaking), allow_mib=40) == []
    (sentence,) = soak.verdict(notes(leaking), allow_mib=20)
    assert sentence.startswith("memory grew by 2") or sentence.startswith("memory grew by 3")
    assert soak.verdict(notes([200 * mib + i * mib // 50 for i in range(180)], "heap in use")) != []
    assert soak.verdict(notes([7] * 120 + [8] * 60, "threads")) != []
    assert soak.verdict(notes([7] * 170 + [8] * 10, "threads")) == []


def test_documents_grow_and_shrink_and_some_ranks_have_none(soak):
    rows = [
        [sum(soak.documents_of(step, rank, 2, 512, 0)) for rank in range(2)] for step in range(400)
    ]
    every = [n for step in rows for n in step]
    assert max(every) > 400 and 0 < min(n for n in every if n) < 40
    assert any(step[0] == 0 < step[1] for step in rows)
    assert all(0 <= n <= 512 for n in every)
