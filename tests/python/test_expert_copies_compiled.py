"""ExpertParallel with copies as operations of torch.library: the bits that it has without them."""

import copy
import functools
import gc

import pytest

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm") or not hasattr(torch.library, "custom_op"):
    pytest.skip("this torch has no _grouped_mm, or no custom_op", allow_module_level=True)

from compiling import compiles  # noqa: E402
from test_device_copies import on_device  # noqa: E402, F401
from test_expert_parallel_copies import (  # noqa: E402
    HIDDEN,
    INNER,
    LOCAL,
    MOST,
    TOPK,
    batch,
    experts_of,
    module_on,
    one_step,
)
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import waybill  # noqa: E402
from waybill.torch.experts import operations  # noqa: E402
from waybill.torch.moe import SwiGLUExperts  # noqa: E402

RANKS = 3
ROOM = RANKS * MOST * TOPK


def pair_on(world, kind="stacked", compiled=None, **options):
    """A module, the same by operations, and both's experts."""
    own = experts_of(world.rank, kind)
    other = copy.deepcopy(own)
    made = {"fixed_rows": ROOM, **options}
    plain = module_on(world, own, **made)
    return plain, module_on(world, other, operations=compiled, **made), own, other


def same_steps(plain, other, own, others, inputs):
    """Outputs and gradients of a step have the same bits."""
    wanted, got = one_step(plain, inputs), one_step(other, inputs)
    wanted += [one.grad for one in own.parameters()]
    got += [one.grad for one in others.parameters()]
    assert any(one is not None and one.abs().sum() > 0 for one in wanted) or len(inputs[0]) == 0
    for one, two in zip(wanted, got):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)
    for one in (*own.parameters(), *others.parameters()):
        one.grad = None


def routed_to(inputs, *experts):
    """The same tokens, all to these experts."""
    x, scores, ids, gradient = inputs
    return x, scores, torch.tensor(experts).repeat(ids.shape[0], 1), gradient


def cases(rank):
    """A rank in turn without tokens, all to one expert, no token at all, even loads."""
    for seed in range(RANKS + 1):
        yield batch(rank, RANKS, seed, empty=seed - 1)
    yield routed_to(batch(rank, RANKS, 7), 1, 1)
    yield tuple(one[:0] for one in batch(rank, RANKS, 8))
    yield routed_to(batch(rank, RANKS, 9), *(LOCAL * rank + slot for slot in range(TOPK)))


@pytest.mark.parametrize("kind, options", [
    ("stacked", {}), ("stacked", {"keep_copies": True}), ("stacked", {"weights": "experts"}),
    ("lists", {}), ("lists", {"keep_copies": True}), ("stacked", {"min_rows": 10**6}),
])  # fmt: skip
def test_as_without_operations(kind, options):
    def body(world):
        plain, other, own, others = pair_on(world, kind, True, **options)
        assert other.uses_operations()
        for inputs in cases(world.rank):
            same_steps(plain, other, own, others, inputs)
            with torch.no_grad():
                assert torch.equal(plain(*inputs[:3]), other(*inputs[:3]))
        plain.finalize()
        other.finalize()

    waybill.run_threads(RANKS, body)
    assert not operations._held


@pytest.mark.parametrize("keep", [False, True])
def test_as_without_operations_as_on_gpus(on_device, keep):  # noqa: F811
    def body(world):
        plain, other, own, others = pair_on(world, "stacked", True, keep_copies=keep)
        for inputs in cases(world.rank):
            same_steps(plain, other, own, others, inputs)

    waybill.run_threads(RANKS, body)


def test_frozen_experts_and_parts_and_bfloat16_under_autocast():
    def body(world):
        plain, other, own, others = pair_on(world, "stacked", True)
        inputs = batch(world.rank, RANKS, 0)
        for one in (own, others):
            one.up.requires_grad_(False)
        same_steps(plain, other, own, others, inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same_steps(plain, other, own, others, inputs)
        for one in (own, others):
            one.requires_grad_(False)
        same_steps(plain, other, own, others, inputs)

    waybill.run_threads(RANKS, body)


@pytest.mark.parametrize("saved", ["experts_dispatch", "experts_with_copies", None])
def test_checkpoints(saved):
    """Selective ones, and one that computes all again."""
    kept = set()

    def policy(context, operation, *args, **options):
        if str(operation) == f"waybill.{saved}.default":
            kept.add(saved)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def body(world):
        plain, other, own, others = pair_on(world, "stacked", True)
        more = {"use_reentrant": False}
        if saved is not None:
            more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        again = functools.partial(checkpoint, other, **more)
        for seed in range(2):
            same_steps(plain, again, own, others, batch(world.rank, RANKS, seed, empty=0))

    waybill.run_threads(RANKS, body)
    assert kept == {saved} - {None}
    gc.collect()
    assert not operations._held


def test_a_backward_twice():
    def body(world):
        plain, other, own, others = pair_on(world, "stacked", True)
        x, scores, ids, gradient = batch(world.rank, RANKS, 1)
        found = []
        for module, experts in ((plain, own), (other, others)):
            out = module(x, scores, ids)
            out.backward(gradient, retain_graph=True)
            out.backward(gradient)
            found.append([one.grad for one in experts.parameters()])
        assert all(torch.equal(one, two) for one, two in zip(*found))

    waybill.run_threads(RANKS, body)


class NoModule:
    """Experts of the two functions alone."""

    def expert_tensors(self, expert):
        return [torch.ones(HIDDEN, requires_grad=True)]

    def use_tensors(self, slot, tensors):
        pass

    def __call__(self, rows, ends):
        return rows


class Stray(SwiGLUExperts):
    """Experts that use a tensor of somebody else's."""

    def forward(self, rows, ends):
        return super().forward(rows, ends) * self.factor[0]


def test_refused_by_name():
    def body(world):
        with pytest.raises(waybill.Unsupported, match=r"expected a torch\.nn\.Module"):
            module_on(world, NoModule(), fixed_rows=ROOM, operations=True)
        experts = Stray(LOCAL, HIDDEN, INNER, torch.float32)
        experts.factor = [torch.ones((), requires_grad=True)]
        module = module_on(world, experts, fixed_rows=ROOM, operations=True)
        with pytest.raises(waybill.Unsupported, match=r"a tensor of \[\] that requires gradients"):
            one_step(module, batch(world.rank, RANKS, 0))

    waybill.run_threads(RANKS, body)


@compiles
def test_one_graph_of_alike_modules():
    """Rank 1 has no tokens. Copies in a pool, and kept ones; loads that need copies, and that need
    none.
    """

    def body(world):
        seen = []

        def backend(graph, inputs):
            seen.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        @functools.partial(torch.compile, backend=backend, fullgraph=True)
        def call(module, x, scores, ids):
            return torch.tanh(module(x, scores, ids))

        def plain_call(module, x, scores, ids):
            return torch.tanh(module(x, scores, ids))

        drawn = batch(world.rank, 2, 0, empty=1)
        for keep in (False, True):
            plain, other, own, others = pair_on(world, keep_copies=keep)
            calls = [functools.partial(one, of) for one, of in ((plain_call, plain), (call, other))]
            for inputs in (drawn, routed_to(drawn, 0, 2), routed_to(drawn, 1, 1)):
                same_steps(*calls, own, others, inputs)
        assert len(seen) == 1

    waybill.run_threads(2, body, timeout_s=60)
