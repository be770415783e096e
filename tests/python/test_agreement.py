"""Ranks that do not mean the same call are told so; none gets a wrong result."""

import re

import numpy as np
import pytest
from error_texts import DISAGREE_IN_EXCHANGE, UNUSABLE, disagree_in_call

import waybill

WORLDS = [(2, None), (4, 2)]
TOKENS = 24


def routing_of(world_size, more=0):
    """Documents of a world; one ends ``more`` tokens later, and the next is as much shorter."""
    lengths = [TOKENS // 2] * (2 * world_size)
    lengths[0] += more
    lengths[1] -= more
    plan = waybill.plan(lengths, world_size=world_size, tokens_per_rank=TOKENS, block_tokens=4)
    return plan.to_routing()


class Step:
    """One rank's dispatcher and tensors."""

    def __init__(self, world):
        self.world = world
        self.is_odd = world.rank == world.world_size - 1
        self.dispatcher = waybill.SequenceDispatcher(world)
        self.dispatcher.reserve(1 << 20)
        self.rows = np.zeros((2 * TOKENS * world.world_size, 8), np.float32)

    def plan(self, routing):
        return self.dispatcher.plan_dispatch((routing.fwd_kv, self.rows))

    def gradient_plan(self, routing):
        return self.dispatcher.plan_kv_gradient((routing.fwd_kv, self.rows))

    def dispatch(self, plan, **options):
        self.dispatcher.dispatch(plan, self.rows, **options)
        return self.dispatcher.last_dispatch

    def gradient(self, plan, **options):
        self.dispatcher.kv_gradient(plan, self.rows, **options)


def other_lengths(step):
    step.dispatch(step.plan(routing_of(step.world.world_size, 1 if step.is_odd else 0)))


def another_operation(step):
    routing = routing_of(step.world.world_size)
    there, back = step.plan(routing), step.gradient_plan(routing)
    step.gradient(back) if step.is_odd else step.dispatch(there)


def swapped_gradients(step):
    routing = routing_of(step.world.world_size)
    there, back = step.plan(routing), step.gradient_plan(routing)
    numbers = [step.dispatch(there), step.dispatch(there)]
    assert numbers == [1, 2]
    for number in numbers if step.is_odd else reversed(numbers):
        step.gradient(back, of_dispatch=number)


def replaced_plan(step):
    routing = routing_of(step.world.world_size)
    there, back = step.plan(routing), step.gradient_plan(routing)
    number = step.dispatch(there)
    if step.is_odd:
        step.dispatcher.replace_plan(back, (routing_of(step.world.world_size, 1).fwd_kv, step.rows))
    step.gradient(back, of_dispatch=number)


@pytest.mark.parametrize("world_size, ranks_per_node", WORLDS)
@pytest.mark.parametrize(
    "calls, named",
    [
        (other_lengths, "^" + disagree_in_call("dispatch", 1) + ": the plan differs"),
        (another_operation, r"rank \d calls (dispatch|kv_gradient), rank \d (kv_gr|disp)"),
        (swapped_gradients, r"kv_gradient: .* belongs to dispatch [12] on rank \d, to dispatch"),
        (replaced_plan, r"kv_gradient: .* the plan differs"),
    ],
)
def test_what_differs_is_named_by_all(world_size, ranks_per_node, calls, named):
    def body(world):
        step = Step(world)
        with pytest.raises(waybill.Disagreement, match=named) as caught:
            calls(step)
        assert isinstance(caught.value, waybill.InvalidArgument)
        with pytest.raises(waybill.TransportError, match=UNUSABLE):
            step.dispatch(step.plan(routing_of(world_size)))

    waybill.run_threads(world_size, body, timeout_s=10, ranks_per_node=ranks_per_node)


def reserved_in_turn(world):
    dispatchers = [waybill.SequenceDispatcher(world) for _ in range(2)]
    for dispatcher in reversed(dispatchers) if world.rank == 1 else dispatchers:
        dispatcher.reserve(1 << 16)


def a_barrier_against_windows(world):
    dispatcher = waybill.SequenceDispatcher(world)
    world.barrier() if world.rank == 1 else dispatcher.reserve(1 << 16)


def closed_in_turn(world):
    dispatchers = [waybill.SequenceDispatcher(world) for _ in range(2)]
    for dispatcher in reversed(dispatchers) if world.rank == 1 else dispatchers:
        dispatcher.close()


@pytest.mark.parametrize(
    "calls, named",
    [
        (reserved_in_turn, "window of dispatcher [12].*window of dispatcher [12]"),
        (a_barrier_against_windows, "World::barrier"),
        (closed_in_turn, "release.*of dispatcher"),
    ],
)
def test_what_is_made_in_another_order_is_not_taken_for_the_other(calls, named):
    """Else rows of one dispatcher arrive in windows of another, and a barrier ends without all."""

    def body(world):
        with pytest.raises(waybill.Disagreement) as caught:
            calls(world)
        world.barrier()  # all have been told, and go on together
        return str(caught.value)

    for rank, text in enumerate(waybill.run_threads(3, body, timeout_s=10)):
        assert re.search(DISAGREE_IN_EXCHANGE + r" \d+: rank ", text), text
        assert f"rank {rank} calls " in text and "same order on all ranks" in text
        assert re.search(named, text), text
        assert "rank 1 " in text


def test_wrong_numbers_move_nothing():
    def body(world):
        step = Step(world)
        there = step.plan(routing_of(1))
        assert step.dispatcher.last_dispatch == 0
        for number in (-1, 1.5, 2**64):
            with pytest.raises(waybill.InvalidArgument, match="of_dispatch"):
                step.dispatch(there, of_dispatch=number)
        assert step.dispatcher.last_dispatch == 0
        assert step.dispatch(there, of_dispatch=7) == 1

    waybill.run_threads(1, body)


@pytest.mark.parametrize("num_plans", [1, 2])
def test_backward_passes_in_another_order(num_plans):
    torch = pytest.importorskip("torch")
    import waybill.torch

    def body(world):
        attention = waybill.torch.ContextParallelAttention(
            world, 1, 1, 8, dtype=torch.float32, in_place=False, block_tokens=4
        )
        homes = ([[2 * TOKENS], [TOKENS], [TOKENS]], [[2 * TOKENS], [TOKENS], [4, TOKENS - 4]])
        plans = [attention.plan(home) for home in homes[:num_plans]] * (3 - num_plans)
        rows = plans[0].home_tokens[world.rank]
        tensors = [torch.zeros(rows, 1, 8, requires_grad=True) for _ in range(3)]
        losses = [attention(plan, *tensors).sum() for plan in plans]
        if world.rank == 1:
            losses.reverse()
        with pytest.raises(waybill.Disagreement) as caught:
            for loss in losses:
                loss.backward()
        return str(caught.value)

    texts = waybill.torch.run_threads(3, body, timeout_s=60)
    for text in texts:
        assert "belongs to dispatch" in text and "rank 1" in text
