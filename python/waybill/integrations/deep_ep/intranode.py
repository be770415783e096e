"""Dispatch and combine for many tokens, between the ranks of a host."""

from __future__ import annotations

import zlib
from typing import Any, List, Optional, Sequence, Tuple

import torch

from ..._errors import shown
from ...errors import Disagreement, InvalidArgument
from ...torch._tensors import require_known_ids
from .arguments import COUNTS, WINDOWS, Call, Rows, counts_of, occurrences
from .handles import DispatchHandle, LayerKey, Layers, Received


class Intranode:
    """The part of a buffer whose windows ``num_nvl_bytes`` counts."""

    def __init__(self, layers: Layers, num_nvl_bytes: int, limit: Optional[int] = None) -> None:
        self.rank, self.num_ranks, self.device = layers.rank, layers.num_ranks, layers.device
        self._layers, self._bytes, self._limit = layers, num_nvl_bytes, limit
        self.queue = layers.queue

    def max_tokens(self, hidden: int) -> int:
        """Tokens that a rank may dispatch: as many from each rank fit into the windows."""
        most = min(self._bytes // (WINDOWS * 2 * hidden), 2**31 - 1) // self.num_ranks
        return most if self._limit is None else min(most, self._limit)

    def check_room(self, rows: torch.Tensor, call: Call) -> None:
        """Raises where the windows do not hold so many tokens."""
        most = self.max_tokens(rows.shape[1])
        if not 0 < most >= rows.shape[0]:
            raise InvalidArgument(
                f"{call.who}: x of rank {self.rank} has {rows.shape[0]} tokens of {rows.shape[1]},"
                f" expected at most {most}: num_nvl_bytes = {self._bytes} hold that many of each"
                " rank. Call set_max_tokens, or set WAYBILL_DEEP_EP_MAX_TOKENS, before the bytes"
                " are asked for, on all ranks"
            )

    def check_route(
        self, num_tokens: int, is_token_in_rank: Any, num_tokens_per_expert: Any, topk_idx: Any,
        topk_weights: Any, call: Call,
    ) -> None:  # fmt: skip
        """The arguments of a dispatch that has no handle."""
        place = f"{call.who}: num_tokens_per_expert of rank {self.rank}"
        shape = (num_tokens, self.num_ranks)
        call.table("is_token_in_rank", is_token_in_rank, shape, torch.bool)
        if not isinstance(num_tokens_per_expert, torch.Tensor) or num_tokens_per_expert.ndim != 1:
            raise InvalidArgument(
                f"{place} is {shown(num_tokens_per_expert)}, expected that of get_dispatch_layout"
            )
        experts = num_tokens_per_expert.numel()
        call.table("num_tokens_per_expert", num_tokens_per_expert, (experts,), *COUNTS)
        if experts == 0 or experts % self.num_ranks != 0:
            raise InvalidArgument(
                f"{place} has {experts} entries, expected a multiple of {self.num_ranks} ranks"
            )
        if topk_idx is None:
            if topk_weights is not None:
                raise InvalidArgument(
                    f"{call.who}: topk_weights of rank {self.rank} without topk_idx"
                )
            return
        ids = call.ids(topk_idx, experts, num_tokens)
        call.weights(topk_weights, num_tokens, ids.shape[1])
        if self.device.type == "cpu":
            self._check_layout(ids, is_token_in_rank, experts, call.who)

    def _check_layout(
        self, ids: torch.Tensor, is_token_in_rank: torch.Tensor, experts: int, who: str
    ) -> None:
        """Choices on ranks that their token does not go to would be lost. The host looks."""
        _, _, needed = counts_of(ids, experts, self.num_ranks)
        lost = needed & ~is_token_in_rank
        if bool(lost.any()):
            token, there = (int(place) for place in lost.nonzero()[0])
            raise InvalidArgument(
                f"{who}: is_token_in_rank[{token}, {there}] of rank {self.rank} is False, expected"
                " True, as topk_idx has an expert there: it is of another get_dispatch_layout"
            )

    def dispatch(
        self, x: Rows, handle: DispatchHandle, num_tokens_per_expert: torch.Tensor,
        topk_idx: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor], alignment: int,
        num_worst_tokens: int, num_sms: int,
    ) -> Received:  # fmt: skip
        """Collective. With ``num_worst_tokens`` the host waits for nothing."""
        experts = num_tokens_per_expert.numel()
        num_local = experts // self.num_ranks
        # All ranks must give these alike, as arriving rows are read by them.
        agreed = (
            f"num_experts = {experts},"
            f" num_topk = {None if topk_idx is None else topk_idx.shape[1]},"
            f" topk_weights = {None if topk_weights is None else 'given'}"
        )
        if self._limit is None:
            agreed += f", num_worst_tokens = {num_worst_tokens}"
        rows, recv_scales = self._send(x, handle, num_sms, agreed)
        choices = self._send_choices(topk_idx, topk_weights, handle, num_sms)
        if num_worst_tokens > 0:
            handle.rows_out = num_worst_tokens
        else:
            handle.num_rows = handle.rows_out = handle.layout()._handle.num_recv_rows()
        out, out_scales = _rows(rows, handle.rows_out), _rows(recv_scales, handle.rows_out)
        found, weights = self._local_choices(choices, topk_idx, topk_weights, handle, num_local)
        if num_worst_tokens > 0:
            return Received(out, out_scales, found, weights, [], handle)
        if found is None:
            counts = self._exchange_counts(num_tokens_per_expert, num_sms)
        else:
            counts = _on_host(local_counts(found, num_local))
            if self.device.type != "cpu" and topk_idx is not None:  # the host has waited
                require_known_ids(topk_idx, experts, -1, "Buffer.dispatch: topk_idx", self.rank)
        aligned = [-(-count // alignment) * alignment for count in counts]
        return Received(out, out_scales, found, weights, aligned, handle)

    def handle(
        self, is_token_in_rank: torch.Tensor, ids: Optional[torch.Tensor] = None
    ) -> DispatchHandle:
        """The handle of a dispatch.

        :param ids: [tokens, ranks] the ranks of each token in the order of sums, -1; None: 0..
        """
        if ids is None:
            ranks = torch.arange(self.num_ranks, dtype=torch.int32, device=self.device)
            ids = torch.where(is_token_in_rank, ranks, -1)
        return DispatchHandle(self, is_token_in_rank.clone(), ids)

    def again(self, x: Rows, handle: DispatchHandle, num_sms: int) -> Received:
        """Collective: other rows by the routing of a dispatch."""
        rows, scales = self._send(x, handle, num_sms)
        size = handle.rows_out
        return Received(_rows(rows, size), _rows(scales, size), None, None, None, handle)

    def choices(
        self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: DispatchHandle,
        num_experts: int, num_sms: int,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:  # fmt: skip
        """Collective: ids and weights by the routing of a dispatch."""
        given = (topk_idx, topk_weights, handle)
        sent = self._send_choices(*given, num_sms)
        return self._local_choices(sent, *given, num_experts // self.num_ranks)

    def combine(
        self, x: torch.Tensor, handle: DispatchHandle, topk_weights: Optional[torch.Tensor],
        biases: Sequence[torch.Tensor], num_sms: int,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        """Collective: sums of the rows of each token, and of their weights."""
        key = handle.key
        rows = x[: key.fixed_rows]
        sums = self._layers.get(key, num_sms).combine(rows, handle.layouts[key], biases=biases)
        if topk_weights is None:
            return sums, None
        topk = topk_weights.shape[1]
        floats = self._floats_key(2 * topk, key.max_tokens)
        layer = self._layers.get(floats, num_sms)
        if floats not in handle.layouts:  # that dispatch had no topk slots: its routing is sent now
            tokens = handle.ids.shape[0]
            nothing = torch.zeros(tokens, floats.hidden, dtype=torch.float32, device=self.device)
            _, _, handle.layouts[floats] = layer.dispatch(nothing, handle.ids)
        pad = floats.hidden - topk
        wide = torch.nn.functional.pad(topk_weights[: key.fixed_rows], (0, pad))
        return sums, layer.combine(wide, handle.layouts[floats])[:, :topk].contiguous()

    def _send(
        self, x: Rows, handle: DispatchHandle, num_sms: int, agreed: str = ""
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Views of what arrived; room for all tokens of all ranks. ``agreed`` is the same on all of
        them, which they compare with the call.
        """
        hidden = x.x.shape[1]
        key = self._layers.of_ranks(x.payload, hidden, self.max_tokens(hidden))
        layer, layout = self._layers.get(key, num_sms), handle.layouts.get(key)
        origin = zlib.crc32(agreed.encode())
        try:
            rows, _, made = layer._dispatch(
                x.x, handle.ids, None, None, x.held(), layout, origin=origin
            )
        except Disagreement as error:
            if agreed:
                error.args = (f"Buffer.dispatch: rank {self.rank} has {agreed}: {error}",)
            raise
        handle.layouts.setdefault(key, made)
        return rows, x.shown(made.recv_scales)

    def _floats_key(self, columns: int, max_tokens: int) -> LayerKey:
        return self._layers.of_ranks("floats", -(-columns // 4) * 4, max_tokens)

    def _send_choices(
        self, topk_idx: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor],
        handle: DispatchHandle, num_sms: int,
    ) -> Optional[torch.Tensor]:  # fmt: skip
        """[rows, ids and then weights]: float32 holds each number of an expert exactly."""
        if topk_idx is None:
            return None
        tokens, topk = topk_idx.shape
        key = self._floats_key(2 * topk, handle.key.max_tokens)
        packed = torch.zeros(tokens, key.hidden, dtype=torch.float32, device=self.device)
        packed[:, :topk] = topk_idx
        if topk_weights is not None:
            packed[:, topk : 2 * topk] = topk_weights
        layer, layout = self._layers.get(key, num_sms), handle.layouts.get(key)
        rows, _, made = layer.dispatch(packed, handle.ids, layout_desc=layout)
        handle.layouts.setdefault(key, made)
        return rows

    def _local_choices(
        self, choices: Optional[torch.Tensor], topk_idx: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor], handle: DispatchHandle, num_local: int,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:  # fmt: skip
        """Ids among this rank's experts, -1 elsewhere, and their weights, 0 elsewhere."""
        if choices is None or topk_idx is None:
            return None, None
        topk = topk_idx.shape[1]
        rows = _rows(choices, handle.rows_out)
        ids = rows[:, :topk].to(topk_idx.dtype) - self.rank * num_local
        here = (ids >= 0) & (ids < num_local)
        if handle.num_rows is None:  # rows after those that came are of other dispatches
            places = torch.arange(handle.rows_out, dtype=torch.int32, device=self.device)
            here &= (places < handle.prefix()[-1, self.rank])[:, None]
        ids = torch.where(here, ids, -1)
        if topk_weights is None:
            return ids, None
        return ids, rows[:, topk : 2 * topk].masked_fill(~here, 0.0)

    def _exchange_counts(self, mine: torch.Tensor, num_sms: int) -> List[int]:
        """Choices of this rank's experts, of all ranks together."""
        ranks, local = self.num_ranks, mine.numel() // self.num_ranks
        key = self._floats_key(local, ranks)._replace(topk=1, fixed_rows=ranks)
        table = torch.zeros(ranks, key.hidden, dtype=torch.float32, device=self.device)
        table[:, :local] = mine.view(ranks, local)
        to = torch.arange(ranks, dtype=torch.int32, device=self.device)[:, None]
        rows, _, _ = self._layers.get(key, num_sms).dispatch(table, to)
        return _on_host(rows[:, :local].to(torch.int64).sum(0))


def _rows(view: Any, number: int) -> Any:
    """A copy of the first rows; what the view has not is not written. None stays None."""
    if view is None or number <= view.shape[0]:
        return None if view is None else view[:number].clone()
    out = view.new_empty(number, view.shape[1])
    out[: view.shape[0]] = view
    return out


def local_counts(ids: torch.Tensor, num_local: int) -> torch.Tensor:
    """[local experts] int32: how often the ids have each; -1 is none."""
    return occurrences(torch.where(ids < 0, num_local, ids), num_local)


def _on_host(numbers: torch.Tensor) -> List[int]:
    """Nothing copies to pageable memory after a kernel that waits for ranks."""
    if numbers.is_cuda:
        torch.cuda.current_stream(numbers.device).synchronize()
    return numbers.tolist()
