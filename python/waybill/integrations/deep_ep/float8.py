"""Rows as float8 e4m3 with scales in the two forms that DeepEP's callers read."""

from __future__ import annotations

from typing import Tuple

import torch

__all__ = ["packed_exponents", "round_scales_up", "rows_as_float8"]

_GROUP, _LARGEST = 128, 448.0
_LEAST = 1e-4  # of what a group's largest element counts as


def rows_as_float8(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Elements, and for each 128 of them a scale that is a power of two: at least the largest of
    them over 448.
    """
    tokens, hidden = x.shape
    groups = x.view(tokens, hidden // _GROUP, _GROUP).float()
    largest = groups.abs().amax(-1).clamp(min=_LEAST)
    scales = round_scales_up(largest / _LARGEST)
    elements = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    return elements.view(tokens, hidden), scales


def round_scales_up(scales: torch.Tensor) -> torch.Tensor:
    """The power of two that is the next one, or the same."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))


def packed_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two as the eight bits of float32's exponent, four in an int32, the first lowest."""
    exponents = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    return exponents.to(torch.uint8).view(torch.int32)
