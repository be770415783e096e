"""Texts that come from files or go to them."""

from __future__ import annotations

import os
from typing import Any, Tuple, Union

from .errors import InvalidArgument

Path = Union[str, os.PathLike[str]]


def json_text(text: Any, who: str) -> Tuple[str, str]:
    """(text, where it comes from) of a JSON text, or of the file of a path that is no JSON text."""
    if not isinstance(text, (str, os.PathLike)):
        raise InvalidArgument(f"{who}: got a {type(text).__name__}, expected a JSON text or a path")
    if isinstance(text, str) and text.lstrip().startswith("{"):
        return text, "JSON"
    with open(text, encoding="utf-8") as file:
        return file.read(), os.fspath(text)


def kept(text: str, path: Union[Path, None]) -> str:
    """The text itself, also written to ``path`` when there is one."""
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text
