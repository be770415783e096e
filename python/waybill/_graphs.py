"""How ``torch.compile`` treats Waybill's calls, and notes on errors that follow a lost device.

A call ends a graph, runs as it is, and another graph begins after it. Without torch nothing of
this happens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Optional, Type, TypeVar, cast

from . import _core
from .errors import Error

_SHARED = (
    "waybill: ranks share that GPU: torch.cuda.synchronize() waits for the kernels of all of them,"
    " also of one that waits for this rank; expected torch.cuda.current_stream().synchronize()"
)


def explain(error: BaseException) -> None:
    """Adds what is known of lost devices to an error that is not Waybill's, which knows it."""
    if isinstance(error, Error) or not isinstance(error, Exception):
        return
    faults = _core.device_faults()  # (rank, device, ranks of this process on it, text) each
    notes = [f"waybill: cuda:{device} was lost: {text}" for _, device, _, text in faults]
    if any(num_ranks > 1 for _, _, num_ranks, _ in faults):
        notes.append(_SHARED)
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for note in notes:
        if note not in said:
            add_note(error, note)


def add_note(error: BaseException, note: str) -> None:
    """A line below the error's text."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    else:
        error.args = ("\n".join([str(error), note]), *error.args[1:])


def explain_at_exit() -> None:
    """For ranks that are processes: the exception that ends this one says what is known. What was
    there to print it does so.
    """
    before: Any = sys.excepthook
    if getattr(before, "_explains", False):
        return

    def hook(
        kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        explain(error)
        before(kind, error, traceback)

    hook._explains = True  # type: ignore[attr-defined]
    sys.excepthook = hook


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

    # That function marks its result so: who traces a caller stops before this call.
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
