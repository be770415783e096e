"""Between torch tensors and the compiled part; autocast, derivatives and operations of torch."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, Tuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from .._arrays import AnyArray, as_numpy, library_dtype
from .._errors import shown
from ..errors import InvalidArgument, Unsupported

_forward_ad: Any = torch.autograd.forward_ad


def _is_transformed() -> bool:
    """Whether tensors may be of forward-mode AD or of torch.func."""
    return _forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def refuse_tangent(value: torch.Tensor, name: str) -> None:
    """A tensor of forward-mode AD, whose tangent would be lost where rows are read as bytes, or of
    torch.func, whose elements lie elsewhere.
    """
    # There are none in compiled programs.
    if torch.compiler.is_compiling() or not _is_transformed():
        return
    unpacked = _forward_ad.unpack_dual(value)
    if unpacked.tangent is not None:
        raise Unsupported(
            f"{name} has a tangent, expected none: calls of Waybill have no derivatives in forward"
            " mode"
        )
    func = torch._C._functorch
    if func.is_gradtrackingtensor(value) or func.is_batchedtensor(value):
        raise Unsupported(
            f"{name} is a tensor of torch.func, as of grad or vmap, expected one without: calls of"
            " Waybill have derivatives by autograd alone"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A second derivative is an error. (torch's once_differentiable does so
    only where the gradient that comes in is differentiated, too: of a loss that is linear in the
    output, second derivatives would be left out silently.)
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        for gradient in gradients:
            if isinstance(gradient, torch.Tensor):
                refuse_tangent(gradient, "a gradient")
        if not torch.is_grad_enabled():  # without create_graph=True
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        given = [t for t in found if t is not None]
        with torch.enable_grad():
            marked = iter(_NoSecond.apply(torch.zeros(0, requires_grad=True), *given))
        return tuple(None if t is None else next(marked) for t in found)

    return call


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(t.view_as(t) for t in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Unsupported(
            "got a gradient of a gradient (create_graph=True) of a Waybill call, expected first"
            " derivatives alone"
        )


_NOTHING = nullcontext()


def autocast_dtype(kind: str) -> torch.dtype:
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(kind)
    old: Any = torch  # before torch 2.4
    return old.get_autocast_gpu_dtype() if kind == "cuda" else old.get_autocast_cpu_dtype()


def autocast_now(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts with the state that autocast has now. Their cache is off: weights that were
    cast where autograd does not look would go to the caller, too.
    """
    return functools.partial(
        torch.autocast, kind, dtype=autocast_dtype(kind), enabled=is_autocast(kind),
        cache_enabled=False,
    )  # fmt: skip


def casts_to(kind: str, dtype: torch.dtype) -> bool:
    """Whether autocast is on, to this dtype."""
    return is_autocast(kind) and autocast_dtype(kind) == dtype


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """For tensors that are of the right dtype by then."""
    return torch.autocast(kind, enabled=False) if is_autocast(kind) else _NOTHING


def has_operations() -> bool:
    return hasattr(torch.library, "custom_op")


def operation(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: waybill::name, which changes none of its arguments.

    Compilers keep the order of all of them. By their tensors alone a rank without rows has none: a
    tensor without elements depends on nothing.
    """
    if not has_operations():
        return _no_operation

    def in_order(function: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"waybill::{name}", function, mutates_args=(), schema=schema)
        if hasattr(made, "register_effect"):  # not in older versions of torch
            from torch._library.effects import EffectType

            made.register_effect(EffectType.ORDERED)
        return made

    return in_order


def _no_operation(function: Any) -> Any:
    """Before torch 2.4, which cannot make one: the function as it is."""
    function.register_fake = lambda fake: fake
    function.register_autograd = lambda *_, **__: None
    return function


_profiling: Any = torch.autograd
_nvtx: Any = torch.cuda.nvtx


def profiled(name: str, device: torch.device) -> AbstractContextManager[None]:
    """``waybill:name`` on the timeline."""
    on_gpu = device.type == "cuda"
    return _Profiled(name, on_gpu) if on_gpu or _profiling._profiler_enabled() else _NOTHING


class _Profiled:
    __slots__ = ("_name", "_on_gpu", "_record")

    def __init__(self, name: str, on_gpu: bool) -> None:
        self._name, self._on_gpu = f"waybill:{name}", on_gpu
        self._record: Any = None

    def __enter__(self) -> None:
        if self._on_gpu:
            _nvtx.range_push(self._name)
        if _profiling._profiler_enabled():
            self._record = torch.profiler.record_function(self._name)
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*error)
        if self._on_gpu:
            _nvtx.range_pop()


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


def tensor(array: Any, device: Optional[torch.device] = None) -> Any:
    """A tensor over an array's memory, or its copy on a device; None stays None."""
    if array is None:
        return None
    shared = torch.from_numpy(array)
    return shared if device is None or device.type == "cpu" else shared.to(device)


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small table of the host, which does not wait for the device."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


def tensors(value: Any, device: Optional[torch.device] = None) -> Any:
    """Tensors for arrays, also inside tuples and lists; records keep their type."""
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


def require_rows(value: Any, name: str) -> torch.Tensor:
    """A tensor that has a first axis."""
    if require_tensor(value, name).ndim == 0:
        raise InvalidArgument(f"{name} has no axes, expected [rows, ...]")
    found: torch.Tensor = value
    return found


def is_plain(value: Any) -> bool:
    """Whether all is well with a tensor, as with most: its elements lie in memory one after
    another, it is of no subclass, and no transform is at work.
    """
    return (
        type(value) is torch.Tensor
        and not value.is_nested
        and value.layout is torch.strided
        and value.is_contiguous()
        and not (value.is_neg() or value.is_conj())
        and not _is_transformed()
    )


def require_moved(value: Any, name: str) -> torch.Tensor:
    """A tensor that a call reads by itself, outside of torch: its derivatives in forward mode would
    be lost.
    """
    found = require_tensor(value, name)
    refuse_tangent(found, name)
    return found


def require_moved_rows(value: Any, name: str) -> torch.Tensor:
    """As require_moved, of a tensor that has a first axis."""
    found = require_rows(value, name)
    refuse_tangent(found, name)
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
    # From an array torch would ask for its device and stream first.
    capsule = bits.__dlpack__() if hasattr(bits, "__dlpack__") else bits
    return from_dlpack(capsule).view(dtype)


def stream_of(device: torch.device) -> int:
    """torch's current stream of a GPU; 0 for host memory."""
    return 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream


def stream_given(stream: Any, device: torch.device, name: str) -> int:
    """The handle of a stream that the caller gave; None is the current stream."""
    if stream is None:
        return stream_of(device)
    handle = getattr(stream, "cuda_stream", None)
    if not isinstance(handle, int):
        raise InvalidArgument(f"{name} = {shown(stream)}, expected a torch.cuda.Stream or None")
    return handle


def wants_gradients(*values: Any) -> bool:
    """Whether autograd records, and some of the values require gradients."""
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return True
    return False


def say_no_gradients(who: str, instead: str, *values: Any) -> None:
    """A warning where a caller may expect gradients of a call that carries none."""
    if wants_gradients(*values):
        warnings.warn(
            f"{who}: got a tensor that requires gradients, and carries none: {instead}; detach() it"
            " where none are meant",
            stacklevel=callers_level(),
        )


def callers_level() -> int:
    """The stacklevel, for who calls this, of the first frame that is not of Waybill."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def bits_of(value: torch.Tensor, name: str) -> torch.Tensor:
    """The same memory as integers of the element's size."""
    library_name(value.dtype, name)
    return value.detach().view(_BITS[value.element_size()])


def save_mark(ctx: Any, like: torch.Tensor) -> None:
    """Saves a tensor without elements for backward. A checkpoint computes a region again when
    backward asks for what was saved there: then all ranks do, at the same place, and also one that
    had nothing to compute and save.
    """
    ctx.save_for_backward(like.new_empty(0))


def read_mark(ctx: Any) -> None:
    """Before the calls of a backward: what a checkpoint computes again comes before them."""
    _ = ctx.saved_tensors


def payload(value: torch.Tensor, name: str) -> Tuple[AnyArray, str]:
    """A CPU tensor's memory and its dtype's name."""
    return as_numpy(bits_of(value, name).numpy(), name), dtype_name(value.dtype)


#: A tensor for the compiled part: address, dtype, shape.
Given = Tuple[int, str, Tuple[int, ...]]


_NAMES: dict[torch.dtype, str] = {}


def library_name(dtype: torch.dtype, name: str) -> str:
    """The compiled part's name for the elements of the tensor ``name``."""
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    if dtype.itemsize not in _BITS:
        raise Unsupported(
            f"{name} has dtype {dtype} of {dtype.itemsize} bytes, expected elements of 1, 2, 4 or 8"
            " bytes"
        )
    return _NAMES.setdefault(dtype, library_dtype(dtype_name(dtype), dtype.itemsize))


def given(
    value: Any, name: str, device: torch.device
) -> Tuple[Optional[Given], Optional[torch.Tensor]]:
    """A contiguous tensor on the device, and what must live while it is used; None stays None."""
    if value is None:
        return None, None
    tensor = require_memory(value, name)
    if tensor.device != device:
        raise InvalidArgument(f"{name} lies on {tensor.device}, expected {device}")
    if tensor.ndim == 0:  # which the compiled part would take for none
        raise InvalidArgument(f"{name} has no axes, expected a row for each token")
    if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return (tensor.data_ptr(), library_name(tensor.dtype, name), tuple(tensor.shape)), tensor


def view_of(bits: Any, dtype: torch.dtype) -> Optional[torch.Tensor]:
    """A tensor over memory of the layer; None stays None."""
    return None if bits is None else shown_memory(bits, dtype)


def adjacent_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Slices of a common projection go as they are; rows must have adjacent elements, in memory."""
    if tensor.is_neg():
        return tensor.resolve_neg().contiguous()
    if tensor.is_contiguous():
        return tensor
    size = 1
    for extent, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:])):
        if stride != size and extent != 1:
            return tensor.contiguous()
        size *= extent
    return tensor


def flat_rows(value: torch.Tensor) -> torch.Tensor:
    """[rows, ...] of any number of axes before the last."""
    return value if value.ndim == 2 else value.reshape(-1, value.shape[-1])


def as_autocast(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Under autocast floats of any dtype are welcome, as to torch's own operations."""
    if getattr(value, "dtype", dtype) == dtype:
        return value
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float and is_autocast(device.type) else value


def is_autocast(kind: str) -> bool:
    """Whether torch's autocast is on for a kind of device."""
    try:
        return torch.is_autocast_enabled(kind)
    except TypeError:  # before torch 2.4
        cpu = kind == "cpu"
        return torch.is_autocast_cpu_enabled() if cpu else torch.is_autocast_enabled()


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether all values of the other are values of dtype."""
    if dtype == other:
        return True
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # float8
        return False


def require_known_ids(
    ids: torch.Tensor, num_experts: int, dropped: int, name: str, rank: int
) -> None:
    """Raises for an id that is neither an expert's nor ``dropped``. The host waits for a device."""
    if dropped in (-1, num_experts) and ids.numel() > 0:  # one range: one look at all of them
        least, most = (int(number) for number in torch.aminmax(ids))
        if min(dropped, 0) <= least and most <= max(dropped, num_experts - 1):
            return
    wrong = ((ids < 0) | (ids >= num_experts)) & (ids != dropped)
    if not bool(wrong.any()):
        return
    place = [int(axis) for axis in wrong.nonzero()[0]]
    raise InvalidArgument(
        f"{name}{place} of rank {rank} is {int(ids[tuple(place)])}, expected 0..{num_experts - 1},"
        f" or {dropped} for none"
    )


def torch_dtype(value: Any, name: str) -> torch.dtype:
    """torch's dtype of that name, or itself."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"{name} = {shown(value)}, expected a dtype of torch, or its name")
    return found
