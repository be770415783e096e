"""What goes wrong inside a call of a module is said in the words of the caller's own call."""

import time

import pytest
from error_texts import CLOSED, FINALIZED

from waybill import Disagreement, InvalidArgument, Timeout, TransportError
from waybill._errors import said_by

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")
moe = pytest.importorskip("waybill.torch.moe")

LENGTHS = [[70, 6], [4, 20, 3]]


def attention_of(world, **options):
    given = {"dtype": torch.float32, "in_place": True, "block_tokens": 4, **options}
    return wt.ContextParallelAttention(world, 2, 1, 8, **given)


def rows_of(plan, world):
    rows = plan.home_tokens[world.rank]
    return [torch.randn(rows, heads, 8, requires_grad=True) for heads in (2, 1, 1)]


def called(world):
    attention = attention_of(world)
    plan = attention.plan(LENGTHS)
    return attention, plan, rows_of(plan, world)


def on_two_ranks(body):
    """Errors of the body must be caught there; ranks wait 0.5 s for each other."""
    wt.run_threads(2, body, timeout_s=0.5)


def experts_of(world, **options):
    return moe.ExpertParallel(
        moe.SwiGLUExperts(2, 8, 8), num_experts=4, topk=2, hidden=8, max_tokens=6, group=world,
        dtype=torch.float32, gradients="sum", **options,
    )  # fmt: skip


def tokens():
    return (
        torch.randn(5, 8, requires_grad=True),
        torch.rand(5, 2, requires_grad=True),
        torch.tensor([[0, 3]] * 5),
    )


@pytest.mark.parametrize("make", [called, lambda w: (experts_of(w), *tokens()[:1], tokens()[1:])])
def test_a_rank_that_does_not_call(make):
    def body(world):
        module, first, rest = make(world)
        if world.rank == 1:
            time.sleep(0.8)
            return
        with pytest.raises(Timeout, match=rf"^{type(module).__name__}: forward: .*rank 0 waited"):
            module(first, *rest)

    on_two_ranks(body)


def test_a_rank_that_does_not_go_backward():
    def body(world):
        attention, plan, rows = called(world)
        out = attention(plan, *rows)
        if world.rank == 1:
            time.sleep(0.8)
            return
        with pytest.raises(Timeout, match=r"^ContextParallelAttention: backward: .*rank 0 waited"):
            out.sum().backward()

    on_two_ranks(body)


def test_a_rank_whose_experts_do_not_go_backward():
    def body(world):
        out = experts_of(world)(*tokens())
        if world.rank == 1:
            time.sleep(0.8)
            return
        with pytest.raises(Timeout, match=r"^backward of EPAll2AllLayer\.combine: .*0 waited"):
            out.sum().backward()

    on_two_ranks(body)


def test_another_plan_on_one_rank():
    def body(world):
        attention = attention_of(world)
        plan = attention.plan(LENGTHS if world.rank == 0 else [LENGTHS[0], LENGTHS[1][::-1]])
        match = "^ContextParallelAttention: forward: .*the plan differs.*same plans in the same"
        with pytest.raises(Disagreement, match=match):
            attention(plan, *rows_of(plan, world))

    on_two_ranks(body)


def test_gradients_that_one_rank_needs():
    def body(world):
        attention, plan, (q, k, v) = called(world)
        if world.rank == 1:
            k, v = k.detach(), v.detach()
        match = "^ContextParallelAttention: backward: .*k or v, require gradients on all ranks or"
        with pytest.raises(Disagreement, match=match):
            attention(plan, q, k, v).sum().backward()

    on_two_ranks(body)


def test_a_module_that_was_closed():
    def body(world):
        attention, plan, rows = called(world)
        out = attention(plan, *rows)
        attention.gather(LENGTHS[world.rank])
        attention.close()
        calls = (
            lambda: attention(plan, *rows), lambda: attention.gather(LENGTHS[world.rank]),
            lambda: attention.prepare(plan), out.sum().backward,
            lambda: attention.fixed_plan(plan, wt.Capacities.of(plan)),
        )  # fmt: skip
        for call in calls:
            match = f"^ContextParallelAttention.*: the module {CLOSED} on rank {world.rank}"
            with pytest.raises(TransportError, match=match):
                call()

    on_two_ranks(body)


def test_arguments_by_their_names():
    def body(world):
        attention, plan, (q, _, _) = called(world)
        with pytest.raises(InvalidArgument, match=r"^ContextParallelAttention\.plan: pieces of 1"):
            attention.plan([[3]])
        with pytest.raises(InvalidArgument, match=r"^ContextParallelAttention\.gather: held: pie"):
            attention.gather("x")
        latent = attention_of(world, latent_dim=4)
        plan = latent.plan(LENGTHS)
        for rows in (None, q):
            with pytest.raises(InvalidArgument, match=r"^ContextParallelAttention: rows (is|has)"):
                latent.latent(plan, q, rows, lambda rows: (rows, rows))
        with pytest.raises(InvalidArgument, match=r"^ExpertParallel: fixed_rows = -1"):
            experts_of(world, fixed_rows=-1)
        layer = experts_of(world)
        layer.finalize()
        with pytest.raises(TransportError, match=f"^ExpertParallel: the module {FINALIZED}"):
            layer(*tokens())

    on_two_ranks(body)


def test_what_has_its_words_keeps_them():
    with pytest.raises(InvalidArgument, match=r"^Module: x = 3$"), said_by("Module: forward"):
        raise InvalidArgument("Module: x = 3")
    with pytest.raises(InvalidArgument, match=r"^Module: call: y = 3$"), said_by("Module: call"):
        raise InvalidArgument("SequenceDispatcher: y = 3")
    with pytest.raises(ValueError, match=r"^y$"), said_by("Module: call"):
        raise ValueError("y")
