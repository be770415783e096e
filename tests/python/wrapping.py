"""Programs of ranks whose models torch wraps, in DDP or FSDP2."""

import pathlib

import pytest
from test_process_worlds import expect_all_well, run_ranks


def needs_fully_shard():
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("a torch without fully_shard")


def run_wrapped(tmp_path, program, wrapper, world_size):
    """A program of test_process_worlds with {folder}, {tests} and {wrapper}, "ddp" or "fsdp"."""
    if wrapper == "fsdp":
        needs_fully_shard()
    program = program.replace("{folder}", str(tmp_path)).replace("{wrapper}", wrapper)
    program = program.replace("{tests}", str(pathlib.Path(__file__).parent))
    expect_all_well(run_ranks(tmp_path, program, world_size))
