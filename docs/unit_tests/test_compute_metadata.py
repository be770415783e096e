"""compute_metadata: from lengths and destinations to tables, forward and reverse.

    python unit_tests/test_compute_metadata.py

It computes where rows go. It does not choose destinations, and it moves nothing.
"""

import numpy as np
from lesson import raises, run

import waybill

LENGTHS = [[10, 5, 0], [8, 12, 4], [6, 0, 9]]  # of each rank's shards; 0 is padding
DISPATCH = [[1, 2, -1], [2, 0, 1], [0, -1, 2]]  # the rank that each goes to; -1: nowhere


def test_offsets():
    """Buffers fill without gaps, by source rank, then shard."""
    fwd, _ = waybill.compute_metadata(LENGTHS, DISPATCH)
    assert fwd.dst_rank.tolist() == DISPATCH
    assert fwd.dst_offset.tolist() == [[0, 0, 0], [5, 0, 10], [12, 0, 13]]
    # Rank 2 gets 5 rows of rank 0, then 8 of rank 1 at row 5, then 9 of its own at row 13.


def test_counts():
    """num_recv_tokens[r][i]: rows that rank r gets from rank i; the last column is their sum."""
    fwd, rev = waybill.compute_metadata(LENGTHS, DISPATCH)
    assert fwd.num_recv_tokens.tolist() == [[0, 12, 6, 18], [10, 4, 0, 14], [5, 8, 9, 22]]
    assert fwd.num_total_recv_tokens == [18, 14, 22]
    assert (rev.num_recv_tokens[:, :3] == fwd.num_recv_tokens[:, :3].T).all()


def test_conservation():
    """What is sent is received."""
    fwd, rev = waybill.compute_metadata(LENGTHS, DISPATCH)
    assert sum(fwd.num_total_recv_tokens) == np.sum(LENGTHS) == sum(rev.num_total_recv_tokens)


def test_reverse():
    """Reverse tables are what the receiver sends back, in the order in which it received."""
    _, rev = waybill.compute_metadata(LENGTHS, DISPATCH)
    assert rev.dst_rank.tolist() == [[1, 2, -1], [0, 1, -1], [0, 1, 2]]
    assert rev.dst_offset.tolist() == [[8, 0, 0], [0, 20, 0], [10, 0, 6]]


def test_bijection():
    """Forward and reverse together change nothing."""
    fwd, rev = waybill.compute_metadata(LENGTHS, DISPATCH)
    source = np.random.default_rng(1).random((3, 24, 4))
    there = np.zeros((3, max(fwd.num_total_recv_tokens), 4))
    waybill.orchestrate_simulate(source, there, fwd)
    back = waybill.orchestrate_simulate(there, np.zeros_like(source), rev)
    for rank, rows in enumerate(np.sum(LENGTHS, axis=1)):
        assert (back[rank, :rows] == source[rank, :rows]).all()


def test_padding():
    """num_seqs counts what is no padding; get_slice leaves the padding out."""
    fwd, _ = waybill.compute_metadata(LENGTHS, DISPATCH)
    assert fwd.num_seqs.tolist() == [2, 3, 2]
    part = fwd.get_slice(2)
    assert part.dst_rank.tolist() == [0, 2] and part.seq_len.tolist() == [6, 9]


def test_device_dtypes():
    """normalize_dtype gives what kernels read: half of the bytes."""
    part = waybill.compute_metadata(LENGTHS, DISPATCH)[0].get_slice(0)
    small = part.normalize_dtype()
    assert small.normalized and small.dst_rank.dtype == "int32" and small.seq_len.dtype == "uint32"
    assert small.dst_offset.nbytes * 2 == part.dst_offset.nbytes


def test_copies():
    """With a third axis a shard has copies; they come home side by side, to be summed."""
    dispatch = [[[0, 1], [1, -1]], [[1, 0], [-1, -1]]]  # [rank][shard][copy]
    fwd, rev = waybill.compute_metadata([[4, 2], [3, 0]], dispatch)
    ones = np.ones((2, max(fwd.num_total_recv_tokens), 1), np.float32)
    planes = waybill.orchestrate_simulate(ones, np.zeros((2, 12, 1), np.float32), rev)
    sums = waybill.sum_kv_copies(planes[0], rev, rank=0)
    assert sums[:, 0].tolist() == [2, 2, 2, 2, 1, 1]  # four rows had two copies, two rows one


def test_validator():
    """validate reads the tables with code of its own, and names what is wrong."""
    fwd, rev = waybill.compute_metadata(LENGTHS, DISPATCH)
    assert waybill.validate(fwd, rev) == []
    fwd.dst_offset[1, 0] += 1
    finding = waybill.validate(fwd, rev)[0]
    assert (finding.rank, finding.shard) == (1, 0), finding


def test_lost_rows():
    """A shard with rows and no destination is an error, unless it is to stay at home."""
    raises(waybill.InvalidArgument, "has no destination", waybill.compute_metadata, [[3]], [[-1]])
    fwd, _ = waybill.compute_metadata([[3]], [[-1]], undispatched="keep")
    assert fwd.num_total_recv_tokens == [0]


def test_errors():
    """Shapes, ranks and lengths are checked first; the error says what it got and expected."""
    raises(waybill.InvalidArgument, "shape", waybill.compute_metadata, [[3, 2]], [[0]])
    raises(
        waybill.InvalidArgument,
        "expected -1 (none) or 0..0",
        waybill.compute_metadata,
        [[3]],
        [[1]],
    )
    raises(waybill.InvalidArgument, "-3", waybill.compute_metadata, [[-3]], [[0]])


if __name__ == "__main__":
    run(globals())
