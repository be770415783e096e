"""Helpers on integer tensors, under the original's names. See ``waybill``."""

from __future__ import annotations

import torch

from .. import index_ops
from ._tensors import host_array, require_tensor
from ._tensors import tensor as as_tensor

__all__ = [
    "exclusive_cumsum",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "prepend_zero",
    "prepend_zero_fn",
]


def exclusive_cumsum(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Prefix sums along ``dim``, shifted by one: the first slice is 0, the last never enters."""
    value = require_tensor(tensor, "exclusive_cumsum: tensor")
    result = index_ops.exclusive_cumsum(host_array(value), dim)
    return as_tensor(result, value.device)


def prepend_zero(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """One slice of zeros in front along ``dim``; the dtype is kept."""
    value = require_tensor(tensor, "prepend_zero: tensor")
    return as_tensor(index_ops.prepend_zero(host_array(value), dim), value.device)


prepend_zero_fn = prepend_zero


def mask_by_neg(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``tensor`` where ``mask`` is true (not 0), -1 elsewhere."""
    value = require_tensor(tensor, "mask_by_neg: tensor")
    result = index_ops.mask_by_neg(host_array(value), host_array(mask))
    return as_tensor(result, value.device)


def index_put_with_neg_padding_1d(
    tensor: torch.Tensor, src: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """A copy of ``tensor`` with ``tensor[index[i]] = src[i]``, in order; index -1 is dropped."""
    value = require_tensor(tensor, "index_put_with_neg_padding_1d: tensor")
    result = index_ops.index_put_with_neg_padding_1d(
        host_array(value), host_array(src), host_array(index)
    )
    return as_tensor(result, value.device)
