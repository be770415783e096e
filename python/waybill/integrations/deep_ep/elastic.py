"""``deep_ep.ElasticBuffer``: dispatch and combine of experts."""

from __future__ import annotations

from typing import Any, Dict, List, NoReturn, Optional, Tuple, Union

import torch

from ..._arrays import converted, count, flag, int64
from ..._graphs import outside_graphs
from ..._lifetime import OfThisProcess
from ...errors import InvalidArgument, Unsupported
from ...torch.world import world_of
from ...world import World, agree_on
from .arguments import Call, check_timeout, columns_first, elastic_bytes
from .buffer import Buffer, _Rows
from .elastic_rows import Compact, EPHandle, Expanded
from .events import EventHandle, EventOverlap, handle_of
from .handles import Layers, Received

_NOT_EXPERTS = (
    "all_gather", "agrs_get_inplace_tensor", "agrs_new_session", "agrs_set_config",
    "create_agrs_session", "destroy_agrs_session", "engram_fetch", "engram_write",
    "get_agrs_buffer_size_hint", "get_agrs_num_max_session_bytes",
    "get_engram_storage_size_hint", "get_pp_buffer_size_hint", "pp_recv", "pp_send",
    "pp_set_config",
)  # fmt: skip


class ElasticBuffer(OfThisProcess):
    """Takes tokens to the ranks of their experts and back, by the calls of DeepEP's class of this
    name; what that has beyond experts is ``Unsupported``. One host. Two runs give the same bits.

    :param group: a process group, a DeviceMesh of one dimension or a ``waybill.World``
    :param num_bytes: of windows; None: what ``get_buffer_size_hint`` says for the sizes that follow
    :param num_max_tokens_per_rank: of calls that say none
    :param num_cpu_timeout_secs, num_gpu_timeout_secs: None, or at least the World's deadline, which
        holds

    What the other options allow or prefer is as it is with any of their values: two runs give the
    same bits, and one host has no network whose queue pairs and service level could be chosen.
    """

    _why_not_copied = "buffers that other ranks write to: make one on each rank's group"

    @outside_graphs
    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: Optional[int] = None,
        num_gpu_timeout_secs: Optional[int] = None,
        explicitly_destroy: bool = False,
    ) -> None:
        given, who = locals(), "ElasticBuffer"
        self.group = group

        def check(world: World) -> dict[str, Any]:
            if int64(num_cpu_bytes, f"{who}: num_cpu_bytes") != 0:
                raise Unsupported(f"{who}: num_cpu_bytes = {num_cpu_bytes}, expected 0")
            made = converted(
                who, given, (count, "num_max_tokens_per_rank hidden num_topk sl_idx"),
                (count, "num_allocated_qps"), (flag, "use_fp8_dispatch deterministic"),
                (flag, "prefer_overlap_with_compute allow_hybrid_mode explicitly_destroy"),
                (flag, "allow_multiple_reduction"),
            )  # fmt: skip
            self.num_max_tokens_per_rank: int = made["num_max_tokens_per_rank"]
            self.allow_hybrid_mode: bool = made["allow_hybrid_mode"]
            self.allow_multiple_reduction: bool = made["allow_multiple_reduction"]
            self.explicitly_destroy: bool = made["explicitly_destroy"]
            check_timeout(num_cpu_timeout_secs, f"{who}: num_cpu_timeout_secs", world)
            check_timeout(num_gpu_timeout_secs, f"{who}: num_gpu_timeout_secs", world)
            if num_bytes is None:
                sizes = (self.num_max_tokens_per_rank, made["hidden"])
                self.num_bytes = elastic_bytes(world.world_size, *sizes)
            else:
                self.num_bytes = count(num_bytes, f"{who}: num_bytes")
            return {
                "num_bytes": self.num_bytes,
                "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
                "explicitly_destroy": self.explicitly_destroy,
            }

        world = world_of(group, None, None, who)
        agree_on(world, who, lambda: check(world))
        self.rank_idx, self.num_ranks = world.rank, world.world_size
        self.num_scaleout_ranks, self.scaleout_rank_idx = 1, 0
        self.num_scaleup_ranks, self.scaleup_rank_idx = world.world_size, world.rank
        self.num_rdma_ranks, self.num_nvlink_ranks = 1, world.world_size
        self.num_allocated_qps = 0
        self._world = world
        self._layers = Layers(world, who)
        self._queue = self._layers.queue
        self._parts: Dict[Tuple[bool, int, int, int], Any] = {}

    @outside_graphs
    def destroy(self) -> None:
        """Collective: gives all symmetric memory back."""
        self._layers.destroy(self.explicitly_destroy)

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes for calls of these sizes, where all tokens may come to one rank. Expanded rows take
        as many more as a token has topk slots.
        """
        size = getattr(group, "world_size", None) or getattr(group, "size", None)
        if size is None:
            raise InvalidArgument(
                f"ElasticBuffer.get_buffer_size_hint: group is a {type(group).__name__}, expected a"
                " process group, a DeviceMesh or a World"
            )
        return elastic_bytes(size() if callable(size) else size, num_max_tokens_per_rank, hidden)

    @staticmethod
    @outside_graphs
    def capture() -> EventHandle:
        """An event after the work that torch's current stream has."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream that calls run on; None in host memory."""
        return self._queue.stream

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """Ranks over a network, and ranks of a host."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """Ranks over a network, and ranks of a host: as get_physical_domain_size."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: Any, num_topk: Any, *_: Any, **__: Any) -> int:
        """``Buffer.num_sms``."""
        return Buffer.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: nothing goes over a network."""
        return 0

    @outside_graphs
    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Collective: returns when all ranks have called and the work of their streams is done."""
        if self._queue.device.type == "cuda":
            torch.cuda.synchronize(self._queue.device)
        self._world.barrier()

    @outside_graphs
    @torch.no_grad()
    def dispatch(
        self,
        x: _Rows,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Optional[EventHandle] = None,
        previous_event_before_epilogue: Optional[EventHandle] = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Tuple[_Rows, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap]:
        """(rows, ids among this rank's experts, weights, handle, event). Compact: a row for each
        token, by source rank and token, ids [rows, topk] (-1 elsewhere). With ``do_expand`` a row
        for each topk slot, by expert, source rank, token, topk slot, padded with zeros to
        ``expert_alignment``; weights [rows], no ids.

        :param do_cpu_sync: results of the size that comes, for which the host waits; False: of the
            worst case, and counts on the device alone
        :param use_tma_aligned_col_major_sf: scales have the rows of a column side by side, each
            column aligned to 16 bytes
        """
        call = self._layers.call("dispatch")
        who = call.who
        rows = call.rows(x)
        waits = flag(async_with_compute_stream, f"{who}: async_with_compute_stream")
        if do_cpu_sync is not None:
            do_cpu_sync = flag(do_cpu_sync, f"{who}: do_cpu_sync")
        stats = cumulative_local_expert_recv_stats
        by_columns = flag(use_tma_aligned_col_major_sf, f"{who}: use_tma_aligned_col_major_sf")

        def ordered(made: Received) -> Received:
            if made.scales is None or not by_columns:
                return made
            return made._replace(scales=columns_first(made.scales))

        if handle is not None:
            call.own_handle(self._is_own(handle))
            if topk_idx is not None or do_cpu_sync:
                raise InvalidArgument(
                    f"{who}: topk_idx, or do_cpu_sync = True, of rank {self.rank_idx} with a handle"
                )
            call.same_tokens(rows.x, handle.topk_idx.shape[0])
            call.weights(topk_weights, *handle.topk_idx.shape)
            handle.part.check(rows.x, handle.topk_idx, call)
            self._wait(previous_event_before_epilogue, who)
            got, event = self._queue.run(
                lambda: ordered(handle.part.again(rows, handle, topk_weights)),
                [rows.x, rows.scales, topk_weights, handle.topk_idx], previous_event, waits,
            )  # fmt: skip
            return got.rows, got.topk_idx, got.topk_weights, handle, event
        part = self._part(num_experts, num_max_tokens_per_rank, expert_alignment, do_expand, call)
        ids = call.ids(topk_idx, part.num_experts, rows.x.shape[0])
        call.weights(topk_weights, *ids.shape)
        part.check(rows.x, ids, call)
        call.stats(stats, part.num_experts // self.num_ranks)
        copies = flag(do_handle_copy, f"{who}: do_handle_copy")
        sms = int64(num_sms, f"{who}: num_sms") or Buffer.num_sms
        exact = do_cpu_sync is None or do_cpu_sync
        self._wait(previous_event_before_epilogue, who)

        def body() -> Received:
            kept = ids.clone() if copies else ids
            made: Received = part.dispatch(rows, kept, topk_weights, exact, sms)
            if stats is not None:
                stats.add_(made.handle.num_unaligned_recv_tokens_per_expert.to(stats.dtype))
            return ordered(made)

        given: List[Any] = [rows.x, rows.scales, ids, topk_weights, stats]
        got, event = self._queue.run(body, given, previous_event, waits)
        return got.rows, got.topk_idx, got.topk_weights, got.handle, event

    @outside_graphs
    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Optional[EventHandle] = None,
        previous_event_before_epilogue: Optional[EventHandle] = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """(sums of the rows of each token [tokens, hidden], sums of their weights, event): float32,
        biases first, rounded once.

        :param topk_weights: of compact rows [rows, topk]; of expanded ones Unsupported
        """
        call = self._layers.call("combine")
        who = call.who
        call.own_handle(self._is_own(handle))
        biases = handle.part.check_combine(x, handle, topk_weights, bias, call)
        waits = flag(async_with_compute_stream, f"{who}: async_with_compute_stream")
        self._wait(previous_event_before_epilogue, who)
        (sums, weights), event = self._queue.run(
            lambda: handle.part.combine(x, handle, topk_weights, biases),
            [x, topk_weights, *biases], previous_event, waits,
        )  # fmt: skip
        return sums, weights, event

    def __getattr__(self, name: str) -> Any:
        if name not in _NOT_EXPERTS:
            raise AttributeError(f"ElasticBuffer has no {name}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise Unsupported(f"ElasticBuffer.{name}: expected calls of experts alone")

        return refuse

    def _part(
        self, num_experts: Any, max_tokens: Any, alignment: Any, do_expand: Any, call: Call
    ) -> Any:
        """The part that serves calls which ask for rows in this order."""
        who, room = call.who, self.num_max_tokens_per_rank if max_tokens is None else max_tokens
        expands = flag(do_expand, f"{who}: do_expand")
        experts = int64(0 if num_experts is None else num_experts, f"{who}: num_experts")
        most = int64(room, f"{who}: num_max_tokens_per_rank")
        step = int64(1 if alignment is None else alignment, f"{who}: expert_alignment")
        call.experts(experts, self.num_ranks)
        if most < 1 or step < 1:
            raise InvalidArgument(
                f"{who}: num_max_tokens_per_rank = {most}, expert_alignment = {step} on rank"
                f" {self.rank_idx}, expected >= 1"
            )
        key = (expands, experts, most, step)
        if key not in self._parts:
            kind = Expanded if expands else Compact
            self._parts[key] = kind(self._layers, self.num_bytes, experts, most, step)
        return self._parts[key]

    def _is_own(self, handle: Any) -> bool:
        return isinstance(handle, EPHandle) and handle.part in self._parts.values()

    def _wait(self, event: Optional[EventHandle], who: str) -> None:
        handle = handle_of(event, f"{who}: previous_event_before_epilogue")
        if handle is not None:
            handle.stream_wait(self._queue.stream)
