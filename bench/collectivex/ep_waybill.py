"""Waybill as a backend of CollectiveX: ``EPAll2AllLayer`` behind the methods of its ``EPBackend``.

normal       a row per token and rank (rows="compact"), sums of what the experts returned
low-latency  a row per topk slot, room for any routing, so that no host waits; weights at home

All options are the layer's defaults but those: ``num_sm`` is what the layer chooses. float8 rows
are made by the layer (payload="quantized"), inside of the dispatch that is timed.
"""

from __future__ import annotations

import types
from importlib.metadata import version
from typing import Any

import torch
from ep_backend import EPBackend
from torch import distributed

from waybill.torch.moe import EPAll2AllLayer

_GROUP = 128  # elements with a scale
_MOST_TOKENS = 256  # of a rank in low-latency mode, which has memory for the worst routing


class WaybillBackend(EPBackend):
    name = "waybill"
    maturity = "candidate"
    kernel_generation = "waybill-compact"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")

    def __init__(
        self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device
    ) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        self.library_version = version("waybill")
        self.local = args.experts // world_size
        self.low_latency = self.mode == "low-latency"
        self.float8 = self.precision == "fp8"
        if self.low_latency:
            self.kernel_generation = "waybill-fixed-rows"
            self.receive_layout = "token-expert"
            self.combine_weight_semantics = "weighted-kernel-sum"
        if self.float8:
            self.stage_device_work = True  # rows become bfloat16 again
            self.dispatch_dtype = "fp8-e4m3fn"
            self.dispatch_value_bytes = 1
            self.dispatch_scale_bytes_per_copy = 4 * (args.hidden // _GROUP)

    def buffer_cap(self, args: Any) -> int | None:
        return _MOST_TOKENS if self.low_latency else None

    def create_buffer(self, spec: Any) -> None:
        args = self.args
        mode: dict[str, Any] = {"rows": "compact"}
        if self.low_latency:
            mode = {"fixed_rows": 1.0, "copy_out": False}
        self.layer = EPAll2AllLayer(
            distributed.group.WORLD, spec.max_tokens_per_rank, args.hidden, args.topk, self.rank,
            args.experts, min(self.world_size, args.gpus_per_node), self.world_size,
            payload="quantized" if self.float8 else "plain", **mode,
        )  # fmt: skip

    # ---- what is timed ----

    def dispatch(self, problem: Any) -> types.SimpleNamespace:
        with torch.no_grad():
            rows, weights, layout = self.layer.dispatch(
                problem.dispatch_x, problem.topk_idx, problem.topk_weights
            )
        return types.SimpleNamespace(rows=rows, weights=weights, layout=layout)

    def stage(self, problem: Any, handle: Any) -> None:
        handle.combine_input = self._plain_rows(handle)

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        return self._combined(handle, handle.combine_input)

    # ---- what the oracle looks at ----

    def recv_tokens(self, handle: Any) -> int:
        if self.low_latency:
            return int(handle.layout.recv_expert_offsets[-1])
        return len(handle.rows)

    def inspect_dispatch(self, problem: Any, handle: Any) -> types.SimpleNamespace:
        num_rows = self.recv_tokens(handle)
        payload = self._plain_rows(handle)[:num_rows].clone()
        counts = handle.layout.recv_expert_counts.to(torch.int64)
        first = self.rank * self.local
        if self.low_latency:
            experts = torch.arange(self.local, device=payload.device).repeat_interleave(counts)
            return types.SimpleNamespace(
                payload=payload, expert_ids=first + experts, local_expert_counts=counts
            )
        local_ids = handle.layout.recv_topk_indices.to(torch.int64)
        here = (local_ids >= 0) & (local_ids < self.local)
        return types.SimpleNamespace(
            payload=payload,
            expert_ids=torch.where(here, first + local_ids, -1),
            weights=handle.weights.float().masked_fill(~here, 0),
            local_expert_counts=counts,
        )

    def combine_transformed(
        self, problem: Any, handle: Any, transformed: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.zeros(
            len(handle.rows), self.args.hidden, dtype=torch.bfloat16, device=self.device
        )
        rows[: len(transformed)] = transformed.to(torch.bfloat16)
        return self._combined(handle, rows)

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """What arrives of x: the same, or as float8 makes it."""
        if not self.float8:
            return x
        groups = x.float().unflatten(-1, (-1, _GROUP))
        scales = groups.abs().amax(-1, keepdim=True) * torch.tensor(1 / 448, device=x.device)
        elements = (groups / scales).masked_fill(scales == 0, 0).to(torch.float8_e4m3fn)
        return _plain(elements.flatten(-2), scales.squeeze(-1))

    def finalize(self, rc: int) -> int:
        self.layer.finalize()
        return super().finalize(rc)

    def _plain_rows(self, handle: Any) -> torch.Tensor:
        if not self.float8:
            return handle.rows
        return _plain(handle.rows, handle.layout.recv_scales)

    def _combined(self, handle: Any, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.layer.combine(rows, handle.layout, weighted=self.low_latency)


def _plain(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 rows of float8 elements and a scale for each group of them."""
    groups = elements.float().unflatten(-1, (-1, _GROUP))
    return (groups * scales[..., None]).flatten(-2).to(torch.bfloat16)
