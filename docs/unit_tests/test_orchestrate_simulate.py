"""orchestrate_simulate: moves the rows of all ranks as tables say, in one process.

    python unit_tests/test_orchestrate_simulate.py

It shows where rows must arrive. It has no network, no ranks and no time.
"""

import numpy as np
from lesson import raises, run

import waybill


def numbered(world_size, rows, hidden=2):
    """Rows that say who they are: rank * 100 + row + 1. A 0 means that nothing came."""
    ranks, places = np.arange(world_size)[:, None, None], np.arange(rows)[None, :, None]
    return np.broadcast_to(ranks * 100.0 + places + 1, (world_size, rows, hidden)).copy()


def tables(dst_rank, dst_offset, seq_len):
    """Metadata of these three tables; orchestrate_simulate reads no others."""
    return waybill.Metadata(*(np.array(table) for table in (dst_rank, dst_offset, seq_len)), None)


def moved(metadata, source, rows):
    output = np.zeros((source.shape[0], rows, source.shape[2]))
    result = waybill.orchestrate_simulate(source, output, metadata)
    assert result is output  # it is written in place, and returned
    return output[:, :, 0].tolist()


def test_addresses():
    """A shard goes to dst_rank, from row dst_offset on."""
    metadata = tables([[1], [0]], [[1], [0]], [[2], [1]])
    assert moved(metadata, numbered(2, 2), 3) == [[101, 0, 0], [0, 1, 2]]


def test_slices():
    """Shards lie back to back in the source: each begins where the one before ends."""
    metadata = tables([[0, 1], [1, 0]], [[0, 0], [1, 2]], [[2, 1], [1, 1]])
    assert moved(metadata, numbered(2, 3), 3) == [[1, 2, 102], [3, 101, 0]]


def test_copies():
    """With a third axis a shard goes to several ranks: context parallelism."""
    metadata = tables([[[0, 1]], [[1, -1]]], [[[0, 0]], [[2, 0]]], [[2], [1]])
    assert moved(metadata, numbered(2, 2), 3) == [[1, 2, 0], [1, 2, 101]]


def test_padding():
    """Rank -1 moves nothing, wherever it stands; its rows are skipped."""
    metadata = tables([[-1, 0], [-1, -1]], [[0, 0], [0, 0]], [[1, 2], [0, 0]])
    assert moved(metadata, numbered(2, 3), 2) == [[2, 3], [0, 0]]


def test_round_trip():
    """Forward, then reverse: every row is back where it left, bit for bit."""
    fwd, rev, *_ = waybill.create_qkv_dispatch(4, 32, 3, 4, seed=5)
    source = numbered(4, 32)
    there = np.zeros((4, max(fwd.num_total_recv_tokens), 2))
    waybill.orchestrate_simulate(source, there, fwd)
    back = waybill.orchestrate_simulate(there, np.zeros_like(source), rev)
    assert (back == source).all()


def test_any_dtype():
    """Rows move as bytes: any elements of 1, 2, 4 or 8 bytes."""
    metadata = tables([[1], [0]], [[0], [0]], [[2], [2]])
    for dtype in (np.int8, np.float16, np.float32, np.float64):
        source = numbered(2, 2).astype(dtype)
        output = waybill.orchestrate_simulate(source, np.zeros_like(source), metadata)
        assert (output == source[::-1]).all()


def test_errors_write_nothing():
    """What does not fit is an error that names the place, and nothing is written."""
    metadata = tables([[0], [1]], [[0], [2]], [[2], [2]])
    output = np.zeros((2, 3, 2))
    raises(RuntimeError, "source rank 1, destination rank 1", waybill.orchestrate_simulate,
           numbered(2, 2), output, metadata)  # fmt: skip
    assert not output.any()
    far = tables([[2], [0]], [[0], [0]], [[1], [1]])
    raises(IndexError, "2", waybill.orchestrate_simulate, numbered(2, 2), output, far)


def test_rows_written_twice():
    """Of two shards for the same rows the later one wins, unless overlap="reject"."""
    metadata = tables([[0, 0], [-1, -1]], [[0, 0], [0, 0]], [[1, 1], [0, 0]])
    assert moved(metadata, numbered(2, 2), 1)[0] == [2]
    raises(waybill.ShapeMismatch, "also written", waybill.orchestrate_simulate,
           numbered(2, 2), np.zeros((2, 1, 2)), metadata, overlap="reject")  # fmt: skip


def test_real_ranks_do_the_same():
    """What it does not test, ranks that move rows at the same time, SequenceDispatcher does."""
    plan = waybill.plan([40, 10, 30], world_size=2, tokens_per_rank=40)
    routing, metadata = plan.to_routing(), plan.to_metadata()
    source = numbered(2, 40)

    def rank_main(world):
        with waybill.SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_q, source[world.rank]))
            (rows,) = dispatcher.dispatch(there, source[world.rank])
            return rows.copy()

    wanted = waybill.simulate_communication(list(source), metadata.fwd_q)
    for got, rows in zip(waybill.run_threads(2, rank_main), wanted):
        assert (got == rows).all()


if __name__ == "__main__":
    run(globals())
