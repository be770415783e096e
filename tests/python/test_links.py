"""Speeds of links: read, given to worlds, agreed on."""

import inspect
import pathlib
import re

import pytest

import waybill
from waybill.moe.predict import ExpertSummary

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
    with pytest.raises(waybill.InvalidArgument, match="expected 1 to 1e"):
        waybill.run_threads(1, lambda world: world.use_links(waybill.LinkSpeeds(0)))
