"""The low-latency calls of a Buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Optional, Tuple, Union

import torch

from ..._arrays import flag, int64
from ..._copies import OfThisProcess
from ..._graphs import outside_graphs
from ...errors import InvalidArgument
from .arguments import check_stats
from .config import Config
from .events import EventOverlap, Queue
from .handles import LowLatencyHandle
from .layers import Layers
from .low_latency import Arrived, Format, LowLatency, refuse_masks, refuse_waits

__all__ = ["LowLatencyCalls"]

_Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
_Hook = Optional[Callable[[], None]]


class LowLatencyCalls(OfThisProcess):
    """A part of Buffer."""

    _why_not_copied = "buffers that other ranks write to: make one on each rank's group"
    num_sms: int
    rank: int
    low_latency_mode: bool
    _layers: Optional[Layers]
    _queue: Queue
    _few: LowLatency

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
        expert by source rank, then token, then topk slot; behind them nothing is written. The
        results are the caller's: any number of them may be kept.

        :param cumulative_local_expert_recv_stats: [experts] int32, to which the counts are added
        :param round_scale: scales are powers of two; with use_ue8m0 their exponents, four an int32
        :param return_recv_hook: the rows are there when the hook was called
        """
        who = "Buffer.low_latency_dispatch"
        self._alive(who)
        if not self.low_latency_mode:
            raise InvalidArgument(
                f"{who}: the buffer was made with low_latency_mode = False, expected True"
            )
        refuse_waits(dispatch_wait_recv_cost_stats, "dispatch_wait_recv_cost_stats", who)
        form = Format(
            flag(use_fp8, f"{who}: use_fp8"), flag(round_scale, f"{who}: round_scale"),
            flag(use_ue8m0, f"{who}: use_ue8m0"),
        )  # fmt: skip
        most = int64(num_max_dispatch_tokens_per_rank, f"{who}: num_max_dispatch_tokens_per_rank")
        experts = int64(num_experts, f"{who}: num_experts")
        key = self._few.checked(x, topk_idx, most, experts, form, who)
        stats, device = cumulative_local_expert_recv_stats, self._queue.device
        check_stats(stats, experts // self._few.num_ranks, who, self.rank, device)

        def body() -> Arrived:
            got = self._few.dispatch(x, topk_idx, key, form, self.num_sms)
            if stats is not None:
                stats.add_(got.counts)
            return got

        given = [x, topk_idx, stats]
        got, event, hook = self._run(
            body, given, Arrived.tensors, async_finish, return_recv_hook, who
        )
        rows: _Rows = got.x if got.scales is None else (got.x, got.scales)
        return rows, got.counts, got.handle, event, hook

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
        del use_logfmt
        who = "Buffer.low_latency_combine"
        self._alive(who)
        refuse_waits(combine_wait_recv_cost_stats, "combine_wait_recv_cost_stats", who)
        zero_copy = flag(zero_copy, f"{who}: zero_copy")
        self._few.check_combine(x, topk_idx, topk_weights, handle, zero_copy, out, who)
        rows = None if zero_copy else x
        sums, event, hook = self._run(
            lambda: self._few.combine(rows, topk_weights, handle, out, self.num_sms),
            [rows, topk_weights, out, handle.buffer], lambda got: [got], async_finish,
            return_recv_hook, who,
        )  # fmt: skip
        return sums, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[experts, slots, hidden] bfloat16 that a combine with ``zero_copy`` reads."""
        who = "Buffer.get_next_low_latency_combine_buffer"
        self._alive(who)
        return self._few.combine_buffer(self._few.own_handle(handle, who))

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing has to be zero before a call: does nothing."""
        self._alive("Buffer.clean_low_latency_buffer")
        del num_max_dispatch_tokens_per_rank, hidden, num_experts

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> NoReturn:
        """Unsupported."""
        del rank_to_mask, mask
        refuse_masks("Buffer.low_latency_update_mask_buffer")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> NoReturn:
        """Unsupported."""
        del mask_status
        refuse_masks("Buffer.low_latency_query_mask_buffer")

    def low_latency_clean_mask_buffer(self) -> NoReturn:
        """Unsupported."""
        refuse_masks("Buffer.low_latency_clean_mask_buffer")

    def _run(
        self, body: Any, given: Any, tensors_of: Any, async_finish: bool, with_hook: bool, who: str
    ) -> Tuple[Any, EventOverlap, _Hook]:
        async_finish = flag(async_finish, f"{who}: async_finish")
        with_hook = flag(with_hook, f"{who}: return_recv_hook")
        if async_finish and with_hook:
            raise InvalidArgument(
                f"{who}: async_finish and return_recv_hook on rank {self.rank}, expected one of"
                " them"
            )
        wait = async_finish or with_hook
        got, event = self._queue.run(body, given, tensors_of, None, wait)
        if with_hook:
            return got, EventOverlap(), event.current_stream_wait
        return got, event, None

    def _alive(self, who: str) -> None:
        if self._layers is None:
            raise InvalidArgument(f"{who}: the buffer of rank {self.rank} was destroyed")

    def _sms(self, config: Optional[Config]) -> int:
        if config is None:
            return self.num_sms
        if not isinstance(config, Config):
            raise InvalidArgument(
                f"Buffer: config of rank {self.rank} is a {type(config).__name__}, expected a"
                " Config"
            )
        return config.num_sms
