"""Copies of experts in one process: what their weights are, and where their gradients go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, List

import numpy as np

from .. import _core
from .._arrays import BITS, AnyArray, ArrayLike, IntArray, as_numpy, index_array
from ..errors import InvalidArgument
from .simulate import per_rank


def simulate_expert_copies(slots: ArrayLike, weights: Sequence[Any]) -> List[AnyArray]:
    """The weights in all slots once copies have theirs from their homes.

    :param slots: integers ``[num_ranks, slots per rank]``, the expert of each slot, -1: empty;
        ``slots`` of ``even_experts``
    :param weights: ``[experts per rank, ...]`` per rank, of any dtype
    :returns: ``[slots per rank, ...]`` per rank: home experts as given, copies as their homes,
        zeros where a slot is empty
    :raises InvalidArgument: naming argument and rank
    """
    who = "simulate_expert_copies"
    table = _table(slots, who)
    home = _alike(weights, f"{who}: weights", len(table))
    first, num_slots = home[0], table.shape[1]
    row_bytes = first.nbytes // len(first) if len(first) else 0
    bits = [one.reshape(-1).view(np.uint8) for one in home]
    made = _core.simulate_expert_copies(table, len(first) * len(home), bits, row_bytes)
    shape = (num_slots, *first.shape[1:])
    return [one.view(np.uint8).view(first.dtype).reshape(shape) for one in made]


def simulate_expert_copy_gradients(
    slots: ArrayLike, gradients: Sequence[Any], copy_gradients: Sequence[Any]
) -> List[AnyArray]:
    """The gradients of the home experts once those of copies have come home.

    The sum of an expert begins with home's gradient; those of copies follow by rank. Sums are
    float32 (float64 for float64) and rounded once. An expert without copies stays as it is.

    :param slots: as in ``simulate_expert_copies``; leave out, as -1, copies without rows
    :param gradients: ``[experts per rank, ...]`` per rank: float32, float16, bfloat16 (as
        ``ml_dtypes.bfloat16``) or float64
    :param copy_gradients: ``[spare slots, ...]`` per rank: float32; float64 where gradients are.
        Empty slots are not read
    :returns: ``[experts per rank, ...]`` per rank, of the dtype of ``gradients``
    :raises InvalidArgument: naming argument and rank
    """
    who = "simulate_expert_copy_gradients"
    table = _table(slots, who)
    home = _alike(gradients, f"{who}: gradients", len(table))
    copies = _alike(copy_gradients, f"{who}: copy_gradients", len(table))
    dtypes = [home[0].dtype.name, copies[0].dtype.name]
    views: list[Any] = []
    for name, arrays in (("gradients", home), ("copy_gradients", copies)):
        dtype = arrays[0].dtype
        if dtype.name not in ("float32", "float16", "bfloat16", "float64"):
            raise InvalidArgument(f"{who}: {name} is {dtype}, expected floats")
        shape = (len(arrays[0]), math.prod(arrays[0].shape[1:]))
        views.append([one.reshape(shape).view(BITS[dtype.itemsize]) for one in arrays])
    num_experts = len(home[0]) * len(home)
    made = _core.simulate_expert_copy_gradients(table, num_experts, *views, *dtypes)
    return [one.view(home[0].dtype).reshape(home[0].shape) for one in made]


def _table(slots: Any, who: str) -> IntArray:
    table = index_array(slots, f"{who}: slots")
    if table.ndim != 2 or len(table) == 0:
        raise InvalidArgument(
            f"{who}: slots has shape {list(table.shape)}, expected [num_ranks, slots per rank]"
        )
    return table


def _alike(values: Any, name: str, world_size: int) -> List[AnyArray]:
    """An array per rank, of one shape and dtype, contiguous."""
    entries = per_rank(values, name, world_size)
    arrays = [np.ascontiguousarray(as_numpy(one, f"{name}[{r}]")) for r, one in enumerate(entries)]
    first = arrays[0]
    for r, one in enumerate(arrays):
        if one.ndim == 0 or one.shape != first.shape or one.dtype != first.dtype:
            raise InvalidArgument(
                f"{name}[{r}] is {one.dtype} of shape {list(one.shape)}, expected {first.dtype} of"
                f" shape {list(first.shape)}, as on rank 0, with an axis of experts"
            )
    return arrays
