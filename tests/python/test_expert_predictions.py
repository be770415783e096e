"""What a dispatch of experts sends, and how long its calls take: figures of plans, predictions."""

import numpy as np
import pytest
from error_texts import SPEED_OF_LINKS

import waybill
from waybill.moe import EPConfig, predict, simulate_dispatch, summarize


def case(per_node, world=8, tokens=20, seed=0):
    random = np.random.default_rng(seed)
    config = EPConfig(tokens, 256, 3, 16, 0, world, per_node, "bfloat16")
    return config, [random.integers(0, 17, (tokens, 3)) for _ in range(world)]  # 16: dropped


@pytest.mark.parametrize("per_node", [8, 4, 2, 1])
def test_bytes_are_those_of_the_simulation(per_node):
    config, ids = case(per_node)
    calls = {call.call: call for call in predict(config, ids)}
    assert list(calls) == [
        "grouped_dispatch", "cached_dispatch", "compact_combine", "summed_combine",
        "grouped_combine", "low_latency_dispatch", "low_latency_combine",
    ]  # fmt: skip
    tokens = [np.zeros((len(i), 256), np.float32) for i in ids]
    traffic = simulate_dispatch(config, tokens, ids).traffic
    node = np.arange(8) // per_node
    inside = traffic["crossings"] * (node[:, None] == node) * 512
    between = traffic["crossings"] * 512 - inside
    there, back = calls["grouped_dispatch"], calls["summed_combine"]
    assert np.array_equal(there.nvlink_out, inside.sum(1))
    assert np.array_equal(there.nvlink_in, inside.sum(0))
    assert np.array_equal(there.network_out, between.sum(1))
    assert np.array_equal(there.network_in, between.sum(0))
    assert np.array_equal(back.network_out, there.network_in)
    assert np.array_equal(back.nvlink_in, there.nvlink_out)
    straight = traffic["unique_tokens_per_rank_pair"] * (node[:, None] != node) * 512
    assert np.array_equal(calls["low_latency_dispatch"].network_out, straight.sum(1))
    assert np.all(there.puts >= traffic["inter_node_ranges"].sum(1))
    for call in calls.values():
        inside = call.overlapped_seconds + max(call.nvlink_seconds, call.block_seconds)
        longest = max(call.network_seconds, inside)
        assert call.seconds == pytest.approx(call.begin_seconds + longest + call.end_seconds)


def test_follows_what_it_is_told():
    config, ids = case(2)
    usual = predict(config, ids, path="waiting")
    slow = predict(config, ids, network=1e8, path="waiting")
    near = predict(config, ids, path="pipelined")
    for a, b, c in zip(usual[:5], slow, near):
        assert b.seconds > a.seconds >= c.seconds
        assert b.network_seconds >= max(a.network_out.max(), a.network_in.max()) / 1e8
    float8 = predict(config, ids, payload="scaled")
    assert np.array_equal(float8[0].network_out * 512, usual[0].network_out * (256 + 8))
    slow_links = {f"{name}_bytes_per_second": 1e9 for name in ("nvlink", "network", "block")}
    told = predict(config, ids, **slow_links)
    for earlier in ("nvlink", "network", "block"):  # names of before
        name = f"{earlier}_bytes_per_second"
        given = {**slow_links, earlier: slow_links[name]}
        with pytest.raises(waybill.InvalidArgument, match=f"predict: got {earlier} and {name}"):
            predict(config, ids, **given)
        del given[name]
        assert [one.seconds for one in predict(config, ids, **given)] == [
            one.seconds for one in told
        ]
    assert told[0].seconds > usual[0].seconds


def test_wrong_arguments_are_named():
    config, ids = case(2)
    for arguments, text in [
        ({"network": 0.0}, "network"),
        ({"nvlink": float("nan")}, "nvlink"),
        ({"block": -1}, "block"),
        ({"num_sms": 0}, "num_sms = 0"),
        ({"path": "fast"}, 'path = "fast"'),
        ({"path": 3}, "path = 3"),
        ({"payload": "half"}, "payload"),
        ({"network_post_seconds": -1}, "network_post_seconds"),
    ]:
        with pytest.raises(waybill.InvalidArgument, match=text):
            predict(config, ids, **arguments)
    with pytest.raises(waybill.InvalidArgument, match="exp_indices"):
        predict(config, ids[:3])
    with pytest.raises(waybill.InvalidArgument, match="expected an EPConfig"):
        predict(None, ids)


def summed_case(per_node, seed, world=4):
    random = np.random.default_rng(seed)
    config = EPConfig(9, 16, 3, 8, 0, world, per_node, "float32")
    counts = random.integers(0, 10, world)
    ids = [random.integers(0, 9, (n, 3)) for n in counts]  # 8: dropped
    return config, ids


@pytest.mark.parametrize("per_node", [4, 2, 1])
def test_counts_what_the_simulation_sends(per_node):
    for seed in range(10):
        config, ids = summed_case(per_node, seed)
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
    config, ids = summed_case(2, 3)
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


def test_wrong_arguments_of_a_summary_are_named():
    config, ids = summed_case(2, 4)
    with pytest.raises(waybill.InvalidArgument, match="exp_indices"):
        summarize(config, ids[:3])
    with pytest.raises(waybill.InvalidArgument, match="9"):
        summarize(config, [np.full((1, 3), 9)] * 4)
    with pytest.raises(waybill.InvalidArgument, match="EPConfig"):
        summarize(None, ids)
    with pytest.raises(waybill.InvalidArgument, match=SPEED_OF_LINKS):
        summarize(config, ids).limit_seconds(nvlink=0)
    with pytest.raises(waybill.InvalidArgument, match="summarize"):
        waybill.moe.ExpertSummary()


def test_copies_even_out_what_a_dispatch_sends():
    config = EPConfig(256, 512, 4, 32, 0, 8, 8)
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, 32, (256, 4)) for _ in range(8)]
    for of_rank in ids:
        of_rank[:, 0] = 5  # rank 1 is hot
    plain, even = (predict(config, ids, spare_experts=spare)[0] for spare in (0, 2))
    assert even.nvlink_in.max() < plain.nvlink_in.max()
    assert even.begin_seconds > plain.begin_seconds + 20e-6  # counted twice, planned between
    with pytest.raises(waybill.InvalidArgument, match=r"predict: spare_experts = -1, expected 0.."):
        predict(config, ids, spare_experts=-1)
