"""Odd speeds, costs, choices and sizes: an error that names the caller's argument, never a guess, a
number that is none, or a crash.
"""

import math

import numpy as np
import pytest

import waybill
from waybill.moe import EPConfig, predict, simulate_dispatch, summarize

CONFIG = EPConfig(2, 512, 2, 4, 0, 4, 2, "bfloat16")
IDS = [[[2, 3], [0, 0]], [], [], []]
NO_SPEEDS = [
    math.nan, math.inf, -math.inf, 0, -1, 0.5, 1e-300, 5e-324, 2e18, 1e300, 10**400, "1e9",
    "400Gbit/s", b"1", "", None, True, False, np.True_, [], {},
]  # fmt: skip
NO_COSTS = [math.nan, math.inf, -1e-9, 1e300, 10**400, "1e-6", None, True, []]


@pytest.mark.parametrize("speed", NO_SPEEDS, ids=repr)
@pytest.mark.parametrize("name", ["nvlink", "network", "block"])
def test_speeds_make_sense(name, speed):
    with pytest.raises(waybill.InvalidArgument, match=f"^predict: {name}_bytes_per_second = "):
        predict(CONFIG, IDS, **{f"{name}_bytes_per_second": speed})
    with pytest.raises(waybill.InvalidArgument, match=f"LinkSpeeds: {name}_bytes"):
        waybill.LinkSpeeds(**{f"{name}_bytes_per_second": speed})
    if name != "block":
        with pytest.raises(
            waybill.InvalidArgument, match=f"ExpertSummary: {name}_bytes_per_second = "
        ):
            summarize(CONFIG, IDS).limit_seconds(**{f"{name}_bytes_per_second": speed})
        with pytest.raises(waybill.InvalidArgument, match=f"{name}_bytes_per_second = "):
            waybill.plan([300, 80], 2, 200, **{f"{name}_bytes_per_second": speed})


@pytest.mark.parametrize("cost", NO_COSTS, ids=repr)
@pytest.mark.parametrize(
    "name",
    ["message_seconds", "phase_seconds", "network_message_seconds", "network_post_seconds",
     "path_bytes_per_second"],
)  # fmt: skip
def test_costs_make_sense(name, cost):
    with pytest.raises(waybill.InvalidArgument, match=f"^predict: {name} = "):
        predict(CONFIG, IDS, **{name: cost})


def test_the_most_that_is_taken_gives_numbers():
    most = dict.fromkeys(("message_seconds", "phase_seconds", "network_message_seconds"), 1e18)
    for given in ({"nvlink": 1, "network": 1, "block": 1}, most, {"path_bytes_per_second": 1}):
        assert all(math.isfinite(call.seconds) for call in predict(CONFIG, IDS, **given))


@pytest.mark.parametrize("call", [predict, summarize])
def test_words_and_ids_are_named_as_the_caller_has_them(call):
    who = call.__name__
    for payload in ("fp8", -1, None, ["plain"]):
        with pytest.raises(waybill.InvalidArgument, match=f"^{who}: payload = "):
            call(CONFIG, IDS, payload=payload)
    for dropped in (-2, 3, 2**31, 2**62):
        with pytest.raises(waybill.InvalidArgument, match=f"^{who}: dropped_id = "):
            call(CONFIG, IDS, dropped_id=dropped)
    for path in ("", "wait", None, 1):
        with pytest.raises(waybill.InvalidArgument, match=r"^predict: path = "):
            predict(CONFIG, IDS, path=path)


@pytest.mark.parametrize("rows", ["grouped", "compact"])
@pytest.mark.parametrize("alignment", [2**29, 2**30, 2**31 - 1, 2**31, 2**62, 2**70])
def test_padding_beyond_32_bits_is_refused(rows, alignment):
    config = EPConfig(4, 4, 2, 8, 0, 2, 2, "float32")
    tokens = [np.ones((1, 4), np.float32)] * 2
    with pytest.raises(waybill.InvalidArgument, match="expert_alignment"):
        simulate_dispatch(
            config, tokens, [np.array([[0, 4]])] * 2, rows=rows, expert_alignment=alignment
        )


def test_predicted_bytes_are_those_that_cross():
    random = np.random.default_rng(1)
    for nodes, local in ((1, 4), (3, 1), (5, 3), (8, 8)):
        world = nodes * local
        config = EPConfig(6, 128, 4, 2 * world, 0, world, local, "bfloat16")
        ids = [
            np.stack([random.permutation(2 * world)[:4] for _ in range(1 + r % 6)])
            for r in range(world)
        ]
        out = np.zeros(world, int)
        back = np.zeros(world, int)
        for r, of_rank in enumerate(ids):
            for token in of_rank:
                for node in {int(e) // 2 // local for e in token} - {r // local}:
                    out[r] += 256
                    back[node * local + r % local] += 256
        calls = {call.call: call for call in predict(config, ids)}
        for name in ("grouped_dispatch", "cached_dispatch"):
            assert calls[name].network_out.tolist() == out.tolist()
            assert calls[name].network_in.tolist() == back.tolist()
        for name in ("compact_combine", "summed_combine", "grouped_combine"):
            assert calls[name].network_out.tolist() == back.tolist()
            assert calls[name].network_in.tolist() == out.tolist()
