"""float8 e4m3 with a float32 scale for each 128 elements."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from .. import _core
from .._arrays import AnyArray, as_numpy
from ..errors import InvalidArgument
from .arrays import as_float8


def quantize_fp8(rows: Any) -> Tuple[AnyArray, AnyArray]:
    """Elements and scales of rows: scale = max|x| * (1/448), element = x / scale, both in float32.

    A group of zeros has scale 0 and zeros. A NaN makes its group NaN.

    :param rows: [rows, a multiple of 128] of float32, float16 or bfloat16
    :returns: elements [rows, hidden] (ml_dtypes.float8_e4m3fn where it is installed, else uint8
        codes), scales [rows, hidden / 128] float32
    """
    array = np.ascontiguousarray(as_numpy(rows, "quantize_fp8: rows"))
    if array.dtype.name not in ("float32", "float16", "bfloat16"):
        raise InvalidArgument(
            f"quantize_fp8: rows has dtype {array.dtype}, expected float32, float16 or bfloat16"
        )
    bits = array.view(np.int32 if array.dtype.itemsize == 4 else np.int16)
    elements, scales = _core.quantize_rows(bits, array.dtype.name)
    return as_float8(elements), scales.view(np.float32)
