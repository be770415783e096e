"""The symmetric memory of a layer, and its barrier, by themselves."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from ... import _core
from ..._arrays import flag, instance, int64
from ..._graphs import outside_graphs
from ..._lifetime import Made, OfThisProcess, unwinding
from ...moe import EPConfig
from .._tensors import torch_dtype, view_of
from ..world import world_of


class DispatchCombineContext(OfThisProcess, Made):
    """The symmetric buffers of an expert-parallel layer. From ``create``; collective calls."""

    _why_not_copied = "buffers that other ranks write to: make one on each rank"
    ep_config: EPConfig
    dispatch_output_buf: torch.Tensor  #: [rows, hidden]: rows received
    weight_recv_buf: torch.Tensor  #: [rows]: their weights

    _context: Any
    _unwinding: Any
    _made_by = "DispatchCombineContext.create"

    @classmethod
    @outside_graphs
    def create(
        cls, ep_config: EPConfig, capacity: int = 2, *, world: Any = None
    ) -> DispatchCombineContext:
        """Collective: buffers of max_tokens * topk * capacity rows.

        :param world: a World, or a group of torch.distributed; None is the default group
        """
        who = "DispatchCombineContext"
        instance(ep_config, EPConfig, f"{who}: ep_config", "an EPConfig")
        ep_config, compiled = ep_config._for_use()
        rank = world_of(world, ep_config.local_world_size, None, who, "world")
        context = _core.ExpertContext(rank._world, compiled, int64(capacity, f"{who}: capacity"))
        self = cls._with(ep_config=ep_config, _unwinding=unwinding(), _context=context)
        self.reallocate_dispatch_output_buf(0)
        return self

    @outside_graphs
    def reallocate_dispatch_output_buf(
        self, dispatch_recv_tokens: int
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """The output and weight buffers, with at least so many rows. Collective when they must
        grow, that is on all ranks alike; they never shrink.
        """
        rows = int64(dispatch_recv_tokens, "reallocate_dispatch_output_buf: dispatch_recv_tokens")
        tokens, weights = self._context.reallocate(rows)
        config = self.ep_config
        dtypes = (config.token_dtype_name, config.weight_dtype_name)
        made: Any = [view_of(b, torch_dtype(t, "dtype")) for b, t in zip((tokens, weights), dtypes)]
        self.dispatch_output_buf, self.weight_recv_buf = made
        return self.dispatch_output_buf, self.weight_recv_buf

    @outside_graphs
    def finalize(self) -> None:
        """Collective: gives all symmetric memory back. Twice does nothing. When an error of this
        rank is in flight, nobody is waited for, and the memory goes with the world.
        """
        if self._unwinding():
            return
        self.__dict__.pop("dispatch_output_buf", None)
        self.__dict__.pop("weight_recv_buf", None)
        self._context.finalize()


class BarrierAllContext(OfThisProcess):
    """A barrier of the ranks of a node, or of the world, by signals that only grow."""

    _why_not_copied = "signals that other ranks write to: make one on each rank"

    @outside_graphs
    def __init__(self, is_intra_node: bool = True, *, world: Any = None) -> None:
        rank = world_of(world, None, None, "BarrierAllContext", "world")
        self._unwinding = unwinding()
        self._barrier = _core.ExpertBarrier(
            rank._world, flag(is_intra_node, "BarrierAllContext: is_intra_node")
        )

    @outside_graphs
    def barrier_all(self) -> None:
        """Returns when all ranks of the node (or the world) have called. Raises Timeout."""
        self._barrier.barrier_all()

    @outside_graphs
    def finalize(self) -> None:
        """Collective: gives the signals back. Twice does nothing. When an error of this rank is in
        flight, nobody is waited for, and they go with the world.
        """
        if self._unwinding():
            return
        self._barrier.finalize()
