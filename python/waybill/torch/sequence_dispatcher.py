"""Moving shards of Q, K and V between ranks, for torch tensors in host memory and on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Tuple

import torch

from .._graphs import outside_graphs
from ..errors import InvalidArgument
from ..sequence_dispatcher import Dispatcher, PlanHandle, Rows, TensorFormat, row_layout, row_shape
from ..world import World
from ._tensors import (
    is_plain,
    library_name,
    require_moved,
    require_rows,
    say_no_gradients,
    shown_memory,
    stream_of,
    torch_dtype,
)

__all__ = ["SequenceDispatcher"]

_INSTEAD = "ContextParallelAttention is known to autograd"


class SequenceDispatcher(Dispatcher[torch.Tensor]):
    """``waybill.SequenceDispatcher`` for tensors on the device of the world: "cpu" or a GPU.

    On GPUs calls are queued on torch's current stream of that device and return at once, but for
    those in which the windows grow; what they read must not change before they are done. Ranks that
    are threads with a GPU each wait on the host until all have queued theirs. Calls can be captured
    in a CUDA graph, windows reserved before (over several nodes an even number of calls); where
    other ranks are threads of the process, with
    ``capture_begin(capture_error_mode="thread_local")`` on a stream of the rank's own. A Timeout
    is then raised by the next call, or by synchronize(); the GPU is lost to the process.

    Gradients do not flow through these calls, and dispatch warns where a tensor requires them:
    ContextParallelAttention is known to autograd.
    """

    _device: torch.device

    @outside_graphs
    def dispatch(
        self, plan: PlanHandle, *tensors: Any, of_dispatch: int = 0
    ) -> Tuple[torch.Tensor, ...]:
        say_no_gradients("dispatch", _INSTEAD, *tensors)
        return super().dispatch(plan, *tensors, of_dispatch=of_dispatch)

    def _check_world(self, world: World) -> None:
        self._device = torch.device(world.device)

    def _stream(self) -> int:
        return stream_of(self._device)

    def _format(self, value: Any, name: str) -> Tuple[TensorFormat, str]:
        if isinstance(value, TensorFormat):
            dtype = self._dtype(value.dtype, f"{name}: dtype")
            format_ = TensorFormat(dtype, row_shape(value.row_shape, name))
        else:
            tensor = require_rows(value, name)
            format_ = TensorFormat(tensor.dtype, tuple(tensor.shape[1:]))
        return format_, library_name(format_.dtype, name)

    def _rows(self, value: Any, name: str, writable: bool) -> Tuple[Rows, Any]:
        plain = is_plain(value)
        tensor = value if plain else require_moved(value, name)
        if tensor.device != self._device:
            raise InvalidArgument(
                f"{name} lies on {tensor.device}, expected {self._device}, that of the world"
            )
        dtype = library_name(tensor.dtype, name)
        if not plain and (tensor.is_neg() or tensor.is_conj()):
            raise InvalidArgument(f"{name} is a lazy view, expected memory: resolve it first")
        rows = tensor.shape[0] if tensor.ndim > 0 else 0
        if rows > 0 and (plain or tensor.is_contiguous()):
            layout = (rows, tensor.numel() // rows, tensor.stride(0))
        else:
            layout = row_layout(tensor.shape, tensor.stride(), name)
        return (tensor.data_ptr(), dtype, *layout), tensor

    def _placed(self, format_: TensorFormat, rows: int, offset: int) -> Any:
        shape, strides = (rows, *format_.row_shape), [1]
        for extent in reversed(format_.row_shape):
            strides.insert(0, strides[0] * extent)
        return format_.dtype, shape, tuple(strides), offset // format_.dtype.itemsize

    def _shown(self, plan: PlanHandle, window: Any) -> Tuple[torch.Tensor, ...]:
        made = window.made
        if made is None:
            with torch.inference_mode(False):
                memory = shown_memory(window.bytes, torch.uint8)
            # As one tensor of each dtype, made when it is first asked for.
            made = window.made = functools.cache(functools.partial(_elements, memory))
        return tuple([made(dtype).as_strided(*place) for dtype, *place in plan._places])

    def _apart(self, views: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, ...]:
        """Each is for autograd a tensor of its own, which does not change with the others."""
        return tuple(view.data for view in views)

    def _read(self, plan: PlanHandle, tensors: Iterable[torch.Tensor]) -> list[Rows]:
        """The memory of tensors that were looked at."""
        return [
            (t.data_ptr(), library_name(t.dtype, "a tensor"), t.shape[0], hidden, t.stride(0))
            for t, hidden in zip(tensors, plan._hidden)
        ]

    def _empty(self, shape: Tuple[int, ...], dtype: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _dtype(self, value: Any, name: str) -> torch.dtype:
        return torch_dtype(value, name)


def _elements(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return memory[: len(memory) // 8 * 8].view(dtype)
