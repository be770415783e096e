"""test_qkv_dispatch: Q, K and V of a random plan there and back, every element compared.

    python unit_tests/test_test_qkv_dispatch.py

The integration test of all the others. This file also does its steps by hand, and damages them.
"""

import types

import numpy as np
from lesson import raises, run

import waybill


def test_passes():
    """It returns when every row arrived and came back; it would raise an AssertionError."""
    for world, degree in ((1, 1), (2, 2), (4, 2), (8, 8)):
        waybill.test_qkv_dispatch(world_size=world, max_seq_shard=degree, num_tokens=64, num_seqs=3)


def test_options():
    """Options by keyword, or as an object that has them, such as argparse's."""
    waybill.test_qkv_dispatch(types.SimpleNamespace(world_size=2, num_tokens=256, seed=7))
    raises(waybill.InvalidArgument, "tokens", waybill.test_qkv_dispatch, tokens=64)


def test_many_seeds():
    """Every random plan passes."""
    for seed in range(30):
        waybill.test_qkv_dispatch(world_size=4, num_tokens=64, hidden_size=4, seed=seed)


def steps(damage=None):
    """Its steps for Q: make tables, move rows there and back, compare. True if all are back."""
    fwd_q, rev_q, *_ = waybill.create_qkv_dispatch(4, 64, 3, 4, seed=1)
    if damage is not None:
        damage(fwd_q, rev_q)
    source = np.random.default_rng(1).random((4, 64, 8), np.float32)
    there = np.zeros((4, max(fwd_q.num_total_recv_tokens), 8), np.float32)
    waybill.orchestrate_simulate(source, there, fwd_q)
    back = waybill.orchestrate_simulate(there, np.zeros_like(source), rev_q)
    return bool((back == source).all())


def test_by_hand():
    """The same for Q in five lines."""
    assert steps()


def test_a_wrong_table_is_seen():
    """Two destinations swapped on the way back: the counts agree, the rows do not."""

    def swap(_, rev_q):
        shards = np.flatnonzero(rev_q.dst_rank[0] >= 0)[:2]
        rev_q.dst_offset[0, shards] = rev_q.dst_offset[0, shards[::-1]]

    assert not steps(swap)


def test_the_validator_names_it():
    """A check by rows says that something is wrong. validate says where."""
    results = waybill.create_qkv_dispatch(4, 64, 3, 4, seed=1)
    results[0].dst_offset[2, 0] += 1
    finding = waybill.validate(*results)[0]
    assert (finding.rank, finding.shard) == (2, 0), finding


def test_impossible_sizes():
    """Four shards cannot go to two different ranks."""
    wanted = "max_cp_degree = 4, expected 1..world_size = 2"
    raises(
        waybill.InvalidArgument, wanted, waybill.test_qkv_dispatch, world_size=2, max_seq_shard=4
    )


if __name__ == "__main__":
    run(globals())
