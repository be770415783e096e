"""Nothing keeps a world in a cycle of references: Python would end it at any time, in any rank's
thread, and giving memory of a GPU back waits for kernels of other ranks there, which wait for this
rank.
"""

import gc

import pytest
from packed import module
from ways import settled_garbage

torch = pytest.importorskip("torch")

from deep_ep_cases import BYTES, EXPERTS, LOCAL, WORLD, Buffer, everyone, layout_of  # noqa: E402

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts  # noqa: E402


def many_tokens(world):
    buffer = Buffer(world, BYTES, explicitly_destroy=True)
    mine = everyone()[world.rank]
    given = {"topk_idx": mine.ids, "topk_weights": mine.weights, **layout_of(buffer, mine)}
    x, _, _, _, handle, _ = buffer.dispatch(mine.x, async_finish=True, **given)
    assert len(list(handle)) == 6
    buffer.combine(x, handle)
    buffer.destroy()


def few_tokens(world):
    num_bytes = Buffer.get_low_latency_rdma_size_hint(7, 512, WORLD, EXPERTS)
    buffer = Buffer(
        world, num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=LOCAL,
        explicitly_destroy=True,
    )  # fmt: skip
    mine = everyone(0, 512)[world.rank]
    got, _, handle, _, hook = buffer.low_latency_dispatch(
        mine.x, mine.ids, 7, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    hook()
    assert len(list(handle)) == 5
    buffer.low_latency_combine(got, mine.ids, mine.weights, handle)
    buffer.destroy()


def experts(world):
    layer = EPAll2AllLayer(
        world, 4, 8, 2, world.rank, EXPERTS, WORLD, WORLD, torch.float32, torch.float32, 16
    )
    x = torch.ones(4, 8, requires_grad=True)
    ids = torch.arange(8, dtype=torch.int32).view(4, 2)
    rows, _, layout = layer.dispatch(x, ids)
    layer.combine(rows, layout).sum().backward()
    layer.finalize()


def shared_layers(world):
    """Modules that nobody finalizes: what they share stays with the world, and goes with it."""
    own = SwiGLUExperts(EXPERTS // WORLD, 8, 8)
    for options in ({}, {"spare_experts": 1, "min_rows": 1, "limit": 1.0}):
        moe = ExpertParallel(
            own, num_experts=EXPERTS, topk=2, hidden=8, max_tokens=4, group=world, gradients="sum",
            dtype=torch.float32, **options,
        )  # fmt: skip
        moe(torch.ones(4, 8), torch.ones(4, 2), torch.arange(8).view(4, 2)).sum().backward()
    assert len(world._expert_layers) == 3


def attention(world):
    attend = module(world)
    plan = attend.plan([[40], [9], [3]])
    fixed = attend.fixed_plan(plan, wt.Capacities.of(plan))
    for given, rows in ((plan, plan.home_tokens[world.rank]), (fixed, 40)):
        q, k, v = (torch.ones(rows, n, 8).double().requires_grad_() for n in (2, 1, 1))
        attend(given, q, k, v).sum().backward()
    attend.close()


@pytest.mark.parametrize("body", [many_tokens, few_tokens, experts, shared_layers, attention])
def test_a_world_goes_with_its_last_user(body):
    with settled_garbage():
        wt.run_threads(WORLD, body)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found = [one for one in gc.garbage if isinstance(one, waybill.World)]
            gc.garbage.clear()
        finally:
            gc.set_debug(0)
    assert found == []
