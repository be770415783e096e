"""Helpers on tensors of indices and numbers, under DistCA's names. See ``waybill``."""

from __future__ import annotations

from typing import Any

import torch

from .. import index_ops
from .._graphs import outside_graphs
from ._tensors import host_array, require_tensor
from ._tensors import tensor as as_tensor

__all__ = [
    "exclusive_cumsum",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "prepend_zero",
    "prepend_zero_fn",
]


@outside_graphs
def exclusive_cumsum(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Prefix sums along ``dim``, shifted by one: the first slice is 0, the last never enters.
    int64 of integers; floats keep their dtype.
    """
    value = require_tensor(tensor, "exclusive_cumsum: tensor")
    return _like(value, index_ops.exclusive_cumsum(_array(value, "exclusive_cumsum: tensor"), dim))


@outside_graphs
def prepend_zero(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """One slice of zeros in front along ``dim``; the dtype is kept."""
    value = require_tensor(tensor, "prepend_zero: tensor")
    return _like(value, index_ops.prepend_zero(_array(value, "prepend_zero: tensor"), dim))


prepend_zero_fn = prepend_zero


@outside_graphs
def mask_by_neg(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``tensor`` where ``mask`` is true (not 0), -1 elsewhere; broadcast, and of the dtype of
    ``tensor``, or int64 where that cannot hold -1.
    """
    value = require_tensor(tensor, "mask_by_neg: tensor")
    given = _array(value, "mask_by_neg: tensor"), _array(mask, "mask_by_neg: mask")
    return _like(value, index_ops.mask_by_neg(*given))


@outside_graphs
def index_put_with_neg_padding_1d(
    tensor: torch.Tensor, src: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """A copy of ``tensor`` with ``tensor[index[i]] = src[i]``, in order; index -1 is dropped."""
    who = "index_put_with_neg_padding_1d"
    value = require_tensor(tensor, f"{who}: tensor")
    given = (("tensor", value), ("src", src), ("index", index))
    arrays = (_array(one, f"{who}: {name}") for name, one in given)
    return _like(value, index_ops.index_put_with_neg_padding_1d(*arrays))


def _has_numpy(value: Any) -> bool:
    """Not bfloat16 nor the floats of 8 bits, of which float32 holds all values."""
    return not value.is_floating_point() or value.dtype in (
        torch.float16,
        torch.float32,
        torch.float64,
    )


def _array(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and not _has_numpy(value):
        value = value.float()
    return host_array(value, name)


def _like(value: torch.Tensor, result: Any) -> torch.Tensor:
    """The result on the device of the argument, in its dtype where numpy has none for it."""
    made: torch.Tensor = as_tensor(result, value.device)
    return made if _has_numpy(value) else made.to(value.dtype)
