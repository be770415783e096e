"""Layers that all modules of a model share."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional, Tuple

import torch

from .._errors import said_by
from ..errors import InvalidArgument
from ..torch.moe import EPAll2AllLayer
from ..torch.moe.tensors import world_of

__all__ = ["shared_layer"]

_Key = Tuple[int, int, int, torch.dtype, torch.device]
# A group that is destroyed takes its layers along.
_made: weakref.WeakKeyDictionary[Any, Dict[_Key, EPAll2AllLayer]] = weakref.WeakKeyDictionary()


def shared_layer(
    group: Any,
    rows: torch.Tensor,
    topk: int,
    num_experts: int,
    who: str,
    max_tokens: Optional[int] = None,
    *,
    grows: bool = False,
) -> EPAll2AllLayer:
    """The layer of a process group for rows of this width, dtype and device; ids -1 go nowhere. It
    is made if there is none, which is collective.

    :param max_tokens: tokens of a rank, the same on all; None: those of the first call
    :param grows: all ranks have as many tokens, so that one with room for more can be made
    """
    layers = _made.setdefault(group, {})
    key = (rows.shape[1], topk, num_experts, rows.dtype, rows.device)
    layer = layers.get(key)
    tokens = rows.shape[0]
    if layer is not None and (tokens <= layer.max_tokens or not grows):
        if tokens > layer.max_tokens:
            raise InvalidArgument(
                f"{who}: {tokens} tokens on rank {layer.rank}, expected at most {layer.max_tokens},"
                " as in the first call: say max_tokens before it"
            )
        return layer
    if max_tokens is not None and tokens > max_tokens:
        raise InvalidArgument(f"{who}: {tokens} tokens, expected at most max_tokens = {max_tokens}")
    world = world_of(group, None, None if rows.is_cuda else "cpu", who)
    try:
        with said_by(who):
            layer = layers[key] = EPAll2AllLayer(
                world, max(max_tokens or tokens, 1), rows.shape[1], topk, world.rank, num_experts,
                world.topology.ranks_per_node, world.world_size, rows.dtype, torch.float32,
                dropped_id=-1,
            )  # fmt: skip
    except InvalidArgument as error:
        if max_tokens is None:
            error.args = (
                f"{who}: ranks that have other numbers of tokens in the first call need max_tokens,"
                f" the same on all, said before it: {error}",
            )
        raise
    return layer
