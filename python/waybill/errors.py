"""Errors of the library. Their texts name function, argument, the value got and the expected."""

import threading
import time
from typing import Any, ClassVar, Dict, Optional

from . import _core

__all__ = [
    "CudaError",
    "Disagreement",
    "Error",
    "InternalError",
    "Interrupted",
    "InvalidArgument",
    "IoError",
    "NotThreeAxes",
    "PeerFailed",
    "RankOutOfRange",
    "ShapeMismatch",
    "Timeout",
    "TransportError",
    "Unsupported",
    "WrongType",
]

# A terminal would take these for commands: the control characters C0, DEL and C1, ends of lines and
# paragraphs, marks that turn the direction of writing, and bytes that are no text.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F)]
_CONTROLS += [*range(0x2066, 0x206A)]
_PRINTABLE = {c: f"\\x{c:02x}" if c < 0x80 else f"\\u{c:04x}" for c in _CONTROLS}
_PRINTABLE.update({half: f"\\u{half:04x}" for half in range(0xD800, 0xE000)})
_PRINTABLE.update({0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)})
for _kept in "\n\t":
    del _PRINTABLE[ord(_kept)]


def printable(text: str) -> str:
    """The text with what a terminal could take for a command written out, as \\x1b."""
    return text.translate(_PRINTABLE)


class Error(Exception):
    """Base of all errors of the library. Its quoted text is safe to print."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(a) if isinstance(a, str) else a for a in args))


class InvalidArgument(Error, ValueError):
    """The caller passed something wrong."""


class WrongType(InvalidArgument, TypeError):
    """An argument of another type than expected, or an integer too large for it."""


class Disagreement(InvalidArgument):
    """Ranks do not mean the same collective call: the operation, two ranks and what differs."""


class ShapeMismatch(InvalidArgument, RuntimeError):
    """Tensors that do not fit the metadata in a simulation; a RuntimeError in DistCA."""


class RankOutOfRange(InvalidArgument, IndexError):
    """A destination outside the world in a simulation; an IndexError in DistCA."""


class NotThreeAxes(InvalidArgument, AssertionError):
    """A simulated tensor without three axes; an AssertionError in DistCA."""


class Unsupported(Error, NotImplementedError):
    """The request is well formed, but this build cannot serve it."""


class IoError(Error, OSError):
    """A file or text could not be read, parsed or written."""


class TransportError(Error, RuntimeError):
    """The machinery between ranks failed; the text says what was being done."""


class PeerFailed(TransportError):
    """Another rank failed, was interrupted or is gone. The text names it and says why."""


class Interrupted(Error, KeyboardInterrupt):
    """A wait that the user ended (Ctrl-C), on a thread on which Python handles no signals. The main
    thread has what its handler raised: KeyboardInterrupt.
    """

    _last_raised: ClassVar[Dict[int, float]] = {}  #: when, in each thread

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_raised[threading.get_ident()] = time.monotonic()


class CudaError(Error, RuntimeError):
    """A CUDA call failed; the text says what was being done, on which device."""


class Timeout(Error, TimeoutError):
    """A rank stayed silent past the deadline: who waited for whom, and for what.

    The attributes are None where a Timeout was not raised by the library.
    """

    operation: Optional[str] = None  #: "dispatch"
    what: Optional[str] = None  #: the counter: "signal", "exchange"
    rank: Optional[int] = None  #: that waited
    peer: Optional[int] = None  #: that was waited for
    wanted: Optional[int] = None  #: the least count that would have ended the wait
    seen: Optional[int] = None  #: the last count seen
    seconds: Optional[float] = None  #: waited


class InternalError(Error, RuntimeError):
    """A defect of the library, never of the caller."""


_core.set_error_types({name: globals()[name] for name in __all__})
for _name in __all__:
    globals()[_name].__module__ = "waybill"  # users see and catch this name
