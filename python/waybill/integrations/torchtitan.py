"""Experts and attention of torchtitan, put in by its own override:

    --override.imports waybill.integrations.torchtitan.waybill_dispatcher
    --override.imports waybill.integrations.torchtitan.waybill_attention

For the version in docs/integrations/README.md; importing this needs torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalTokenDispatcher,
)

from .._errors import said_by
from .._graphs import outside_graphs
from ..torch.moe import EPAllToAllLayoutDesc
from ._layers import shared_layer
from ._varlen_attention import SharedDocuments, WaybillAttention, share_documents

__all__ = [
    "SharedDocuments",
    "WaybillAttention",
    "WaybillTokenDispatcher",
    "share_documents",
    "waybill_attention",
    "waybill_dispatcher",
]


@dataclass(frozen=True)
class DispatchMetadata:
    """Of a dispatch, for its combine."""

    layout: EPAllToAllLayoutDesc
    scores_R: torch.Tensor
    layer: Any


class WaybillTokenDispatcher(BaseEPTokenDispatcher):
    """Tokens to their experts by ``EPAll2AllLayer``; without a mesh of experts, on this rank alone.

    Layers of a model share one, so that its memory is there once.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """:param num_max_tokens_per_rank: None: as many as come, with new windows for more"""

        num_max_tokens_per_rank: Optional[int] = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_max_tokens_per_rank = config.num_max_tokens_per_rank

    @outside_graphs
    @said_by("WaybillTokenDispatcher")
    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> Any:
        """(rows by expert, source rank, token, topk slot; rows of each expert; metadata)"""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        layer = shared_layer(
            self.ep_mesh.get_group(), x_TD, topk_expert_ids_TK.shape[1], self.num_experts,
            "WaybillTokenDispatcher", self.num_max_tokens_per_rank,
            grows=self.num_max_tokens_per_rank is None,
        )  # fmt: skip
        rows_RD, scores_R, layout = layer.dispatch(
            x_TD, topk_expert_ids_TK, topk_scores_TK.to(torch.float32)
        )
        assert scores_R is not None and layout.recv_expert_counts is not None
        counts_e = layout.recv_expert_counts.to(num_local_tokens_per_expert_E.dtype)
        return rows_RD, counts_e, DispatchMetadata(layout, scores_R, layer)

    @outside_graphs
    @said_by("WaybillTokenDispatcher")
    def combine(
        self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """(T, D): each row times its score, rounded as torchtitan does, and summed in float32."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        scored = routed_output_RD.to(torch.float32) * metadata.scores_R[:, None]
        return metadata.layer.combine(scored.to(routed_output_RD.dtype), metadata.layout)


@override(
    target=AllToAllTokenDispatcher.Config,
    description="Waybill moves the tokens of experts.",
    exact=True,
)
def waybill_dispatcher(
    cfg: Any, *, num_max_tokens_per_rank: Optional[int] = None
) -> WaybillTokenDispatcher.Config:
    """The same dispatcher, by Waybill."""
    return derive(
        cfg, WaybillTokenDispatcher.Config, num_max_tokens_per_rank=num_max_tokens_per_rank
    )


@override(
    target=VarlenAttention.Config,
    description="Waybill evens out the attention of packed documents among ranks.",
    exact=True,
)
def waybill_attention(cfg: Any, *, kernel: str = "auto") -> WaybillAttention.Config:
    """The same attention, shared by ranks."""
    return derive(cfg, WaybillAttention.Config, kernel=kernel)
