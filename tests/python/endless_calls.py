"""Endless loops over each collective call, whose data are there: no wait of them really waits."""

import itertools

import numpy as np
import torch

import waybill
import waybill.moe
import waybill.torch as wt
from waybill.integrations.deep_ep import Buffer
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts

ROWS, HIDDEN, TOPK = 4, 16, 2


def _metadata(world_size):
    """Each rank's only document goes to the next rank."""
    ranks = list(range(world_size))
    q_dst = [(rank + 1) % world_size for rank in ranks]
    offsets = [*ranks, world_size]
    return waybill.QkvPlan(
        world_size, offsets, [ROWS] * world_size, q_dst, offsets, ranks
    ).to_metadata()


def _dispatcher(face, rows, world):
    dispatcher = face.SequenceDispatcher(world)
    return dispatcher, (_metadata(world.world_size).fwd_kv, rows)


def numpy_dispatch(world):
    rows = np.ones((ROWS, HIDDEN), np.float32)
    dispatcher, part = _dispatcher(waybill, rows, world)
    plan = dispatcher.plan_dispatch(part)
    return lambda: dispatcher.dispatch(plan, rows)


def dispatch(world):
    rows = torch.ones(ROWS, HIDDEN)
    dispatcher, part = _dispatcher(wt, rows, world)
    plan = dispatcher.plan_dispatch(part)
    return lambda: dispatcher.dispatch(plan, rows)


def kv_gradient(world):
    dispatcher, part = _dispatcher(wt, torch.ones(ROWS, HIDDEN), world)
    plan = dispatcher.plan_kv_gradient(part)
    gradient = torch.ones(plan.window_rows[0], HIDDEN)
    return lambda: dispatcher.kv_gradient(plan, gradient)


def plan_dispatch(world):
    dispatcher, part = _dispatcher(wt, torch.ones(ROWS, HIDDEN), world)
    return lambda: dispatcher.plan_dispatch(part)


def reserve(world):
    dispatcher, _ = _dispatcher(wt, torch.ones(ROWS, HIDDEN), world)
    return lambda: dispatcher.reserve(1 << 16)


def gradient_inputs(world):
    dispatcher, part = _dispatcher(wt, torch.ones(ROWS, HIDDEN), world)
    plan = dispatcher.plan_kv_gradient(part)
    return lambda: dispatcher.gradient_inputs(plan)


def _attention(world):
    attend = wt.ContextParallelAttention(world, 2, 1, HIDDEN, block_tokens=1, dtype=torch.float32)
    rows = [torch.ones(ROWS, heads, HIDDEN, requires_grad=True) for heads in (2, 1, 1)]
    return attend, rows, [(0, world.rank * ROWS, ROWS)]


def attention(world):
    attend, rows, pieces = _attention(world)
    plan = attend.plan(attend.gather(pieces))

    def call():
        with torch.no_grad():
            attend(plan, *rows)

    return call


def attention_and_backward(world):
    attend, rows, pieces = _attention(world)
    plan = attend.plan(attend.gather(pieces))
    return lambda: attend(plan, *rows).sum().backward()


def plan(world):
    """Of this rank alone, as even_experts."""
    lengths = [ROWS] * world.world_size
    return lambda: waybill.plan(lengths, world.world_size, ROWS)


def even_experts(world):
    rows = np.ones((world.world_size, 2 * world.world_size), np.int64)
    return lambda: waybill.moe.even_experts(rows, spare_experts=1)


def gather(world):
    attend, _, pieces = _attention(world)
    return lambda: attend.gather(pieces)


def _ids(world):
    return torch.arange(ROWS * TOPK, dtype=torch.int32).view(ROWS, TOPK) % (2 * world.world_size)


def _layer(world):
    return EPAll2AllLayer(
        world, ROWS, HIDDEN, TOPK, world.rank, 2 * world.world_size, world.world_size,
        world.world_size, torch.float32, torch.float32,
    )  # fmt: skip


def expert_dispatch(world):
    layer, ids = _layer(world), _ids(world)
    return lambda: layer.dispatch(torch.ones(ROWS, HIDDEN), ids)


def expert_combine(world):
    layer, ids = _layer(world), _ids(world)
    rows, _, layout = layer.dispatch(torch.ones(ROWS, HIDDEN), ids)
    return lambda: layer.combine(rows, layout)


def expert_barrier(world):
    return _layer(world).ep_barrier_all


def experts(world):
    tokens = torch.ones(ROWS, HIDDEN, requires_grad=True)
    layer = ExpertParallel(
        SwiGLUExperts(2, HIDDEN, HIDDEN, torch.float32), group=world, dtype=torch.float32,
        num_experts=2 * world.world_size, topk=TOPK, hidden=HIDDEN, max_tokens=ROWS,
        gradients="sum",
    )  # fmt: skip
    scores, ids = torch.ones(ROWS, TOPK), _ids(world).long()
    return lambda: layer(tokens, scores, ids).sum().backward()


def _buffer(world):
    return Buffer(world, 1 << 20, 1 << 20, low_latency_mode=True)


def deep_ep(world):
    buffer, ids = _buffer(world), _ids(world).long()
    tokens = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16)
    counts, _, of_experts, goes, _ = buffer.get_dispatch_layout(ids, 2 * world.world_size)
    weights = torch.ones(ROWS, TOPK)

    def call():
        rows, _, _, _, handle, _ = buffer.dispatch(
            tokens, None, counts, None, goes, of_experts, ids, weights
        )
        buffer.combine(rows, handle)

    return call


def deep_ep_low_latency(world):
    buffer, ids = _buffer(world), _ids(world).long()
    tokens = torch.ones(ROWS, 128, dtype=torch.bfloat16)
    weights = torch.ones(ROWS, TOPK)

    def call():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            tokens, ids, ROWS, 2 * world.world_size, use_fp8=False
        )
        buffer.low_latency_combine(rows, ids, weights, handle)

    return call


def barrier(world):
    return world.barrier


CALLS = {
    call.__name__: call
    for call in (
        numpy_dispatch, dispatch, kv_gradient, plan_dispatch, reserve, gradient_inputs, plan,
        even_experts, attention, attention_and_backward, gather, expert_dispatch, expert_combine,
        expert_barrier, experts, deep_ep, deep_ep_low_latency, barrier,
    )
}  # fmt: skip


def loop(name, begun, world):
    """Never ends by itself; ``begun`` is called after some calls of rank 0."""
    torch.set_num_threads(1)
    call = CALLS[name](world)
    for count in itertools.count():
        call()
        if count == 3 and world.rank == 0:
            begun()
