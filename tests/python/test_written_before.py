"""What version 0.1 has written, JSON and pickles, is read and holds what it held then."""

import importlib
import importlib.util
import json
import pathlib
import pickle
import subprocess
import sys

import pytest

import waybill
from waybill import compat

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "golden" / "written_by_0_1"
FACTS = json.loads((FOLDER / "facts.json").read_text(encoding="utf-8"))
PICKLES = sorted(path.stem for path in FOLDER.glob("*.pickle"))
JSON = sorted({path.stem for path in FOLDER.glob("*.json")} - {"facts"})
READERS = {
    "waybill.attention_costs": waybill.AttentionCosts.from_json,
    "waybill.attention_plan": waybill.AttentionPlan.from_json,
    "waybill.metadata": waybill.Metadata.from_json,
    "waybill.plan": waybill.QkvPlan.from_json,
}
NEED_TORCH = [name for name in PICKLES if name.startswith(("torch_", "batch_"))]


def facts(value):
    """As write.py finds them; through JSON, as they were kept."""
    spec = importlib.util.spec_from_file_location("write", FOLDER / "write.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return json.loads(json.dumps(script.facts(value)))


def differences(was, now, path=""):
    """Places where what was is not there any more; what is new beside it is none."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key, value in was.items():
            yield from differences(value, now.get(key, "nothing"), f"{path}/{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (one, other) in enumerate(zip(was, now)):
            yield from differences(one, other, f"{path}/{i}")
    elif was != now:
        yield f"{path}: {was} is now {now}"


def test_all_files_are_there():
    assert len(PICKLES) == 25 and sorted(FACTS) == PICKLES
    assert len(NEED_TORCH) == 5


@pytest.mark.parametrize("name", PICKLES)
def test_pickles(name):
    if name in NEED_TORCH:
        pytest.importorskip("torch")
    value = pickle.loads((FOLDER / f"{name}.pickle").read_bytes())
    assert [*differences(FACTS[name], facts(value))] == []


@pytest.mark.parametrize("name", JSON)
def test_json(name):
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    kind = json.loads(text).get("format")
    if kind in READERS:
        value = READERS[kind](text)
        assert [*differences(json.loads(text), json.loads(value.to_json()))] == []
        if not name.startswith("torch_"):
            assert facts(value) == FACTS[name]
    elif kind == "waybill.links":
        assert waybill.read_links(text) == waybill.LinkSpeeds(375e9, 45e9, 12e9, "NVIDIA H200")
    else:
        assert kind == "waybill.dispatch"
        program = pathlib.Path(sys.executable).parent / "waybill"
        said = subprocess.run(
            [program, "validate", FOLDER / f"{name}.json"], capture_output=True, text=True
        )
        assert said.returncode == 0, said.stdout + said.stderr


def test_a_difference_is_found():
    was = FACTS["plan"]
    assert [*differences(was, was)] == []
    text = (FOLDER / "plan.json").read_text(encoding="utf-8")
    other = waybill.plan([70, 64, 31, 1, 90, 83], 4, 128).to_qkv_plan()
    assert json.loads(text)["format"] == "waybill.plan" and [*differences(was, facts(other))]


@pytest.mark.parametrize("old", compat.MOVED)
def test_modules_that_moved_are_found_under_their_old_names(old):
    if old.startswith("waybill.torch"):
        pytest.importorskip("torch")
    now = vars(importlib.import_module(compat.MOVED[old]))
    was = vars(importlib.import_module(old))
    public = [name for name in now if not name.startswith("__")]
    assert len(public) > 5 and all(was[name] is now[name] for name in public)


def test_other_modules_are_not_there():
    with pytest.raises(ModuleNotFoundError, match=r"waybill\.linkz"):
        importlib.import_module("waybill.linkz")
