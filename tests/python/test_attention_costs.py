"""What a kernel takes, as data: measured, kept, and evened out by plans."""

import json
import pathlib

import pytest

import waybill

COSTS = waybill.AttentionCosts(1e12, row_pairs=200, shard_pairs=50_000, backward_ratio=3.0)


def ranks_seconds(routing_plan, costs):
    """What each rank's shards take, from a QkvPlan."""
    pairs = routing_plan.shard_work
    seconds = [0.0] * routing_plan.world_size
    for n, rank in enumerate(routing_plan.q_dst.tolist()):
        rows = int(routing_plan.shard_len[n])
        seconds[rank] += costs.seconds(int(pairs[n]), rows, 1 if rows else 0)
    return seconds


def imbalance(seconds):
    return max(seconds) / (sum(seconds) / len(seconds))


MANY_AND_LONG = [[9000, 500], [60] * 500]  # rank 1 has little work in pairs, and many shards


def test_plans_even_out_what_the_kernel_takes():
    plain = waybill.plan(MANY_AND_LONG, 2, 0)
    planned = waybill.plan(MANY_AND_LONG, 2, 0, costs=COSTS)
    assert imbalance(ranks_seconds(plain.to_qkv_plan(), COSTS)) > 1.05
    assert imbalance(ranks_seconds(planned.to_qkv_plan(), COSTS)) < 1.02
    assert planned.validate() == []
    assert planned.imbalance < 1.02  # of work as the kernel takes it
    assert planned.work.sum() > plain.work.sum()


@pytest.mark.parametrize("options", [{"window": 300}, {"mask": "full"}, {"window": 4096}, {}])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_under_every_mask(options, world_size):
    lengths = [9000, 40, 2000, 700, 128, 5000, 1] * 3
    plan = waybill.plan(lengths, world_size, 0, costs=COSTS, **options)
    assert plan.validate() == []
    assert plan.balanced


def test_without_costs_plans_are_as_before():
    plan = waybill.plan(MANY_AND_LONG, 2, 0)
    assert "row_pairs" not in plan.to_json() and "tails" not in plan.to_json()
    zero = waybill.plan(
        MANY_AND_LONG, 2, 0, pairs_per_second=1e12, costs=waybill.AttentionCosts(2e12)
    )
    assert zero == waybill.plan(MANY_AND_LONG, 2, 0, pairs_per_second=1e12)


def test_plans_with_costs_are_kept():
    plan = waybill.plan(MANY_AND_LONG, 2, 0, costs=COSTS, tails=True)
    assert waybill.AttentionPlan.from_json(plan.to_json()) == plan


def shards_of_pieces(plan):
    """Shards at home of the longest document."""
    qkv = plan.to_qkv_plan()
    home = [r for r in range(2) for _ in range(*qkv.rank_shard_offsets[r : r + 2].tolist())]
    return [n for n, rank in enumerate(qkv.q_dst.tolist()) if rank == home[n] == 0]


def test_tails_leave_one_shard_at_home():
    lengths = [[20000], [18000]]
    middle, tails = (waybill.plan(lengths, 2, 0, tails=tails) for tails in (False, True))
    assert len(shards_of_pieces(tails)) == 1 < len(shards_of_pieces(middle))
    assert tails.balanced and tails.validate() == []


def test_predictions_take_them():
    plan = waybill.plan(MANY_AND_LONG, 2, 0)
    step = waybill.predict_step(plan, costs=COSTS)
    expected = ranks_seconds(plan.to_qkv_plan(), COSTS)
    assert step.phases[1].phase == "attention"
    assert step.phases[1].seconds.tolist() == pytest.approx(expected)
    assert step.phases[4].seconds.tolist() == pytest.approx([3.0 * s for s in expected])


def test_texts(tmp_path):
    costs = waybill.AttentionCosts(5e11, 7, 9, 2.0, 0.03, {"device": "H200"})
    path = tmp_path / "costs.json"
    assert waybill.AttentionCosts.from_json(costs.to_json(path)) == costs
    assert waybill.AttentionCosts.from_json(path) == costs
    assert costs.seconds(100, 10, 1) == (100 + 70 + 9) / 5e11
    assert costs.seconds(100, 10, 1, backward=True) == 2 * (100 + 70 + 9) / 5e11


def test_the_page_has_one():
    page = (pathlib.Path(__file__).parents[2] / "docs/formats.md").read_text(encoding="utf-8")
    begin = page.index('{\n  "format": "waybill.attention_costs"')
    text = page[begin : page.index("```", begin)]
    assert waybill.AttentionCosts.from_json(text).to_json() == text


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": "waybill.plan"}, "waybill.attention_costs"),
        ({"version": 2}, "version = 2, expected 1"),
        ({"rows": 2}, '"rows" is unknown'),
        ({"about": []}, '"about" is no object'),
        ({"row_pairs": -1}, "row_pairs = -1, expected 0.."),
        ({"pairs_per_second": 0}, "pairs_per_second = 0"),
    ],
)
def test_wrong_texts(change, words):
    text = json.dumps({**json.loads(COSTS.to_json()), **change})
    with pytest.raises(waybill.InvalidArgument, match=words):
        waybill.AttentionCosts.from_json(text)


def test_wrong_costs():
    with pytest.raises(waybill.InvalidArgument, match=r"plan: costs is a float"):
        waybill.plan([10], 1, costs=1e12)
    with pytest.raises(waybill.InvalidArgument, match="shard_pairs"):
        waybill.AttentionCosts(1e12, shard_pairs=2**41)
