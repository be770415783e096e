"""Tensors between torch and the compiled layers."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Optional, Tuple

import torch

from ..._agreement import agree
from ..._arrays import library_dtype
from ..._errors import shown as shown_value
from ...errors import InvalidArgument
from ...world import World, seconds_of
from .._tensors import dtype_name, require_memory, shown_memory

#: A tensor for the compiled part: address, dtype, shape.
Given = Tuple[int, str, Tuple[int, ...]]


@functools.cache
def _library_name(dtype: torch.dtype) -> str:
    return library_dtype(dtype_name(dtype), dtype.itemsize)


def given(value: Any, name: str, device: torch.device) -> Tuple[Given, torch.Tensor]:
    """A contiguous tensor on the device, and what must live while it is used."""
    tensor = require_memory(value, name)
    if tensor.device != device:
        raise InvalidArgument(f"{name} lies on {tensor.device}, expected {device}")
    if tensor.ndim == 0:  # which the compiled part would take for none
        raise InvalidArgument(f"{name} has no axes, expected a row for each token")
    if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return (tensor.data_ptr(), _library_name(tensor.dtype), tuple(tensor.shape)), tensor


def shown(bits: Any, dtype: torch.dtype) -> Optional[torch.Tensor]:
    """A tensor over memory of the layer; None stays None."""
    return None if bits is None else shown_memory(bits, dtype)


def flat_rows(value: torch.Tensor) -> torch.Tensor:
    """[rows, ...] of any number of axes before the last."""
    return value if value.ndim == 2 else value.reshape(-1, value.shape[-1])


def as_autocast(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Under autocast floats of any dtype are welcome, as to torch's own operations."""
    if getattr(value, "dtype", dtype) == dtype:
        return value
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float and is_autocast(device) else value


def is_autocast(device: torch.device) -> bool:
    """Whether torch's autocast is on there."""
    try:
        return torch.is_autocast_enabled(device.type)
    except TypeError:  # before torch 2.4
        cpu = device.type == "cpu"
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
    """That each is of an expert, or dropped. The host looks: it waits for a device."""
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
        raise InvalidArgument(f"{name} = {shown_value(value)}, expected a torch dtype")
    return found


def world_of(
    group: Any, local_world_size: Optional[int], device: Any, who: str, name: str = "group",
    timeout_s: Optional[float] = None,
) -> World:  # fmt: skip
    """A World itself, or the one that layers of a process group or DeviceMesh share (None: of the
    default group); the first one makes it, which is collective.

    A World has a device and a deadline: others are refused.
    """
    if isinstance(group, World):
        try:
            _require_same(group, device, timeout_s, who)
        except InvalidArgument as error:
            agree(group, who, {}, error)  # the others compare what they make
        return group
    from .shared_worlds import shared_world  # not every torch has torch.distributed

    return shared_world(group, device, local_world_size, who, name)


def _require_same(world: World, device: Any, timeout_s: Optional[float], who: str) -> None:
    """What is said of a World that is there, and has it."""
    known = (world.device, world.device.split(":")[0])
    is_name = isinstance(device, (str, torch.device))
    if device is not None and not (is_name and str(device) in known):
        got = shown_value(device)
        raise InvalidArgument(f"{who}: device = {got}, expected {world.device}, that of the World")
    if timeout_s is not None and seconds_of(timeout_s, who) != world.timeout_s:
        raise InvalidArgument(
            f"{who}: timeout_s = {timeout_s:g}, expected {world.timeout_s:g}, that of the World"
        )


def group_of_layer(group: Any) -> Any:
    """A weak reference: a layer does not keep its group; None for a World."""
    if isinstance(group, World):
        return None
    from ..._process_group import group_of

    return weakref.ref(group_of(group, "EPAll2AllLayer", "ep_group"))
