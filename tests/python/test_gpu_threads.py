"""Ranks that are threads with a GPU each: no device waits for a thread that is elsewhere."""

import numpy as np
import pytest
from error_texts import UNUSABLE
from ways import TorchWay, random_bits, random_plan, rows_of, simulated

import waybill

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    waybill.num_gpus() < 2 or not torch.cuda.is_available(),
    reason="fewer than two GPUs, or an installation without CUDA",
)


def test_a_rank_that_never_calls_costs_no_device():
    way, plan = TorchWay("cuda"), random_plan(2, 2, "per_rank")
    routing, metadata = plan.to_routing(), plan.to_metadata()
    bits = [random_bits(4, (rows, 8), r) for r, rows in enumerate(rows_of(plan))]

    def body(world, comes):
        rows = way.from_bits(bits[world.rank], "float32")
        dispatcher = way.face.SequenceDispatcher(world)
        there = dispatcher.plan_dispatch((routing.fwd_q, rows))
        dispatcher.reserve(there)
        if not comes(world.rank):
            return None
        try:
            return way.bits(dispatcher.dispatch(there, rows)[0])
        except waybill.Timeout:
            with pytest.raises(waybill.TransportError, match=f"world {UNUSABLE}"):
                dispatcher.dispatch(there, rows)
            raise

    with pytest.raises(waybill.Timeout) as caught:
        way.run(2, lambda world: body(world, lambda rank: rank == 0), timeout_s=1.0)
    error = caught.value
    assert (error.operation, error.rank, error.peer) == ("dispatch", 0, 1)

    got = way.run(2, lambda world: body(world, lambda rank: True))
    for rank, want in enumerate(simulated(bits, metadata.fwd_q)):
        assert np.array_equal(got[rank], want)


def test_what_one_rank_loads_or_allocates_stops_nobody():
    """Between two calls each rank in turn multiplies, sorts and allocates, the other calls on."""
    way, plan = TorchWay("cuda"), random_plan(2, 4, "per_rank")
    routing = plan.to_routing()

    def body(world):
        rows = torch.ones(rows_of(plan)[world.rank], 16, device="cuda")
        with way.face.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_q, rows))
            for turn, dtype in enumerate((torch.float16, torch.float32, torch.complex64)):
                for size in (3, 257, 2048):
                    dispatcher.dispatch(there, rows)
                    if turn % 2 == world.rank:
                        square = torch.ones(size, size, dtype=dtype, device="cuda")
                        product = (square @ square).abs().float().flatten().sort().values
                        assert product[-1].item() == size
                        torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
            dispatcher.synchronize()
        return True

    assert way.run(2, body) == [True, True]
