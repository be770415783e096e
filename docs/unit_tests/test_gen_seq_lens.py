"""gen_seq_lens: random sequence lengths for every rank.

    python unit_tests/test_gen_seq_lens.py

It draws lengths. It plans nothing: which rank attends to which sequence is decided later.
"""

import numpy as np
from lesson import raises, run

import waybill


def test_shape():
    """One row per rank, one length per sequence."""
    lengths = waybill.gen_seq_lens(4, 3, 100)
    assert lengths.shape == (4, 3)
    assert lengths.dtype == np.int32


def test_sums():
    """The lengths of each rank sum to total_len, which counts tokens of one rank, not of all."""
    for total in (3, 10, 1000, 2**31 - 1):
        assert waybill.gen_seq_lens(5, 3, total).sum(axis=1, dtype=np.int64).tolist() == [total] * 5


def test_positive():
    """No length is negative, and none is 0 where there are enough tokens."""
    for seed in range(50):
        assert waybill.gen_seq_lens(8, 16, 16, seed=seed).min() == 1
    assert sorted(waybill.gen_seq_lens(1, 4, 2)[0]) == [0, 0, 1, 1]  # two tokens for four sequences


def test_seeds():
    """The same seed gives the same lengths on every machine, another seed gives others."""
    first, again = (waybill.gen_seq_lens(2, 4, 64, seed=7) for _ in range(2))
    assert (first == again).all()
    assert (first != waybill.gen_seq_lens(2, 4, 64, seed=8)).any()
    assert (waybill.gen_seq_lens(2, 4, 64) == waybill.gen_seq_lens(2, 4, 64, seed=0)).all()


def test_given_draws():
    """Draws of your own in place of a seed: larger draws become longer sequences."""
    lengths = waybill.gen_seq_lens(1, 3, 80, uniforms=[0.9, 0.5, 0.1])
    assert lengths[0, 0] > lengths[0, 1] > lengths[0, 2]
    assert lengths.sum() == 80


def test_smallest():
    """One rank with one sequence gets all tokens; no tokens are fine, too."""
    assert waybill.gen_seq_lens(1, 1, 12).tolist() == [[12]]
    assert waybill.gen_seq_lens(2, 2, 0).tolist() == [[0, 0], [0, 0]]


def test_errors():
    """Wrong sizes are refused before anything is drawn; the error names the argument."""
    raises(waybill.InvalidArgument, "world_size = 0", waybill.gen_seq_lens, 0, 1, 10)
    raises(waybill.InvalidArgument, "num_seqs = 0", waybill.gen_seq_lens, 1, 0, 10)
    raises(waybill.InvalidArgument, "total_len = -1", waybill.gen_seq_lens, 1, 1, -1)


def test_not_real_documents():
    """The lengths are nearly even. Those of real documents come from sample_documents."""
    even = waybill.gen_seq_lens(1, 64, 64 * 1024, seed=1)[0]
    real = np.array(waybill.sample_documents("wlbllm", 64 * 1024, seed=1))
    assert real.sum() == 64 * 1024
    assert real.max() / real.mean() > even.max() / even.mean()


if __name__ == "__main__":
    run(globals())
