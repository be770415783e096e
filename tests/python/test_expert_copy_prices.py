"""What copies of hot experts cost and gain: price_copies and break_even_rows."""

import numpy as np
import pytest

import waybill
from waybill.moe import EPConfig, break_even_rows, even_experts, predict, price_copies


def case(per_node, world=4, tokens=64):
    """All ranks' tokens like expert 0."""
    rng = np.random.default_rng(0)
    config = EPConfig(tokens, 256, 2, 8, 0, world, per_node, "bfloat16")
    ids = [np.stack([np.zeros(tokens, int), rng.integers(1, 8, tokens)], 1) for _ in range(world)]
    return config, ids


@pytest.mark.parametrize("per_node", [4, 2])
def test_rows_are_priced_without_and_with_copies(per_node):
    config, ids = case(per_node)
    made = price_copies(config, ids, spare_experts=1, intermediate=512)
    rows = np.stack([np.bincount(one.ravel(), minlength=8) for one in ids])
    plan = even_experts(rows, spare_experts=1)
    assert made.rows_before.tolist() == rows.sum(0).reshape(4, 2).sum(1).tolist()
    assert made.rows_after.tolist() == plan.rank_rows.tolist()
    assert made.num_copies == int((plan.quotas[:, 2:] > 0).sum()) > 0
    for step, spare in ((made.before, 0), (made.after, 1)):
        calls = {call.call: call.seconds for call in predict(config, ids, spare_experts=spare)}
        assert step.dispatch == calls["grouped_dispatch"]
        assert step.cached_dispatch == calls["cached_dispatch"]
        assert step.combine == calls["summed_combine" if per_node == 4 else "grouped_combine"]
        together = step.dispatch + step.weights + step.gemm + step.combine
        assert step.forward == pytest.approx(together)
        together += step.cached_dispatch - step.dispatch + step.gemm + step.gradients
        assert step.backward == pytest.approx(together)
    # Six operations for each of hidden x intermediate and row.
    assert made.before.gemm == pytest.approx(made.rows_before.max() * 6 * 256 * 512 / 600e12)
    assert made.before.weights == made.before.gradients == 0 < made.after.gradients
    assert made.weight_bytes == 3 * 256 * 512 * 2
    assert any("is hot" in sentence for sentence in made.explained)


def test_nothing_to_copy():
    config, _ = case(4)
    made = price_copies(config, [np.zeros((0, 2), int)] * 4, spare_experts=2)
    assert made.num_copies == 0 and made.after.gradients == made.after.weights == 0
    assert made.after.dispatch > made.before.dispatch  # it is planned all the same


def test_rows_from_which_a_copy_pays():
    config, _ = case(4)
    # 8 bytes of an element against 6 operations of a row.
    given = {"gemm_flops_per_second": 600e12, "link_bytes_per_second": 400e9}
    assert break_even_rows(config, **given) == 2000
    assert break_even_rows(config, **{**given, "link_bytes_per_second": 50e9}) == 16000
    assert break_even_rows(config, weights=1, gradients=0, gemm=1, **given) == 1500
    assert break_even_rows(config, weights=0, gradients=0, **given) == 0
    assert break_even_rows(config) == np.ceil(8 / 345e9 / (6 / 600e12))


def test_wrong_arguments_are_named():
    config, ids = case(4)
    for options, text in (
        ({"spare_experts": 9}, "spare_experts = 9"),
        ({"limit": 0.5}, "limit = 0.5"),
        ({"intermediate": 0}, "intermediate = 0"),
        ({"gemm_flops_per_second": float("nan")}, "gemm_flops_per_second"),
        ({"nvlink_bytes_per_second": 0}, "price_copies: nvlink_bytes_per_second = 0"),
        ({"expert_alignment": 0}, "expert_alignment = 0"),
    ):
        with pytest.raises(waybill.InvalidArgument, match=text):
            price_copies(config, ids, **{"spare_experts": 1, **options})
    for options, text in (
        ({"weights": -1}, "weights = -1"),
        ({"gemm": 0}, "gemm = 0"),
        ({"gemm_flops_per_second": 0}, "gemm_flops_per_second = 0"),
        ({"link_bytes_per_second": float("inf")}, "break_even_rows: link_bytes_per_second"),
    ):
        with pytest.raises(waybill.InvalidArgument, match=text):
            break_even_rows(config, **options)
