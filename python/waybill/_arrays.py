"""The door for what callers give: arrays, numbers, words, texts of files."""

from __future__ import annotations

import contextlib
import operator
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Tuple, Union

import numpy as np
import numpy.typing as npt

from . import _core
from ._errors import shown
from .errors import InvalidArgument, IoError, Unsupported, WrongType, printable

#: Functions accept for indices, counts and lengths: a numpy array, anything with
#: ``__dlpack__`` in host memory, or nested sequences of integers.
ArrayLike = Any
IntArray = npt.NDArray[Any]
AnyArray = npt.NDArray[Any]

_KNOWN = frozenset(np.dtype(name) for name in ("int64", "int32", "uint32", "uint64", "bool"))
_INT64 = np.dtype(np.int64)
#: The library's names of dtypes, and what it also calls some of them.
_LIBRARY_NAMES = frozenset(_core.dtype_names)
_ALIASES = frozenset(_core.short_dtype_names)
_DLPACK_CPU = 1
_CUDA_DEVICES = (2, 13)


def as_numpy(value: Any, name: str) -> AnyArray:
    """A numpy array over the caller's memory where it has some, else a new one."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack_device__"):
        try:
            device = value.__dlpack_device__()[0]
            if device == _DLPACK_CPU:
                tracked = getattr(value, "requires_grad", False)
                return np.from_dlpack(value.detach() if tracked else value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            # torch's "meta", or a dtype that numpy lacks
            raise InvalidArgument(f"{name} cannot be seen as a numpy array: {error}") from None
        where = "a CUDA device" if device in _CUDA_DEVICES else f"DLPack device {int(device)}"
        raise InvalidArgument(
            f"{name} lies on {where}, expected host memory: use waybill.torch for GPU tensors"
        )
    try:
        return np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name} is no array: {error}") from None


def index_array(value: ArrayLike, name: str) -> IntArray:
    """A contiguous array of a dtype that indices may have; the compiled part checks the rest."""
    array = as_numpy(value, name)
    if array.dtype not in _KNOWN:
        if array.size == 0 and not isinstance(value, np.ndarray):
            array = array.astype(np.int64)  # numpy makes [] a float array
        elif array.dtype.newbyteorder("=") in _KNOWN:
            array = array.astype(array.dtype.newbyteorder("="))
        else:
            raise InvalidArgument(f"{name} has dtype {array.dtype}, expected int64")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise WrongType(f"{name} has {array.max()}, expected integers of 64 bits with a sign")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def flat_list(value: ArrayLike, name: str) -> list[int]:
    """Integers along one axis."""
    array = index_array(value, name)
    if array.ndim != 1:
        raise InvalidArgument(f"{name} has shape {list(array.shape)}, expected one axis")
    return array.tolist()  # type: ignore[no-any-return]


def plain_array(value: ArrayLike, name: str) -> AnyArray:
    """Contiguous and in the byte order of this machine, of the caller's dtype."""
    array = as_numpy(value, name)
    if array.size == 0 and array is not value:
        array = array.astype(np.int64)  # numpy makes [] a float array
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def whole_numbers(value: ArrayLike, name: str, floats: bool = False) -> IntArray:
    """As index_array, of any dtype of integers, and of whole floats where these are welcome."""
    if type(value) is np.ndarray and value.dtype is _INT64 and value.flags.c_contiguous:
        return value  # most are, and there is nothing to look at
    array = plain_array(value, name)
    if array.dtype.kind in "iu" and array.dtype.itemsize < 4:
        array = array.astype(np.int64)
    elif floats and array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # a value that does not fit is no whole number
            whole = array.astype(np.int64)
        if not np.array_equal(whole, array):
            place = tuple(int(i) for i in np.argwhere(whole != array)[0])
            raise InvalidArgument(
                f"{name}{list(place)} = {array[place]}, expected a whole number of 64 bits"
            )
        array = whole
    return index_array(array, name)


#: Integers by their size: rows move as bytes, whatever their elements mean.
BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def dtype_name(array: AnyArray, name: str) -> str:
    """Names what the bytes mean: numpy's own name leaves out their order and what a record has."""
    size = array.dtype.itemsize
    if size not in BITS or array.dtype.hasobject:
        raise Unsupported(
            f"{name} has dtype {array.dtype} of {size} bytes, expected elements of 1, 2, 4 or 8"
            " bytes"
        )
    plain = array.dtype.isnative and array.dtype.names is None
    return array.dtype.name if plain else str(array.dtype)


def payload(array: AnyArray, name: str) -> Tuple[AnyArray, str]:
    """The same memory as integers of the element's size, and the name of its dtype."""
    kind = dtype_name(array, name)
    return array.view(BITS[array.dtype.itemsize]), kind


def integer(value: Any, name: str) -> int:
    """A plain int of anything that is one."""
    try:
        return operator.index(value)
    except TypeError:
        raise WrongType(f"{name} = {shown(value)}, expected an integer") from None


def int64(value: Any, name: str) -> int:
    """A plain int that the compiled part takes as 64 bits."""
    result = integer(value, name)
    if not -(2**63) <= result < 2**63:
        raise WrongType(f"{name} = {shown(result)}, expected an integer of 64 bits")
    return result


def at_least(value: Any, least: int, name: str, below: int = 2**63) -> int:
    """An int64 that is at least so large, and less than ``below``, the compiled part's limit."""
    result = int64(value, name)
    if not least <= result < below:
        raise InvalidArgument(f"{name} = {result}, expected >= {least}")
    return result


def within(value: Any, low: int, high: int, name: str, high_text: str = "") -> int:
    """An int64 in low..high; errors write the end as ``high_text`` if it is given."""
    result = int64(value, name)
    if not low <= result <= high:
        raise InvalidArgument(f"{name} = {result}, expected {low}..{high_text or high}")
    return result


def number(value: Any, name: str) -> float:
    """A float of anything that is one; the compiled part looks at nan and inf. What only reads as
    one, or is true or false, would be a guess.
    """
    try:
        if isinstance(value, (str, bytes, bytearray, bool, np.bool_)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise WrongType(f"{name} = {shown(value)}, expected a number") from None


def flag(value: Any, name: str) -> bool:
    """True or False, also as 1 and 0: the truth of anything else, "no" too, would be a guess."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    try:
        if operator.index(value) in (0, 1):
            return bool(value)
    except TypeError:
        pass
    raise WrongType(f"{name} = {shown(value)}, expected True or False")


def choice(value: Any, name: str, *options: str) -> str:
    """One of some words."""
    if isinstance(value, str) and value in options:
        return value
    *others, last = (f'"{option}"' for option in options)
    expected = f"expected {', '.join(others)} or {last}" if others else f"expected {last}"
    if isinstance(value, str):
        raise InvalidArgument(f'{name} = "{value[:60]}", {expected}')
    raise WrongType(f"{name} = {shown(value)}, {expected}")


def library_dtype_of(value: Any, name: str) -> str:
    """The library's name of a dtype that the caller named, or has of numpy or torch."""
    text = value if isinstance(value, str) else str(getattr(value, "__name__", shown(value)))
    if type(value).__module__ == "torch" and not hasattr(value, "shape"):
        text = str(value)
    elif isinstance(value, (np.dtype, type)):
        with contextlib.suppress(TypeError, ValueError):  # np.floating, and classes with a dtype
            known = np.dtype(value)
            text = text if known.kind == "O" else known.name
    found = text.removeprefix("torch.")
    if found not in _LIBRARY_NAMES and found not in _ALIASES:
        raise InvalidArgument(f"{name} = {shown(text)}, expected one of {sorted(_LIBRARY_NAMES)}")
    return found


def instance(value: Any, kind: Any, name: str, expected: str) -> None:
    """Raises where the value is of no such type."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, expected {expected}")


def sequence(value: Any, name: str, expected: str) -> Any:
    """A value with a length and entries by number: not one number, a text, a set or a generator."""
    entries = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not entries and (not hasattr(value, "__dlpack__") or getattr(value, "ndim", 0) == 0):
        raise WrongType(f"{name} = {shown(value)}, expected {expected}")
    return value


def converted(
    who: str, given: Mapping[str, Any], *kinds: Tuple[Callable[[Any, str], Any], str]
) -> dict[str, Any]:
    """Arguments by name. A kind is a function of a value and its name in errors, such as ``int64``,
    and the names of the arguments that it converts. A name that is not there is left out.
    """
    return {
        name: convert(given[name], f"{who}: {name}")
        for convert, names in kinds
        for name in names.split()
        if name in given
    }


def count(value: Any, name: str) -> int:
    """An int64 that is not negative."""
    return at_least(value, 0, name)


def library_dtype(dtype_name: str, itemsize: int) -> str:
    """The library's name of a dtype; one that it has no name for passes as integers of its size."""
    return dtype_name if dtype_name in _LIBRARY_NAMES else f"int{8 * itemsize}"


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
