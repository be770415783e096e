"""``deep_ep.Buffer`` on EPAll2AllLayer."""

from __future__ import annotations

from typing import Any, List, NoReturn, Optional, Tuple, Union

import torch

from ..._agreement import agreed_world
from ..._arrays import flag, int64
from ..._graphs import outside_graphs
from ...errors import InvalidArgument, Unsupported
from ...torch.moe.tensors import world_of
from .arguments import biases_of, check_network, check_table, weights_shape
from .config import Config, ll_bytes
from .events import EventHandle, EventOverlap
from .handles import DispatchHandle
from .intranode import Intranode, Received
from .layers import Layers
from .layout import checked_ids, counts_of, first_wrong
from .low_latency import LowLatency, refuse_masks
from .low_latency_calls import LowLatencyCalls

__all__ = ["Buffer"]

_Pair = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
_Event = Optional[EventOverlap]


class Buffer(LowLatencyCalls):
    """Takes tokens to the ranks of their experts and back, by the calls of DeepEP's class of this
    name. All calls but ``get_dispatch_layout`` are collective, and so is making one.

    Rows come by source rank, then token. Symmetric memory is taken by the first call of each kind.

    :param group: a process group, a DeviceMesh of one dimension or a ``waybill.World``; one host
    :param num_nvl_bytes: of windows for dispatch and combine, for each kind of payload
    :param num_rdma_bytes: of windows for the low-latency calls, for each kind of payload
    :param low_latency_mode: whether there are low-latency calls
    :param num_qps_per_rank, allow_mnnvl: of a network, of which one host has no use
    """

    num_sms: int = 20  #: of calls without a Config, of all buffers

    @outside_graphs
    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ) -> None:
        self.group = group

        def check() -> dict[str, Any]:
            if group is None or comm is not None:
                raise Unsupported(
                    "Buffer: comm (MPI) is not served, expected a process group in group"
                )
            if flag(enable_shrink, "Buffer: enable_shrink"):
                refuse_masks("Buffer: enable_shrink = True")
            check_network(
                "Buffer",
                num_qps_per_rank,
                allow_nvlink_for_low_latency_mode,
                allow_mnnvl,
                use_fabric,
            )
            self.num_nvl_bytes = _bytes(num_nvl_bytes, "Buffer: num_nvl_bytes")
            self.num_rdma_bytes = _bytes(num_rdma_bytes, "Buffer: num_rdma_bytes")
            self.low_latency_mode = flag(low_latency_mode, "Buffer: low_latency_mode")
            self.explicitly_destroy = flag(explicitly_destroy, "Buffer: explicitly_destroy")
            return {
                "num_nvl_bytes": self.num_nvl_bytes, "num_rdma_bytes": self.num_rdma_bytes,
                "low_latency_mode": self.low_latency_mode,
                "explicitly_destroy": self.explicitly_destroy,
            }  # fmt: skip

        world = agreed_world(lambda: world_of(group, None, None, "Buffer"), "Buffer", check)
        self.rank, self.group_size = world.rank, world.world_size
        self.enable_shrink = False
        self._layers: Optional[Layers] = Layers(world, "Buffer")
        self._queue = self._layers.queue
        self._many = Intranode(world, self._layers, self.num_nvl_bytes)
        self._few = LowLatency(world, self._layers, self.num_rdma_bytes)

    @outside_graphs
    def destroy(self) -> None:
        """Collective: gives all symmetric memory back."""
        if not self.explicitly_destroy:
            raise InvalidArgument(
                "Buffer.destroy: the buffer was made with explicitly_destroy = False, expected True"
            )
        layers, self._layers = self._layers, None
        if layers is not None:
            layers.finalize()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether float8 rows are served: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors of calls without a Config; an even number."""
        number = int64(new_num_sms, "Buffer.set_num_sms: new_num_sms")
        if number < 2 or number % 2 != 0:
            raise InvalidArgument(f"Buffer.set_num_sms: {number}, expected an even number >= 2")
        Buffer.num_sms = number

    @staticmethod
    @outside_graphs
    def capture() -> EventOverlap:
        """An event behind what torch's current stream has."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The least ``num_rdma_bytes`` for low-latency calls of these sizes."""
        return ll_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Settings of a dispatch."""
        del num_ranks
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Settings of a combine."""
        del num_ranks
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """The stream that calls run on; None in host memory."""
        return self._queue.stream

    @outside_graphs
    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: _Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where this rank's tokens go: (tokens for each rank [ranks] int32, None, topk slots of
        each expert [num_experts] int32, [tokens, ranks] whether a token goes to a rank, event).

        :param topk_idx: [tokens, topk] int64 or int32; -1 is no expert
        """
        who = "Buffer.get_dispatch_layout"
        experts = int64(num_experts, f"{who}: num_experts")
        if experts < 1 or experts % self.group_size != 0:
            raise InvalidArgument(
                f"{who}: num_experts = {experts} on rank {self.rank}, expected a multiple of"
                f" {self.group_size} ranks"
            )
        ids = checked_ids(topk_idx, who, self.rank, self._queue.device)
        if self._queue.device.type == "cpu":
            first_wrong(ids, experts, who, self.rank)
        (tokens, choices, inside), event = self._queue.run(
            lambda: counts_of(ids, experts, self.group_size), [ids], list, previous_event,
            async_finish, allocate_on_comm_stream,
        )  # fmt: skip
        return tokens, None, choices, inside, event

    @outside_graphs
    @torch.no_grad()
    def dispatch(
        self,
        x: _Pair,
        handle: Optional[DispatchHandle] = None,
        num_tokens_per_rank: Optional[torch.Tensor] = None,
        num_tokens_per_rdma_rank: Optional[torch.Tensor] = None,
        is_token_in_rank: Optional[torch.Tensor] = None,
        num_tokens_per_expert: Optional[torch.Tensor] = None,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: _Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[Any, Any, Any, Optional[List[int]], Optional[DispatchHandle], EventOverlap]:
        """(rows, ids among this rank's experts (-1 elsewhere), their weights (0 elsewhere), tokens
        of each local expert, handle, event). With a handle its routing is used again, and only rows
        and event are given.

        :param x: [tokens, hidden] bfloat16, or (float8_e4m3fn, scales [tokens, hidden / 128])
        :param expert_alignment: the counts in the list are rounded up to a multiple
        :param num_worst_tokens: rows of the results, the same on all ranks; the host waits for
            nothing, the list is empty, and what lies behind the rows that came has ids -1
        """
        del num_tokens_per_rdma_rank
        who = "Buffer.dispatch"
        self._alive(who)
        rows, scales = self._many.checked(x, who)
        sms = self._sms(config)
        if handle is not None:
            self._check_again(handle, rows, topk_idx, topk_weights)
            (out, out_scales), event = self._queue.run(
                lambda: self._many.again(rows, scales, handle, sms), [rows, scales], list,
                previous_event, async_finish, allocate_on_comm_stream,
            )  # fmt: skip
            return _pair(out, out_scales), None, None, None, None, event
        if num_tokens_per_rank is not None:
            name, shape = f"{who}: num_tokens_per_rank", (self.group_size,)
            kinds = (torch.int32, torch.int64)
            check_table(num_tokens_per_rank, name, shape, kinds, self.rank, self._queue.device)
        alignment, worst = self._check_room(rows, expert_alignment, num_worst_tokens)
        route = self._many.route(
            rows.shape[0], is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, who
        )
        got, event = self._queue.run(
            lambda: self._many.dispatch(rows, scales, route, alignment, worst, sms),
            [rows, scales, *route], Received.tensors, previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip
        found = _pair(got.x, got.scales), got.topk_idx, got.topk_weights
        return (*found, got.counts, got.handle, event)

    def _check_again(
        self, handle: Any, rows: torch.Tensor, topk_idx: Any, topk_weights: Any
    ) -> None:
        who = "Buffer.dispatch"
        self._check_handle(handle, who)
        if topk_idx is not None or topk_weights is not None:
            raise InvalidArgument(
                f"{who}: topk_idx or topk_weights of rank {self.rank} with a handle, expected one"
                " or the other"
            )
        if rows.shape[0] != handle.ids.shape[0]:
            raise InvalidArgument(
                f"{who}: x of rank {self.rank} has {rows.shape[0]} tokens, expected"
                f" {handle.ids.shape[0]}, as in the dispatch of the handle"
            )

    def _check_room(
        self, rows: torch.Tensor, expert_alignment: Any, num_worst_tokens: Any
    ) -> Tuple[int, int]:
        who = "Buffer.dispatch"
        alignment = int64(expert_alignment, f"{who}: expert_alignment")
        worst = int64(num_worst_tokens, f"{who}: num_worst_tokens")
        least = self.group_size * rows.shape[0]
        if alignment < 1 or (worst != 0 and worst < least):
            raise InvalidArgument(
                f"{who}: expert_alignment = {alignment}, num_worst_tokens = {worst} on rank"
                f" {self.rank}, expected >= 1, and 0 or at least {least}: all tokens of all ranks"
            )
        return alignment, worst

    @outside_graphs
    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None] = None,
        config: Optional[Config] = None,
        previous_event: _Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """(sums of the rows of each token [tokens, hidden], sums of their weights, event): in
        float32, biases first, then by rank, rounded once.

        :param x: [rows, hidden] bfloat16, in the order of the dispatch
        :param topk_weights: [rows, topk] float32
        :param bias: one or two [tokens, hidden]
        """
        who = "Buffer.combine"
        self._alive(who)
        self._check_handle(handle, who)
        kinds = (torch.bfloat16,)
        hidden = next(key.hidden for key in handle.layouts if key.kind != "floats")
        place = (self.rank, self._queue.device)
        check_table(x, f"{who}: x", (handle.rows_out, hidden), kinds, *place)
        biases = biases_of(bias, who, self.rank)
        for one in biases:
            check_table(one, f"{who}: bias", (handle.ids.shape[0], hidden), kinds, *place)
        if topk_weights is not None:
            shape, kinds = weights_shape(topk_weights, handle.rows_out), (torch.float32,)
            check_table(topk_weights, f"{who}: topk_weights", shape, kinds, *place)
        sms = self._sms(config)
        (sums, weights), event = self._queue.run(
            lambda: self._many.combine(x, handle, topk_weights, biases, sms),
            [x, topk_weights, *biases], list, previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip
        return sums, weights, event

    def internode_dispatch(self, *_: Any, **__: Any) -> NoReturn:
        """Several nodes are not served."""
        raise Unsupported("Buffer.internode_dispatch: expected ranks of one host, and dispatch")

    def internode_combine(self, *_: Any, **__: Any) -> NoReturn:
        """Several nodes are not served."""
        raise Unsupported("Buffer.internode_combine: expected ranks of one host, and combine")

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> NoReturn:
        """Symmetric memory has no face of its own."""
        raise Unsupported("Buffer.get_local_buffer_tensor: the windows have a layout of their own")

    def _check_handle(self, handle: Any, who: str) -> None:
        if not isinstance(handle, DispatchHandle) or handle._owner is not self._many:
            raise InvalidArgument(
                f"{who}: handle of rank {self.rank} is of another buffer, or none, expected one"
                " that dispatch of this buffer gave"
            )


def _pair(x: torch.Tensor, scales: Optional[torch.Tensor]) -> _Pair:
    return x if scales is None else (x, scales)


def _bytes(value: Any, name: str) -> int:
    number = int64(value, name)
    if number < 0:
        raise InvalidArgument(f"{name} = {number}, expected >= 0")
    return number
