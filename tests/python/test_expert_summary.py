"""waybill.moe.summarize: what the simulation's traffic says, and what bounds it."""

import numpy as np
import pytest

import waybill
from waybill.moe import EPConfig, simulate_dispatch, summarize


def case(per_node, seed, world=4):
    random = np.random.default_rng(seed)
    config = EPConfig(9, 16, 3, 8, 0, world, per_node, "float32")
    counts = random.integers(0, 10, world)
    ids = [random.integers(0, 9, (n, 3)) for n in counts]  # 8: dropped
    return config, ids


@pytest.mark.parametrize("per_node", [4, 2, 1])
def test_counts_what_the_simulation_sends(per_node):
    for seed in range(10):
        config, ids = case(per_node, seed)
        got = summarize(config, ids)
        tokens = [np.zeros((len(i), 16), np.float32) for i in ids]
        want = simulate_dispatch(config, tokens, ids)
        node = np.arange(4) // per_node
        inside = want.traffic["crossings"] * (node[:, None] == node)
        between = want.traffic["crossings"] - inside
        assert np.array_equal(got.node_out, inside.sum(1))
        assert np.array_equal(got.node_in, inside.sum(0))
        assert np.array_equal(got.network_out, between.sum(1))
        assert np.array_equal(got.network_in, between.sum(0))
        assert np.array_equal(got.computed, want.num_recv_tokens_per_rank)
        assert np.array_equal(got.received, want.traffic["unique_tokens_per_rank_pair"].sum(0))
        assert np.array_equal(got.expert_choices, want.splits[:, :8].sum(0))
        assert np.array_equal(got.tokens, [len(i) for i in ids])
        assert np.array_equal(got.dropped, want.splits[:, 8])
        near = max(got.node_in.max(), got.node_out.max()) * 64 / 1000
        far = max(got.network_in.max(), got.network_out.max()) * 64 / 100
        assert got.limit_seconds(nvlink=1000, network=100) == pytest.approx(max(near, far))
        assert np.bincount(got.placement(), minlength=4).tolist() == [2] * 4


def test_text_and_sentences():
    config, ids = case(2, 3)
    summary = summarize(config, ids)
    sentences = summary.explain(network=1e9)
    assert "sets the limit" in sentences[0] and "1.00 GB/s" in sentences[0]
    assert "top-3 of 8 experts" in str(summary) and str(summary) == summary.text()


def test_payload_and_dropped_id():
    config = EPConfig(2, 256, 2, 4, 0, 2, 2)
    ids = [[[0, -1]], [[3, 2], [1, 1]]]
    summary = summarize(config, ids, dropped_id=-1, payload="quantized")
    assert summary.row_bytes == 256 + 8 and summary.dropped.tolist() == [1, 0]
    assert summary.node_in.tolist() == [1, 0]


def test_wrong_arguments_are_named():
    config, ids = case(2, 4)
    with pytest.raises(waybill.InvalidArgument, match="exp_indices"):
        summarize(config, ids[:3])
    with pytest.raises(waybill.InvalidArgument, match="9"):
        summarize(config, [np.full((1, 3), 9)] * 4)
    with pytest.raises(waybill.InvalidArgument, match="EPConfig"):
        summarize(None, ids)
    with pytest.raises(waybill.InvalidArgument, match="expected 1 to 1e"):
        summarize(config, ids).limit_seconds(nvlink=0)
    with pytest.raises(waybill.InvalidArgument, match="summarize"):
        waybill.moe.ExpertSummary()
