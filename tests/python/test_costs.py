"""Measured speeds of links and of attention kernels: data, files, and where plans take them."""

import inspect
import json
import pathlib
import re

import pytest
from error_texts import SPEED_OF_LINKS

import waybill
from waybill.moe.predict import ExpertSummary

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


TEXT = """{"format": "waybill.links", "version": 1, "device": "a GPU", "num_gpus": 2,
"nvlink_bytes_per_second": 2e10, "network_bytes_per_second": 3e9, "block_bytes_per_second": 1e10}"""
SLOW = waybill.LinkSpeeds(2e10, 3e9, 1e10, "a GPU")


def test_all_defaults_are_those_of_the_library():
    root = pathlib.Path(__file__).resolve().parents[2]
    header = (root / "include/waybill/core/link_speeds.h").read_text()
    usual = waybill.LinkSpeeds()
    for name, value in list(vars(usual).items())[:3]:
        assert float(re.search(rf"\b{name} = ([\d.e]+);", header)[1]) == value
    given = {"nvlink": usual.nvlink_bytes_per_second, "network": usual.network_bytes_per_second}
    given.update({f"{name}_bytes_per_second": value for name, value in given.items()})
    found = 0
    calls = (waybill.planner.plan, waybill.compare, waybill.moe.predict)
    for call in (*calls, *vars(ExpertSummary).values()):
        if not inspect.isfunction(call):
            continue
        for name, parameter in inspect.signature(call).parameters.items():
            if name in given and parameter.default is not inspect.Parameter.empty:
                assert parameter.default == given[name], (call, name)
                found += 1
    assert found >= 6


def test_links_are_read(tmp_path):
    file = tmp_path / "links.json"
    file.write_text(TEXT)
    assert waybill.read_links(file) == waybill.read_links(TEXT) == SLOW
    with pytest.raises(waybill.IoError, match="block_bytes_per_second"):
        waybill.read_links(TEXT.replace("1e10", "-1"))


@pytest.mark.parametrize("speed", [float("nan"), 0, -1, 1e19])
@pytest.mark.parametrize("name", ["nvlink_bytes_per_second", "network_bytes_per_second"])
def test_speeds_that_make_no_sense(speed, name):
    """An error in the words of the call."""
    plan = waybill.plan([300, 200], 2)
    for who, call in (
        ("plan", lambda **given: waybill.plan([300, 200], 2, **given)),
        ("compare", lambda **given: waybill.compare([300, 200], 2, **given)),
        ("predict_step", lambda **given: waybill.predict_step(plan, **given)),
    ):
        with pytest.raises(waybill.InvalidArgument, match=f"^{who}: {name} = "):
            call(**{name: speed})


def test_devices_have_names():
    for odd in (None, 3, ["NVIDIA H200"]):
        with pytest.raises(waybill.WrongType, match="LinkSpeeds: device = "):
            waybill.LinkSpeeds(device=odd)


def test_links_of_a_machine_with_gpus_are_for_planning_anywhere(capfd):
    """Ranks in host memory have no links that could be others."""

    def body(world):
        world.use_links(SLOW)

    waybill.run_threads(2, body)
    plan = waybill.plan([3000, 2000, 1000, 800], 4, 1700, **SLOW.rates)
    assert waybill.predict_step(plan, **SLOW.rates).seconds > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(waybill.num_gpus() == 0, reason="needs a GPU")
def test_a_world_on_other_gpus_says_so_once(capfd):
    def body(world):
        world.use_links(SLOW)

    waybill.run_threads(2, body, device="cuda")
    said = capfd.readouterr().err
    assert said.count("these speeds were measured on a GPU, but rank 0 has NVIDIA") == 1, said


def test_links_decide_a_prediction():
    plan = waybill.plan([3000, 2000, 1000, 800], 4, 1700)
    fast = waybill.predict_step(plan).seconds
    assert waybill.predict_step(plan, **SLOW.rates).seconds > fast


def test_worlds_agree_on_links():
    def body(world):
        world.use_links(SLOW)
        waybill.SequenceDispatcher(world).close()
        return True

    assert waybill.run_threads(2, body) == [True, True]

    def differ(world):
        world.use_links(SLOW if world.rank == 0 else waybill.LinkSpeeds())

    with pytest.raises(waybill.InvalidArgument, match="expected the same on all ranks"):
        waybill.run_threads(2, differ)
    with pytest.raises(waybill.InvalidArgument, match=SPEED_OF_LINKS):
        waybill.run_threads(1, lambda world: world.use_links(waybill.LinkSpeeds(0)))
