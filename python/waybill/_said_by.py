"""Errors of calls that the library makes for a caller, in the caller's words."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Optional, Type, TypeVar, cast

from .errors import Disagreement, Error

_F = TypeVar("_F", bound=Callable[..., Any])

# What a caller of something above these has not written. What a call of them does, such as
# "dispatch", stays: it says where ranks are.
_INSIDE = re.compile(
    r"^(EPAll2AllLayer|SequenceDispatcher|BatchPlanner(\.\w+)?|ContextParallelAttention(\.\w+)?"
    r"|share_memory\(window\)|reserve|read_launch_environment): "
)


class said_by:
    """What the library raises inside begins with ``who``, unless it does so already. A
    disagreement of ranks ends with ``of_all``: what must be the same on all of them. Also a
    decorator. (One of contextlib takes two microseconds of every call, however it ends.)
    """

    __slots__ = ("_of_all", "_who")

    def __init__(self, who: str, of_all: str = "") -> None:
        self._who, self._of_all = who, of_all

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if isinstance(error, Error):
            self._say(error)

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except Error as error:
                self._say(error)
                raise

        return cast(_F, call)

    def _say(self, error: Error) -> None:
        text = str(error)
        if text.startswith(self._who.partition(":")[0]):
            return
        text = f"{self._who}: {_INSIDE.sub('', text)}"
        if self._of_all and isinstance(error, Disagreement):
            text = f"{text}: {self._of_all}"
        error.args = (text, *error.args[1:])
