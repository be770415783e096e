"""Ranks as processes with gloo, forked where the framework has been imported already.
Under torchrun they are those of the job, each of which runs all tests, here on two GPUs:

    WAYBILL_TEST_DEVICE=cuda torchrun --nproc-per-node 2 -m pytest tests/integrations
"""

import multiprocessing
import os
import tempfile
import traceback

import pytest
import torch

from waybill.torch import initialize_distributed

LIMIT_S = 60
DEVICE = os.environ.get("WAYBILL_TEST_DEVICE", "cpu")  #: of the tensors


def _one(body, rank, world_size, folder, results):
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world_size
        )
        value = body(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        results.put((rank, None, value))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)


def _in_this_job(world_size, body):
    rank, size = initialize_distributed(device=DEVICE)
    if size != world_size:
        pytest.skip(f"{size} ranks, expected {world_size}")
    values = [None] * size
    torch.distributed.all_gather_object(values, body(rank))
    return values


def run(world_size, body):
    """What body(rank) returned in each process, by rank; plain values."""
    if "RANK" in os.environ:
        return _in_this_job(world_size, body)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_one, args=(body, rank, world_size, folder, results))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            found = sorted(results.get(timeout=LIMIT_S) for _ in ranks)
        finally:
            for rank in ranks:
                rank.join(5)
                rank.kill()
    wrong = [f"rank {rank}:\n{text}" for rank, text, _ in found if text]
    assert not wrong, "\n".join(wrong)
    return [value for *_, value in found]
