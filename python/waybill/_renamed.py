"""Keywords that had another name before."""

from __future__ import annotations

import functools
from typing import Callable, ParamSpec, TypeVar

from .errors import InvalidArgument

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Lets a function take ``old=new`` names: callers of the old ones go on to work."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **given: _P.kwargs) -> _R:
            for old in names.keys() & given.keys():
                new = names[old]
                if new in given:
                    who = function.__name__
                    raise InvalidArgument(f"{who}: got {old} and {new}, expected {new} alone")
                given[new] = given.pop(old)
            return function(*args, **given)

        return call

    return decorate
