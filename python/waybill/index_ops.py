"""Helpers on integer arrays, under the original's names."""

from __future__ import annotations

from . import _core
from ._arrays import ArrayLike, IntArray, index_array

__all__ = [
    "exclusive_cumsum",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "prepend_zero",
    "prepend_zero_fn",
]


def exclusive_cumsum(tensor: ArrayLike, dim: int = 0) -> IntArray:
    """Prefix sums along ``dim``, shifted by one: first slice 0, the last never enters. int64.

    ``[0, 1, 2, 3, 4, 5]`` gives ``[0, 0, 1, 3, 6, 10]``.
    """
    return _core.exclusive_cumsum(index_array(tensor, "exclusive_cumsum: tensor"), dim)


def prepend_zero(tensor: ArrayLike, dim: int = 0) -> IntArray:
    """One slice of zeros in front along ``dim``; the dtype is kept."""
    return _core.prepend_zero(index_array(tensor, "prepend_zero: tensor"), dim)


prepend_zero_fn = prepend_zero


def mask_by_neg(tensor: ArrayLike, mask: ArrayLike) -> IntArray:
    """``tensor`` where ``mask`` is true (not 0), -1 elsewhere. int64."""
    return _core.mask_by_neg(
        index_array(tensor, "mask_by_neg: tensor"), index_array(mask, "mask_by_neg: mask")
    )


def index_put_with_neg_padding_1d(tensor: ArrayLike, src: ArrayLike, index: ArrayLike) -> IntArray:
    """A copy of ``tensor`` with ``tensor[index[i]] = src[i]`` in order, over flattened elements.

    Index -1 is dropped; of repeated indices the last wins; any other index outside the array is an
    InvalidArgument. int64, shape of ``tensor``.
    """
    who = "index_put_with_neg_padding_1d"
    return _core.index_put_with_neg_padding_1d(
        index_array(tensor, f"{who}: tensor"),
        index_array(src, f"{who}: src"),
        index_array(index, f"{who}: index"),
    )
