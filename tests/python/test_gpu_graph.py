"""A CUDA graph that holds a dispatch and its way back, on one rank a GPU."""

import numpy as np
import pytest
from ways import TorchWay, captured, random_bits, random_plan, rows_of, simulated

import waybill

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not (waybill.num_gpus() and torch.cuda.is_available()),
    reason="no GPU, or an installation without CUDA",
)


def plans_of_one_size(world_size):
    """Every rank has a shard for each rank: for itself first, or for the next one first."""
    offsets = [world_size * r for r in range(world_size + 1)]
    shards = world_size * world_size
    return [
        waybill.QkvPlan(
            world_size, offsets, [37] * shards,
            [(s // world_size + s + first) % world_size for s in range(shards)],
            range(shards + 1), range(shards),
        )
        for first in (0, 1)
    ]  # fmt: skip


def test_a_graph_replays_with_new_rows_and_a_new_plan():
    way, world_size = TorchWay("cuda"), waybill.num_gpus()
    plans = plans_of_one_size(world_size)
    routings = [plan.to_routing() for plan in plans]
    rows = rows_of(plans[0])
    bits = [[random_bits(2, (n, 512), 10 * i + r) for r, n in enumerate(rows)] for i in range(4)]

    def body(world):
        given = [way.from_bits(b[world.rank], "bfloat16") for b in bits]
        q, kept = given[0].clone(), []
        dispatcher = way.face.SequenceDispatcher(world, local_by_copy_engine=False)
        there = dispatcher.plan_dispatch((routings[0].fwd_q, q))
        back = dispatcher.plan_dispatch((routings[0].rev_q, q))
        dispatcher.reserve(1 << 22)
        (received,) = dispatcher.dispatch(there, q)
        dispatcher.dispatch(back, received)
        dispatcher.synchronize()
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            (received,) = dispatcher.dispatch(there, q)
            copy = received.new_empty(1 << 12, 512)
            copy[: len(received)] = received
            (home,) = dispatcher.dispatch(back, received)
        world.barrier()
        for i, rank_rows in enumerate(given):
            if i == 2:
                dispatcher.replace_plan(there, (routings[1].fwd_q, q))
                dispatcher.replace_plan(back, (routings[1].rev_q, q))
            q.copy_(rank_rows)
            graph.replay()
            dispatcher.synchronize()
            kept.append((way.bits(copy), way.bits(home)))
        world.barrier()
        del graph
        dispatcher.close()
        return kept

    got = way.run(world_size, body)
    for i in range(4):
        expected = simulated(bits[i], plans[i // 2].to_metadata().fwd_q)
        for rank in range(world_size):
            received, home = got[rank][i]
            assert np.array_equal(received[: len(expected[rank])], expected[rank])
            assert np.array_equal(home, bits[i][rank])


def test_windows_cannot_grow_inside_a_graph():
    way = TorchWay("cuda")
    plan = random_plan(1, 3, "per_rank")

    def body(world):
        dispatcher = way.face.SequenceDispatcher(world)
        q = torch.zeros(rows_of(plan)[0], 8, device="cuda")
        ready = dispatcher.plan_dispatch((plan.to_routing().fwd_q, q))
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            with pytest.raises(waybill.InvalidArgument, match="cannot grow inside a graph"):
                dispatcher.dispatch(ready, q)
            q.add_(1)  # an empty graph is a warning
        dispatcher.close()

    way.run(1, body)
