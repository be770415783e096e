"""Who asks for a name of another library reads where it is here: one table in compat.py."""

import importlib
import re

import pytest

import waybill
from waybill import compat

pytest.importorskip("torch")

import waybill.moe
import waybill.torch.moe

MODULES = (waybill, waybill.moe, waybill.torch, waybill.torch.moe)


@pytest.mark.parametrize("name", compat.ELSEWHERE)
def test_it_says_where(name):
    place = compat.ELSEWHERE[name]
    for module in re.findall(r"waybill(?:\.\w+)+", place):
        if "integrations.megatron" in module or "install" in place:
            continue  # needs Megatron; served without the name
        assert hasattr(importlib.import_module(module), name)
    for module in MODULES:
        if name in vars(module):
            continue
        assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=re.escape(f"{name!r}: it is ")):
            getattr(module, name)
        with pytest.raises(ImportError, match=re.escape(f"{name!r}: it is ")):
            exec(f"from {module.__name__} import {name}")


def test_other_names_are_errors_as_ever():
    for module in MODULES:
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
            getattr(module, "nothing")  # noqa: B009
        with pytest.raises(ImportError, match="cannot import name 'nothing'"):
            exec(f"from {module.__name__} import nothing")


def test_functions_of_the_documents_are_here():
    for module in (waybill, waybill.torch):
        for name in (
            "gen_seq_lens", "compute_metadata", "compute_metadata_kv", "create_qkv_dispatch",
            "orchestrate_simulate", "test_qkv_dispatch", "Metadata", "EPAll2AllLayer",
        ):  # fmt: skip
            assert hasattr(module, name)
