"""Payloads: between what callers have and the elements that the compiled part takes."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import numpy as np

from .._arrays import AnyArray, as_numpy, index_array
from ..errors import InvalidArgument

_NUMPY = {"float32": np.float32, "float16": np.float16, "float64": np.float64}
_BITS = {2: np.int16, 4: np.int32, 8: np.int64}


def _bfloat16_bits(array: AnyArray) -> AnyArray:
    """float32 to the bits of bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    result: AnyArray = np.where(nan, quiet, rounded).astype(np.uint16).view(np.int16)
    return result


def _numbers(value: Any, name: str) -> AnyArray:
    array = as_numpy(value, name)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise InvalidArgument(f"{name} has dtype {array.dtype}, expected floating-point numbers")
    return array


def payload(value: Any, dtype: str, columns: int, name: str) -> Tuple[AnyArray, bool]:
    """Integers of the dtype's size, and whether the caller's array was of that dtype already.

    float32 values are rounded to nearest even where the dtype cannot hold them.
    """
    array = _numbers(value, name)
    if array.ndim == 1 and array.size == 0:
        array = array.reshape(0, columns)
    if array.dtype.name == dtype and array.dtype.isnative:
        native = np.ascontiguousarray(array)
        return native.view(_BITS[native.dtype.itemsize]), True
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return _bfloat16_bits(array.astype(np.float32)), False
        if dtype not in _NUMPY:
            raise InvalidArgument(f"{name} has dtype {array.dtype}, expected {dtype}")
        if dtype != "float64":
            array = array.astype(np.float32)
        plain = np.ascontiguousarray(array.astype(_NUMPY[dtype]))
    return plain.view(_BITS[plain.dtype.itemsize]), False


def payloads(
    values: Any, dtype: str, columns: int, name: str, world_size: int
) -> Tuple[List[AnyArray], bool]:
    """One payload a rank, and whether all were of the dtype already."""
    entries = per_rank(values, name, world_size)
    made = [payload(v, dtype, columns, f"{name}[{r}]") for r, v in enumerate(entries)]
    return [array for array, _ in made], all(same for _, same in made)


def per_rank(values: Any, name: str, world_size: int) -> Sequence[Any]:
    """The entries of an argument that has one for each rank."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise InvalidArgument(
            f"{name} is a {type(values).__name__}, expected one array for each of {world_size}"
            " ranks"
        )
    if len(values) != world_size:
        raise InvalidArgument(
            f"{name} has {len(values)} entries, expected one for each of {world_size} ranks"
        )
    return list(values)


def ids(value: Any, columns: int, name: str) -> AnyArray:
    """Expert ids, or positions, as int64."""
    array = as_numpy(value, name)
    if array.size == 0 and array.ndim <= 1:
        array = np.zeros((0, columns), np.int64)
    checked = index_array(array, name)
    if checked.dtype not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise InvalidArgument(f"{name} has dtype {checked.dtype}, expected int32 or int64")
    return checked.astype(np.int64, copy=False)


def as_float(bits: AnyArray, dtype: str, native: bool) -> AnyArray:
    """Elements under their dtype, or as float32 for callers who gave float32."""
    if dtype in ("float32", "float64"):
        return bits.view(_NUMPY[dtype])
    if dtype == "float16":
        half = bits.view(np.float16)
        return half if native else half.astype(np.float32)
    if native:
        import ml_dtypes  # the caller's array came from it

        return bits.view(ml_dtypes.bfloat16)
    widened = bits.view(np.uint16).astype(np.uint32) << np.uint32(16)
    result: AnyArray = widened.view(np.float32)
    return result


def as_float8(bits: AnyArray) -> AnyArray:
    """e4m3 elements: ml_dtypes.float8_e4m3fn where it is installed, else their codes as uint8."""
    try:
        import ml_dtypes
    except ImportError:
        return bits.view(np.uint8)
    return bits.view(ml_dtypes.float8_e4m3fn)


def float8_bits(value: Any, columns: int, name: str) -> AnyArray:
    """The codes of e4m3 elements, from float8_e4m3fn or uint8."""
    array = as_numpy(value, name)
    if array.ndim == 1 and array.size == 0:
        array = np.zeros((0, columns), np.uint8)
    if array.dtype.name not in ("float8_e4m3fn", "uint8"):
        raise InvalidArgument(f"{name} has dtype {array.dtype}, expected float8_e4m3fn or uint8")
    return np.ascontiguousarray(array).view(np.int8)
