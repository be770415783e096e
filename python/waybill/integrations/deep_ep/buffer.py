"""``deep_ep.Buffer`` on EPAll2AllLayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, NoReturn, Optional, Tuple, Union

import torch

from ..._arrays import count, flag, instance, int64
from ..._graphs import outside_graphs
from ..._lifetime import OfThisProcess
from ...errors import InvalidArgument, Unsupported
from ...moe.payloads import payload_of
from ...torch.world import world_of
from ...world import agreed_world
from .arguments import COUNTS, Config, check_network, counts_of, ll_bytes
from .events import EventHandle, EventOverlap
from .handles import DispatchHandle, Layers, LowLatencyHandle, Received
from .intranode import Intranode
from .low_latency import LowLatency, refuse_masks, refuse_waits

_Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
_Pair = _Rows
_Hook = Optional[Callable[[], None]]
_Event = Optional[EventOverlap]


class Buffer(OfThisProcess):
    """Takes tokens to the ranks of their experts and back, by the calls of DeepEP's class of this
    name. All calls but ``get_dispatch_layout`` are collective, and so is making one.

    Rows come by source rank, then token. Symmetric memory is taken by the first call of each kind.

    :param group: a process group, a DeviceMesh of one dimension or a ``waybill.World``; one host
    :param num_nvl_bytes: of windows for dispatch and combine, for each kind of payload
    :param num_rdma_bytes: of windows for the low-latency calls, for each kind of payload
    :param low_latency_mode: whether there are low-latency calls
    :param num_qps_per_rank, allow_mnnvl: of a network, of which one host has no use
    """

    _why_not_copied = "buffers that other ranks write to: make one on each rank's group"
    rank: int
    num_sms: int = 20  #: for calls without a Config, of all buffers

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
                num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric
            )
            self.num_nvl_bytes = count(num_nvl_bytes, "Buffer: num_nvl_bytes")
            self.num_rdma_bytes = count(num_rdma_bytes, "Buffer: num_rdma_bytes")
            self.low_latency_mode = flag(low_latency_mode, "Buffer: low_latency_mode")
            self.explicitly_destroy = flag(explicitly_destroy, "Buffer: explicitly_destroy")
            names = ("num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "explicitly_destroy")
            return {name: getattr(self, name) for name in names}

        world = agreed_world(lambda: world_of(group, None, None, "Buffer"), "Buffer", check)
        self.rank, self.group_size = world.rank, world.world_size
        self.enable_shrink = False
        self._layers = Layers(world, "Buffer")
        self._queue = self._layers.queue
        self._many = Intranode(self._layers, self.num_nvl_bytes)
        self._few = LowLatency(self._layers, self.num_rdma_bytes)

    @outside_graphs
    def destroy(self) -> None:
        """Collective: gives all symmetric memory back."""
        self._layers.destroy(self.explicitly_destroy)

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
        """An event after the work that torch's current stream has."""
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
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Settings of a combine."""
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
        call = self._layers.call("get_dispatch_layout")
        experts = int64(num_experts, f"{call.who}: num_experts")
        ids = call.ids(topk_idx, call.experts(experts, self.group_size))
        (tokens, choices, inside), event = self._queue.run(
            lambda: counts_of(ids, experts, self.group_size), [ids], previous_event,
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

        :param x: [tokens, hidden] bfloat16, or (rows, scales) of a format with a scale per group:
            float8_e4m3fn with float32 for each 128, or float8 with UE8M0 for each 128 or 32, which
            are float8_e8m0fnu or come four in an int32
        :param expert_alignment: the counts in the list are rounded up to a multiple
        :param num_worst_tokens: rows of the results, the same on all ranks; the host waits for
            nothing, the list is empty, and rows after those that came have ids -1
        """
        call = self._layers.call("dispatch")
        rows = call.rows(x)
        self._many.check_room(rows.x, call)
        sms = self._sms(config)
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            call.own_handle(self._is_own(handle))
            if topk_idx is not None or topk_weights is not None:
                raise InvalidArgument(
                    f"{call.who}: topk_idx or topk_weights of rank {self.rank} with a handle,"
                    " expected one or the other"
                )
            call.same_tokens(rows.x, handle.ids.shape[0])
            got, event = self._queue.run(
                lambda: self._many.again(rows, handle, sms), [rows.x, rows.scales], *streams
            )
            return got.rows, None, None, None, None, event
        if num_tokens_per_rank is not None:
            call.table("num_tokens_per_rank", num_tokens_per_rank, (self.group_size,), *COUNTS)
        alignment, worst = self._check_room(rows.x, expert_alignment, num_worst_tokens)
        self._many.check_route(
            rows.x.shape[0], is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, call
        )
        assert is_token_in_rank is not None and num_tokens_per_expert is not None  # now looked at
        got, event = self._queue.run(
            lambda: self._many.dispatch(
                rows, self._many.handle(is_token_in_rank), num_tokens_per_expert, topk_idx,
                topk_weights, alignment, worst, sms,
            ),
            [
                rows.x, rows.scales, is_token_in_rank, num_tokens_per_expert, topk_idx,
                topk_weights,
            ],
            *streams,
        )  # fmt: skip
        return got.rows, got.topk_idx, got.topk_weights, got.counts, got.handle, event

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
        call = self._layers.call("combine")
        call.own_handle(self._is_own(handle))
        shape = (handle.rows_out, handle.key.hidden)
        biases = call.rows_and_biases(x, bias, shape, handle.ids.shape[0])
        call.weights(topk_weights, handle.rows_out)
        sms = self._sms(config)
        (sums, weights), event = self._queue.run(
            lambda: self._many.combine(x, handle, topk_weights, biases, sms),
            [x, topk_weights, *biases], previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip
        return sums, weights, event

    @outside_graphs
    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Tuple[_Rows, torch.Tensor, LowLatencyHandle, EventOverlap, _Hook]:
        """(rows, or rows and scales; rows of each local expert [experts] int32; handle, event,
        hook). Rows are [experts, ranks * num_max_dispatch_tokens_per_rank, hidden]: those of an
        expert by source rank, then token, then topk slot; after them nothing is written. The
        results are the caller's: any number of them may be kept.

        :param cumulative_local_expert_recv_stats: [experts] int32, to which the counts are added
        :param round_scale: the format is "float8_ue8m0", not "float8"; its scales come as float32,
            or with use_ue8m0 as they are, four in an int32
        :param return_recv_hook: the rows are there when the hook was called
        """
        call = self._layers.call("low_latency_dispatch")
        who = call.who
        if not self.low_latency_mode:
            raise InvalidArgument(
                f"{who}: the buffer was made with low_latency_mode = False, expected True"
            )
        refuse_waits(dispatch_wait_recv_cost_stats, "dispatch_wait_recv_cost_stats", who)
        use_fp8, round_scale = (
            flag(use_fp8, f"{who}: use_fp8"),
            flag(round_scale, f"{who}: round_scale"),
        )
        use_ue8m0 = flag(use_ue8m0, f"{who}: use_ue8m0")
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise InvalidArgument(
                f"{who}: use_ue8m0 = True with use_fp8 = {use_fp8}, round_scale = {round_scale},"
                " expected both"
            )
        kind = "plain" if not use_fp8 else "float8_ue8m0" if round_scale else "float8"
        multiple = payload_of(kind, who, 0).group * (4 if use_ue8m0 else 1) if use_fp8 else 1
        most = int64(num_max_dispatch_tokens_per_rank, f"{who}: num_max_dispatch_tokens_per_rank")
        experts = int64(num_experts, f"{who}: num_experts")
        key = self._few.checked(x, topk_idx, most, experts, kind, multiple, call)
        stats = cumulative_local_expert_recv_stats
        call.stats(stats, experts // self.group_size)

        def body() -> Received:
            got = self._few.dispatch(x, topk_idx, key, use_ue8m0, self.num_sms)
            if stats is not None:
                stats.add_(got.counts)
            return got

        given = [x, topk_idx, stats]
        got, event, hook = self._run(body, given, async_finish, return_recv_hook, who)
        return got.rows, got.counts, got.handle, event, hook

    @outside_graphs
    @torch.no_grad()
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[torch.Tensor] = None,
        combine_wait_recv_cost_stats: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, EventOverlap, _Hook]:
        """(sums of the rows of each token, each times its weight [tokens, hidden]; event; hook): in
        float32, in the order of the topk slots, rounded once.

        :param x: [experts, slots, hidden] bfloat16, as dispatch gave them
        :param topk_idx: that of the dispatch
        :param use_logfmt: accepted; rows travel as bfloat16, which loses less
        :param zero_copy: the rows are those of ``get_next_low_latency_combine_buffer(handle)``
        :param out: where the sums are written
        """
        call = self._layers.call("low_latency_combine")
        who = call.who
        refuse_waits(combine_wait_recv_cost_stats, "combine_wait_recv_cost_stats", who)
        zero_copy = flag(zero_copy, f"{who}: zero_copy")
        self._few.check_combine(x, topk_idx, topk_weights, handle, zero_copy, out, call)
        rows = None if zero_copy else x
        sums, event, hook = self._run(
            lambda: self._few.combine(rows, topk_weights, handle, out, self.num_sms),
            [rows, topk_weights, out, handle.buffer], async_finish,
            return_recv_hook, who,
        )  # fmt: skip
        return sums, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[experts, slots, hidden] bfloat16 that a combine with ``zero_copy`` reads."""
        call = self._layers.call("get_next_low_latency_combine_buffer")
        return self._few.combine_buffer(self._few.own_handle(handle, call))

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing has to be zero before a call: does nothing."""
        self._layers.call("clean_low_latency_buffer")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> NoReturn:
        """Unsupported."""
        refuse_masks("Buffer.low_latency_update_mask_buffer")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> NoReturn:
        """Unsupported."""
        refuse_masks("Buffer.low_latency_query_mask_buffer")

    def low_latency_clean_mask_buffer(self) -> NoReturn:
        """Unsupported."""
        refuse_masks("Buffer.low_latency_clean_mask_buffer")

    def _run(
        self, body: Any, given: Any, async_finish: bool, with_hook: bool, who: str
    ) -> Tuple[Any, EventOverlap, _Hook]:
        async_finish = flag(async_finish, f"{who}: async_finish")
        with_hook = flag(with_hook, f"{who}: return_recv_hook")
        if async_finish and with_hook:
            raise InvalidArgument(
                f"{who}: async_finish and return_recv_hook on rank {self.rank}, expected one of"
                " them"
            )
        wait = async_finish or with_hook
        got, event = self._queue.run(body, given, None, wait)
        if with_hook:
            return got, EventOverlap(), event.current_stream_wait
        return got, event, None

    def _sms(self, config: Optional[Config]) -> int:
        if config is None:
            return self.num_sms
        instance(config, Config, f"Buffer: config of rank {self.rank}", "a Config")
        return config.num_sms

    def internode_dispatch(self, *_: Any, **__: Any) -> NoReturn:
        """Several nodes are not served."""
        raise Unsupported("Buffer.internode_dispatch: ranks are of one host: call dispatch")

    def internode_combine(self, *_: Any, **__: Any) -> NoReturn:
        """Several nodes are not served."""
        raise Unsupported("Buffer.internode_combine: ranks are of one host: call combine")

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> NoReturn:
        """Symmetric memory has no face of its own."""
        raise Unsupported("Buffer.get_local_buffer_tensor: the windows have a layout of their own")

    def _is_own(self, handle: Any) -> bool:
        return isinstance(handle, DispatchHandle) and handle._owner is self._many
