"""How ``torch.compile`` treats Waybill's calls: they end a graph, run as they are, and another
graph begins behind them. Without torch nothing of this happens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ._device_faults import explain

__all__ = ["never_compile_calls", "outside_graphs"]

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
        try:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **options)
            if not disabled:
                disable: Any = sys.modules["torch"].compiler.disable
                disabled.append(disable(function))
            return disabled[0](*args, **options)
        except Exception as error:
            explain(error)
            raise

    # What that function puts on what it returns: who traces a caller stops before this call.
    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return cast(_F, marked)


def never_compile_calls(torch: Any) -> None:
    """The frame of ``call`` runs between two graphs, where it would be compiled. For all of them,
    which share their code; what the compiler's skip_code does, without importing it.
    """
    code = outside_graphs(_nothing).__code__
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        skip = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.set_code_exec_strategy(code, skip)
    elif hasattr(frames, "skip_code"):  # before torch 2.7
        frames.skip_code(code)


def _nothing() -> None:
    pass
