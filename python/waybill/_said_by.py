"""Errors of calls that the library makes for a caller, in the caller's words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from .errors import Disagreement, Error

# What a caller of something above these has not written. What a call of them does, such as
# "dispatch", stays: it says where ranks are.
_INSIDE = re.compile(
    r"^(EPAll2AllLayer|SequenceDispatcher|BatchPlanner(\.\w+)?|ContextParallelAttention(\.\w+)?"
    r"|share_memory\(window\)|reserve): "
)


@contextlib.contextmanager
def said_by(who: str, of_all: str = "") -> Iterator[None]:
    """What the library raises inside begins with ``who``, unless it does so already. A
    disagreement of ranks ends with ``of_all``: what must be the same on all of them. Also a
    decorator.
    """
    try:
        yield
    except Error as error:
        text = str(error)
        if not text.startswith(who.partition(":")[0]):
            text = f"{who}: {_INSIDE.sub('', text)}"
            if of_all and isinstance(error, Disagreement):
                text = f"{text}: {of_all}"
            error.args = (text, *error.args[1:])
        raise
