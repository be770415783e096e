"""Texts that come from files or go to them."""

from __future__ import annotations

import os
import stat
from typing import Any, Tuple, Union

from . import _core
from ._errors import shown
from .errors import InvalidArgument, IoError, WrongType, printable

Path = Union[str, os.PathLike[str]]


def json_text(text: Any, who: str) -> Tuple[str, str]:
    """(text, where it comes from) of a JSON text, or of the file of a path that is no JSON text."""
    if not isinstance(text, (str, os.PathLike)):
        raise InvalidArgument(f"{who}: got a {type(text).__name__}, expected a JSON text or a path")
    if isinstance(text, str) and text.lstrip().startswith("{"):
        return text, "JSON"
    return _read(text, who), printable(os.fspath(text))


def _read(path: Path, who: str) -> str:
    """The whole file, within the limits of the library."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except ValueError as error:  # a zero in the name
        raise InvalidArgument(f"{who}: got {path!r}, expected a path: {error}") from None
    with file:
        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        most = _core.max_file_bytes if regular else _core.max_stream_bytes
        content = bytearray()
        while piece := file.read(1 << 20):
            content += piece
            if len(content) > most:
                what = "a file" if regular else "what is no regular file"
                raise IoError(
                    f"{os.fspath(path)}: cannot read: more than {most >> 30} GiB, the most that is"
                    f" read of {what}"
                )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise IoError(f"{os.fspath(path)}: is no UTF-8 text: {error.reason}") from None


def kept(text: str, path: Union[Path, None]) -> str:
    """The text itself, also written to ``path`` when there is one."""
    if path is not None:
        if not isinstance(path, (str, os.PathLike)):  # a number would be a file that is open
            raise WrongType(f"to_json: path = {shown(path)}, expected a path or None")
        try:
            file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
        except ValueError as error:  # a zero in the name, or half a character
            raise InvalidArgument(f"to_json: path = {path!r}, expected a path: {error}") from None
        with file:
            file.write(text)
    return text
