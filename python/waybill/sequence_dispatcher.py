"""Moving shards of Q, K and V between ranks in host memory, for numpy."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from ._arrays import AnyArray, as_numpy, dtype_name, library_dtype
from ._dispatcher import Dispatcher, PlanHandle, Rows, TensorFormat
from ._errors import shown
from ._tensor_checks import row_layout, row_shape
from .errors import InvalidArgument, Unsupported
from .world import World

__all__ = ["PlanHandle", "SequenceDispatcher", "TensorFormat"]


class SequenceDispatcher(Dispatcher[AnyArray]):
    """Moves shards of Q, K and V between the ranks of a world, by plans, and sums the gradients of
    the copies of K and V. For numpy arrays; ``waybill.torch.SequenceDispatcher`` takes tensors.

    Calls are collective: every rank makes the same calls in the same order, each with its own part
    of the same plan. A fast rank may be one call ahead of a slow one; there is no barrier. A call
    that raises anything but InvalidArgument or Unsupported leaves the dispatcher unusable.

    Every rank has two windows, used in turn, that grow when a plan needs more: at the first call
    with that plan, which then waits for all ranks, or ahead of time with reserve().

    As a context manager it is closed at the end of the block, unless that ends with an exception:
    the other ranks would wait in vain.

    Args:
        world: of ``run_threads``; it is kept alive.
        num_sms: multiprocessors of a GPU that a call may use, 0: its copy engines do it. Ranks in
            host memory ignore it.
        chunk_bytes: unit of work, a multiple of 16.
        local_by_copy_engine: on GPUs long rows that stay on their rank go by copy engine.
        max_window_bytes: larger plans are refused; the same on all ranks.
        relay: with the routing of an AttentionPlan that has a relay schedule, whether receivers
            forward K and V to each other: "automatic" where the links then allow clearly less time,
            "never" or "always". "always" with num_sms = 0 is refused on GPUs, whose copy engines
            forward nothing. PlanHandle.way says what was chosen.
    """

    def _check_world(self, world: World) -> None:
        if world.device != "cpu":
            raise Unsupported(
                f"SequenceDispatcher: the world's tensors lie on {world.device}, and numpy has"
                " host memory only: use waybill.torch.SequenceDispatcher"
            )

    def _stream(self) -> int:
        return 0

    def _format(self, value: Any, name: str) -> Tuple[TensorFormat, str]:
        if isinstance(value, TensorFormat):
            dtype = self._dtype(value.dtype, f"{name}: dtype")
            shape = row_shape(value.row_shape, name)
        else:
            array = as_numpy(value, name)
            if array.ndim == 0:
                raise InvalidArgument(f"{name} has no axes, expected [rows, ...]")
            dtype, shape = array.dtype, array.shape[1:]
        return TensorFormat(dtype, shape), _library_name(np.empty(0, dtype), name)

    def _rows(self, value: Any, name: str, writable: bool) -> Tuple[Rows, Any]:
        array = as_numpy(value, name)
        if writable and (not isinstance(value, np.ndarray) or not array.flags.writeable):
            raise InvalidArgument(f"{name} cannot be written, expected a writable numpy array")
        library_name = _library_name(array, name)
        rows, hidden, stride = row_layout(array.shape, _strides(array, name), name)
        return (array.__array_interface__["data"][0], library_name, rows, hidden, stride), array

    def _show(self, bits: Any, format_: TensorFormat) -> AnyArray:
        return bits.view(format_.dtype).reshape(len(bits), *format_.row_shape)

    def _empty(self, shape: Tuple[int, ...], dtype: Any) -> AnyArray:
        return np.empty(shape, dtype)

    def _dtype(self, value: Any, name: str) -> Any:
        try:
            if value is not None:  # which is float64 to numpy
                return np.dtype(value)
        except (TypeError, ValueError):
            pass
        raise InvalidArgument(f"{name} = {shown(value)}, expected a dtype of numpy, or its name")


def _library_name(array: AnyArray, name: str) -> str:
    size = array.dtype.itemsize
    if size not in (1, 2, 4, 8) or array.dtype.hasobject:
        raise Unsupported(
            f"{name} has dtype {array.dtype} of {size} bytes, expected elements of 1, 2, 4 or 8"
            " bytes"
        )
    return library_dtype(dtype_name(array), size)


def _strides(array: AnyArray, name: str) -> list[int]:
    """In elements."""
    size = array.dtype.itemsize
    if any(stride % size != 0 for stride in array.strides):
        raise InvalidArgument(
            f"{name} has strides of {array.strides} bytes, expected multiples of {size}"
        )
    return [stride // size for stride in array.strides]
