"""A rank whose own error ends it cleans up without the others, and its error is what is raised."""

import re
import time

import pytest

pytest.importorskip("torch")

import torch
from test_process_worlds import run_ranks

import waybill
import waybill.torch as wt
from waybill.integrations.deep_ep import Buffer, ElasticBuffer
from waybill.moe import EPConfig
from waybill.torch.moe import (
    BarrierAllContext,
    DispatchCombineContext,
    EPAll2AllLayer,
    ExpertParallel,
    SwiGLUExperts,
)

pytestmark = pytest.mark.xdist_group("processes")

HIDDEN, MOST = 16, 4
DEADLINE_S, SOON_S = 30, 10


def layer(world):
    made = EPAll2AllLayer(world, MOST, HIDDEN, 2, world.rank, 4, 2, 2, torch.float32)
    return made, made.finalize


def experts(world):
    made = ExpertParallel(
        SwiGLUExperts(2, HIDDEN, HIDDEN, torch.float32), group=world, dtype=torch.float32,
        num_experts=4, topk=2, hidden=HIDDEN, max_tokens=MOST, gradients="sum",
    )  # fmt: skip
    return made, made.finalize


def context(world):
    config = EPConfig(
        max_tokens=MOST, hidden=HIDDEN, topk=2, num_experts=4, rank=world.rank, world_size=2,
        local_world_size=2, token_dtype=torch.float32,
    )  # fmt: skip
    made = DispatchCombineContext.create(config, world=world)
    return made, made.finalize


def barrier(world):
    made = BarrierAllContext(world=world)
    return made, made.finalize


def dispatcher(world):
    made = waybill.SequenceDispatcher(world)
    made.reserve(1 << 16)
    return made, made.close


def attention(world):
    made = wt.ContextParallelAttention(world, 2, 1, HIDDEN, dtype=torch.float32)
    made.gather([(0, world.rank * MOST, MOST)])
    return made, made.close


def buffer(world):
    made = Buffer(world, 1 << 20, 0, explicitly_destroy=True)
    ids = torch.zeros(MOST, 2, dtype=torch.int64)
    counts, _, of_experts, goes, _ = made.get_dispatch_layout(ids, 4)
    rows = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16)
    made.dispatch(rows, None, counts, None, goes, of_experts, ids, torch.ones(MOST, 2))
    return made, made.destroy


MAKERS = [layer, experts, context, barrier, dispatcher, attention, buffer]
assert ElasticBuffer.destroy.__doc__ == Buffer.destroy.__doc__  # both are of the same layers


def expect_the_users_error_soon(body):
    begun = time.monotonic()
    with pytest.raises(ValueError, match="the user's own"):
        wt.run_threads(2, body, timeout_s=DEADLINE_S)
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("make", MAKERS)
def test_the_error_of_a_rank_that_cleans_up(make):
    def body(world):
        _, clean_up = make(world)
        try:
            if world.rank == 0:
                raise ValueError("the user's own")
            world.barrier()
        finally:
            clean_up()

    expect_the_users_error_soon(body)


@pytest.mark.parametrize("make", MAKERS)
def test_a_peer_that_failed_is_not_waited_for(make):
    """The other one cleans up without an error of its own."""

    def body(world):
        _, clean_up = make(world)
        if world.rank == 0:
            raise ValueError("the user's own")
        clean_up()

    expect_the_users_error_soon(body)


@pytest.mark.parametrize("make", MAKERS)
def test_all_clean_up_where_an_older_error_is_handled(make):
    """What is made in an except block is given back there: nobody fails."""

    def body(world):
        try:
            raise ValueError("before")
        except ValueError:
            made, clean_up = make(world)
            clean_up()
            clean_up()
            return getattr(made, "_closed", True)

    assert wt.run_threads(2, body, timeout_s=DEADLINE_S) == [True, True]


def test_ranks_that_are_processes(tmp_path):
    program = """
        import time
        import torch
        import waybill.torch as wt
        from waybill.torch.moe import EPAll2AllLayer

        world = waybill.World.from_environment(timeout_s=60)
        layer = EPAll2AllLayer(world, 4, 16, 2, world.rank, 4, 2, 2, torch.float32)
        begun = time.monotonic()
        try:
            if world.rank == 0:
                raise ValueError("the user's own")
        finally:
            try:
                layer.finalize()
            finally:
                print("finalize ended after", time.monotonic() - begun, "s", flush=True)
    """
    (failed, first), (told, second) = run_ranks(tmp_path, program, world_size=2)
    for text in (first, second):
        assert float(re.search(r"finalize ended after (\S+) s", text)[1]) < 40, text
    assert failed != 0 and first.endswith("ValueError: the user's own\n"), first
    assert "During handling" not in first, first
    assert told != 0 and "PeerFailed" in second, second
    assert re.search("rank 0 (is gone|left)", second), second
