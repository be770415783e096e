"""SequenceDispatcher against the simulation, on all kinds of ranks."""

import gc
import pickle
import weakref

import numpy as np
import pytest
from error_texts import CLOSED, UNUSABLE
from ways import (
    PLAN_EDGES,
    edge_plan,
    random_bits,
    random_plan,
    rows_of,
    simulated,
    simulated_sums,
)  # fmt: skip

import waybill
from waybill import TensorFormat

LAYOUTS = ["per_rank", "per_query"]
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "float64"]


def payloads(plan, dtype_size, hidden, seed):
    """Bits for each rank's rows."""
    return [
        random_bits(dtype_size, (rows, hidden), seed + r) for r, rows in enumerate(rows_of(plan))
    ]


def numbers(plan, dtype, shape, seed):
    """Bits of finite numbers of mixed size, for sums."""
    rng = np.random.default_rng(seed)
    made = [(rng.standard_normal(s) * 4.0 ** rng.integers(-3, 4, s)) for s in shape]
    if dtype == "bfloat16":
        return [(m.astype(np.float32).view(np.int32) >> 16).astype(np.int16) for m in made]
    return [m.astype(dtype).view(f"int{8 * np.dtype(dtype).itemsize}") for m in made]


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_q_and_kv_in_one_call_and_q_home_again(way, world_size, dtype, kv_layout):
    size = np.dtype({"bfloat16": "int16", "float8_e4m3fn": "int8"}.get(dtype, dtype)).itemsize
    seed = 10 * world_size
    check_q_and_kv(way, random_plan(world_size, seed, kv_layout), seed, dtype, size)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("edge", PLAN_EDGES)
def test_q_and_kv_of_plans_that_break_things(way, edge, kv_layout):
    for world_size, seed in ((1, 0), (2, 1), (3, 2), (3, 3)):
        check_q_and_kv(way, edge_plan(world_size, edge, seed, kv_layout), seed, "float32", 4)


def check_q_and_kv(way, plan, seed, dtype, size):
    world_size = len(rows_of(plan))
    metadata, routing = plan.to_metadata(), plan.to_routing()
    q, k, v = (payloads(plan, size, n, seed) for n in (24, 8, 5))
    expected = [simulated(q, metadata.fwd_q)]
    expected += [simulated(rows, metadata.fwd_kv) for rows in (k, v)]

    def body(world):
        mine = [way.from_bits(rows[world.rank], dtype) for rows in (q, k, v)]
        with way.face.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch(
                (routing.fwd_q, mine[0]),
                (metadata.fwd_kv, *mine[1:]),
            )
            back = dispatcher.plan_dispatch((routing.rev_q, mine[0]))
            got = dispatcher.dispatch(there, *mine)
            bits = [way.bits(view) for view in got]
            (home,) = dispatcher.dispatch(back, got[0])  # the input may lie in the window
            assert [t.dtype for t in got] == [way.dtype(dtype)] * 3
            return bits, way.bits(home)

    for rank, (bits, home) in enumerate(way.run(world_size, body)):
        for got, want in zip(bits, expected):
            assert np.array_equal(got, want[rank])
        assert np.array_equal(home, q[rank])


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "result"),
    [("float32", None), ("float64", None), ("bfloat16", None), ("bfloat16", "float32"),
     ("float16", None)],
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_copies_are_summed(way, world_size, dtype, result, kv_layout):
    if way.name == "numpy" and dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    seed = 7 * world_size
    plan = random_plan(world_size, seed, kv_layout)
    metadata, routing, rows = plan.to_metadata(), plan.to_routing(), rows_of(plan)
    received = [int(n) for n in metadata.fwd_kv.num_total_recv_tokens]
    bits = numbers(plan, dtype, [(n, 6) for n in received], seed)
    gradients = bits
    if dtype == "bfloat16":
        import ml_dtypes

        gradients = [b.view(ml_dtypes.bfloat16) for b in bits]
    else:
        gradients = [b.view(dtype) for b in bits]
    wide = [g.astype(np.float32) for g in gradients] if result else gradients
    expected = simulated_sums(wide, metadata, rows)

    def body(world):
        gradient = way.from_bits(bits[world.rank], dtype)
        with way.face.SequenceDispatcher(world) as dispatcher:
            plan = dispatcher.plan_kv_gradient((routing.fwd_kv, gradient))
            assert (plan.own_rows, plan.window_rows) == (
                [rows[world.rank]], [len(gradient)],
            )  # fmt: skip
            wanted = None if result is None else way.dtype(result)
            (new,) = dispatcher.kv_gradient(plan, gradient, dtype=wanted)
            (place,) = dispatcher.gradient_inputs(plan)
            place[...] = gradient  # no copy is left to do
            (again,) = dispatcher.kv_gradient(plan, place, out=[new + 0])
            return way.bits(new), way.bits(again)

    for rank, (new, again) in enumerate(way.run(world_size, body)):
        want = np.ascontiguousarray(expected[rank])
        assert np.array_equal(new, want.view(new.dtype)) and np.array_equal(new, again)


def test_rows_at_any_distance_and_of_several_axes(way):
    plan = random_plan(3, 4, "per_rank")
    fwd = plan.to_metadata().fwd_q
    rows = rows_of(plan)
    wide = [random_bits(2, (n + 2, 3, 50), r) for r, n in enumerate(rows)]
    flat = [w[:, 1, 4:28].reshape(len(w), 24)[:n] for w, n in zip(wide, rows)]
    expected = simulated([np.ascontiguousarray(f) for f in flat], fwd)

    def body(world):
        whole = way.from_bits(wide[world.rank], "float16")
        q = whole[:, 1, 4:28].reshape(-1, 4, 6)  # heads of a fused projection; rows too many
        with way.face.SequenceDispatcher(world) as dispatcher:
            plan = dispatcher.plan_dispatch((fwd, TensorFormat(way.dtype("float16"), (4, 6))))
            assert plan.formats[0].hidden == 24
            (got,) = dispatcher.dispatch(plan, q)
            assert tuple(got.shape[1:]) == (4, 6)
            return way.bits(got)

    for got, want in zip(way.run(3, body), expected):
        assert np.array_equal(got.reshape(-1, 24), want)


def test_views_show_the_window_until_the_next_call(way):
    """No copy: the same two windows, in turn. And their memory outlives dispatcher and world."""
    plan = random_plan(2, 5, "per_rank")
    routing, rows = plan.to_routing(), rows_of(plan)

    def body(world):
        fill = [
            way.from_bits(np.full((rows[world.rank], 4), n, np.float32).view(np.int32), "float32")
            for n in (1, 2, 3)
        ]
        with way.face.SequenceDispatcher(world) as dispatcher:
            plan = dispatcher.plan_dispatch((routing.fwd_q, fill[0]))
            first, second, third = (dispatcher.dispatch(plan, f)[0] for f in fill)
            seen = [set(way.bits(t).view(np.float32).ravel()) for t in (first, second, third)]
            copy = way.bits(second)
        del dispatcher, plan, first
        gc.collect()
        return seen, second, third, copy

    for seen, second, third, copy in way.run(2, body):
        assert seen == [{3.0}, {2.0}, {3.0}]  # the first view shows what came later
        assert np.array_equal(way.bits(second), copy) and len(third) == len(second)


def test_views_are_tensors_of_their_own_for_autograd():
    """Also where the window was first shown in inference mode, and where another view changes."""
    torch = pytest.importorskip("torch")
    wt = pytest.importorskip("waybill.torch")
    plan = random_plan(1, 5, "per_rank")
    routing, rows = plan.to_routing(), rows_of(plan)[0]

    def body(world):
        dispatcher = wt.SequenceDispatcher(world)
        sent = torch.randn(rows, 4)
        ready = dispatcher.plan_dispatch((routing.fwd_q, sent, sent))
        with torch.inference_mode():
            dispatcher.dispatch(ready, sent, sent)
            dispatcher.dispatch(ready, sent, sent)
        first, second = dispatcher.dispatch(ready, sent, sent)
        weight = torch.ones(4, requires_grad=True)
        loss = (first * weight).sum()
        second.zero_()
        loss.backward()
        assert torch.equal(weight.grad, first.sum(0)) and not second.any()

    wt.run_threads(1, body)


def test_windows_that_are_outgrown_or_closed_are_held_by_views_alone():
    torch = pytest.importorskip("torch")
    wt = pytest.importorskip("waybill.torch")
    plan = random_plan(1, 5, "per_rank")

    def body(world):
        dispatcher = wt.SequenceDispatcher(world)
        sent = torch.randn(rows_of(plan)[0], 4)
        ready = dispatcher.plan_dispatch((plan.to_routing().fwd_q, sent))
        for end in (lambda: dispatcher.reserve(2 * dispatcher.window_bytes), dispatcher.close):
            (view,) = dispatcher.dispatch(ready, sent)
            (given,) = dispatcher._read(ready, (sent,))
            window = dispatcher._send("", str, ready, (sent,), [given], 0)
            dispatcher._shown(ready, window)
            shown = weakref.ref(window.made)
            del window
            assert shown() is not None
            copy = view.clone()
            end()
            assert shown() is None and torch.equal(view, copy)

    wt.run_threads(1, body)


def test_plans_can_be_replaced(way):
    plans = [random_plan(2, seed, "per_rank") for seed in (7, 7, 8, 10)]
    plans.sort(key=lambda plan: -plan.to_qkv_plan().num_shards)

    def body(world):
        results = []
        with way.face.SequenceDispatcher(world, local_by_copy_engine=False) as dispatcher:
            dispatcher.reserve(1 << 20)
            assert dispatcher.window_bytes == 1 << 20
            ready = None
            for plan in plans:
                bits = payloads(plan, 4, 16, 3)[world.rank]
                q = way.from_bits(bits, "float32")
                part = (plan.to_routing().fwd_q, q)
                if ready is None:
                    ready = dispatcher.plan_dispatch(part)
                else:
                    dispatcher.replace_plan(ready, part)
                results.append(way.bits(dispatcher.dispatch(ready, q)[0]))
            with pytest.raises(waybill.InvalidArgument, match="other formats"):
                dispatcher.replace_plan(ready, (part[0], q[:, :8]))
        return results

    got = way.run(2, body)
    for i, plan in enumerate(plans):
        expected = simulated(payloads(plan, 4, 16, 3), plan.to_metadata().fwd_q)
        for rank in range(2):
            assert np.array_equal(got[rank][i], expected[rank])


@pytest.mark.parametrize("relay", ["never", "always", "automatic"])
def test_a_relay_delivers_the_same(relay):
    """One long document: its home would send to everybody."""
    plan = waybill.plan([1600], 4, 400, block_tokens=16)
    assert plan.relay_hops
    metadata, routing, rows = plan.to_metadata(), plan.to_routing(), rows_of(plan)
    kv = [
        np.random.default_rng(r).integers(-4, 5, (n, 8)).astype(np.float32)
        for r, n in enumerate(rows)
    ]
    received = simulated(kv, metadata.fwd_kv)
    sums = simulated_sums(received, metadata, rows)  # of whole numbers: exact in any order

    def body(world):
        with waybill.SequenceDispatcher(world, relay=relay) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_kv, kv[0]))
            back = dispatcher.plan_kv_gradient((routing.fwd_kv, kv[0]))
            dispatcher.reserve(there, back)
            (got,) = dispatcher.dispatch(there, kv[world.rank])
            got = got.copy()
            (gradient,) = dispatcher.kv_gradient(back, got)
            return there.way, got, gradient

    for rank, (way, got, gradient) in enumerate(waybill.run_threads(4, body, timeout_s=20)):
        if relay != "automatic":
            assert way == {"never": "direct", "always": "relay"}[relay]
        assert np.array_equal(got, received[rank]) and np.array_equal(gradient, sums[rank])


def test_rows_cross_to_another_once_per_node():
    plan = random_plan(4, 9, "per_rank")
    metadata, routing = plan.to_metadata(), plan.to_routing()
    k = payloads(plan, 2, 16, 1)
    expected = simulated(k, metadata.fwd_kv)

    def body(world):
        with waybill.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_kv, k[0]))
            return there.way, dispatcher.dispatch(there, k[world.rank])[0].copy()

    for rank, (way, got) in enumerate(waybill.run_threads(4, body, ranks_per_node=2)):
        assert way == "once_per_node" and np.array_equal(got, expected[rank])


def test_wrong_arguments_move_nothing(way):
    plan = random_plan(1, 2, "per_rank")
    routing, rows = plan.to_routing(), rows_of(plan)[0]
    q = random_bits(4, (rows, 8), 1)

    def body(world):
        good = way.from_bits(q, "float32")
        dispatcher = way.face.SequenceDispatcher(world)
        other = way.face.SequenceDispatcher(world)
        part = (routing.fwd_q, good)
        ready = dispatcher.plan_dispatch(part)
        cases = [
            (lambda: dispatcher.dispatch(ready), "got 0 tensors, expected 1"),
            (
                lambda: dispatcher.dispatch(ready, good[:-1]),
                rf"\[0\] has shape \[{rows - 1}, 8\], expected at least {rows} rows",
            ),
            (lambda: dispatcher.dispatch(ready, good[:, :4]), r"expected \[rows, 8\]"),
            (lambda: dispatcher.dispatch(ready, good[:, ::2]), "adjacent elements in a row"),
            (
                lambda: dispatcher.dispatch(ready, way.from_bits(q, "int32")),
                "int32, expected .*float32",
            ),
            (lambda: dispatcher.dispatch(ready, 5), r"dispatch: tensors\[0\]"),
            (lambda: other.dispatch(ready, good), "belongs to another dispatcher"),
            (lambda: dispatcher.kv_gradient(ready, good), "the plan is for dispatch"),
            (lambda: dispatcher.dispatch("plan", good), "plan is a str, expected a PlanHandle"),
            (lambda: dispatcher.plan_dispatch(routing.fwd_q), "expected .metadata, tensor, ..."),
            (lambda: dispatcher.plan_dispatch((plan, good)), "expected SparseMetadata"),
            (lambda: dispatcher.reserve(-1), "window_bytes = -1"),
            (lambda: way.face.SequenceDispatcher(None), "world is a NoneType"),
            (lambda: way.face.SequenceDispatcher(world, num_sms=-1), "num_sms = -1"),
            (lambda: way.face.SequenceDispatcher(world, chunk_bytes=7).plan_dispatch(part), "7"),
            (lambda: way.face.SequenceDispatcher(world, relay="no"), 'relay = "no"'),
            (lambda: way.face.PlanHandle(), "PlanHandle: got a constructor call"),
            (lambda: way.face.ReadyPlan(), "PlanHandle: got a constructor call"),
        ]
        for call, text in cases:
            with pytest.raises(waybill.InvalidArgument, match=text):
                call()
        (got,) = dispatcher.dispatch(ready, good)
        assert np.array_equal(np.sort(way.bits(got), 0), np.sort(q, 0))
        small = way.face.SequenceDispatcher(world, max_window_bytes=64)
        with pytest.raises(waybill.InvalidArgument, match="max_window_bytes = 64"):
            small.dispatch(small.plan_dispatch(part), good)
        dispatcher.close()
        dispatcher.close()  # again does nothing
        assert "closed" in repr(dispatcher)
        with pytest.raises(waybill.TransportError, match=CLOSED):
            dispatcher.dispatch(ready, good)
        return True

    assert way.run(1, body) == [True]


def test_a_rank_that_never_calls_is_named_by_the_others():
    routing = random_plan(3, 2, "per_rank").to_routing()
    q = [np.zeros((500, 2), np.float32)] * 3

    def body(world):
        dispatcher = waybill.SequenceDispatcher(world)
        plan = dispatcher.plan_dispatch((routing.fwd_q, q[0]))
        dispatcher.reserve(plan)
        if world.rank == 1:
            return None
        with pytest.raises(waybill.Timeout) as caught:
            dispatcher.dispatch(plan, q[0])
        with pytest.raises(waybill.TransportError, match=UNUSABLE):
            dispatcher.dispatch(plan, q[0])
        return caught.value

    errors = waybill.run_threads(3, body, timeout_s=0.3)
    for rank in (0, 2):
        error = errors[rank]
        assert (error.operation, error.rank, error.peer) == ("dispatch", rank, 1)
        assert (error.what, error.wanted, error.seen) == ("signal", 1, 0) and error.seconds >= 0.3


def test_a_block_that_fails_does_not_wait_for_the_others():
    def body(world):
        with waybill.SequenceDispatcher(world):
            if world.rank == 0:
                raise KeyError("early")

    with pytest.raises(KeyError, match="early"):
        waybill.run_threads(2, body, timeout_s=0.3)


def test_outputs_that_cannot_be_written():
    routing = random_plan(1, 2, "per_rank").to_routing()
    frozen = np.zeros((rows_of(random_plan(1, 2, "per_rank"))[0], 2), np.float32)
    frozen.flags.writeable = False

    def body(world):
        dispatcher = waybill.SequenceDispatcher(world)
        plan = dispatcher.plan_kv_gradient((routing.fwd_kv, frozen))
        for out in (frozen, frozen.tolist()):
            with pytest.raises(waybill.InvalidArgument, match=r"out\[0\] cannot be written"):
                dispatcher.kv_gradient(plan, frozen, out=[out])

    waybill.run_threads(1, body)


def test_outputs_that_share_memory():
    """Of one of two sums nothing would be left. What lies between another's rows is its own."""
    plan = random_plan(1, 2, "per_rank")
    routing, count = plan.to_routing(), rows_of(plan)[0]
    gradients = [
        np.full((routing.fwd_kv.num_total_recv_tokens[0], 2), n, np.float32) for n in (1, 2)
    ]
    wide, long = (np.zeros(shape, np.float32) for shape in ((count, 4), (2 * count, 2)))
    one = wide[:, :2]

    def body(world):
        dispatcher = waybill.SequenceDispatcher(world)
        plan = dispatcher.plan_kv_gradient((routing.fwd_kv, *gradients))
        for own in (one, wide[:, 2:]), (wide[:, 2:], one), (long[1::2], long[::2]):
            dk, dv = dispatcher.kv_gradient(plan, *gradients, out=own)
            assert dk.any() and (dv == 2 * dk).all()
        for shared in (one, one), (wide[:, 1:3], one), (long[1:], long[:-1]), (long[::2], long):
            with pytest.raises(waybill.InvalidArgument, match=r"out\[1\] shares memory with .*0"):
                dispatcher.kv_gradient(plan, *gradients, out=shared)

    waybill.run_threads(1, body)


def test_windows_with_room_hold_plans_at_the_same_places(torch_way):
    """K begins where it does with any other plan."""
    plans = [random_plan(2, seed, "per_rank") for seed in (1, 2, 4)]

    def body(world):
        places, room = set(), 400
        with torch_way.face.SequenceDispatcher(world, local_by_copy_engine=False) as dispatcher:
            for plan in plans:
                routing, rows = plan.to_routing(), rows_of(plan)[world.rank]
                bits = random_bits(4, (rows, 3), world.rank)
                q = torch_way.from_bits(bits, "float32")
                parts = [(m.with_room(room), q) for m in (routing.fwd_q, routing.fwd_kv)]
                ready = dispatcher.plan_dispatch(*parts)
                assert ready.window_rows == [room, room]
                dispatcher.reserve(ready)
                views = dispatcher.dispatch(ready, q, q)
                places.add(views[1].data_ptr() - views[0].data_ptr())
                again = pickle.loads(pickle.dumps(parts[0][0]))
                assert again == parts[0][0] != routing.fwd_q
                with pytest.raises(waybill.InvalidArgument, match="with_room: rows = -1"):
                    routing.fwd_q.with_room(-1)
        return places

    for places in torch_way.run(2, body):
        assert len(places) == 1
