"""What kernels of Waybill have reported, for errors of others: after a wait on a GPU that missed
its deadline the device is lost, and who uses it next, such as torch, gets an error with no reason.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, NamedTuple, Optional, Type

from . import _core
from .errors import Error

__all__ = ["explain", "explain_at_exit"]

_SHARED = (
    "waybill: ranks share that GPU: torch.cuda.synchronize() waits for the kernels of all of them,"
    " also of one that waits for this rank; expected torch.cuda.current_stream().synchronize()"
)


class DeviceFault(NamedTuple):
    """What a kernel of a rank of this process has reported."""

    rank: int
    device: int
    num_ranks: int  #: of this process on the device
    text: str  #: call, rank, peer, wanted and seen value, or what it had been given


def reported() -> list[DeviceFault]:
    """Of all ranks that are in this process."""
    return [DeviceFault(*fault) for fault in _core.device_faults()]


def explain(error: BaseException) -> None:
    """Adds what is known of lost devices to an error that is not Waybill's, which knows it."""
    if isinstance(error, Error) or not isinstance(error, Exception):
        return
    faults = reported()
    notes = [f"waybill: cuda:{fault.device} was lost: {fault.text}" for fault in faults]
    if any(fault.num_ranks > 1 for fault in faults):
        notes.append(_SHARED)
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for note in notes:
        if note not in said:
            _add_note(error, note)


def _add_note(error: BaseException, note: str) -> None:
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
