"""Experts of Megatron-Core: a token dispatcher of its own. Packed documents: its core attention.

For the version in docs/integrations/README.md; importing this needs Megatron-Core. Its
``MoEFlexTokenDispatcher`` is served by ``waybill.integrations.deep_ep.install()``.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from .._errors import said_by
from .._graphs import outside_graphs
from ..errors import InvalidArgument, Unsupported
from ._core_attention import SharedSeqParams, WaybillCoreAttention, share_sequences
from ._layers import shared_layer

__all__ = [
    "SharedSeqParams",
    "WaybillCoreAttention",
    "WaybillTokenDispatcher",
    "install",
    "share_sequences",
    "uninstall",
]


class WaybillTokenDispatcher(MoETokenDispatcher):
    """Tokens to their experts by ``EPAll2AllLayer``: rows come grouped by expert, so that nothing
    is permuted before the experts or behind them. Layers of a model share one.

    With expert tensor parallelism a token goes to all ranks that have a part of its expert, and
    their outputs are summed.
    """

    #: Tokens of a rank in one call, the same on all ranks; None: those of the first call.
    max_tokens: Optional[int] = None

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: List[int],
        config: Any,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if config.moe_pad_expert_input_to_capacity:
            raise Unsupported(
                "WaybillTokenDispatcher: moe_pad_expert_input_to_capacity, expected False: rows of"
                " an expert are not padded"
            )
        if getattr(config, "moe_router_padding_for_quantization", False):
            raise Unsupported(
                "WaybillTokenDispatcher: moe_router_padding_for_quantization, expected False: rows"
                " of an expert are not padded"
            )
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.router_topk = config.moe_router_topk

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Unsupported: they are not run beside the dispatch."""
        del shared_experts
        raise Unsupported(
            "WaybillTokenDispatcher: moe_shared_expert_overlap = True, expected False"
        )

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """(tokens [T, hidden], probabilities of the topk slots [T, topk]); notes the topk slots."""
        self.hidden_shape = tokens.shape
        rows = tokens.reshape(-1, self.hidden_shape[-1])
        if rows.device.type == "cpu":
            _check_map(routing_map, self.router_topk, rows.shape[0])
        # Experts that the map has not, as they were dropped, come last, with a probability of 0.
        chosen = torch.where(routing_map, probs, torch.zeros_like(probs))
        order = torch.where(routing_map, probs, -1.0)
        ids = order.detach().topk(self.router_topk, dim=-1).indices
        weights = chosen.gather(1, ids).to(torch.float32)
        ids = ids.masked_fill(~routing_map.gather(1, ids), -1)
        if self.tp_size > 1:
            ids = self._parts_of(ids)
            weights = weights.repeat_interleave(self.tp_size, dim=1)
        self._ids = ids
        return rows, weights

    def _parts_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Each topk slot as those of all ranks that have a part of the expert."""
        local = self.num_local_experts
        parts = torch.arange(self.tp_size, device=ids.device)
        at = (ids // local * self.tp_size)[..., None] + parts
        spread = at * local + (ids % local)[..., None]
        return torch.where(ids[..., None] < 0, -1, spread).flatten(1)

    @outside_graphs
    @said_by("WaybillTokenDispatcher")
    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Collective: rows and probabilities, by expert, source rank, token and topk slot."""
        self._layer = shared_layer(
            self.tp_ep_group, hidden_states, self._ids.shape[1],
            self.num_local_experts * self.tp_size * self.ep_size, "WaybillTokenDispatcher",
            self.max_tokens,
        )  # fmt: skip
        rows, weights, self._layout = self._layer.dispatch(hidden_states, self._ids, probs)
        assert weights is not None
        return rows, weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, rows of each local expert in host memory, probabilities)"""
        counts = self._layout.recv_expert_counts
        assert counts is not None
        return hidden_states, counts.to("cpu", torch.int64), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing: rows are in order."""
        return hidden_states

    @outside_graphs
    @said_by("WaybillTokenDispatcher")
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Collective: the sums of each token's rows, in float32, rounded once."""
        return self._layer.combine(hidden_states, self._layout)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the tokens came."""
        return hidden_states.view(self.hidden_shape)


def _check_map(routing_map: torch.Tensor, topk: int, num_tokens: int) -> None:
    """Choices beyond the topk slots would go nowhere. The host looks: it waits for a device."""
    if routing_map.shape[0] != num_tokens:
        raise InvalidArgument(
            f"WaybillTokenDispatcher: routing_map of {routing_map.shape[0]} tokens, expected"
            f" {num_tokens}"
        )
    most = int(routing_map.sum(dim=1).max()) if num_tokens > 0 else 0
    if most > topk:
        raise InvalidArgument(
            f"WaybillTokenDispatcher: routing_map has {most} experts of a token, expected at most"
            f" moe_router_topk = {topk}"
        )


_before: List[Any] = []


def install() -> None:
    """From now on a ``MoELayer`` with ``moe_token_dispatcher_type = "alltoall"`` has Waybill's."""
    if not _before:
        _before.append(moe_layer.MoEAlltoAllTokenDispatcher)
        moe_layer.MoEAlltoAllTokenDispatcher = WaybillTokenDispatcher


def uninstall() -> None:
    """Megatron-Core's own again."""
    if _before:
        moe_layer.MoEAlltoAllTokenDispatcher = _before.pop()
