"""Ranks whose plans differ are told in which document first; a plan of other ranks, a plan that was
forgotten and ranks that do not fit the world are said in the words of the caller.
"""

import os
import re

import numpy as np
import pytest
from error_texts import a_divisor, disagree_in_call
from packed import module
from test_process_worlds import run_ranks

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

LENGTHS = [[40, 20], [7, 9], [30]]
OTHER = {
    "a length": ([[40, 20], [7, 8], [30]], "document 1 of rank 1 = 8 tokens, the others 9 tokens"),
    "one more": ([[40, 20], [7, 9, 5], [30]], "document 2 of rank 1 = 5 tokens, the others none"),
    "one less": ([[40, 20], [7, 9], []], "document 0 of rank 2 = none, the others 30 tokens"),
    "the order": ([[20, 40], [7, 9], [30]], "document 0 of rank 0 = 20 tokens, the others 40 tok"),
}  # fmt: skip


def called(attend, plan, rank, rows):
    tensors = [torch.ones(rows, n, 8).double().requires_grad_() for n in (2, 1, 1)]
    return attend(plan, *tensors)


def texts_of(body, world_size=3):
    def each(world):
        with pytest.raises(waybill.Disagreement) as error:
            body(world)
        return str(error.value)

    return wt.run_threads(world_size, each, timeout_s=20)


@pytest.mark.parametrize("what", OTHER)
def test_the_first_document_is_named(what):
    """Rank 2 planned other lengths than the others."""
    lengths, named = OTHER[what]

    def body(world):
        attend = module(world, in_place=False)
        plan = attend.plan(lengths if world.rank == 2 else LENGTHS)
        called(attend, plan, world.rank, plan.home_tokens[world.rank])

    for text in texts_of(body):
        who = "ContextParallelAttention: forward: dispatch"
        assert text.startswith(f"{disagree_in_call(who, 1)}: the plan differs: hash "), text
        assert f"rank 2 with {named}" in text, text
        assert "ContextParallelAttention.gather tells all ranks" in text
        assert text.endswith("all ranks call the same plans in the same order")
        assert text.count("expected the same on all ranks") == 1


def test_pieces_of_numbered_documents_are_named():
    usual = [[(0, 0, 30)], [(0, 30, 30), (1, 0, 5)]]
    other = [[(0, 0, 30)], [(0, 30, 31), (1, 0, 5)]]

    def body(world):
        attend = module(world, in_place=False)
        plan = attend.plan(other if world.rank else usual)
        called(attend, plan, world.rank, plan.home_tokens[world.rank])

    for text in texts_of(body, 2):
        assert "rank 1 with document 0 of rank 1 = 31 tokens from 30 of number 0" in text, text


def test_plans_of_another_planner_or_in_another_order():
    """The option is named; two plans in another order are named by what differs between them."""

    def options(world):
        attend = module(world, in_place=False)
        planner = attend.planner
        if world.rank:
            shape = planner.shape
            planner = wt.BatchPlanner(
                2, 2, 1, shape.head_dim, shape.v_head_dim, dtype=shape.dtype, in_place=False,
                block_tokens=planner.facts()["block_tokens"], imbalance_target=1.5,
            )  # fmt: skip
        called(attend, planner.plan([[41], [6]]), world.rank, (41, 6)[world.rank])

    for text in texts_of(options, 2):
        assert re.search(r"rank 1 with imbalance_target = 1.5, the others [\d.]+: all", text), text

    def order(world):
        attend = module(world, in_place=False)
        plans = [attend.plan([[40], [6]]), attend.plan([[6], [40]])]
        for plan in reversed(plans) if world.rank else plans:
            called(attend, plan, world.rank, plan.home_tokens[world.rank])

    for text in texts_of(order, 2):
        assert "rank 1 with document 0 of rank 0 = 6 tokens, the others 40 tokens" in text, text


def test_many_documents_are_told_by_rank(monkeypatch):
    from waybill.torch.attention import moves

    monkeypatch.setattr(moves, "_MOST_NAMED", 3)

    def body(world):
        attend = module(world, in_place=False)
        plan = attend.plan([[40, 20 + world.rank], [7, 9]])
        called(attend, plan, world.rank, plan.home_tokens[world.rank])

    for text in texts_of(body, 2):
        assert "rank 1 with the documents of rank 0 = 2 with hash " in text, text


def test_the_world_goes_on_after_a_difference():
    """Nobody waits for a rank: all have compared, and other objects of the world are of use."""

    def body(world):
        attend = module(world, in_place=False)
        with pytest.raises(waybill.Disagreement):
            plan = attend.plan([[40 + world.rank], [6]])
            called(attend, plan, world.rank, plan.home_tokens[world.rank])
        world.barrier()
        again = module(world, in_place=False)
        out = called(again, again.plan([[40], [6]]), world.rank, (40, 6)[world.rank])
        assert torch.equal(out, torch.ones_like(out))

    wt.run_threads(2, body, timeout_s=20)


@pytest.mark.parametrize("face", [waybill, wt], ids=["numpy", "torch"])
def test_a_plan_of_another_world(face):
    rows = np.zeros((200, 8), np.float32) if face is waybill else torch.zeros(200, 8)
    routing, its = (
        waybill.plan([12] * 2 * size, size, 24, block_tokens=4).to_routing() for size in (4, 2)
    )

    def body(world):
        dispatcher = face.SequenceDispatcher(world)
        there = dispatcher.plan_dispatch((its.fwd_kv, rows))
        calls = {
            "plan_dispatch": lambda *parts: dispatcher.plan_dispatch(*parts),
            "plan_kv_gradient": lambda *parts: dispatcher.plan_kv_gradient(*parts),
            "replace_plan": lambda *parts: dispatcher.replace_plan(there, *parts),
        }
        for who, call in calls.items():
            with pytest.raises(waybill.InvalidArgument) as error:
                call((routing.fwd_kv, rows))
            assert str(error.value) == (
                f"{who}: the plan is for 4 ranks, expected 2, as the world has"
            )
        dispatcher.dispatch(there, rows)  # unchanged

    face.run_threads(2, body, timeout_s=20)


def test_a_forgotten_plan():
    def body(world):
        rows = torch.zeros(5, 2, 8)
        for face, given in ((waybill, rows.numpy()), (wt, rows)):
            dispatcher = face.SequenceDispatcher(world)
            for call, made_by in (
                (dispatcher.dispatch, "plan_dispatch"),
                (dispatcher.kv_gradient, "plan_kv_gradient"),
            ):
                text = rf"^{call.__name__}: plan is a \w+, expected a PlanHandle, as of {made_by}"
                with pytest.raises(waybill.InvalidArgument, match=text):
                    call(given)
        attend = module(world)
        text = r"^ContextParallelAttention: got Tensor, q, k and no v, expected \(plan, q, k, v\)"
        with pytest.raises(waybill.InvalidArgument, match=text):
            attend(rows, rows, rows)
        text = r"^ContextParallelAttention: plan is a list, expected a BatchPlan, as of plan\("
        with pytest.raises(waybill.InvalidArgument, match=text):
            attend([[5]], rows, rows, rows)

    wt.run_threads(1, body)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("meeting", ["file", "tcp"])
def test_one_rank_twice(tmp_path, meeting):
    from test_process_worlds import free_port

    url = f"tcp://127.0.0.1:{free_port()}" if meeting == "tcp" else f"file://{tmp_path}/meet"
    program = """
    os.environ["RANK"] = str(min(int(os.environ["RANK"]), 1))  # 0, 1, 1
    try:
        waybill.World.from_environment(timeout_s=5)
    except waybill.Error as error:
        print(error)
"""
    outputs = [text for _, text in run_ranks(tmp_path, program, 3, {"WAYBILL_RENDEZVOUS": url})]
    twice = [text for text in outputs if "rank 1 connected twice" in text or "been in" in text]
    assert any(
        "another rank (RANK, or what its launcher sets) in each process" in text for text in twice
    ), outputs


def test_more_ranks_on_a_host_than_there_are(monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in given.items():
        monkeypatch.setitem(os.environ, name, value)
    text = a_divisor("^World.from_environment: LOCAL_WORLD_SIZE", 4, "WORLD_SIZE = 2$")
    with pytest.raises(waybill.InvalidArgument, match=text):
        waybill.World.from_environment()

    def body(world):
        from waybill.torch.moe import EPAll2AllLayer

        text = a_divisor("^EPAll2AllLayer: local_world_size", 4, "world_size = 2$")
        with pytest.raises(waybill.InvalidArgument, match=text):
            EPAll2AllLayer(world, 6, 8, 2, world.rank, 4, 4, 2)

    wt.run_threads(2, body, timeout_s=20)
