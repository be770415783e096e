"""The interface of DeepEP's ``Buffer``, and of ``ElasticBuffer`` for experts, served by Waybill:
which callers it serves is a table in docs/integrations/deep_ep.md.

Rows, sums and their order are those of ``waybill.torch.moe.EPAll2AllLayer``, on which all of it is
built: on GPUs of one host, and on CPU ranks.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any, Dict

from ...errors import InvalidArgument
from .arguments import Config, set_max_tokens, topk_idx_t
from .buffer import Buffer
from .elastic import ElasticBuffer
from .elastic_rows import EPHandle
from .events import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "install",
    "set_max_tokens",
    "topk_idx_t",
    "uninstall",
]


_PUBLIC = {
    "Buffer": Buffer, "Config": Config, "ElasticBuffer": ElasticBuffer, "EPHandle": EPHandle,
    "EventHandle": EventHandle, "EventOverlap": EventOverlap, "set_max_tokens": set_max_tokens,
    "topk_idx_t": topk_idx_t,
}  # fmt: skip

_NAMES = ("deep_ep", "deep_ep.utils", "deep_ep.buffer")
_before: Dict[str, Any] = {}


def install(*, replace: bool = False) -> None:
    """From now on ``import deep_ep``, ``deep_ep.utils`` and ``deep_ep.buffer`` of this process are
    Waybill's. Call it before anything imports deep_ep: what has it already keeps it.

    :param replace: also where DeepEP itself is installed or imported; else that is InvalidArgument
    """
    if getattr(sys.modules.get("deep_ep"), "is_waybill", False):
        return
    if not replace and ("deep_ep" in sys.modules or importlib.util.find_spec("deep_ep")):
        raise InvalidArgument(
            "deep_ep.install: DeepEP is here itself: give replace=True to put Waybill in its place"
        )
    package = types.ModuleType("deep_ep", "Waybill, by the names of DeepEP")
    utils, buffer = (types.ModuleType(name) for name in _NAMES[1:])
    for module, names in (
        (package, {**_PUBLIC, "utils": utils, "buffer": buffer, "is_waybill": True}),
        (utils, {"EventHandle": EventHandle, "EventOverlap": EventOverlap}),
        (buffer, {"Buffer": Buffer}),
    ):
        vars(module).update(names)
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
    package.__path__ = []
    utils.__path__ = []
    for name, module in zip(_NAMES, (package, utils, buffer)):
        _before[name] = sys.modules.get(name)
        sys.modules[name] = module


def uninstall() -> None:
    """Puts back the modules that were there before ``install``."""
    for name in list(_before):
        old = _before.pop(name)
        if old is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = old
