"""Checkpoints that autograd computes again in backward, on ranks that have nothing to compute."""

import pytest

import waybill

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import waybill.torch as wt  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

WORLD, HIDDEN, EXPERTS = 3, 8, 6
TIMEOUT = 20.0


def recomputed(function, *arguments):
    return checkpoint(function, *arguments, use_reentrant=False)


def directly(function, *arguments):
    return function(*arguments)


def first_expert_only(world, reentry, parts, weighted=False):
    """Rank 2 has no tokens, and all go to the experts of rank 0: the others skip theirs. What is
    in one of the parts is computed again together.
    """
    layer = EPAll2AllLayer(
        world, 5, HIDDEN, 2, world.rank, EXPERTS, WORLD, WORLD, torch.float32
    )  # fmt: skip
    generator = torch.Generator().manual_seed(world.rank)
    count = (4, 2, 0)[world.rank]
    x = torch.randn(count, HIDDEN, generator=generator).requires_grad_()
    gate = torch.rand(count, 2, generator=generator).requires_grad_(weighted)
    ids = torch.tensor([[0, 1]]).expand(count, 2).contiguous()
    weight = torch.full((HIDDEN, HIDDEN), 0.25).requires_grad_()

    def experts(rows, row_weights):
        if rows.shape[0] == 0:  # nothing is saved for backward
            return rows
        return torch.tanh(rows @ weight) * row_weights[:, None]

    layouts = []

    def there(tokens, gates):
        rows, row_weights, layout = layer.dispatch(tokens, ids, gates)
        layouts.append(layout)
        return rows, row_weights

    def home(rows):
        return layer.combine(rows, layouts[0])

    def whole(tokens, gates):
        rows, row_weights, layout = layer.dispatch(tokens, ids, gates)
        return layer.combine(experts(rows, row_weights), layout)

    for _ in range(2):
        layouts.clear()
        if parts == "whole":
            out = reentry(whole, x, gate)
        elif parts == "dispatch and experts":
            out = home(reentry(lambda t, g: experts(*there(t, g)), x, gate))
        elif parts == "experts and combine":
            out = reentry(lambda r, w: home(experts(r, w)), *there(x, gate))
        else:
            out = reentry(home, experts(*reentry(there, x, gate)))
        (out.square().sum() + x.sum() * 0).backward()
    grads = [x.grad, gate.grad, weight.grad]
    layer.finalize()
    return [out.detach(), *(None if g is None else g.clone() for g in grads)]


PARTS = ["whole", "dispatch and experts", "experts and combine", "each alone"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("parts", PARTS)
def test_experts_that_are_skipped(parts, weighted):
    def run(reentry):
        return wt.run_threads(
            WORLD, lambda world: first_expert_only(world, reentry, parts, weighted),
            timeout_s=TIMEOUT,
        )  # fmt: skip

    for rank, (got, want) in enumerate(zip(run(recomputed), run(directly))):
        for a, b in zip(got, want):
            assert (a is None and b is None) or torch.equal(a, b), rank
    assert want[3] is None  # rank 2 has computed nothing


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_that_is_skipped(reentrant):
    """Rank 0 attends to everything, rank 2 has no rows at home either."""
    own = waybill.QkvPlan(3, [0, 1, 2, 2], [3, 2], [0, 0], [0, 2], [0, 1])

    def attend(q, k, v, sequences, shape):
        assert q.shape[0] == 5  # a kernel without sequences is not called
        return torch.einsum("qhd,khd->qhk", q, k).softmax(-1) @ v[:, 0] * 2.0

    def body(world, reentry):
        rows = (3, 2, 0)[world.rank]
        q, k, v = (torch.full((rows, 1, 4), float(i + 1)).requires_grad_() for i in range(3))
        attention = wt.ContextParallelAttention(
            world, 1, 1, 4, dtype=torch.float32, kernel=attend, in_place=False
        )
        plan = attention.plan(own)
        for _ in range(2):
            out = reentry(attention, plan, q, k, v)
            out.square().sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    def run(reentry):
        return wt.run_threads(3, lambda world: body(world, reentry), timeout_s=TIMEOUT)

    def again(function, *arguments):
        return checkpoint(function, *arguments, use_reentrant=reentrant)

    for got, want in zip(run(again), run(directly)):
        assert all(torch.equal(a, b) for a, b in zip(got, want))
