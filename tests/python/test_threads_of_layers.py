"""Layers and dispatchers of one world, called by several threads of a rank at a time."""

import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from several_threads import together

import waybill

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import BarrierAllContext, EPAll2AllLayer  # noqa: E402
from waybill.world import _torch_on  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX, ROUNDS = 2, 8, 2, 4, 6, 30


def layer_on(world, **options):
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD, torch.float32, **options
    )


def steps(layer, scale):
    tokens = torch.full((3, HIDDEN), scale, requires_grad=True)
    ids = torch.tensor([[0, 3], [1, 2], [0, 2]])
    for _ in range(ROUNDS):
        rows, _, layout = layer.dispatch(tokens, ids)
        sums = layer.combine(rows * 2, layout)
        assert bool((sums == 4 * scale).all())
        sums.sum().backward()
        assert bool((tokens.grad == 4).all())
        tokens.grad = None


def test_two_layers_in_any_order():
    """A call that waits lets those of the other layer go on: ranks need no common order of both."""

    def body(world):
        layers = [layer_on(world) for _ in range(2)]
        works = [lambda layer=layer, i=i: steps(layer, 1.0 + i) for i, layer in enumerate(layers)]
        together(*(reversed(works) if world.rank else works))
        for layer in layers:
            layer.finalize()

    run_threads(WORLD, body, timeout_s=20)


def test_one_waits_while_another_goes_on():
    """Rank 1 begins with the second layer, on which nobody of rank 0 waits before."""

    def body(world):
        first, second = layer_on(world), layer_on(world)
        done = threading.Event()
        if world.rank == 0:
            together(lambda: steps(first, 1.0), lambda: steps(second, 2.0))
        else:
            steps(second, 2.0)
            done.set()
            steps(first, 1.0)
        first.finalize()
        second.finalize()

    run_threads(WORLD, body, timeout_s=20)


def test_a_layer_beside_a_dispatcher_and_a_barrier():
    plan = waybill.QkvPlan(2, [0, 1, 2], [5, 5], [1, 0], [0, 1, 2], [0, 1])
    table = plan.to_metadata().fwd_q
    rows = [np.full((5, 4), 1.0 + r, np.float32) for r in range(2)]

    def body(world):
        layer, barrier = layer_on(world), BarrierAllContext(world=world)
        dispatcher = waybill.SequenceDispatcher(world)
        ready = dispatcher.plan_dispatch((table, rows[0]))
        dispatcher.reserve(ready)

        def send():
            for _ in range(ROUNDS):
                (got,) = dispatcher.dispatch(ready, rows[world.rank])
                assert (got == rows[1 - world.rank]).all()

        def meet():
            for _ in range(ROUNDS):
                barrier.barrier_all()

        together(lambda: steps(layer, 1.0), send, meet)
        dispatcher.close()
        barrier.finalize()
        layer.finalize()

    run_threads(WORLD, body, timeout_s=20)


def test_two_threads_on_one_layer_take_turns():
    """Of one rank: there is no order on which ranks could disagree."""

    def body(world):
        layer = EPAll2AllLayer(world, MAX, HIDDEN, TOPK, 0, EXPERTS, 1, 1, torch.float32)
        ids = torch.tensor([[0, 1]] * 3)

        def work(value):
            for _ in range(ROUNDS):
                rows, _, layout = layer.dispatch(torch.full((3, HIDDEN), value), ids)
                assert bool((rows == value).all())
                assert bool((layer.combine(rows, layout) == 2 * value).all())

        together(lambda: work(1.0), lambda: work(2.0), lambda: work(3.0))
        layer.finalize()

    run_threads(1, body)


@pytest.mark.parametrize("attempt", range(4))
def test_windows_that_grow_at_a_time_are_told_apart(attempt):
    """Ranks may grow them in another order: then they hear of it, and no rows are mixed up."""

    def body(world):
        layers = [layer_on(world, capacity=1) for _ in range(2)]
        ids = torch.zeros(MAX, TOPK, dtype=torch.int64)  # 24 rows on rank 0, room for 12
        told = []

        def grow(i):
            try:
                rows, _, _ = layers[i].dispatch(torch.full((MAX, HIDDEN), 1.0 + i), ids)
                assert bool((rows == 1 + i).all())
            except waybill.Disagreement as error:
                told.append(str(error))
            except waybill.TransportError as error:  # the world of a rank that was told
                told.append(str(error))

        works = [lambda: grow(0), lambda: grow(1)]
        together(*(reversed(works) if world.rank else works))
        return told

    for told in run_threads(WORLD, body, timeout_s=2):
        assert not told or any("window of layer" in text for text in told), told


IDS = torch.tensor([[0, 3], [1, 2], [0, 2]])


def _dispatch(layer):
    layer.dispatch(torch.ones(3, HIDDEN), IDS)


def _dispatches(world):
    layers = [layer_on(world) for _ in range(2)]
    return [lambda layer=layer: _dispatch(layer) for layer in layers]


def _whole_steps(world):
    layers = [layer_on(world) for _ in range(2)]
    return [lambda layer=layer: steps(layer, 1.0) for layer in layers]


def _combines(world):
    layers = [layer_on(world) for _ in range(2)]
    there = [layer.dispatch(torch.ones(3, HIDDEN), IDS) for layer in layers]
    return [
        lambda layer=layer, got=got: layer.combine(got[0], got[2])
        for layer, got in zip(layers, there)
    ]


def _layer_and_dispatcher(world):
    plan = waybill.QkvPlan(2, [0, 1, 2], [5, 5], [1, 0], [0, 1, 2], [0, 1])
    rows = np.zeros((5, 4), np.float32)
    layer, dispatcher = layer_on(world), waybill.SequenceDispatcher(world)
    ready = dispatcher.plan_dispatch((plan.to_metadata().fwd_q, rows))
    dispatcher.reserve(ready)
    return [lambda: _dispatch(layer), lambda: dispatcher.dispatch(ready, rows)]


@pytest.mark.parametrize("calls", [_dispatches, _whole_steps, _combines, _layer_and_dispatcher])
def test_opposite_orders_on_one_thread_end_at_the_deadline(calls):
    """No thread is there to make the other call: all ranks hear who did not come, and why."""

    def body(world):
        works = calls(world)
        began = time.monotonic()
        with pytest.raises(waybill.Timeout) as caught:
            for work in reversed(works) if world.rank else works:
                work()
        time.sleep(0.4)  # who leaves before the other's deadline would be named as gone
        return str(caught.value), time.monotonic() - began

    for rank, (text, seconds) in enumerate(run_threads(WORLD, body, timeout_s=0.6)):
        assert f": rank {rank} waited 0.6" in text and f" from rank {1 - rank} " in text
        assert "; ranks may be in different calls, or rank" in text and seconds < 8


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_rank_that_shares_a_gpu_runs_backward_itself(monkeypatch, is_shared):
    """Without a GPU: torch is told that there is one."""
    streams = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda gpu: f"stream of GPU {gpu}")
    monkeypatch.setattr(torch.cuda, "stream", lambda of: streams.append(of) or nullcontext())
    with _torch_on(3, is_shared):
        assert torch._C._is_multithreading_enabled() is not is_shared
    assert torch._C._is_multithreading_enabled()
    assert streams == ["stream of GPU 3"] * is_shared
