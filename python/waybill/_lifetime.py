"""Objects that cannot be copied or never change, what they forward, cleaning up after errors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Type, TypeVar

from .errors import InvalidArgument, WrongType

_M = TypeVar("_M", bound="Made")
_U = TypeVar("_U", bound="Unchanging")


class Made:
    """Functions of the library make it, never a user's call of its constructor."""

    __slots__ = ()
    _made_by: ClassVar[str]

    def __init__(self) -> None:
        who = type(self).__name__
        raise InvalidArgument(f"{who}: got a constructor call, expected {self._made_by}")

    @classmethod
    def _with(cls: Type[_M], **fields: Any) -> _M:
        """The object with these attributes."""
        self = cls.__new__(cls)
        for name, value in fields.items():
            setattr(self, name, value)
        return self


class Unchanging:
    """Nothing changes it: every copy is the thing itself. Pickles say how to make it again."""

    __slots__ = ()

    def __copy__(self: _U) -> _U:
        return self

    def __deepcopy__(self: _U, memo: Any) -> _U:
        return self


class WrittenOnce:
    """Its fields are set when it is made, and read-only from then on."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise AttributeError(f"{type(self).__name__}: {name} is read-only: make another one")
        super().__setattr__(name, value)

    def _write(self, **fields: Any) -> None:
        """Sets fields of an object that is new."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}: {name} is read-only: make another one")


def forwarded(path: str, doc: str) -> Any:
    """A read-only attribute of what an object holds, such as ``_plan.shard_len``."""
    return property(operator.attrgetter(path), doc=doc)


class OfThisProcess:
    """It holds what lies in this process alone, such as a connection or a device's memory."""

    __slots__ = ()
    _why_not_copied: ClassVar[str]  #: says what it holds, and what to do instead

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise WrongType(
            f"{type(self).__name__}: cannot be copied or pickled, as it holds"
            f" {self._why_not_copied}"
        )


def _in_flight() -> int:
    """The id of the exception that is handled here, also by a ``finally``, or that of None."""
    return id(sys.exc_info()[1])


def unwinding() -> Callable[[], bool]:
    """A function: whether an exception is in flight that was not when it was made. Code that runs
    in an ``except`` block from its beginning to its end may fail, too.
    """
    before = _in_flight()
    return lambda: sys.exc_info()[1] is not None and _in_flight() != before
