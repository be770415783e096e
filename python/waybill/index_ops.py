"""Helpers on arrays of indices and numbers, under DistCA's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _core
from ._arrays import AnyArray, ArrayLike, integer, plain_array, whole_numbers
from ._errors import shown
from .errors import InvalidArgument

__all__ = [
    "exclusive_cumsum",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "prepend_zero",
    "prepend_zero_fn",
]


def exclusive_cumsum(tensor: ArrayLike, dim: int = 0) -> AnyArray:
    """Prefix sums along ``dim``, shifted by one: first slice 0, the last never enters.

    ``[0, 1, 2, 3, 4, 5]`` gives ``[0, 0, 1, 3, 6, 10]``. Sums of integers are int64, as torch's;
    floats keep their dtype, and are summed in float64.
    """
    who = "exclusive_cumsum"
    array = _numbers(tensor, f"{who}: tensor")
    if array.dtype.kind != "f":
        return _core.exclusive_cumsum(whole_numbers(array, f"{who}: tensor"), dim)
    axis = _axis(array, dim, who)
    sums = np.zeros(array.shape, np.float64)
    after, before = ([slice(None)] * array.ndim for _ in range(2))
    after[axis], before[axis] = slice(1, None), slice(None, -1)
    np.cumsum(array[tuple(before)], axis=axis, dtype=np.float64, out=sums[tuple(after)])
    with np.errstate(over="ignore"):  # too large for the dtype is inf, as torch's
        return sums.astype(array.dtype)


def prepend_zero(tensor: ArrayLike, dim: int = 0) -> AnyArray:
    """One slice of zeros in front along ``dim``; the dtype is kept."""
    array = _numbers(tensor, "prepend_zero: tensor")
    axis = _axis(array, dim, "prepend_zero")
    zeros = np.zeros((*array.shape[:axis], 1, *array.shape[axis + 1 :]), array.dtype)
    return np.concatenate([zeros, array], axis=axis)


prepend_zero_fn = prepend_zero


def mask_by_neg(tensor: ArrayLike, mask: ArrayLike) -> AnyArray:
    """``tensor`` where ``mask`` is true (not 0), -1 elsewhere; one may be broadcast to the other.

    Integers with a sign and floats keep their dtype; what cannot hold -1 becomes int64.
    """
    who = "mask_by_neg"
    array, keep = _numbers(tensor, f"{who}: tensor"), _numbers(mask, f"{who}: mask")
    try:
        shape = np.broadcast_shapes(array.shape, keep.shape)
    except ValueError:
        raise InvalidArgument(
            f"{who}: mask has shape {list(keep.shape)}, expected {list(array.shape)}, or one that"
            " can be broadcast with it"
        ) from None
    if array.dtype.kind in "bu":
        signed = whole_numbers(np.broadcast_to(array, shape), f"{who}: tensor")
        return _core.mask_by_neg(signed, np.ascontiguousarray(np.broadcast_to(keep != 0, shape)))
    return np.asarray(np.where(keep != 0, array, array.dtype.type(-1)))


def index_put_with_neg_padding_1d(tensor: ArrayLike, src: ArrayLike, index: ArrayLike) -> AnyArray:
    """A copy of ``tensor`` with ``tensor[index[i]] = src[i]`` in order, over flattened elements.

    Index -1 is dropped; of repeated indices the last wins; any other index outside the array is an
    InvalidArgument. The shape and dtype of ``tensor``, which must hold ``src``: one value, or as
    many as there are indices.
    """
    who = "index_put_with_neg_padding_1d"
    result = np.array(_numbers(tensor, f"{who}: tensor"), order="C")
    given = _numbers(src, f"{who}: src")
    # Which element of src each place gets, -1 for none.
    chosen = _core.index_put_with_neg_padding_1d(
        np.full(result.shape, -1), np.arange(given.size), whole_numbers(index, f"{who}: index")
    )
    taken = chosen >= 0
    result[taken] = _as_dtype(given.reshape(-1)[chosen[taken]], result.dtype, f"{who}: src")
    return result


def _numbers(value: Any, name: str) -> AnyArray:
    """Integers, floats or bools of any size."""
    array = plain_array(value, name)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name} has dtype {array.dtype}, expected integers or floats")
    return array


def _axis(array: AnyArray, dim: Any, who: str) -> int:
    axis = integer(dim, f"{who}: dim")
    if array.ndim == 0:
        raise InvalidArgument(f"{who}: got a scalar, expected at least one dimension")
    if not -array.ndim <= axis < array.ndim:
        raise InvalidArgument(
            f"{who}: dim = {shown(axis)}, expected {-array.ndim}..{array.ndim - 1} for an array of"
            f" {array.ndim} dimensions"
        )
    return axis % array.ndim


def _as_dtype(values: AnyArray, dtype: Any, name: str) -> AnyArray:
    """The values in a dtype that holds them; among floats they are rounded."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    if values.dtype.kind == "f":
        raise InvalidArgument(f"{name} has dtype {values.dtype}, expected {dtype}, that of tensor")
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for value in (int(values.min(initial=0)), int(values.max(initial=0))):
        if not low <= value <= high:
            raise InvalidArgument(f"{name} has {value}, which {dtype}, that of tensor, cannot hold")
    return values.astype(dtype)
