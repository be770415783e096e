"""Between torch tensors and the numpy arrays of the compiled part."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, Optional, Tuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from .._arrays import AnyArray, as_numpy
from .._errors import shown
from ..errors import InvalidArgument, Unsupported
from ._first_order import refuse_tangent

_INSIDE = (
    os.path.dirname(os.path.dirname(__file__)),
    os.path.join(os.path.dirname(torch.__file__), "_dynamo"),
)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_array(value: Any, name: str = "got a tensor that") -> Any:
    """A numpy array over a CPU tensor's memory, a copy of another device's; the rest as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        if value.is_cpu and not value.requires_grad:
            return value.numpy()
        return value.detach().cpu().numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:  # sparse, meta, bfloat16
        raise InvalidArgument(
            f"{name} is of {value.dtype} ({value.layout}, {value.device}), expected int64 with"
            f" strides: {error}"
        ) from None


def on_host(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """Calls a function of the numpy face with the values as numpy arrays."""
    try:
        return function(*(host_array(value) for value in values), **options)
    except InvalidArgument:
        for name, value in zip(inspect.signature(function).parameters, values):
            host_array(value, f"{function.__name__}: {name}")  # raises with the name of the one
        raise


def tensor(array: Any, device: Optional[torch.device] = None) -> Any:
    """A tensor over an array's memory, or its copy on a device; None stays None."""
    if array is None:
        return None
    shared = torch.from_numpy(array)
    return shared if device is None or device.type == "cpu" else shared.to(device)


def tensors(value: Any, device: Optional[torch.device] = None) -> Any:
    """The same inside tuples and lists; records keep their type."""
    if isinstance(value, np.ndarray):
        return tensor(value, device)
    if isinstance(value, tuple):
        inside = (tensors(item, device) for item in value)
        return type(value)(*inside) if hasattr(value, "_fields") else tuple(inside)
    if isinstance(value, list):
        return [tensors(item, device) for item in value]
    return value


def device_of(*values: Any) -> Optional[torch.device]:
    """Where the first tensor lies; None where there is none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device
    return None


def require_device(value: Any, name: str) -> Optional[torch.device]:
    """A device of torch, by its name or number; None stays None."""
    if value is None or isinstance(value, torch.device):
        found = value
    else:
        try:
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                raise TypeError(f"of {type(value).__name__}")
            found = torch.device(value)
        except (RuntimeError, TypeError, ValueError):
            expected = 'a device, such as "cuda:0"'
            raise InvalidArgument(f"{name} = {shown(value)}, expected {expected}") from None
    if found is not None and found.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"{name} = {found}, and torch sees no GPU")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def require_tensor(value: Any, name: str) -> torch.Tensor:
    """Payloads are tensors: anything else would be copied without the caller noticing."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    if value.is_nested:
        raise InvalidArgument(f"{name} is a nested tensor, expected rows of one shape")
    if value.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {value.layout}, expected torch.strided")
    return value


def require_moved(value: Any, name: str) -> torch.Tensor:
    """A tensor that a call reads by itself, outside of torch: its derivatives in forward mode would
    be lost.
    """
    found = require_tensor(value, name)
    refuse_tangent(found, name)
    return found


def require_rows(value: Any, name: str) -> torch.Tensor:
    """A tensor that has a first axis."""
    found = require_tensor(value, name)
    if found.ndim == 0:
        raise InvalidArgument(f"{name} has no axes, expected [rows, ...]")
    return found


def require_memory(value: Any, name: str) -> torch.Tensor:
    """A tensor whose elements lie in memory as they are."""
    found = require_moved(value, name)
    if found.is_meta:
        raise InvalidArgument(f"{name} lies on meta, expected a tensor with elements")
    if found.is_neg() or found.is_conj():
        raise InvalidArgument(f"{name} is a lazy view, expected memory: resolve it first")
    return found


def shown_memory(bits: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory of the library, as an array or, on a device, a capsule."""
    # Of an array torch would ask for its device and stream first.
    capsule = bits.__dlpack__() if hasattr(bits, "__dlpack__") else bits
    return from_dlpack(capsule).view(dtype)


def stream_of(device: torch.device) -> int:
    """torch's current stream of a GPU; 0 for host memory."""
    return 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream


def stream_given(stream: Any, device: torch.device, name: str) -> int:
    """The same of a stream that the caller gave; None is the current one."""
    if stream is None:
        return stream_of(device)
    handle = getattr(stream, "cuda_stream", None)
    if not isinstance(handle, int):
        raise InvalidArgument(f"{name} = {shown(stream)}, expected a torch.cuda.Stream or None")
    return handle


def say_no_gradients(who: str, instead: str, *values: Any) -> None:
    """A warning where a caller may expect gradients of a call that carries none."""
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    ):
        warnings.warn(
            f"{who}: got a tensor that requires gradients, and carries none: {instead}; detach() it"
            " where none are meant",
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """The stacklevel, for who calls this, of the first frame that is not of Waybill."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def bits_of(value: torch.Tensor, name: str) -> torch.Tensor:
    """The same memory as integers of the element's size."""
    size = value.element_size()
    if size not in _BITS:
        raise Unsupported(
            f"{name} has dtype {value.dtype} of {size} bytes, expected elements of 1, 2, 4 or 8"
            " bytes"
        )
    return value.detach().view(_BITS[size])


def save_mark(ctx: Any, like: torch.Tensor) -> None:
    """Saves a tensor without elements for backward. A checkpoint computes a region again when
    backward asks for what was saved there: then all ranks do, at the same place, and also one that
    had nothing to compute and save.
    """
    ctx.save_for_backward(like.new_empty(0))


def meet_mark(ctx: Any, again: str = "") -> None:
    """Before the calls of a backward: what a checkpoint computes again comes before them.

    :param again: what is said of a second backward, instead of torch's words
    """
    try:
        _ = ctx.saved_tensors
    except RuntimeError as error:
        if again and "backward through the graph a second time" in str(error):
            raise InvalidArgument(again) from error
        raise


def payload(value: torch.Tensor, name: str) -> Tuple[AnyArray, str]:
    """A CPU tensor's memory and its dtype's name."""
    return as_numpy(bits_of(value, name).numpy(), name), dtype_name(value.dtype)
