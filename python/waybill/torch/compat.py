"""Triton-distributed's layer for few tokens, by its name, over what Waybill has."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .._arrays import at_least, flag, instance
from .._graphs import outside_graphs
from .._lifetime import OfThisProcess
from ..errors import InvalidArgument, Unsupported
from ..integrations.deep_ep import Buffer
from ..integrations.deep_ep.handles import LowLatencyHandle
from ._tensors import torch_dtype
from .world import world_of

__all__ = ["DispatchMetaInfo", "EPLowLatencyAllToAllLayer"]

_GROUP = 128  # elements with a scale of their own


class DispatchMetaInfo(OfThisProcess):
    """The result of a dispatch that its combine takes."""

    _why_not_copied = "what one rank knows of a dispatch: each dispatch gives one"

    def __init__(self, handle: LowLatencyHandle) -> None:
        self._handle = handle

    @property
    def recv_token_source_indices(self) -> torch.Tensor:
        """[experts, world_size * max_m] int32: the row's token on its source rank, -1: no row."""
        indices: torch.Tensor = self._handle[0]
        return indices

    @property
    def recv_token_source_count_and_start(self) -> torch.Tensor:
        """[experts, world_size] int64: rows of each source rank in the lower half, the first of
        them in the upper half.
        """
        ranges: torch.Tensor = self._handle[1]
        return ranges


class EPLowLatencyAllToAllLayer(OfThisProcess):
    """Takes few tokens to their experts as float8, and the weighted sums back: the layer of this
    name of Triton-distributed. All calls are collective, and so is making one.

    A rank has ``num_experts / world_size`` experts, and each of them ``world_size * max_m`` places
    for rows. Rows of an expert lie by source rank, then token: always. After them nothing is
    written. Ranks are those of one host; ``EPAll2AllLayer`` serves several, with rows back to back.

    :param max_m: most tokens of a rank
    :param hidden: elements of a token; with float8 a multiple of 128
    :param topk: experts of a token
    :param online_quant_fp8: False: rows travel as bfloat16, and there are no scales
    :param rank, world_size: those of the group; local_world_size: the same as world_size
    :param num_experts: experts of all ranks, a multiple of world_size
    :param fp8_gsize: elements with a scale of their own: 128
    :param dtype: of tokens: bfloat16
    :param enable_profiling: False; torch.profiler shows the calls
    :param ep_group: a ``waybill.World``, a process group, or None: the default group
    """

    _why_not_copied = "buffers that other ranks write to: make one on each rank's group"

    @outside_graphs
    def __init__(
        self,
        max_m: int,
        hidden: int,
        topk: int,
        online_quant_fp8: bool,
        rank: int,
        num_experts: int,
        local_world_size: int,
        world_size: int,
        fp8_gsize: int = _GROUP,
        dtype: Any = torch.bfloat16,
        enable_profiling: bool = False,
        *,
        ep_group: Any = None,
    ) -> None:
        who = "EPLowLatencyAllToAllLayer"
        world = world_of(ep_group, None, None, who, "ep_group")
        for name, given, own in (
            ("rank", rank, world.rank), ("world_size", world_size, world.world_size),
            ("local_world_size", local_world_size, world.topology.ranks_per_node),
        ):  # fmt: skip
            if at_least(given, 0, f"{who}: {name}") != own:
                raise InvalidArgument(f"{who}: {name} = {given}, expected {own}, of the group")
        if at_least(fp8_gsize, 1, f"{who}: fp8_gsize") != _GROUP:
            raise Unsupported(f"{who}: fp8_gsize = {fp8_gsize}, expected {_GROUP}")
        if torch_dtype(dtype, f"{who}: dtype") != torch.bfloat16:
            raise Unsupported(f"{who}: dtype = {dtype}, expected torch.bfloat16")
        if flag(enable_profiling, f"{who}: enable_profiling"):
            raise Unsupported(
                f"{who}: enable_profiling = True, expected False: torch.profiler shows the calls"
            )
        self.max_m = at_least(max_m, 1, f"{who}: max_m")
        self.hidden = at_least(hidden, 1, f"{who}: hidden")
        self.topk = at_least(topk, 1, f"{who}: topk")
        self.num_experts = at_least(num_experts, 1, f"{who}: num_experts")
        self.online_quant_fp8 = flag(online_quant_fp8, f"{who}: online_quant_fp8")
        self.rank, self.world_size = world.rank, world.world_size
        self.local_world_size = world.topology.ranks_per_node
        room = Buffer.get_low_latency_rdma_size_hint(
            self.max_m, self.hidden, self.world_size, self.num_experts
        )
        self.num_experts_per_rank = self.num_experts // self.world_size
        self.fp8_gsize, self.num_groups = _GROUP, self.hidden // _GROUP
        self.enable_profiling = False
        self._buffer = Buffer(
            world, num_rdma_bytes=room, low_latency_mode=True, explicitly_destroy=True
        )

    def dispatch(
        self, send_tokens: torch.Tensor, send_scales: None, topk_indices: torch.Tensor
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, DispatchMetaInfo]:
        """Collective: (recv_token [experts, world_size * max_m, hidden], recv_scale [experts,
        world_size * max_m, hidden / 128] float32, expert_recv_count [experts] int32,
        dispatch_meta). The results are the caller's. Without float8 recv_scale is None.

        :param send_tokens: [num_tokens, hidden] bfloat16, num_tokens at most max_m, also 0
        :param send_scales: None: tokens are quantised on the way
        :param topk_indices: [num_tokens, topk] int32 or int64; -1: a slot that goes nowhere
        """
        who = "EPLowLatencyAllToAllLayer.dispatch"
        if send_scales is not None:
            raise Unsupported(
                f"{who}: send_scales is given, expected None: EPAll2AllLayer takes rows with scales"
                ' (payload="scaled")'
            )
        rows, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            send_tokens, topk_indices, self.max_m, self.num_experts, use_fp8=self.online_quant_fp8
        )
        tokens, scales = rows if isinstance(rows, tuple) else (rows, None)
        return tokens, scales, counts, DispatchMetaInfo(handle)

    def combine(
        self,
        send_tokens: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_weights: torch.Tensor,
        dispatch_meta: DispatchMetaInfo,
        zero_copy: bool = False,
    ) -> torch.Tensor:
        """Collective: [num_tokens, hidden] bfloat16: of each token the sum of its rows, each times
        its weight, in float32 and in the order of the topk slots, rounded once.

        :param send_tokens: [experts, world_size * max_m, hidden] bfloat16, at the places of
            dispatch
        :param topk_indices: those of the dispatch
        :param topk_weights: [num_tokens, topk] float32
        :param zero_copy: accepted: rows are always read from send_tokens
        """
        who = "EPLowLatencyAllToAllLayer.combine"
        instance(dispatch_meta, DispatchMetaInfo, f"{who}: dispatch_meta", "what dispatch returned")
        flag(zero_copy, f"{who}: zero_copy")
        sums, _, _ = self._buffer.low_latency_combine(
            send_tokens, topk_indices, topk_weights, dispatch_meta._handle
        )
        return sums

    def dump_dispatch_trace(self) -> None:
        """Does nothing, as in Triton-distributed without enable_profiling."""

    def dump_combine_trace(self) -> None:
        """Does nothing, as in Triton-distributed without enable_profiling."""

    def finalize(self) -> None:
        """Collective: gives all symmetric memory back. Twice does nothing."""
        self._buffer.destroy()
