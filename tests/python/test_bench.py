"""python -m waybill bench: all ways come to the same sums, and what it writes says so."""

import functools
import importlib.util
import json
import subprocess
import sys

import pytest

import waybill

pytest.importorskip("torch")

import rank_processes  # noqa: F401 (what the processes are forked from)
from torch import multiprocessing

from waybill import _bench
from waybill._bench import attention, experts, ranks
from waybill.integrations import deep_ep

SIZES = ["--tokens", "1,9", "--hidden", "64", "--experts", "8", "--topk", "3", "--seconds", "1"]
OURS = ("Waybill", "Waybill, compact rows")


def run(*arguments, device="cpu"):
    return subprocess.run(
        [sys.executable, "-m", "waybill", "bench", "--device", device, *arguments],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def check_figures(result, ways):
    assert [table["tokens"] for table in result["tables"]] == [1, 9]
    for table in result["tables"]:
        lines = {line["way"]: line for line in table["lines"]}
        for way in ways:
            assert lines[way]["right"] is True
            assert all(us > 0 for us in lines[way]["us"].values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_figures_and_files(device, tmp_path):
    if device == "cuda" and waybill.num_gpus() < 1:
        pytest.skip("needs a GPU")
    found, page = tmp_path / "bench.json", tmp_path / "bench.html"
    done = run(*SIZES, "--json", str(found), "--html", str(page), device=device)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(found.read_text())
    assert result["format"] == "waybill.bench" and "--tokens 1,9" in result["command"]
    lines = result["experts"]["tables"][0]["lines"]
    if waybill.num_gpus() < 2:
        hand = [f"{way} by hand (copies)" for way in ("all-to-all", "all-gather")]
        assert [line["way"] for line in lines] == [*OURS, *hand, "DeepEP", "NCCL EP"]
        assert [line["note"] for line in lines[4:]] == ["needs 2 GPUs"] * 2
        check_figures(result["experts"], [*OURS, *hand])
    else:
        check_figures(result["experts"], OURS)
    # The table on the terminal has the figures of the file.
    us = lines[0]["us"]["dispatch"]
    assert f"{us:.1f}" in done.stdout and f"{us:.1f}" in page.read_text()
    assert "WRONG" not in done.stdout


def test_report_for_an_issue(capsys):
    assert _bench.main(["--device", "cpu", *SIZES, "--report"]) == 0
    out = capsys.readouterr().out
    head, facts = out.split("\n\n")[:2]
    assert head.startswith("`python -m waybill bench --device cpu --tokens 1,9")
    assert "waybill " in facts and "torch " in facts and "2 ranks, threads on CPUs" in facts
    assert "None" not in facts  # what is not there is "no"
    assert "| Waybill, compact rows | " in out and "| DeepEP | needs 2 GPUs | " in out


ATTENTION = ("Waybill", *(f"{way} by hand (copies)" for way in attention.WAYS))


def test_attention(capsys, tmp_path):
    """Documents across ranks, of one token, and with a token left over."""
    found = tmp_path / "bench.json"
    lengths = ["--attention", "40,1,1,23,2"]
    assert _bench.main(["--device", "cpu", *SIZES, *lengths, "--json", str(found)]) == 0
    result = json.loads(found.read_text())["attention"]
    assert (result["tokens"], result["longest"], result["backward"]) == (66, 40, True)
    assert [line["way"] for line in result["lines"]] == list(ATTENTION)
    assert all(line["right"] and line["us"] > 0 for line in result["lines"])
    out = capsys.readouterr().out
    assert "attention, forward and backward" in out and "5 documents of 66 tokens" in out


@pytest.mark.parametrize("part", [0, 1])
def test_wrong_attention_is_said(part, monkeypatch, capsys):
    """Outputs, and gradients alone."""
    step = attention.Batch.step

    def damaged(batch, way):
        run = step(batch, way)

        def wrong():
            found = run()
            if way == "hybrid":
                found[part][0] += 1
            return found

        return wrong

    monkeypatch.setattr(attention.Batch, "step", damaged)
    assert _bench.main(["--device", "cpu", *SIZES, "--attention", "9,7", "--report"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert sum("WRONG" in line for line in lines) == 1
    assert any("hybrid" in line and "WRONG" in line for line in lines)


@pytest.mark.parametrize("name", ["combine", "dispatch_again"])
def test_a_wrong_way_is_said(name, monkeypatch, capsys):
    def damaged(way):
        calls = dict(zip(experts.CALLS, experts.all_to_all(way)))
        whole = calls[name]

        def call():
            whole()
            rows = way.sums if name == "combine" else way.rows
            rows[0, 0] += 1  # the first token of each rank

        return tuple({**calls, name: call}.values())

    monkeypatch.setitem(experts.BY_HAND, "all-to-all", damaged)
    assert _bench.main(["--device", "cpu", *SIZES]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(("WRONG" in line) == ("all-to-all" in line) for line in lines if "by hand" in line)
    assert all("right" in line for line in lines if line.startswith("Waybill"))


def measured_with_deep_ep(rank, *arguments):
    deep_ep.install(replace=True)
    return experts.measure(rank, *arguments)


@pytest.fixture
def forked(monkeypatch):
    """Processes of ranks come from one that has torch."""
    start = functools.partial(multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(multiprocessing, "spawn", start)


def test_ranks_as_processes(forked):
    """As on several GPUs, over gloo, with Waybill's own module in DeepEP's place."""
    sizes = ([1, 9], 128, 3, 8)
    place = ranks.Place("cpu", 2, processes=True)
    result = ranks.start(place, measured_with_deep_ep, sizes, 1.0)
    hand = [f"{way} by hand (gloo)" for way in ("all-to-all", "all-gather")]
    check_figures(result, [*OURS, *hand, "DeepEP"])
    notes = [table["lines"][-1] for table in result["tables"]]
    assert notes == [{"way": "NCCL EP", "note": "not installed"}] * 2


def failing(rank):
    if rank.rank == 1:
        raise RuntimeError("rank 1 has had enough")
    rank.gather(None)


def test_a_rank_that_fails_ends_the_others(forked):
    for processes in (True, False):
        with pytest.raises(Exception, match="rank 1 has had enough"):
            ranks.start(ranks.Place("cpu", 2, processes), failing)


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--ranks 3 --experts 8", ["--experts", "got 8", "--ranks = 3"]),
        ("--tokens 128,x", ["--tokens", "'x'", "1..1048576"]),
        ("--tokens 0", ["--tokens", "'0'"]),
        ("--topk 9 --experts 8", ["--topk", "got 9", "1..8"]),
        ("--attention 1", ["--attention", "'1'", "at least 2 tokens"]),
        ("--attention wlblm", ["wlblm", "wlbllm"]),
    ],
)
def test_wrong_arguments_are_named(argument, words, capsys):
    with pytest.raises(SystemExit) as ended:
        _bench.main(["--device", "cpu", *argument.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and all(word in said for word in words), said


def test_gpus_that_are_not_there(capsys, monkeypatch):
    monkeypatch.setattr(ranks, "num_gpus", lambda: 0)
    with pytest.raises(SystemExit):
        _bench.main(["--device", "cuda"])
    assert "--device: got cuda" in capsys.readouterr().err


def test_without_torch(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else find(n))
    with pytest.raises(SystemExit):
        _bench.main([])
    assert "pip install torch" in capsys.readouterr().err
