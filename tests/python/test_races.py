"""Calls of several threads at once, which no program should make: an error or the right rows, never
memory that is somebody else's."""

import functools
import threading
import time

import numpy as np
import pytest
from error_texts import CLOSED, OF_ANOTHER_THREAD
from several_threads import together

import waybill

SECONDS = 0.7
REFUSALS = (waybill.InvalidArgument, waybill.TransportError)


def plan_of(lengths):
    """Metadata of one rank whose shards have these lengths."""
    shards = len(lengths)
    documents = list(range(shards))
    return waybill.QkvPlan(
        1, [0, shards], lengths, [0] * shards, [*documents, shards], documents
    ).to_metadata()  # fmt: skip


def in_parallel(*works):
    """Runs each again and again for a while, on a thread of its own; the first error is raised."""
    end, failed = time.monotonic() + SECONDS, threading.Event()

    def run(work):
        while time.monotonic() < end and not failed.is_set():
            try:
                work()
            except BaseException:
                failed.set()
                raise

    together(*(functools.partial(run, work) for work in works))


@pytest.fixture
def world():
    return waybill.World.from_all_gather(0, 1, lambda mine: [mine])


def test_properties_of_a_plan_that_is_replaced(world):
    tables = [plan_of([3] * 40), plan_of([2] * 40)]
    rows = np.ones((120, 2), np.float32)
    dispatcher = waybill.SequenceDispatcher(world)
    plan = dispatcher.plan_dispatch((tables[0].fwd_q, rows))
    dispatcher.reserve(plan)
    turn = iter(range(10**9))

    def replace():
        dispatcher.replace_plan(plan, (tables[next(turn) % 2].fwd_q, rows))

    def look():
        own, window, wire = plan.own_rows, plan.window_rows, plan.wire_bytes
        assert own in ([120], [80]) and window in ([120], [80]), (own, window)
        assert wire in ([120 * 8], [80 * 8]), wire
        assert plan.window_bytes >= 80 * 8 and plan.way == "direct" and repr(plan)
        assert dispatcher.window_bytes >= 120 * 8

    in_parallel(replace, look, look)


def test_windows_that_grow_or_close_while_results_are_wrapped(world):
    table = plan_of([50])
    rows = np.arange(100, dtype=np.float32).reshape(50, 2)
    state = {"dispatcher": waybill.SequenceDispatcher(world), "views": []}

    def send():
        dispatcher = state["dispatcher"]
        try:
            plan = dispatcher.plan_dispatch((table.fwd_q, rows))
            state["views"] = [*state["views"][-20:], dispatcher.dispatch(plan, rows)[0]]
        except REFUSALS as error:
            assert OF_ANOTHER_THREAD in str(error) or CLOSED in str(error), error

    def grow():
        dispatcher = state["dispatcher"]
        try:
            dispatcher.reserve(min(2 * dispatcher.window_bytes + 1, 1 << 22))
        except REFUSALS as error:
            assert OF_ANOTHER_THREAD in str(error) or CLOSED in str(error), error
        time.sleep(0.001)

    def close():
        time.sleep(0.01)
        try:
            state["dispatcher"].close()
            state["dispatcher"] = waybill.SequenceDispatcher(world)
        except waybill.InvalidArgument as error:
            assert OF_ANOTHER_THREAD in str(error), error

    def look():
        for view in state["views"]:
            assert view.shape == (50, 2) and float(view.sum()) == float(rows.sum())

    in_parallel(send, grow, close, look)


def test_a_layer_whose_memory_goes_while_it_is_looked_at(world):
    torch = pytest.importorskip("torch")
    from waybill.torch.moe import EPAll2AllLayer

    def make():
        return EPAll2AllLayer(world, 8, 4, 2, 0, 4, 1, 1, torch.float32, copy_out=False)

    tokens, ids = torch.ones(8, 4), torch.arange(4, dtype=torch.int32).repeat(4).reshape(8, 2)
    state = {"layer": make()}

    def refused(error):
        texts = (OF_ANOTHER_THREAD, "finalized", "memory of the next two combines is taken")
        return any(text in str(error) for text in texts)

    def send():
        try:
            rows, _, layout = state["layer"].dispatch(tokens, ids)
            assert rows.shape == (16, 4) and bool((rows == 1).all())
            assert layout.recv_expert_counts.tolist() == [4, 4, 4, 4]
        except REFUSALS as error:
            assert refused(error), error

    def look():
        try:
            assert state["layer"].combine_input(4).shape == (4, 4)
            assert state["layer"].output_rows >= 16
        except REFUSALS as error:
            assert refused(error), error

    def end():
        time.sleep(0.01)
        try:
            state["layer"].finalize()
            state["layer"] = make()
        except REFUSALS as error:
            assert refused(error), error

    in_parallel(send, look, end)
