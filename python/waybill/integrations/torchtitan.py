"""Experts and attention of torchtitan, put in by its own override:

    --override.imports waybill.integrations.torchtitan.waybill_dispatcher
    --override.imports waybill.integrations.torchtitan.waybill_experts
    --override.imports waybill.integrations.torchtitan.waybill_attention

For the version in docs/integrations/README.md; importing this needs torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Dict, Optional

import torch
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalTokenDispatcher,
)

from .._arrays import instance
from .._errors import said_by
from .._graphs import outside_graphs
from ..errors import InvalidArgument, Unsupported
from ..torch.attention.plan import RankPieces
from ._shared import COPY_OPTIONS, CopiedExperts, Pieces, SharedRanks, pieces_of, to_experts

__all__ = [
    "SharedDocuments",
    "WaybillAttention",
    "WaybillRoutedExperts",
    "WaybillTokenDispatcher",
    "share_documents",
    "waybill_attention",
    "waybill_dispatcher",
    "waybill_experts",
]


_WHO = "WaybillAttention"


@dataclass
class SharedDocuments:
    """A batch whose documents lie across ranks: the model's ``attention_masks``."""

    pieces: Pieces
    ranks: SharedRanks
    _asked: bool = False  # for positions; attention, which comes after rotary embeddings, sees none

    def positions(self) -> torch.Tensor:
        """[1, rows]: in the documents, for the model's rotary embeddings."""
        self._asked = True
        held = self.pieces.pieces[self.ranks.rank][:, 1:3].tolist()
        rows = [torch.arange(offset, offset + length) for offset, length in held]
        return torch.cat([torch.arange(0), *rows]).to(self.ranks.world.device)[None]


def share_documents(held: RankPieces, ranks: Any = None, device: Any = None) -> SharedDocuments:
    """Collective: the ``attention_masks`` of a batch of which this rank holds these pieces.

    Args:
        held: lengths of whole documents, or ``Piece(document, offset, length)``.
        ranks: a process group or a DeviceMesh of one dimension; WaybillAttention.ranks by default.
        device: of the model; None is that of the group's backend.
    """
    who = "share_documents"
    shared = SharedRanks.of(WaybillAttention.ranks if ranks is None else ranks, device, who)
    return SharedDocuments(shared.gather(held, who), shared)


class WaybillAttention(VarlenAttention):
    """``VarlenAttention`` whose work is evened out among ranks, which need not hold equally long
    documents, nor whole ones. Layers of a model share one module.

    What torchtitan makes of positions, ``VarlenMetadata``, says whole documents of this rank: the
    first layer that gets it gathers those of the others. Documents that lie across ranks come as
    ``share_documents(...)``.
    """

    #: A process group or DeviceMesh that shares attention; None: all ranks.
    ranks: ClassVar[Any] = None
    #: More of ContextParallelAttention, before the first call: ``num_sms``, ``block_tokens``, ...
    options: ClassVar[Dict[str, Any]] = {}

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """:param kernel: of ContextParallelAttention"""

        kernel: str = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        before, behind = config.window_size
        if (before, behind) == (-1, -1):
            self.mask: Dict[str, Any] = {"mask": "full"}
        elif behind == 0:
            self.mask = {"window": None if before < 0 else before + 1}
        else:
            raise Unsupported(
                f"{_WHO}: window_size = {config.window_size}, expected (-1, 0), (-1, -1) or"
                " (keys before, 0)"
            )
        self.kernel = config.kernel

    @outside_graphs
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: Optional[float] = None,
        out_transform: Optional[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Collective: (B, L, N, H)."""
        del kwargs  # grouped heads need nothing
        q, k, v = (t.flatten(0, 1) for t in (q_BLNH, k_BLNH, v_BLNH))
        if q.is_cuda:  # as torchtitan does
            q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
        if isinstance(attention_masks, SharedDocuments):
            ranks, pieces = attention_masks.ranks, attention_masks.pieces
            if not attention_masks._asked:
                raise InvalidArgument(
                    f"{_WHO}: attention_masks on rank {ranks.rank} were not asked for positions,"
                    " expected positions=masks.positions() in the model's call: without them rotary"
                    " embeddings count this rank's rows"
                )
        else:
            ranks = SharedRanks.of(self.ranks, q.device, _WHO)
            pieces = _whole_documents(attention_masks, len(q), ranks)
        found = pieces.attend(
            ranks, q, k, v, _WHO, self.options, return_lse=out_transform is not None,
            kernel=self.kernel, scale=scale, **self.mask,
        )  # fmt: skip
        shape = (*q_BLNH.shape[:3], v_BLNH.shape[-1])
        if out_transform is None:
            out: torch.Tensor = found.view(shape).to(q_BLNH.dtype)
            return out
        out, lse = found
        # A gradient through the log-sum-exp would be lost.
        if torch.is_grad_enabled() and out.requires_grad:
            raise Unsupported(f"{_WHO}: out_transform on rank {ranks.rank}, expected None to train")
        return out_transform(out.view(shape).to(q_BLNH.dtype), lse.view(shape[:3]))


def _whole_documents(masks: Any, rows: int, ranks: SharedRanks) -> Pieces:
    expected = "VarlenMetadata, or SharedDocuments, as of share_documents"
    instance(masks, VarlenMetadata, f"{_WHO}: attention_masks on rank {ranks.rank}", expected)

    def make() -> Pieces:
        lengths = masks.cu_seq_q.diff().tolist()
        wrong: Optional[InvalidArgument] = None
        if sum(lengths) != rows:
            wrong = InvalidArgument(
                f"{_WHO}: attention_masks on rank {ranks.rank} are of {sum(lengths)} rows, expected"
                f" {rows}: positions begin at 0 on each rank, or come with share_documents"
            )
        return ranks.gather([length for length in lengths if length], _WHO, wrong)

    return pieces_of(masks.cu_seq_q, ranks, make)


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
        self.copied: Optional[CopiedExperts] = None  #: experts whose copies rows go to
        self.training = True

    @outside_graphs
    @said_by("WaybillTokenDispatcher")
    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> Any:
        """(rows by expert, source rank, token, topk slot; rows of each expert; metadata for
        combine: layer, layout and scores)
        """
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        most = self.num_max_tokens_per_rank
        layer, rows_RD, scores_R, layout = to_experts(
            self.ep_mesh.get_group(), (x_TD, topk_expert_ids_TK, topk_scores_TK.to(torch.float32)),
            self.num_experts, "WaybillTokenDispatcher", most, self.copied, self.training,
            grows=most is None,
        )  # fmt: skip
        assert layout.recv_expert_counts is not None
        counts_e = layout.recv_expert_counts.to(num_local_tokens_per_expert_E.dtype)
        return rows_RD, counts_e, (layer, layout, scores_R)

    @outside_graphs
    @said_by("WaybillTokenDispatcher")
    def combine(
        self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """(T, D): each row times its score, rounded as torchtitan does, and summed in float32."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        layer, layout, scores_R = metadata
        scored = routed_output_RD.to(torch.float32) * scores_R[:, None]
        return layer.combine(scored.to(routed_output_RD.dtype), layout)


class _ByCounts(torch.nn.Module):
    """torchtitan's experts, which take counts, with the ends of their rows."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.experts(rows, ends.diff(prepend=ends.new_zeros(1)))
        return outputs


class WaybillRoutedExperts(RoutedExperts):
    """torchtitan's ``RoutedExperts`` with Waybill's dispatcher, and copies of hot experts on other
    ranks in every microbatch: as of ``ExpertParallel``. Without a mesh of experts there are none.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """:param spare_experts, limit, min_rows, keep_copies: of ExpertParallel"""

        spare_experts: int = 1
        limit: float = 1.02
        min_rows: int = 128
        keep_copies: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = {name: getattr(config, name) for name in COPY_OPTIONS}
        experts = _ByCounts(self.inner_experts)
        # Not a submodule: its parameters would be there twice.
        self._copied = (CopiedExperts(experts, options, "WaybillRoutedExperts"),)

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Collective: as torchtitan's."""
        dispatcher = self.token_dispatcher
        if dispatcher.ep_mesh is None:
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        (dispatcher.copied,), dispatcher.training = self._copied, self.training
        x_TD = x_BLD.flatten(0, 1)
        rows_RD, _, metadata = dispatcher.dispatch(
            x_TD, topk_scores_BLK.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1),
            num_local_tokens_per_expert_E,
        )  # fmt: skip
        with maybe_set_sparse_mesh():
            routed_RD = dispatcher.copied.run(*metadata[:2], rows_RD)
        out_TD = dispatcher.combine(routed_RD, metadata, x_TD)
        return out_TD.view(x_BLD.shape[0], -1, x_BLD.shape[2])


@override(
    target=AllToAllTokenDispatcher.Config,
    description="Waybill moves the tokens of experts.",
    exact=True,
)
def waybill_dispatcher(
    cfg: Any, *, num_max_tokens_per_rank: Optional[int] = None
) -> WaybillTokenDispatcher.Config:
    """torchtitan's dispatcher, by Waybill."""
    return derive(
        cfg, WaybillTokenDispatcher.Config, num_max_tokens_per_rank=num_max_tokens_per_rank
    )


@override(
    target=RoutedExperts.Config,
    description="Waybill moves the tokens of experts, and copies hot experts to other ranks.",
    exact=True,
)
def waybill_experts(
    cfg: Any,
    *,
    spare_experts: int = 1,
    limit: float = 1.02,
    min_rows: int = 128,
    keep_copies: bool = False,
    num_max_tokens_per_rank: Optional[int] = None,
) -> WaybillRoutedExperts.Config:
    """torchtitan's experts with Waybill's dispatcher and copies of hot experts."""
    kind = type(cfg.token_dispatcher)
    if kind not in (AllToAllTokenDispatcher.Config, WaybillTokenDispatcher.Config):
        raise Unsupported(
            f"waybill_experts: token_dispatcher is {kind.__qualname__}, expected"
            " AllToAllTokenDispatcher.Config, in whose place Waybill's is put"
        )
    dispatcher = derive(
        cfg.token_dispatcher, WaybillTokenDispatcher.Config,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
    )  # fmt: skip
    return derive(
        cfg, WaybillRoutedExperts.Config, token_dispatcher=dispatcher, limit=limit,
        spare_experts=spare_experts, min_rows=min_rows, keep_copies=keep_copies,
    )  # fmt: skip


@override(
    target=VarlenAttention.Config,
    description="Waybill evens out the attention of packed documents among ranks.",
    exact=True,
)
def waybill_attention(cfg: Any, *, kernel: str = "auto") -> WaybillAttention.Config:
    """torchtitan's attention, shared by ranks."""
    return derive(cfg, WaybillAttention.Config, kernel=kernel)
