"""Payloads of rows on their way to experts, as tensors: what a dispatch takes and gives."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ...errors import InvalidArgument
from ...moe.payloads import Payload, in_tiles, tile_padding, two_scales
from .._tensors import require_moved, shown_memory


def torch_name(name: str) -> torch.dtype:
    """torch's dtype; uint8 where torch is too old to have it."""
    return getattr(torch, name, torch.uint8)


def given_rows(payload: Payload, value: Any, name: str) -> Optional[torch.Tensor]:
    """Rows that are given in the format."""
    return _as_given(payload, value, payload.element_name, payload.dtype, name)


def given_scales(payload: Payload, value: Any, name: str) -> Optional[torch.Tensor]:
    """Scales as they travel, from scales as a caller has them; None stays None."""
    if value is None or not payload.has_row_scale:
        return _as_given(payload, value, payload.scale_name, payload.scale_dtype, name)
    of_groups, of_rows = two_scales(value, name)
    groups = _as_given(payload, of_groups, payload.scale_name, "uint8", f"{name}[0]")
    require_moved(of_rows, f"{name}[1]")
    if groups is None or groups.shape[1:] != (payload.num_groups,):
        shape = None if groups is None else list(groups.shape)
        raise InvalidArgument(
            f"{name}[0] has shape {shape}, expected [num_tokens, {payload.num_groups}]"
        )
    if of_rows.dtype != torch.float32 or of_rows.numel() not in (1, len(groups)):
        raise InvalidArgument(
            f"{name}[1] is {of_rows.dtype} and has {of_rows.numel()} numbers, expected float32,"
            f" one for each of {len(groups)} tokens, or one for all"
        )
    packed = groups.new_zeros(len(groups), payload.scale_columns)
    packed[:, : payload.num_groups] = groups
    packed[:, -4:].view(torch.float32).copy_(of_rows.detach().reshape(-1, 1))
    return packed


def _as_given(
    payload: Payload, value: Any, element: str, dtype: str, name: str
) -> Optional[torch.Tensor]:
    """A tensor of the dtype that the compiled part knows; codes may come as uint8, too."""
    if value is None:
        return None
    tensor = require_moved(value, name)
    if payload.is_bytes:
        return tensor.detach().contiguous().view(torch.uint8)
    named = torch_name(element)
    if tensor.dtype != named and (tensor.dtype != torch.uint8 or named.itemsize > 1):
        raise InvalidArgument(f"{name} is {tensor.dtype}, expected {named}")
    return tensor.detach().view(torch_name(dtype))


def shown_scales(payload: Payload, bits: Any) -> Any:
    """Scales as a caller has them, views of scales as they travel; None stays None."""
    if bits is None:
        return None
    if not payload.has_row_scale:
        return shown_memory(bits, torch_name(payload.scale_name))
    packed = shown_memory(bits, torch.uint8)
    groups = packed[:, : payload.num_groups].view(torch_name(payload.scale_name))
    return groups, packed[:, -4:].view(torch.float32)[:, 0]


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """``waybill.moe.tile_scales`` of a tensor, on its device: one copy where the shape is one of
    whole tiles, else two.

    :param scales: [rows, groups] of one byte each
    """
    require_moved(scales, "tile_scales: scales")
    more_rows, more_columns = tile_padding(scales, scales.itemsize, "tile_scales: scales")
    codes = scales.detach().view(torch.uint8)
    if more_rows or more_columns:
        codes = torch.nn.functional.pad(codes, (0, more_columns, 0, more_rows))
    wide = codes.shape[1] // 4
    if codes.stride(0) % 4 == 0 and codes.stride(1) == 1 and codes.storage_offset() % 4 == 0:
        codes = codes.view(torch.int32)  # four neighbours stay together
    return in_tiles(codes, wide).view(scales.dtype)
