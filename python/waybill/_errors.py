"""The caller's words in errors.

C++ checks values and says "function: argument = got, expected ...". The compiled part says the same
of arguments that fit no signature, with _wrong_call below. A caller of something above these knows
other names: said_by and reworded put them in place of the library's.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Dict, List, Optional, ParamSpec, Tuple, TypeVar, Union, cast

import numpy as np

from . import _core
from .errors import Disagreement, Error, InvalidArgument, WrongType

__all__ = [
    "flat_names",
    "known_keywords",
    "on_rank",
    "renamed",
    "reworded",
    "said_by",
    "shown",
    "tensor_words",
    "unknown_keyword",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")

#: A text in the caller's words, or the caller's words for some of the library's.
Words = Union[Callable[[str], str], Mapping[str, str]]

# A caller of something above these has not written them. A call that they make, such as "dispatch",
# stays: it says where ranks are. Functions of the compiled part go, too.
_INSIDE = re.compile(
    r"(EPAll2AllLayer|EPConfig|EPDispatchOptions|SequenceDispatcher|BatchPlanner(\.\w+)?"
    r"|ContextParallelAttention(\.\w+)?|share_memory\(window\)|reserve|read_launch_environment)"
)


def shown(value: Any) -> str:
    """A value as an error quotes it: short."""
    if isinstance(value, int) and abs(value) >= 2**200:  # Python refuses to write the largest
        return f"{'-' if value < 0 else ''}2^{abs(value).bit_length() - 1} or more"
    if value is None or isinstance(value, (bool, int, float, str, np.number)):
        text = repr(value)
        return text if len(text) <= 60 else text[:60] + "..."
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    return f"a {type(value).__name__}"


def reworded(error: Error, who: str, words: Optional[Words] = None, of_all: str = "") -> Error:
    """The error, which begins with ``who`` from now on, unless it does so already, and has the
    caller's words. A disagreement of ranks ends with ``of_all``: what must be the same on all.
    """
    text = str(error)
    if words:
        text = words(text) if callable(words) else _with_words(text, words)
    name, colon, rest = text.partition(": ")
    said, head = name.replace("::", "."), who.partition(":")[0]
    if said != head and not said.startswith((f"{head}.", f"{head}(", f"{head} ")):
        inside = colon and (_INSIDE.fullmatch(name) or hasattr(_core, name))
        text = f"{who}: {rest if inside else text}"
        if of_all and isinstance(error, Disagreement):
            text = f"{text}: {of_all}"
    error.args = (text, *error.args[1:])
    return error


def _with_words(text: str, words: Mapping[str, str]) -> str:
    """Text in quotes is the caller's and stays."""
    names = "|".join(map(re.escape, words))
    return re.sub(rf'"[^"]*"|\b(?:{names})\b', lambda m: words.get(m[0], m[0]), text)


def flat_names(text: str) -> str:
    """Fields of the library's nested options are arguments of their own in Python."""
    return re.sub(r"\b(?:mask|model|hardware|costs)\.(?=[a-z])", "", text)


class said_by:
    """Rewords errors that the library raises inside. Also a decorator. (One of contextlib takes two
    microseconds of every call, however it ends.)
    """

    __slots__ = ("_of_all", "_who", "_words")

    def __init__(self, who: str, of_all: str = "", words: Optional[Words] = None) -> None:
        self._who, self._of_all, self._words = who, of_all, words

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, Error):
            reworded(error, self._who, self._words, self._of_all)

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except Error as error:
                reworded(error, self._who, self._words, self._of_all)
                raise

        return cast(_F, call)


def on_rank(method: _F) -> _F:
    """Errors about the arguments of this rank's call say which rank that is."""

    @functools.wraps(method)
    def named(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except Disagreement:  # names the ranks
            raise
        except InvalidArgument as error:
            error.args = (f"{error}, on rank {self.rank}",)
            raise

    return cast(_F, named)


def tensor_words(
    who: str, inside: str, name_of: Callable[[int], str], values: Sequence[Any],
    row_shapes: Sequence[Tuple[int, ...]],
) -> Callable[[str], str]:  # fmt: skip
    """Words for a text about ``inside[t]``, a matrix to the compiled part: the function, and name
    and shape of the caller's tensor.
    """

    def reword(text: str) -> str:
        text = f"{who}: {text.partition(': ')[2]}"
        found = re.search(rf"\b{inside}\[(\d+)\]( has shape \[.*?\])?", text)
        if found is None:
            return text
        t = int(found[1])
        shape = f" has shape {list(np.shape(values[t]))}" if found[2] else ""
        row = ", ".join(map(str, row_shapes[t]))
        text = text.replace(found[0], name_of(t) + shape)
        return re.sub(r"expected \[rows, \d+\]", f"expected [rows, {row}]", text)

    return reword


def renamed(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Lets a function take keywords by their names of before, too: ``old=new``. Errors name the
    keyword that was given.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **given: _P.kwargs) -> _R:
            words = {}
            for old in names.keys() & given.keys():
                new = names[old]
                if new in given:
                    who = function.__name__
                    raise InvalidArgument(f"{who}: got {old} and {new}, expected {new} alone")
                given[new] = given.pop(old)
                words[new] = old
            if not words:
                return function(*args, **given)
            with said_by(function.__name__, words=words):
                return function(*args, **given)

        return call

    return decorate


#: Arguments of other libraries, and what is like them here.
_ELSEWHERE = {"causal": "mask", "is_causal": "mask", "softmax_scale": "scale", "top_k": "topk"}


def unknown_keyword(who: str, name: str, known: Sequence[str]) -> WrongType:
    """The error for an argument that there is not: it names the one that is like it."""
    like = difflib.get_close_matches(name, known, 1) or [_ELSEWHERE.get(name, "")]
    hint = f"did you mean {like[0]}?"
    if like[0] not in known:
        hint = f"expected one of {', '.join(sorted(known))}"
    return WrongType(f"{who}: there is no argument {name}, {hint}")


def known_keywords(*others: str) -> Callable[[_F], _F]:
    """For constructors: an unknown keyword is an ``unknown_keyword``. Python suggests one from 3.13
    on, unless an argument is missing, too.

    :param others: names that the constructor passes on, and checks if it is called at all
    """

    def decorate(function: _F) -> _F:
        who = function.__qualname__.partition(".")[0]
        own = inspect.signature(function).parameters.values()
        known = [*[one.name for one in own if one.kind != one.VAR_KEYWORD][1:], *others]
        named = (one for one in own if one.kind == one.KEYWORD_ONLY)
        needed = {one.name for one in named if one.default is one.empty}

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if not others or needed - given.keys():
                for name in given:
                    if name not in known:
                        raise unknown_keyword(who, name, known)
            return function(*args, **given)

        return cast(_F, call)

    return decorate


_SIGNATURE = re.compile(r"^\s*1\. (\w+)\((.*)\) -> .*$", re.MULTILINE)


def _parts(text: str, separator: str) -> List[str]:
    """The text between separators that stand in no brackets."""
    parts: List[str] = []
    depth = begin = 0
    for i, c in enumerate(text):
        depth += (c in "[({") - (c in "])}")
        if c == separator and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [part.strip() for part in [*parts, text[begin:]] if part.strip()]


def _parameters(signature: str) -> List[Tuple[str, str]]:
    """(name, type) of each; the default is left out."""
    parameters = []
    for part in _parts(signature, ","):
        name, _, kind = part.partition(":")
        parameters.append((name.strip(), _parts(kind, "=")[0] if kind.strip() else ""))
    return [(name, kind) for name, kind in parameters if name not in ("self", "*", "/")]


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _mismatch(value: Any, kind: str) -> Optional[str]:
    """The words for the expected value; None where the value may fit."""
    kinds = _parts(kind, "|")
    if len(kinds) > 1:
        wanted = [_mismatch(value, one) for one in kinds]
        return None if None in wanted else " or ".join(str(one) for one in wanted)
    if kind == "None":
        return None if value is None else "None"
    if kind == "int":
        if not _is_integer(value):
            return "an integer"
        return None if -(2**63) <= operator.index(value) < 2**64 else "an integer of 64 bits"
    if kind == "float":
        return None if isinstance(value, (int, float, np.number)) else "a number"
    plain: Dict[str, Any] = {"str": str, "bytes": bytes, "dict": dict, "list": list}
    plain["bool"] = (bool, np.bool_)
    if kind == "str" and isinstance(value, str) and not _is_text(value):
        return "a text without halves of characters"
    if kind in plain:
        return None if isinstance(value, plain[kind]) else kind
    if kind.split("[")[0].endswith(("Sequence", "list")):
        return None if hasattr(value, "__len__") else "a sequence"
    if "array" in kind.lower():
        return None if hasattr(value, "__dlpack__") else "an array"
    return None


def _wrong_call(text: str, given: List[Any], by_name: Dict[str, Any]) -> WrongType:
    """The error for arguments that fit no signature, from nanobind's text and the arguments."""
    found = _SIGNATURE.search(text)
    if found is None:
        return WrongType(text)
    who, signature = found.group(1), found.group(2)
    parameters = _parameters(signature)
    if "self" in _parts(signature, ",")[:1]:
        given = given[1:]
    arguments = [(name, kind, value) for (name, kind), value in zip(parameters, given)]
    kinds = dict(parameters)
    arguments += [(name, kinds.get(name, ""), value) for name, value in by_name.items()]
    for name, kind, value in arguments:
        expected = _mismatch(value, kind)
        if expected is not None:
            return WrongType(f"{who}: {name} = {shown(value)}, expected {expected}")
    for name, kind, value in arguments:  # an integer that fits no narrower or unsigned type
        if "int" in _parts(kind, "|") and _is_integer(value) and not 0 <= value < 2**31:
            wanted = "expected an integer within its range"
            return WrongType(f"{who}: {name} = {shown(value)}, {wanted}")
    got = ", ".join(shown(value) for _, _, value in arguments)
    expected = ", ".join(": ".join(parameter) for parameter in parameters)
    return WrongType(f"{who}: got ({got}), expected ({expected})")


_core.set_error_types({"wrong_call": _wrong_call})
