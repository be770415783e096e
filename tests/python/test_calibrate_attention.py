"""Costs of a kernel from its times."""

import pytest
from packed import random_pieces, rng_of

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")
calibrate = pytest.importorskip("waybill.torch.attention.calibrate")


def shape_of(**options):
    return wt.BatchPlanner(1, 8, 2, 64, **options).shape


@pytest.mark.parametrize("options", [{}, {"window": 512}, {"mask": "full"}])
@pytest.mark.parametrize("row, shard", [(0, 0), (150, 0), (100, 300_000)])
@pytest.mark.parametrize("call", [0, 3e-4])
def test_finds_what_was_put_in(options, row, shard, call):
    """What every call takes is not charged to rows and shards."""
    shape = shape_of(**options)
    cases = calibrate._cases(16384, shape.mask)
    forward = [
        (calibrate.pairs(case, shape) + row * case[0] * case[1] + shard * case[0]) * 1e-12
        + call / 3.5
        for case in cases
    ]
    costs = calibrate.fit(cases, [(t, 2.5 * t) for t in forward], shape, {})
    assert costs.pairs_per_second == pytest.approx(1e12)
    assert costs.about["call_seconds"] == pytest.approx(call, abs=1e-9)
    assert (costs.row_pairs, costs.shard_pairs) == (row, shard)
    assert costs.backward_ratio == pytest.approx(2.5) and costs.error < 1e-6


def test_what_would_be_negative_is_nothing():
    shape = shape_of()
    cases = calibrate._cases(16384, shape.mask)
    found = [calibrate.pairs(case, shape) - 1e-4 * case[0] * case[1] for case in cases]
    times = [(1e-12 * (n + 1000), 1e-9) for n in found]
    costs = calibrate.fit(cases, times, shape, {})
    assert costs.row_pairs >= 0 and costs.shard_pairs >= 0


def test_pairs_are_those_of_the_mask():
    case = (3, 4, 10)
    assert calibrate.pairs(case, shape_of()) == 3 * (7 + 8 + 9 + 10)
    assert calibrate.pairs(case, shape_of(window=8)) == 3 * (7 + 8 + 8 + 8)
    assert calibrate.pairs(case, shape_of(mask="full")) == 3 * 40


def test_on_this_machine(monkeypatch):
    """The calls are real; their times are not, as other programs run beside."""
    timed = calibrate._timed

    def measured(case, kernel, shape, device, repeats):
        assert min(timed(case, kernel, shape, device, repeats)) > 0
        pairs = calibrate.pairs(case, shape)
        return 1e-9 * pairs, 3e-9 * pairs

    monkeypatch.setattr(calibrate, "_timed", measured)
    costs = wt.calibrate_attention(
        2, 1, 16, dtype=torch.float32, device="cpu", rows=512, repeats=2, window=64
    )
    assert costs.pairs_per_second == pytest.approx(1e9) and costs.about["kernel"] == "dot_product"
    assert waybill.AttentionCosts.from_json(costs.to_json()) == costs


def test_bad_input():
    with pytest.raises(waybill.InvalidArgument, match=r"rows = 8, expected 256\.\."):
        wt.calibrate_attention(2, device="cpu", rows=8)
    with pytest.raises(waybill.Unsupported, match='kernel = "varlen" on cpu'):
        wt.calibrate_attention(2, device="cpu", kernel="varlen")


def test_plans_of_pieces_even_them_out():
    costs = waybill.AttentionCosts(1e12, row_pairs=300, shard_pairs=100_000)
    for seed in range(8):
        pieces = random_pieces(rng_of(seed), 2)
        pieces = [[(d, 400 * o, 400 * n) for d, o, n in held] for held in pieces]
        planner = wt.BatchPlanner(2, 4, 2, 8, costs=costs)
        qkv = planner.plan(pieces).qkv_plan
        seconds = [0.0, 0.0]
        for n, pairs in enumerate(qkv.shard_work.tolist()):
            rows = int(qkv.shard_len[n])
            seconds[int(qkv.q_dst[n])] += costs.seconds(pairs, rows, 1 if rows else 0)
        assert max(seconds) / (sum(seconds) / 2) < 1.05, (seed, seconds)
