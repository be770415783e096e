"""``python -m waybill selftest``: passes here, and fails when something is wrong."""

import importlib.util
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from records import records

import waybill
from waybill import _selftest

HAS_TORCH = importlib.util.find_spec("torch") is not None


def run(*arguments, cwd=None):
    """A process of its own."""
    how = [sys.executable, "-m", "waybill", "selftest", *arguments]
    return subprocess.run(how, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


def test_it_passes_here(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    first, *lines, verdict = done.stdout.splitlines()
    assert first.startswith(f"waybill {waybill.__version__} in ") and "Python 3." in first
    assert re.fullmatch(r"selftest: passed: \d+ checks in [\d.]+ s(; skipped .*)?", verdict)
    names = [re.match(r" ?\d+/(\d+)  (.*?)  +(ok|skipped) +[\d.]+ s  \S", line) for line in lines]
    assert all(names) and {int(name.group(1)) for name in names} == {len(lines)}
    shown = {name.group(2): name.group(3) for name in names}
    for name in ("recorded cases", "planner", "simulation", "ranks that are threads", "experts"):
        assert shown[name] == "ok"
    if HAS_TORCH:
        assert shown["ContextParallelAttention"] == shown["EPAll2AllLayer"] == "ok"
    else:
        assert shown["torch"] == "skipped" and "torch is not installed" in verdict
    assert not list(tmp_path.iterdir())


def test_gpus_can_be_left_alone():
    assert _selftest._why_no_gpus(False) == "--no-gpus"
    if not waybill.num_gpus():
        assert _selftest._why_no_gpus(True) in ("built without CUDA", "there is none")


def test_wrong_usage():
    assert run("--no-such-option").returncode == 2
    shown = run("--help")
    assert shown.returncode == 0 and "selftest" in shown.stdout


def damaged(monkeypatch, module, name, change):
    correct = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **options: change(correct, *given, **options))


@pytest.mark.parametrize(
    ("check", "module", "name", "change"),
    [
        ("recorded cases", waybill, "mask_by_neg", lambda f, tensor, mask: tensor),
        ("planner", _selftest, "validate", lambda f, *tables: ["a finding"]),
        ("validator", _selftest, "validate", lambda f, *tables: []),
        ("validator", _selftest, "orchestrate_simulate", lambda f, *given: None),
        (
            "ranks that are threads",
            _selftest,
            "expected_rows",
            lambda f, *g: [r + 1 for r in f(*g)],
        ),
        ("ranks that are threads", _selftest, "expected_gradients", lambda f, *g: f(*g)[::-1]),
        ("experts", _selftest, "simulate_dispatch", lambda f, c, t, ids: f(c, t, ids[::-1])),
    ],
)
@pytest.mark.parametrize("with_traceback", [False, True])
def test_damage_is_found(monkeypatch, capsys, check, module, name, change, with_traceback):
    """The others still run, and a verdict ends the report."""
    damaged(monkeypatch, module, name, change)
    found = [("recorded cases", _selftest.run_golden), *_selftest.CHECKS]
    found = [one for one in found if one[0] in (check, "simulation")]
    assert _selftest._run(found, with_traceback) == 1
    shown = capsys.readouterr().out
    assert f"selftest: FAILED: {check} (2 checks, " in shown and "simulation" in shown
    assert re.search(rf"{check} +FAILED ", shown) and re.search(r"simulation +ok ", shown)
    assert ("Traceback" in shown) == with_traceback


def test_an_interrupt_ends_it(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(_selftest, "_checks", lambda gpus: [("a check", interrupted)])
    assert _selftest.main([]) == 130
    assert "interrupted" in capsys.readouterr().out


def test_a_missing_program_is_no_failure(monkeypatch, capsys):
    missing = subprocess.CompletedProcess([], 1, "", "waybill: the program is not installed beside")
    monkeypatch.setattr(_selftest.subprocess, "run", lambda *given, **options: missing)
    assert _selftest._run([("the program", _selftest.check_program)], False) == 0
    assert "skipped the program: the program is not installed" in capsys.readouterr().out


def test_an_older_program_is_one(monkeypatch):
    other = subprocess.CompletedProcess([], 0, "waybill 0.0.1\n", "")
    monkeypatch.setattr(_selftest.subprocess, "run", lambda *given, **options: other)
    with pytest.raises(AssertionError, match=r"waybill 0\.0\.1, expected"):
        _selftest.check_program()


def test_the_recorded_cases_are_those_of_the_tests():
    for record in _selftest.records():
        assert record in records(record["fn"]), record["case"]
    assert len(_selftest.records()) >= 20


def test_every_wrong_record_is_found():
    """Each output, changed, is noticed: the comparison looks at all of them."""
    count = 0
    for record in _selftest.records():
        for entry in arrays_of(record["outputs"]):
            changed = json.loads(json.dumps(record))
            place = next(e for e in arrays_of(changed["outputs"]) if e == entry)
            values = np.array(place["data"], dtype=float).reshape(place["shape"])
            if values.size == 0:
                continue
            values.reshape(-1)[0] += 1
            place["data"] = values.tolist()
            with pytest.raises(AssertionError, match=re.escape(record["fn"])):
                run_one(changed)
            count += 1
    assert count > 50


def arrays_of(entry):
    if isinstance(entry, list):
        return [found for one in entry for found in arrays_of(one)]
    if not isinstance(entry, dict):
        return []
    if "dtype" in entry:
        return [entry] if entry["dtype"] != "bool" else []
    return [found for one in entry.values() for found in arrays_of(one)]


def run_one(record):
    before = _selftest.records
    _selftest.records = lambda: [record]
    try:
        _selftest.run_golden()
    finally:
        _selftest.records = before
