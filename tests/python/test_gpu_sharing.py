"""Ranks that are threads and share a GPU: what CUDA is told, and what is said where it is late."""

import os
import subprocess
import sys
import textwrap
import warnings

import pytest

import waybill
from waybill import world as worlds

LOADING, QUEUES = "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"


class Driver:
    """As libcuda, of a process that has begun with CUDA, or not."""

    def __init__(self, mode, active):
        self.mode, self.active = mode, active

    def cuModuleGetLoadingMode(self, mode):
        if self.mode is None:
            return 3  # CUDA_ERROR_NOT_INITIALIZED
        mode._obj.value = self.mode
        return 0

    def cuDevicePrimaryCtxGetState(self, device, flags, active):
        active._obj.value = int(device in self.active)
        return 0


def told(monkeypatch, mode, active=(), **environment):
    """(what was warned of, the variables)."""
    monkeypatch.setattr(worlds, "_driver", lambda: Driver(mode, active))
    monkeypatch.setattr(os, "environ", dict(environment))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worlds.load_eagerly()
        worlds.separate_queues(2, "run_threads")
    return [str(one.message) for one in caught], dict(os.environ)


def test_a_process_that_has_not_begun_with_cuda(monkeypatch):
    for mode in (None, 1):
        said, variables = told(monkeypatch, mode)
        assert said == [] and variables == {LOADING: "EAGER", QUEUES: "32"}


def test_a_context_that_loads_lazily(monkeypatch):
    (said,), _ = told(monkeypatch, 2, active=(1,), **{LOADING: "LAZY"})
    assert f"without {LOADING}=EAGER and {QUEUES}=32: " in said
    assert "\n" not in said and said.startswith("run_threads: ranks share a GPU, ")


def test_what_the_user_has_set_stays(monkeypatch):
    said, variables = told(monkeypatch, 1, active=(0,), **{LOADING: "EAGER", QUEUES: "32"})
    assert said == [] and variables == {LOADING: "EAGER", QUEUES: "32"}
    (said,), variables = told(monkeypatch, 1, **{LOADING: "EAGER", QUEUES: "1"})
    assert f"without {QUEUES}=32: " in said and variables[QUEUES] == "1"


def run(program):
    base = {k: v for k, v in os.environ.items() if k not in (LOADING, QUEUES)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PREAMBLE + program)], env=base, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip


PREAMBLE = """
    import torch, waybill
    import waybill.torch as wt
    from waybill.torch.moe import EPAll2AllLayer

    def body(world):
        layer = EPAll2AllLayer(world, 8, 512, 2, world.rank, world.world_size, world.world_size,
                               world.world_size)
        tokens = torch.randn(8, 512, device=world.device, dtype=torch.bfloat16)
        ids = torch.arange(16, device=world.device, dtype=torch.int32).view(8, 2) % world.world_size
        rows, _, layout = layer.dispatch(tokens, ids)
        sums = layer.combine(rows * 1.5, layout)
        torch.cuda.current_stream().synchronize()
        return float(sums.float().sum())
"""


@pytest.mark.skipif(not waybill.num_gpus(), reason="no GPU, or an installation without CUDA")
def test_the_first_use_of_torch_in_the_ranks_of_a_fresh_process():
    done = run("""
    print(len(waybill.run_threads(6, body, device="cuda", timeout_s=20)))
    """)
    assert done.returncode == 0 and done.stdout == "6\n", done.stdout + done.stderr
    assert waybill.num_gpus() >= 6 or "RuntimeWarning" not in done.stderr, done.stderr


@pytest.mark.skipif(waybill.num_gpus() != 1, reason="needs one GPU, for all ranks")
def test_ranks_of_a_process_that_has_begun_with_lazy_loading():
    done = run("""
    torch.zeros(1, device="cuda")
    waybill.run_threads(2, lambda world: None, device="cuda")
    """)
    assert done.returncode == 0 and done.stderr.count("RuntimeWarning") == 1, done.stderr
    assert f"without {LOADING}=EAGER and {QUEUES}=32" in done.stderr, done.stderr
