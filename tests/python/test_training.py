"""examples/python/training.py as docs/training.md starts it; it checks its own gradients."""

import os
import pathlib
import subprocess
import sys

import pytest
from wrapping import needs_fully_shard

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).resolve().parent.parent.parent / "examples/python/training.py"
STEPS = ("--steps", "8")


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_threads():
    """Mixed precision, checkpoints, and a loader of its own process; 30 steps run elsewhere."""
    shown = run(PROGRAM, "--ranks", "3", *STEPS, "--bf16", "--checkpoint", "--workers", "1")
    assert shown.startswith("3 ranks as threads on cpu\n") and "all gradients, as of one" in shown


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ("--wrap", "ddp", "--compile", "aot_eager")), (4, ("--wrap", "fsdp", "--dp", "2"))],
)
def test_processes(ranks, options):
    if "fsdp" in options:
        needs_fully_shard()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    shown = run(*launcher, PROGRAM, *STEPS, *options)
    assert f"{ranks} ranks as processes on cpu" in shown
    assert "all gradients, as of one process" in shown
