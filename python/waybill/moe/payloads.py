"""Payloads of rows on their way to experts, as arrays of numpy: formats of elements and scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple

import numpy as np

from .. import _core
from .._arrays import AnyArray, as_numpy, choice, instance
from .._errors import said_by
from ..errors import InvalidArgument


@dataclass(frozen=True)
class Payload:
    """Shapes and dtypes of a payload's rows and scales, for a given hidden size."""

    name: str
    is_plain: bool
    is_given: bool  #: rows come in the format, with their scales
    is_bytes: bool  #: nobody looks at the rows
    element_name: str  #: dtype of the items of a row, as torch names it
    dtype: str  #: the same for the compiled part
    columns: int  #: items of a row
    scale_name: str  #: dtype of the scales of groups, as torch names it
    scale_dtype: str  #: dtype of scales as they travel, for the compiled part
    scale_columns: int  #: items of the scales of a row, as they travel
    group: int  #: elements that share a scale; 0: no scales
    num_groups: int
    has_row_scale: bool  #: scales are (those of groups, one float32 per row)


def payload_of(name: Any, argument: str, hidden: int) -> Payload:
    """The payload with a name.

    :raises InvalidArgument: that begins with ``argument``
    """
    instance(name, str, argument, 'a text, such as "plain"')
    with said_by(argument.partition(":")[0]):
        return Payload(**_core.ep_payload(name, argument, hidden))


def as_items(bits: AnyArray, dtype: str) -> AnyArray:
    """Items under their dtype: numpy's or that of ml_dtypes, else their codes as uint8."""
    known = getattr(np, dtype, None)
    if known is None:
        try:
            import ml_dtypes
        except ImportError:
            return bits.view(np.uint8)
        known = getattr(ml_dtypes, dtype, np.uint8)
    return bits.view(known)


def item_bits(value: Any, dtype: str, columns: int, name: str) -> AnyArray:
    """Integers of the items' size, from items of the dtype; those of a byte also from uint8."""
    array = as_numpy(value, name)
    if array.ndim == 1 and array.size == 0:
        array = np.zeros((0, columns), array.dtype)
    if dtype == "float32":
        if array.dtype.kind not in "fiu":
            raise InvalidArgument(f"{name} has dtype {array.dtype}, expected float32")
        return np.ascontiguousarray(array.astype(np.float32)).view(np.int32)
    if array.dtype.name not in (dtype, "uint8"):
        or_codes = "" if dtype == "uint8" else " or uint8"
        raise InvalidArgument(f"{name} has dtype {array.dtype}, expected {dtype}{or_codes}")
    return np.ascontiguousarray(array).view(np.int8)


def raw_bytes(value: Any, columns: int, name: str) -> AnyArray:
    """The bytes of rows of any dtype."""
    array = np.ascontiguousarray(as_numpy(value, name))
    if array.size == 0:
        return np.zeros((len(array) if array.ndim > 1 else 0, columns), np.int8)
    return array.view(np.int8)


def row_bits(payload: Payload, value: Any, name: str) -> AnyArray:
    """Rows that are given in the format."""
    if payload.is_bytes:
        return raw_bytes(value, payload.columns, name)
    return item_bits(value, payload.element_name, payload.columns, name)


def scale_bits(payload: Payload, value: Any, name: str) -> AnyArray:
    """Scales as they travel, from scales as a caller has them."""
    if payload.is_bytes:
        return raw_bytes(value, payload.scale_columns, name)
    if not payload.has_row_scale:
        return item_bits(value, payload.scale_name, payload.scale_columns, name)
    return packed_scales(
        payload, value, name,
        lambda one, name: item_bits(one, payload.scale_name, payload.num_groups, name),
        as_numpy, lambda groups, columns: np.zeros((len(groups), columns), np.int8), np.float32,
    )  # fmt: skip


def packed_scales(
    payload: Payload, value: Any, name: str, items: Callable[[Any, str], Any],
    array: Callable[[Any, str], Any], zeros: Callable[[Any, int], Any], float32: Any,
) -> Any:  # fmt: skip
    """(scales of groups, scales of rows) as they travel: side by side, for arrays and tensors."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(
            f"{name} is a {type(value).__name__}, expected (scales of groups, scales of rows)"
        )
    groups, rows = items(value[0], f"{name}[0]"), array(value[1], f"{name}[1]")
    if groups.shape[1:] != (payload.num_groups,):
        raise InvalidArgument(
            f"{name}[0] has shape {list(groups.shape)}, expected [num_tokens, {payload.num_groups}]"
        )
    count = math.prod(rows.shape)
    if rows.dtype != float32 or count not in (1, len(groups)):
        raise InvalidArgument(
            f"{name}[1] has dtype {rows.dtype} and {count} numbers, expected float32, one for each"
            f" of {len(groups)} tokens, or one for all"
        )
    packed = zeros(groups, payload.scale_columns)
    packed[:, : payload.num_groups] = groups
    packed[:, -4:].view(float32)[:] = rows.reshape(-1, 1)
    return packed


def shown_scales(payload: Payload, bits: AnyArray) -> Any:
    """Scales as a caller has them, views of scales as they travel."""
    if not payload.has_row_scale:
        return as_items(bits, payload.scale_name)
    groups = as_items(bits[:, : payload.num_groups], payload.scale_name)
    return groups, bits[:, -4:].view(np.float32)[:, 0]


def kept_scales(
    scales: Any, tile: Optional[Callable[[Any], Any]], copy: Optional[Callable[[Any], Any]]
) -> Any:
    """Scales that a layer has shown, as its caller keeps them; None stays None.

    :param tile: arranges scales of groups, in a copy; None: they stay by row
    :param copy: makes a copy; None: views stay views
    """
    if scales is None:
        return None
    parts = list(scales) if isinstance(scales, tuple) else [scales]
    changes = [tile or copy] + [copy] * (len(parts) - 1)
    kept = [part if change is None else change(part) for part, change in zip(parts, changes)]
    return tuple(kept) if isinstance(scales, tuple) else kept[0]


SCALE_LAYOUTS = ("rows", "128x4")
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def scale_layout_of(layout: Any, payload: Payload, rows: str, alignment: int, who: str) -> str:
    """The option ``scale_layout`` of a layer.

    :raises InvalidArgument: where rows of the layer have no such scales
    """
    known = choice(layout, f"{who}: scale_layout", *SCALE_LAYOUTS)
    if known == "rows":
        return known
    suffix = f'for scale_layout = "{known}"'
    if payload.num_groups == 0 or payload.scale_name == "float32":
        raise InvalidArgument(
            f'{who}: payload = "{payload.name}", expected one whose scales are of a byte, such as'
            f' "mxfp8", {suffix}'
        )
    if rows != "grouped":
        raise InvalidArgument(f'{who}: rows = "{rows}", expected "grouped" {suffix}')
    if alignment % _TILE_ROWS != 0:
        raise InvalidArgument(
            f"{who}: expert_alignment = {alignment}, expected a multiple of {_TILE_ROWS} {suffix}:"
            " the rows of each expert begin at a tile"
        )
    return known


def tile_padding(scales: Any, itemsize: int, name: str) -> Tuple[int, int]:
    """Rows and columns that scales lack to whole tiles."""
    if scales.ndim != 2 or itemsize != 1:
        raise InvalidArgument(
            f"{name} has shape {list(scales.shape)} and items of {itemsize} bytes, expected"
            " [rows, groups] of one byte"
        )
    rows, columns = scales.shape
    return -rows % _TILE_ROWS, -columns % _TILE_COLUMNS


def in_tiles(codes: Any, wide: int) -> Any:
    """Whole tiles in the order of ``tile_scales``: arrays, and tensors.

    :param codes: [rows, columns], ``wide`` tiles by row; items are bytes, or four of them
    """
    rows, columns = codes.shape
    # Row t * 128 + 32 * a + b of column u * 4 + c goes to tile (t, u), place 16 * b + 4 * a + c.
    split = codes.reshape(rows // _TILE_ROWS, 4, 32, wide, columns // max(wide, 1))
    return split.swapaxes(1, 3).reshape(rows, columns)


def tile_scales(scales: Any) -> AnyArray:
    """Scales in the layout "128x4", which block-scaled GEMMs of Blackwell read: "1D Block Scaling
    Factors Layout" of cuBLAS, ``SWIZZLE_32_4_4`` of PyTorch.

    A tile has 128 rows of 4 scales in 512 bytes: the scale c of row r is byte (r % 32) * 16 +
    (r // 32) * 4 + c. Tiles of the same rows follow each other. What is missing to whole tiles is
    zeros.

    :param scales: [rows, groups] of one byte each
    :returns: the same dtype, [rows up to a multiple of 128, groups up to a multiple of 4]. Each 128
        of its rows are the tiles of these 128 rows of scales
    """
    array = as_numpy(scales, "tile_scales: scales")
    padding = tile_padding(array, array.dtype.itemsize, "tile_scales: scales")
    codes = np.pad(array.view(np.uint8), [(0, missing) for missing in padding])
    tiles = in_tiles(codes, codes.shape[1] // _TILE_COLUMNS)
    return np.ascontiguousarray(tiles).view(array.dtype)


def quantize_fp8(rows: Any) -> Tuple[AnyArray, AnyArray]:
    """``quantize_rows`` to float8: scale = max|x| * (1/448), element = x / scale, both in float32.

    A group of zeros has scale 0 and zeros. A NaN makes its group NaN.

    :param rows: [rows, a multiple of 128] of float32, float16 or bfloat16
    :returns: elements [rows, hidden] (ml_dtypes.float8_e4m3fn where it is installed, else uint8
        codes), scales [rows, hidden / 128] float32
    """
    return quantize_rows(rows, "float8", _who="quantize_fp8")


def quantize_rows(rows: Any, payload: str, *, _who: str = "quantize_rows") -> Tuple[AnyArray, Any]:
    """Elements and scales of rows, as a layer with this payload sends them.

    :param rows: [rows, hidden] of float32, float16 or bfloat16
    :param payload: a format that Waybill can quantise to, such as "float8"
    :returns: elements and scales, as a dispatch takes them from who gives them
    """
    array = np.ascontiguousarray(as_numpy(rows, f"{_who}: rows"))
    if array.dtype.name not in ("float32", "float16", "bfloat16"):
        raise InvalidArgument(
            f"{_who}: rows has dtype {array.dtype}, expected float32, float16 or bfloat16"
        )
    bits = array.view(np.int32 if array.dtype.itemsize == 4 else np.int16)
    found = payload_of(payload, f"{_who}: payload", array.shape[-1] if array.ndim else 0)
    with said_by(_who, words={"quantize_rows": _who}):
        elements, scales = _core.quantize_rows(bits, array.dtype.name, found.name)
    return as_items(elements, found.element_name), shown_scales(found, scales)
