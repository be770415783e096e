"""Dispatch and combine for few tokens: a fixed place for each row that may come."""

from __future__ import annotations

from typing import Any, NoReturn, Optional

import torch

from ...errors import InvalidArgument, Unsupported
from .arguments import COUNTS, Call, ll_bytes, packed, powers_of_two
from .handles import LayerKey, Layers, LowLatencyHandle, Received


class LowLatency:
    """The part of a buffer whose windows ``num_rdma_bytes`` counts."""

    def __init__(self, layers: Layers, num_rdma_bytes: int) -> None:
        self.rank, self.num_ranks, self.device = layers.rank, layers.num_ranks, layers.device
        self._layers, self._bytes = layers, num_rdma_bytes
        self.queue = layers.queue

    def checked(
        self, x: Any, topk_idx: Any, num_max_tokens: int, num_experts: int, kind: str,
        multiple: int, call: Call,
    ) -> LayerKey:  # fmt: skip
        """The layer for these arguments, all of which are looked at.

        :param kind: payload
        :param multiple: of it are the columns
        """
        who, place = call.who, f"{call.who}: x of rank {self.rank}"
        is_table = isinstance(x, torch.Tensor) and x.ndim == 2
        rows = call.table(
            "x", x, tuple(x.shape) if is_table else ("num_tokens", "hidden"), torch.bfloat16
        )
        tokens, hidden = rows.shape
        needed = ll_bytes(num_max_tokens, hidden, self.num_ranks, num_experts, who)
        if tokens > num_max_tokens:
            raise InvalidArgument(
                f"{place} has {tokens} tokens, expected at most num_max_dispatch_tokens_per_rank ="
                f" {num_max_tokens}"
            )
        if needed > self._bytes:
            raise InvalidArgument(
                f"{who}: num_rdma_bytes = {self._bytes} of the buffer, expected at least {needed}"
                f" for {num_max_tokens} tokens of {hidden} and {num_experts} experts:"
                " get_low_latency_rdma_size_hint says it"
            )
        if hidden % multiple != 0:
            raise InvalidArgument(
                f"{place} has {hidden} columns, expected a multiple of {multiple}"
            )
        ids = call.ids(topk_idx, num_experts, tokens)
        call.not_too_many(ids, num_experts, num_max_tokens)
        per_token = min(ids.shape[1], num_experts // self.num_ranks)
        return LayerKey(
            kind, hidden, num_max_tokens, num_experts, ids.shape[1],
            self.num_ranks * num_max_tokens * per_token, max_per_expert=num_max_tokens,
        )  # fmt: skip

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, key: LayerKey, packs: bool, num_sms: int
    ) -> Received:
        """Collective. The host waits for nothing. ``packs``: UE8M0 scales come four in an int32,
        not as float32.
        """
        # Combine brings the weights, which take this place.
        later = torch.zeros(topk_idx.shape, dtype=torch.float32, device=self.device)
        layer = self._layers.get(key, num_sms)
        layout: Any
        arrived, _, layout = layer.dispatch(x, topk_idx, later)
        slots = self._slots(layout, key, arrived.shape[0])
        handle = LowLatencyHandle(self, layout, slots, key)
        if self.device.type == "cpu":
            handle.ids = topk_idx.clone()
        out = _spread(arrived, handle)
        recv_scales = None
        if key.kind != "plain":
            recv_scales = layout.recv_scales
            if recv_scales.dtype != torch.float32:
                recv_scales = (packed if packs else powers_of_two)(recv_scales)
            recv_scales = _columns_first(_spread(recv_scales, handle))
        counts = layout.recv_expert_counts.clone()
        return Received(out, recv_scales, None, None, counts, handle)

    def _slots(self, layout: Any, key: LayerKey, num_rows: int) -> torch.Tensor:
        """Each row's place in [local experts * slots]; after them for what is no row."""
        offsets = layout.recv_expert_offsets.to(torch.int64)
        num_local, size = offsets.shape[0] - 1, self.num_ranks * key.max_tokens
        rows = torch.arange(num_rows, dtype=torch.int64, device=self.device)
        expert = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
        place = rows - offsets[expert.clamp(max=num_local - 1)]
        live = (expert < num_local) & (place < size)
        return torch.where(live, expert * size + place, num_local * size)

    def combine(
        self, x: Optional[torch.Tensor], topk_weights: torch.Tensor, handle: LowLatencyHandle,
        out: Optional[torch.Tensor], num_sms: int,
    ) -> torch.Tensor:  # fmt: skip
        """Collective: weighted sums in float32, rounded once. None is the handle's own buffer."""
        layer = self._layers.get(handle.key, num_sms)
        rows = handle.buffer if x is None else x
        assert rows is not None
        flat = rows.reshape(-1, handle.key.hidden)
        place = layer.combine_input(handle.slots.shape[0])
        live = handle.slots.clamp(max=flat.shape[0] - 1)
        torch.index_select(flat, 0, live, out=place)
        if topk_weights.shape[0] > 0:
            held = handle.layout._table("weights").view(torch.float32)
            held.copy_(topk_weights)
        sums = layer.combine(place, handle.layout, weighted=True)
        return sums if out is None else out.copy_(sums)

    def combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[local experts, slots, hidden] for ``zero_copy``."""
        if handle.buffer is None:
            handle.buffer = torch.empty(
                handle.num_local, handle.num_slots, handle.key.hidden, dtype=torch.bfloat16,
                device=self.device,
            )  # fmt: skip
        return handle.buffer

    def own_handle(self, handle: Any, call: Call) -> LowLatencyHandle:
        """The handle, if it is of this buffer."""
        is_own = isinstance(handle, LowLatencyHandle) and handle._owner is self
        call.own_handle(is_own, "low_latency_dispatch")
        return handle

    def check_combine(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, zero_copy: bool, out: Any,
        call: Call,
    ) -> None:  # fmt: skip
        """All arguments of a combine."""
        handle = self.own_handle(handle, call)
        hidden = handle.key.hidden
        if not zero_copy:
            call.table("x", x, (handle.num_local, handle.num_slots, hidden), torch.bfloat16)
        elif handle.buffer is None:
            raise InvalidArgument(
                f"{call.who}: zero_copy = True on rank {self.rank}, but nobody asked for"
                " get_next_low_latency_combine_buffer(handle)"
            )
        tokens = handle.layout.num_dispatch_token_cur_rank
        choices = (tokens, handle.key.topk)
        call.table("topk_idx", topk_idx, choices, *COUNTS)
        call.table("topk_weights", topk_weights, choices, torch.float32)
        if handle.ids is not None and not torch.equal(handle.ids, topk_idx.to(handle.ids.dtype)):
            raise InvalidArgument(
                f"{call.who}: topk_idx of rank {self.rank} is another than in the dispatch of the"
                " handle"
            )
        if out is not None:
            call.table("out", out, (tokens, hidden), torch.bfloat16)


def _spread(rows: torch.Tensor, handle: LowLatencyHandle) -> torch.Tensor:
    """[local experts, slots, columns]: rows at their places, nothing written elsewhere."""
    size = handle.num_local * handle.num_slots
    bits = rows.view(torch.int64) if rows.dtype == torch.float8_e4m3fn else rows
    out = bits.new_empty(size + 1, bits.shape[1])
    out.index_copy_(0, handle.slots, bits)
    return out[:size].view(rows.dtype).view(handle.num_local, handle.num_slots, -1)


def _columns_first(table: torch.Tensor) -> torch.Tensor:
    """The table with the slots of a column side by side in memory."""
    return table.transpose(1, 2).contiguous().transpose(1, 2)


def refuse_masks(who: str) -> NoReturn:
    """Ranks cannot be left out of calls."""
    raise Unsupported(
        f"{who}: ranks cannot be masked: a rank that does not come is a Timeout that names it, and"
        " ends the layers of the buffer; make a group of the ranks that are left, and a buffer of"
        " it"
    )


def refuse_waits(given: Any, name: str, who: str) -> None:
    """Nothing measures how long a rank was waited for."""
    if given is not None:
        raise Unsupported(f"{who}: {name} is not measured, expected None")
