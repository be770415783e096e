"""How ``torch.compile`` treats Waybill's calls: they end a graph, run as they are, and another
graph begins behind them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["outside_graphs"]

_F = TypeVar("_F", bound=Callable[..., Any])
_REASON = "Waybill runs it outside of graphs: it waits for other ranks, or works on host memory"


def outside_graphs(function: _F) -> _F:
    """Never traced: neither the function nor what it calls.

    ``torch.compiler.disable``, but for the compiler's import, which takes longer than torch's own:
    whoever compiles nothing does without.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            disabled.append(_disabled(function, call))
        return disabled[0](*args, **options)

    # What that function puts on what it returns: who traces a caller stops before this call.
    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return cast(_F, marked)


def _disabled(function: Callable[..., Any], call: Any) -> Callable[..., Any]:
    """The function as the compiler must call it. The frames of all ``call``, which share their
    code, are not compiled either, as they would be between two graphs.
    """
    compiler: Any = torch.compiler
    dynamo: Any = sys.modules["torch._dynamo"]
    with contextlib.suppress(AttributeError):  # a torch that has it elsewhere: compiled to nothing
        dynamo.eval_frame.skip_code(call.__code__)
    made: Callable[..., Any] = compiler.disable(function)
    return made
