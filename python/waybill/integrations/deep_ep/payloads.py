"""The formats in which DeepEP's callers have rows, as the table of Waybill's formats has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch

from ... import _core
from ...errors import InvalidArgument
from ...moe.payloads import Payload, payload_of
from ...torch.experts.layer import torch_name

_PACK = torch.int32  #: holds four scales of a byte, the first in the lowest bits


class Rows(NamedTuple):
    """The rows of a dispatch, and the layer's payload for them."""

    x: torch.Tensor
    scales: Optional[torch.Tensor]
    payload: str
    held_dtype: Optional[torch.dtype] = None  #: dtype in which the layer takes the scales

    def held(self) -> Optional[torch.Tensor]:
        """Scales as the layer takes them. On the buffer's stream, as it may copy them."""
        if self.scales is None or self.held_dtype is None:
            return None
        return self.scales.contiguous().view(self.held_dtype)

    def shown(self, scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Scales that a layer has received, as the caller has them."""
        if scales is None or self.scales is None:
            return None
        return scales.view(self.scales.dtype)


def _formats_of(x: torch.Tensor) -> Iterator[Payload]:
    """Formats with elements of the dtype of ``x``, and scales of groups alone."""
    for name in _core.payload_formats:
        form = payload_of(f"scaled_{name}", "x", x.shape[1])
        if torch_name(form.element_name) == x.dtype and not form.has_row_scale:
            yield form


def _scales_of(form: Payload) -> Iterator[tuple[int, torch.dtype]]:
    """Columns and dtype of scales in which the format's are taken."""
    dtype = torch_name(form.scale_name)
    yield form.num_groups, dtype
    if dtype.itemsize == 1 and form.num_groups % _PACK.itemsize == 0:
        yield form.num_groups // _PACK.itemsize, _PACK


def scaled_rows(x: torch.Tensor, scales: torch.Tensor, who: str, rank: int) -> Rows:
    """Rows [tokens, hidden] with scales: the format is that with such elements and scales.

    :raises InvalidArgument: where no format has them
    """
    forms = list(_formats_of(x))
    if not forms:
        known = (payload_of(f"scaled_{name}", "x", 0) for name in _core.payload_formats)
        names = sorted({form.element_name for form in known if not form.has_row_scale})
        raise InvalidArgument(
            f"{who}: x of rank {rank} has dtype {x.dtype}, expected"
            f" {' or '.join(f'torch.{name}' for name in names)} with scales"
        )
    fitting = [form for form in forms if x.shape[1] % form.group == 0]
    if not fitting:
        raise InvalidArgument(
            f"{who}: x of rank {rank} has {x.shape[1]} columns, expected a multiple of"
            f" {min(form.group for form in forms)}"
        )
    for form in fitting:
        for columns, dtype in _scales_of(form):
            if (tuple(scales.shape), scales.dtype) == ((x.shape[0], columns), dtype):
                return Rows(x, scales, form.name, torch_name(form.scale_name))
    choices = [
        f"{(x.shape[0], columns)} of {dtype}"
        for form in fitting
        for columns, dtype in _scales_of(form)
    ]
    raise InvalidArgument(
        f"{who}: scales of rank {rank} is {tuple(scales.shape)} of {scales.dtype}, expected"
        f" {' or '.join(choices)}"
    )


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Scales of a byte, four in an int32. [..., a multiple of 4]"""
    return codes.view(_PACK)


def powers_of_two(codes: torch.Tensor) -> torch.Tensor:
    """float32 of UE8M0 scales. That of code 0, which is 2^-127, becomes 0; NaN infinity."""
    return (codes.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def columns_first(scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with the rows of a column side by side, each column aligned to 16 bytes."""
    step = 16 // scales.itemsize
    rows, columns = scales.shape
    out = scales.new_empty((columns, -(-rows // step) * step)).T[:rows]
    return out.copy_(scales)
