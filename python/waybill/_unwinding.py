"""Cleaning up while an error ends this rank: the others may never come to that."""

from __future__ import annotations

import sys

__all__ = ["Unwinding"]


def _in_flight() -> int:
    """The id of the exception that is handled here, also by a ``finally``, or that of None."""
    return id(sys.exc_info()[1])


class Unwinding:
    """True while an exception is in flight that was not when this was made: code that runs in an
    ``except`` block from its beginning to its end may fail, too.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = _in_flight()

    def __bool__(self) -> bool:
        return sys.exc_info()[1] is not None and _in_flight() != self._before
