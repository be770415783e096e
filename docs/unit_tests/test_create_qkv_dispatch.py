"""create_qkv_dispatch: a random plan with the tables of Q and KV, and what attention is given.

    python unit_tests/test_create_qkv_dispatch.py

It makes data for tests. Plans for training, which balance work, come from waybill.plan.
"""

import numpy as np
from lesson import raises, run

import waybill

SIZES = [(1, 8, 1, 1), (2, 16, 2, 2), (4, 64, 3, 4), (8, 128, 5, 8)]  # ranks, tokens, sequences, cp


def test_five_results():
    """Q forward and reverse, KV forward and reverse, and the attention layout."""
    fwd_q, rev_q, fwd_k, rev_k, attention = waybill.create_qkv_dispatch(4, 64, 3, 4)
    for metadata in (fwd_q, rev_q, fwd_k, rev_k):
        assert isinstance(metadata, waybill.Metadata) and metadata.world_size == 4
    assert fwd_q.dst_rank.ndim == 2  # a query shard goes to one rank
    assert fwd_k.dst_rank.ndim == 3  # a KV shard goes to each rank that needs it
    assert isinstance(attention, waybill.AttnLayout)


def test_total_seq_len():
    """total_seq_len is the number of tokens on each rank, and they all come home."""
    for world, tokens, sequences, degree in SIZES:
        fwd_q, rev_q, *_ = waybill.create_qkv_dispatch(world, tokens, sequences, degree)
        assert sum(fwd_q.num_total_recv_tokens) == world * tokens
        assert rev_q.num_total_recv_tokens == [tokens] * world


def test_shards():
    """A sequence is cut into 1, 2, 4 ... shards, at most max_cp_degree, for different ranks."""
    raw = waybill.create_raw_qkv_dispatch(8, 128, 1, 8, seed=3)
    for count, ranks in zip(raw.num_cp_shards, raw.cp_query_dst):
        assert count in (1, 2, 4, 8)
        assert len(set(ranks[:count].tolist())) == count


def test_causality():
    """A query shard gets the KV of its document up to its own last token: its context."""
    for world, tokens, sequences, degree in SIZES:
        _, _, fwd_k, _, layout = waybill.create_qkv_dispatch(
            world, tokens, sequences, degree, seed=1
        )
        for rank in range(world):
            queries, contexts = (
                np.diff(layout.cu_seqlens_q[rank]),
                np.diff(layout.cu_seqlens_kv[rank]),
            )
            assert len(queries) == layout.num_local_seqs_recv[rank]
            assert (contexts >= queries).all()
            assert contexts.sum() == fwd_k.num_total_recv_tokens[rank]


def test_both_ways_of_kv():
    """Each copy of a KV row comes home once: the planes of a row sum to its number of copies."""
    world, tokens = 4, 64
    _, _, fwd_k, rev_k, _ = waybill.create_qkv_dispatch(world, tokens, 3, 4, seed=2)
    ones = np.ones((world, max(fwd_k.num_total_recv_tokens), 1), np.float32)
    copies = fwd_k.dst_rank.shape[2]
    planes = waybill.orchestrate_simulate(
        ones, np.zeros((world, copies * tokens, 1), np.float32), rev_k
    )
    for rank in range(world):
        sums = waybill.sum_kv_copies(planes[rank], rev_k, rank)[:, 0]
        wanted = np.repeat((fwd_k.dst_rank[rank] >= 0).sum(axis=1), fwd_k.seq_len[rank])
        assert sums.tolist() == wanted.tolist()


def test_valid():
    """validate finds nothing in what it makes, for any seed."""
    for seed in range(20):
        assert waybill.validate(*waybill.create_qkv_dispatch(4, 64, 3, 4, seed=seed)) == []


def test_seeds():
    """The same seed gives the same plan on every machine."""
    first, again, other = (waybill.create_qkv_dispatch(4, 64, 3, 4, seed=s) for s in (1, 1, 2))
    assert first[0] == again[0] and first[2] == again[2]
    assert first[0] != other[0]


def test_intermediates():
    """Intermediate tables and the lengths before sharding come when they are asked for."""
    *_, intermediates, lengths = waybill.create_qkv_dispatch(
        4, 64, 3, 4, return_intermediate=True, return_mlp_no_shard_seq_lens=True
    )
    assert len(intermediates) == 4
    assert lengths.sum(axis=1).tolist() == [64] * 4


def test_errors():
    """Sizes that no plan can have are refused; the error has both numbers."""
    call = waybill.create_qkv_dispatch
    raises(
        waybill.InvalidArgument, "max_cp_degree = 4, expected 1..world_size = 2", call, 2, 16, 2, 4
    )
    raises(waybill.InvalidArgument, "total_seq_len", call, 2, 15, 2, 2)  # no multiple of 2


def test_not_balanced():
    """It draws destinations and does not balance: waybill.plan does."""
    drawn = waybill.create_raw_qkv_dispatch(4, 64, 2, 4, seed=1)
    rows = np.bincount(drawn.cp_query_dst[drawn.cp_query_dst >= 0], minlength=4)
    assert rows.sum() == drawn.num_cp_shards.sum()
    plan = waybill.plan([100, 60, 50, 46], world_size=4, tokens_per_rank=64)
    assert plan.imbalance < 1.1  # the work of the busiest rank over the mean


if __name__ == "__main__":
    run(globals())
