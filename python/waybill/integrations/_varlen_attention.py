"""Attention of torchtitan's models over packed documents, shared by ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Dict, Optional

import torch
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from .._errors import said_by
from .._graphs import outside_graphs
from ..errors import InvalidArgument, Unsupported
from ..torch.batch_plan import RankPieces
from ._shared_attention import Pieces, SharedRanks, pieces_of

__all__ = ["SharedDocuments", "WaybillAttention", "share_documents"]

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
        held = self.pieces.pieces[self.ranks.rank].tolist()
        rows = [torch.arange(offset, offset + length) for _, offset, length in held]
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
        attention = ranks.attention(
            q, k, v, _WHO, self.options, kernel=self.kernel, scale=scale, **self.mask
        )
        plan = pieces.plan_of(attention)
        shape = (*q_BLNH.shape[:3], v_BLNH.shape[-1])
        with said_by(_WHO):
            if out_transform is None:
                return attention(plan, q, k, v).view(shape).to(q_BLNH.dtype)
            out, lse = attention(plan, q, k, v, return_lse=True)
        # A gradient through the log-sum-exp would be lost.
        if torch.is_grad_enabled() and out.requires_grad:
            raise Unsupported(f"{_WHO}: out_transform on rank {ranks.rank}, expected None to train")
        return out_transform(out.view(shape).to(q_BLNH.dtype), lse.view(shape[:3]))


def _whole_documents(masks: Any, rows: int, ranks: SharedRanks) -> Pieces:
    if not isinstance(masks, VarlenMetadata):
        raise InvalidArgument(
            f"{_WHO}: attention_masks on rank {ranks.rank} is a {type(masks).__name__}, expected"
            " VarlenMetadata, or SharedDocuments, as of share_documents"
        )

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
