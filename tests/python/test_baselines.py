"""bench/baselines runs, and all ways come to the same sums."""

import pathlib
import subprocess
import sys

import pytest

import waybill

pytest.importorskip("torch")

EXPERTS = pathlib.Path(__file__).parents[2] / "bench" / "baselines" / "experts.py"


def run(*arguments, device="cpu"):
    return subprocess.run(
        [sys.executable, str(EXPERTS), "--device", device, *arguments],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ways(device):
    if device == "cuda" and waybill.num_gpus() < 2:
        pytest.skip("needs two GPUs")
    sizes = "--ranks 2 --tokens 9 --hidden 64 --experts 8 --topk 3 --calls 2"
    done = run(*sizes.split(), device=device)
    assert done.returncode == 0, done.stdout + done.stderr
    for way in ("waybill", "all_to_all"):
        for call in ("dispatch, with counting", "dispatch, routing known", "combine"):
            line = next(s for s in done.stdout.splitlines() if s.startswith(way) and call in s)
            assert float(line.split()[-3]) > 0
    assert "WRONG" not in done.stdout


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--ranks 3 --experts 8", ["--experts", "got 8", "--ranks = 3"]),
        ("--only waybill,other", ["--only", "'other'", "all_to_all"]),
    ],
)
def test_wrong_arguments_are_named(argument, words):
    done = run(*argument.split())
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
