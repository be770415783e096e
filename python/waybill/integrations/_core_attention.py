"""Core attention of Megatron-Core over packed documents, under context parallelism and without."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Dict, List, Optional

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from .._errors import said_by, shown
from .._graphs import outside_graphs
from ..errors import Error, InvalidArgument, Unsupported
from ..torch import ContextParallelAttention
from ..torch.batch_plan import Piece, RankPieces, piece_table
from ._shared_attention import Pieces, SharedRanks, pieces_of

__all__ = ["SharedSeqParams", "WaybillCoreAttention", "share_sequences"]

_WHO = "WaybillCoreAttention"
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@dataclass
class SharedSeqParams(PackedSeqParams):
    """Packed sequences of this rank whose attention it shares with others: ``share_sequences``."""

    pieces: Optional[Pieces] = None
    ranks: Optional[SharedRanks] = None


class RowSeqParams(SharedSeqParams):
    """With ``rotary="by row"``: a model that makes its rotary embeddings itself, of the longest
    sequence, is told that these would begin at 0 with each piece.
    """

    @property
    def max_seqlen_q(self) -> int:  # type: ignore[override]
        raise InvalidArgument(
            'share_sequences: rotary = "by row" in a model that makes its own rotary embeddings,'
            " which begin at 0 with each piece, expected rotary_pos_emb = embeddings[positions] in"
            ' the call of its layers, or position_embedding_type="none"'
        )

    @max_seqlen_q.setter
    def max_seqlen_q(self, value: Optional[int]) -> None:
        del value


def share_sequences(
    ranks: Any, held: RankPieces, device: Any = None, *, rotary: str = "by sequence"
) -> SharedSeqParams:
    """Collective: the ``packed_seq_params`` of a batch of which each rank holds some pieces, for a
    model with ``context_parallel_size`` = 1; the ranks may be its data-parallel ones.

    Args:
        ranks: a process group, a DeviceMesh of one dimension, or None for the default group.
        held: lengths of whole documents, or ``Piece(document, offset, length)``.
        device: of the model; None is that of the group's backend.
        rotary: "by sequence": the model's rotary embeddings begin at 0 with each sequence, which
            is right for documents that begin on this rank alone. "by row": the model is given
            embeddings of all rows, ``embeddings[positions]``, or has none.
    """
    who = "share_sequences"
    shared = SharedRanks.of(ranks, device, who)
    wrong: Optional[Error] = None
    lengths: List[int] = []
    try:
        lengths = _lengths_of(held, shared.rank, rotary, who)
    except Error as error:
        wrong = error
    pieces = shared.gather(held, who, wrong)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device or shared.world.device, torch.int32)
    longest = max(lengths, default=0)
    kind = SharedSeqParams if rotary == "by sequence" else RowSeqParams
    return kind(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
        max_seqlen_kv=longest, pieces=pieces, ranks=shared,
    )  # fmt: skip


def _lengths_of(held: RankPieces, rank: int, rotary: str, who: str) -> List[int]:
    """Of pieces whose positions are those of the rotary embeddings."""
    if rotary not in ("by sequence", "by row"):
        raise InvalidArgument(
            f'{who}: rotary = {shown(rotary)} on rank {rank}, expected "by sequence" or "by row"'
        )
    table = piece_table(held, rank, who)
    for i, (_, offset, _) in enumerate(table.tolist()):
        if offset and rotary == "by sequence":
            raise InvalidArgument(
                f"{who}: held[{i}] on rank {rank} begins at {offset}, expected 0:"
                " rotary embeddings, which come before core attention, begin at 0 with each"
                ' sequence; say rotary="by row" and give them by row'
            )
    return [int(length) for length in table[:, 2]]


class WaybillCoreAttention(MegatronModule):
    """``core_attention`` of packed sequences (thd), by ContextParallelAttention.

    With Megatron-Core's context parallelism, ``PackedSeqParams`` says the sequences of all ranks,
    of which each has two chunks in zigzag, as Megatron-Core cuts them and its rotary embeddings
    assume: nothing is gathered. Without, ``share_sequences`` shares any pieces among any ranks.
    Layers of a model share one module.
    """

    #: More of ContextParallelAttention, before the first call: ``kernel``, ``num_sms``, ...
    options: ClassVar[Dict[str, Any]] = {}

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type  # how rows travel is the plan's
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        softmax = getattr(config, "softmax_type", "vanilla")
        for name, value, expected in (
            ("attention_type", attention_type, "self"),
            ("attention_dropout", dropout, 0.0),
            ("softmax_type", softmax, "vanilla"),
            ("apply_query_key_layer_scaling", config.apply_query_key_layer_scaling, False),
        ):
            if value != expected:
                raise Unsupported(f"{_WHO}: {name} = {value!r}, expected {expected!r}")
        self.attn_mask_type, self.softmax_scale = attn_mask_type, softmax_scale
        self.pg_collection = pg_collection
        self.window: Optional[int] = None
        sides = config.window_size
        if is_layer_window_attention(sides, config.window_attn_skip_freq, layer_number):
            if sides[1] != 0:
                raise Unsupported(f"{_WHO}: window_size = {sides}, expected (keys before, 0)")
            self.window = None if sides[0] < 0 else sides[0] + 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Optional[torch.Tensor],
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Optional[torch.Tensor] = None,
        packed_seq_params: Optional[PackedSeqParams] = None,
    ) -> torch.Tensor:
        """Collective: [rows, heads * v_head_dim], of query [rows, heads, head_dim]."""
        del attention_mask  # of packed sequences it says nothing
        params = packed_seq_params
        if params is None or params.qkv_format != "thd":
            got = None if params is None else params.qkv_format
            raise Unsupported(
                f"{_WHO}: packed_seq_params of qkv_format {got!r}, expected 'thd': packed sequences"
            )
        if attention_bias is not None:
            raise Unsupported(f"{_WHO}: got an attention_bias, expected None")
        ranks, pieces = self._pieces(params, query.device)
        mask = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask not in _CAUSAL:
            _check_unpadded(params, ranks.rank)
        attention = ranks.attention(
            query, key, value, _WHO, self.options, mask="causal" if mask in _CAUSAL else "full",
            window=self.window, scale=self.softmax_scale,
        )  # fmt: skip
        return _attend(attention, pieces.plan_of(attention), query, key, value).flatten(1)

    def _pieces(self, params: PackedSeqParams, device: torch.device) -> Any:
        """(ranks, what they hold)"""
        group = getattr(params, "cp_group", None) or getattr(self.pg_collection, "cp", None)
        size = 1 if group is None else group.size()
        if isinstance(params, SharedSeqParams):
            if params.ranks is None or params.pieces is None:
                raise InvalidArgument(
                    f"{_WHO}: SharedSeqParams without pieces, expected those of share_sequences"
                )
            if size > 1:
                raise Unsupported(
                    f"{_WHO}: share_sequences with context_parallel_size = {size} on rank"
                    f" {params.ranks.rank}, expected 1: rotary embeddings, which come before core"
                    " attention, would have the positions of zigzag chunks"
                )
            return params.ranks, params.pieces
        if group is None:
            raise InvalidArgument(f"{_WHO}: pg_collection has no cp, expected a process group")
        ranks = SharedRanks.of(group, device, _WHO)
        padded = params.cu_seqlens_q_padded
        ends = params.cu_seqlens_q if padded is None else padded
        return ranks, pieces_of(ends, ranks, lambda: _zigzag(params, ends, ranks))


@outside_graphs
@said_by(_WHO)
def _attend(attention: ContextParallelAttention, *given: Any) -> torch.Tensor:
    out: torch.Tensor = attention(*given)
    return out


def _check_unpadded(params: PackedSeqParams, rank: int) -> None:
    """Causal rows look at no padding, which is behind them."""
    padded, ends = params.cu_seqlens_q_padded, params.cu_seqlens_q
    if padded is not None and padded is not ends and not torch.equal(padded, ends):
        raise Unsupported(
            f"{_WHO}: cu_seqlens_q_padded on rank {rank} differ from cu_seqlens_q, expected equal"
            " where attention is not causal: rows would look at padding"
        )


def _zigzag(params: PackedSeqParams, ends: torch.Tensor, ranks: SharedRanks) -> Pieces:
    """Chunks r and 2n - 1 - r of each sequence are on rank r, as Megatron-Core cuts them."""
    padded = params.cu_seqlens_kv_padded
    other = params.cu_seqlens_kv if padded is None else padded
    if other is not None and other is not ends and not torch.equal(other, ends):
        raise Unsupported(
            f"{_WHO}: cu_seqlens_kv on rank {ranks.rank} differ from cu_seqlens_q, expected equal"
        )
    offsets = ends.tolist()
    chunks = 2 * ranks.world_size if ranks.world_size > 1 else 1
    held: List[List[Piece]] = [[] for _ in range(ranks.world_size)]
    for document, (begin, end) in enumerate(pairwise(offsets)):
        length, rest = divmod(end - begin, chunks)
        if rest:
            raise InvalidArgument(
                f"{_WHO}: sequence {document} of cu_seqlens on rank {ranks.rank} has {end - begin}"
                f" tokens, expected a multiple of {chunks}, padding included"
            )
        for rank in range(ranks.world_size if length else 0):
            for chunk in sorted({rank, chunks - 1 - rank}):
                held[rank].append(Piece(document, chunk * length, length))
    return Pieces(list(held))
