"""A kernel's results as they are used, whatever it gave: those of a user may be anything."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from ..._errors import shown
from ...errors import InvalidArgument
from ._seam import AttentionKernel, AttentionShape, Gradients, Sequences

__all__ = ["attention", "gradients"]


def attention(
    kernel: AttentionKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sequences: Sequences, shape: AttentionShape, want_lse: bool, at: str,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
    """(output, log-sum-exp where it is wanted or the kernel needs it), in memory of their own.

    :param at: "on rank 3"
    """
    given: Any = kernel.forward(q, k, v, sequences, shape, want_lse)
    if not isinstance(given, tuple) or len(given) != 2:
        got = f"{len(given)} results" if isinstance(given, tuple) else shown(given)
        raise InvalidArgument(f"{_who(kernel, at)} returned {got}, expected (output, log-sum-exp)")
    rows = q.shape[0]
    wrong = _wrong(given[0], (rows, shape.heads, shape.v_head_dim), q.device, shape.dtype)
    if wrong is not None:
        raise InvalidArgument(f"{_who(kernel, at)}: its output {wrong}")
    (out,) = _own([q, k, v], given[:1])
    if not (want_lse or kernel.needs_lse):
        return out, None
    lse = given[1]
    wrong = _wrong(lse, (shape.heads, rows), q.device, None)
    if wrong is not None:
        raise InvalidArgument(f"{_who(kernel, at)}: its log-sum-exp {wrong}")
    return out, lse if lse.dtype == torch.float32 else lse.float()


def gradients(
    kernel: AttentionKernel, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: Optional[torch.Tensor], sequences: Sequences, shape: AttentionShape,
    at: str,
) -> Gradients:  # fmt: skip
    """Of q, k and v, each in memory of its own."""
    found: Any = kernel.backward(grad, q, k, v, out, lse, sequences, shape)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        got = f"{len(found)} results" if isinstance(found, (tuple, list)) else shown(found)
        raise InvalidArgument(
            f"{_who(kernel, at)}: backward returned {got}, expected gradients of q, k and v"
        )
    for name, of, one in zip("qkv", (q, k, v), found):
        wrong = _wrong(one, tuple(of.shape), of.device, of.dtype)
        if wrong is not None:
            raise InvalidArgument(f"{_who(kernel, at)}: its gradient of {name} {wrong}")
    dq, dk, dv = _own([grad, q, k, v, out], found)
    return dq, dk, dv


def _who(kernel: AttentionKernel, at: str) -> str:
    return f"ContextParallelAttention: kernel {kernel!r} {at}"


def _wrong(
    value: Any, shape: Tuple[int, ...], device: torch.device, dtype: Optional[torch.dtype]
) -> Optional[str]:
    if not isinstance(value, torch.Tensor):
        return f"is {shown(value)}, expected a tensor {list(shape)}"
    if value.shape != shape:
        return f"has shape {list(value.shape)}, expected {list(shape)}"
    if value.device != device:
        return f"lies on {value.device}, expected {device}"
    if dtype is not None and value.dtype != dtype:
        return f"has dtype {value.dtype}, expected {dtype}"
    return None


def _own(given: list[torch.Tensor], results: Any) -> list[torch.Tensor]:
    """Results are written to: not into what the kernel was given, nor into another of them."""
    taken = {tensor.data_ptr() for tensor in given}
    own = []
    for tensor in results:
        if tensor.numel() and (tensor.data_ptr() in taken or 0 in tensor.stride()):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(tensor.data_ptr())
        own.append(tensor)
    return own
