"""What to say when arguments fit no signature of a compiled function."""

from __future__ import annotations

import operator
import re
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

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
    """What was expected in place of the value; None where it may fit."""
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
    plain: Dict[str, Any] = {
        "str": str,
        "bool": (bool, np.bool_),
        "bytes": bytes,
        "dict": dict,
        "list": list,
    }
    if kind == "str" and isinstance(value, str) and not _is_text(value):
        return "a text without halves of characters"
    if kind in plain:
        return None if isinstance(value, plain[kind]) else kind
    if kind.split("[")[0].endswith(("Sequence", "list")):
        return None if hasattr(value, "__len__") else "a sequence"
    if "ndarray" in kind or "array" in kind:
        return None if hasattr(value, "__dlpack__") else "an array"
    return None


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


def describe(text: str, given: List[Any], by_name: Dict[str, Any]) -> str:
    """Function, argument, got and expected, from nanobind's text and the arguments."""
    found = _SIGNATURE.search(text)
    if found is None:
        return text
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
            return f"{who}: {name} = {shown(value)}, expected {expected}"
    for name, kind, value in arguments:  # of fewer bits, or without a sign
        if kind == "int" and not 0 <= operator.index(value) < 2**31:
            return f"{who}: {name} = {shown(value)}, expected an integer within its range"
    got = ", ".join(shown(value) for _, _, value in arguments)
    return f"{who}: got ({got}), expected ({', '.join(': '.join(p) for p in parameters)})"
