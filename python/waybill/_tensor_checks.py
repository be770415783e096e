"""What is wrong with the tensors of a call, in the words of the caller: names and shapes."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Sequence, Tuple

from ._arrays import int64
from ._errors import shown
from .errors import InvalidArgument

#: The name of the caller's tensor at a place.
Names = Callable[[int], str]


@functools.cache
def numbered(name: str) -> Names:
    """The names of tensors that come as one sequence."""
    return lambda t: f"{name}[{t}]"


@functools.lru_cache(maxsize=256)
def named(who: str, names: Names, t: int) -> str:
    """That name in a call's errors; calls are made again and again, mostly without one."""
    return f"{who}: {names(t)}"


def of_qkv(t: int) -> str:
    """The name of Q, or of one of the tensors after it."""
    return "q" if t == 0 else f"kv[{t - 1}]"


def row_layout(shape: Sequence[int], strides: Sequence[int], name: str) -> Tuple[int, int, int]:
    """(rows, elements of a row, elements from row to row) of a tensor [rows, ...] whose elements
    of a row are adjacent; strides in elements.
    """
    if len(shape) == 0:
        raise InvalidArgument(f"{name} has no axes, expected [rows, ...]")
    hidden = 1
    for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:])):
        if extent != 1 and stride != hidden and 0 not in shape:
            raise InvalidArgument(
                f"{name} has shape {list(shape)} and strides {list(strides)}, expected adjacent"
                " elements in a row"
            )
        hidden *= extent
    return shape[0], hidden, strides[0]


def row_shape(value: Any, name: str) -> Tuple[int, ...]:
    """The extents of a row, as a TensorFormat has them."""
    if not isinstance(value, (tuple, list)):  # torch.Size is one
        raise InvalidArgument(f"{name} has row_shape {shown(value)}, expected a tuple of integers")
    extents = tuple(int64(extent, f"{name}: row_shape[{i}]") for i, extent in enumerate(value))
    if min(extents, default=0) < 0:
        raise InvalidArgument(f"{name} has row_shape {extents}, expected extents >= 0")
    return extents


def refuse_overlap(outputs: Sequence[Tuple[int, str, int, int, int]], names: Names) -> None:
    """Refuses rows that lie on each other in memory to write to: the last one would win."""
    blocks = []
    for t, (address, dtype, num_rows, hidden, stride) in enumerate(outputs):
        if num_rows > 1 and hidden > 0 and abs(stride) < hidden:
            raise InvalidArgument(
                f"{names(t)} has rows of {hidden} elements, {stride} apart, expected memory of its"
                " own for each"
            )
        if num_rows > 0 and hidden > 0:
            size = int("".join(filter(str.isdecimal, dtype.partition("_")[0])) or 8) // 8
            first = address + min(0, stride * (num_rows - 1)) * size
            blocks.append((first, num_rows, hidden * size, abs(stride) * size, t))
    for one, other in itertools.combinations(sorted(blocks), 2):
        if _overlap(one[:4], other[:4]):
            t, u = sorted((one[4], other[4]))
            raise InvalidArgument(f"{names(u)} shares memory with {names(t)}, expected its own")


def _overlap(one: Tuple[int, int, int, int], other: Tuple[int, int, int, int]) -> bool:
    """Whether rows (first byte, number, bytes, bytes from one to the next) lie on each other; the
    other begins after the one. Rows between each other at two distances count as such, too.
    """
    (begin, rows, size, step), (there, others, width, distance) = one, other
    if there >= begin + (rows - 1) * step + size:
        return False
    if rows == 1 or (others > 1 and distance != step):
        return True
    place = (there - begin) % step
    return place < size or place + width > step
