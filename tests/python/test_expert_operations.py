"""ExpertParallel as operations of torch.library: in eager mode, compiled, with checkpoints."""

import functools
import gc

import pytest

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm") or not hasattr(torch.library, "custom_op"):
    pytest.skip("this torch has no _grouped_mm, or no custom_op", allow_module_level=True)

from compiling import compiles  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import waybill  # noqa: E402
from waybill.torch.experts import operations  # noqa: E402
from waybill.torch.moe import ExpertParallel, SwiGLUExperts  # noqa: E402

HIDDEN, INNER, EXPERTS, TOPK, MOST = 16, 32, 6, 3, 8


def module_on(world, ranks, **options):
    draws = torch.Generator().manual_seed(world.rank)
    experts = SwiGLUExperts(EXPERTS // ranks, HIDDEN, INNER, torch.float32)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draws) / 4)
    return ExpertParallel(
        experts, group=world, dtype=torch.float32, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
        max_tokens=MOST, gradients="mean", **{"fixed_rows": ranks * MOST * TOPK, **options},
    )  # fmt: skip


def batch(rank, seed, count=MOST):
    draws = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(count, HIDDEN, generator=draws)
    scores, ids = torch.rand(count, EXPERTS, generator=draws).topk(TOPK)
    ids[torch.rand(ids.shape, generator=draws) < 0.2] = -1
    return x, scores, ids


def step(module, call, given):
    """Output and all gradients."""
    x, scores, ids = given
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    for weight in module.experts.parameters():
        weight.grad = None
    out = call(x, scores, ids)
    out.square().sum().backward()
    return [out.detach(), x.grad, scores.grad, *(w.grad for w in module.experts.parameters())]


def same(some, others):
    for one, other in zip(some, others):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["combine", "experts"])
@pytest.mark.parametrize("count", [MOST, 3, 0])
def test_as_without(weights, count):
    def body(world):
        plain = module_on(world, 2, weights=weights)
        by_operations = module_on(world, 2, weights=weights, operations=True)
        assert plain.layer is by_operations.layer
        given = batch(world.rank, 1, count if world.rank == 0 else MOST)
        same(step(plain, plain, given), step(by_operations, by_operations, given))
        with torch.no_grad():
            torch.testing.assert_close(by_operations(*given), plain(*given))
        plain.finalize()
        by_operations.finalize()

    waybill.run_threads(2, body)


def test_descriptors_go_with_their_tickets():
    def body(world):
        module = module_on(world, 1, operations=True)
        before = len(operations._held)
        for seed in range(3):
            step(module, module, batch(0, seed))
        gc.collect()
        assert len(operations._held) == before
        module.finalize()

    waybill.run_threads(1, body)


@compiles
def test_twenty_batches_of_one_graph():
    def body(world):
        module = module_on(world, 1, shared=lambda x: x * 0.5)
        seen = []

        def backend(graph, inputs):
            seen.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        compiled = torch.compile(module, backend=backend, fullgraph=True)
        for seed in range(20):
            given = batch(0, seed)
            same(step(module, compiled, given), step(module, module, given))
        assert len(seen) == 1
        module.finalize()

    waybill.run_threads(1, body)


@compiles
def test_inductor_keeps_the_order_of_calls():
    """Also on rank 1, which has no tokens: nothing there depends on elements of a tensor."""

    def body(world):
        module = module_on(world, 2)

        @functools.partial(torch.compile, fullgraph=True)
        def two(x, scores, ids):
            return module(torch.tanh(module(x, scores, ids)), scores, ids)

        for seed in range(2):
            given = batch(world.rank, seed, 0 if world.rank == 1 else MOST)
            plain = lambda x, scores, ids: module(torch.tanh(module(x, scores, ids)), scores, ids)
            same(step(module, two, given), step(module, plain, given))
        module.finalize()

    waybill.run_threads(2, body, timeout_s=60)


@pytest.mark.parametrize("saved", ["experts_dispatch", "experts_combine", "nothing"])
def test_selective_checkpoints(saved):
    def body(world):
        module = module_on(world, 2, operations=True)
        given, calls = batch(world.rank, 1), []

        def policy(context, operation, *args, **options):
            name = str(operation)
            if "waybill" in name and context.is_recompute is False:
                calls.append(name)
            keeps = saved in name
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        again = lambda *args: checkpoint(module, *args, use_reentrant=False, context_fn=contexts)
        same(step(module, again, given), step(module, module, given))
        assert any("experts_dispatch" in name for name in calls)
        module.finalize()

    waybill.run_threads(2, body)


def test_what_operations_need():
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match="expected fixed_rows and one chunk"):
            module_on(world, 1, fixed_rows=None, operations=True)
        with pytest.raises(waybill.InvalidArgument, match="expected fixed_rows and one chunk"):
            module_on(world, 1, chunks=2, operations=True)

    waybill.run_threads(1, body)
