"""Attention kernels for sequences of any lengths, with one small interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import torch

from ..._arrays import choice
from ...errors import InvalidArgument
from .backends import (
    DotProductKernel,
    FlashAttention2Kernel,
    FlashAttention3Kernel,
    FlexKernel,
    VarlenKernel,
)
from .seam import AttentionKernel, AttentionShape, FunctionKernel, Sequences

__all__ = [
    "AttentionKernel",
    "AttentionShape",
    "DotProductKernel",
    "FlashAttention2Kernel",
    "FlashAttention3Kernel",
    "FlexKernel",
    "FunctionKernel",
    "Sequences",
    "VarlenKernel",
    "choose_kernel",
]

#: ``ContextParallelAttention(kernel=...)`` takes these.
Kernel = Union[str, AttentionKernel, Callable[..., Any]]

_BY_NAME: dict[str, Callable[[], AttentionKernel]] = {
    "varlen": VarlenKernel,
    "flash_attn": FlashAttention2Kernel,
    "flash_attn_3": FlashAttention3Kernel,
    "flex": FlexKernel,
    "dot_product": DotProductKernel,
}


def choose_kernel(kernel: Kernel, device: torch.device, who: str) -> AttentionKernel:
    """The kernel that an argument means: one by name, one as it is, a function, or "auto".

    "auto" is torch's varlen_attn on GPUs and scaled_dot_product_attention elsewhere.
    """
    if isinstance(kernel, AttentionKernel):
        return kernel
    if isinstance(kernel, str):
        name = choice(kernel, f"{who}: kernel", "auto", *_BY_NAME)
        if name == "auto":
            name = "varlen" if device.type == "cuda" else "dot_product"
        return _BY_NAME[name]()
    if isinstance(kernel, type):
        raise InvalidArgument(
            f"{who}: kernel is the class {kernel.__name__}, expected an object: {kernel.__name__}()"
        )
    if callable(kernel):
        return FunctionKernel(kernel)
    raise InvalidArgument(
        f"{who}: kernel is a {type(kernel).__name__}, expected a name, an AttentionKernel or a"
        " function"
    )
