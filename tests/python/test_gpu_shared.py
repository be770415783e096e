"""Tests of several ranks on GPUs, with ranks as processes of torchrun that may share one GPU."""

import os
import pathlib
import subprocess
import sys

import pytest
from rank_processes import launched, run_programs
from ways import PROCESSES

import waybill

torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).parent
FILES = {
    "test_context_parallel_gpu.py": 2,
    "test_deep_ep.py": 3,
    "test_deep_ep_low_latency.py": 3,
    "test_deep_ep_elastic.py": 3,
    "test_deep_ep_callers.py": 3,
}


def run_ranks(file, ranks, device, chosen, timeout):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-k", chosen, str(HERE / file)]
    environment = {**os.environ, PROCESSES: device, "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=HERE
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert done.stdout.count(" passed") == ranks, done.stdout[-2000:]


@pytest.mark.skipif(
    not (waybill.num_gpus() and torch.cuda.is_available()),
    reason="no GPU, or an installation without CUDA",
)
@pytest.mark.parametrize("file", FILES)
def test_ranks_as_processes(file):
    chosen = "cuda" if "deep_ep" in file else "not calibration and not bounded and not keep"
    run_ranks(file, FILES[file], "cuda", chosen, 240)


PYTEST = """
import sys
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_the_same_on_the_cpu(tmp_path):
    """So that it is not only seen where there are GPUs."""
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-k", "zeros and cpu"]
    arguments.append(HERE / "test_deep_ep_low_latency.py")
    ranks = [{**one, PROCESSES: "cpu"} for one in launched(3)]
    for status, printed in run_programs(tmp_path, [(PYTEST, arguments, one) for one in ranks]):
        assert status == 0 and printed.count(" passed") == 1, printed[-6000:]
