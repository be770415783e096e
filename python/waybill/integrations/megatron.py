"""Megatron-Core: a token dispatcher for experts, and core attention for packed documents.

For the version in docs/integrations/README.md; importing this needs Megatron-Core. Its
``MoEFlexTokenDispatcher`` is served by ``waybill.integrations.deep_ep.install()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.utils import is_layer_window_attention

from .._arrays import choice
from .._errors import said_by
from .._graphs import outside_graphs
from ..errors import Error, InvalidArgument, Unsupported
from ..torch.attention.plan import Piece, RankPieces, piece_table
from ._shared import CopiedExperts, Pieces, SharedRanks, pieces_of, to_experts

__all__ = [
    "SharedSeqParams",
    "WaybillCoreAttention",
    "WaybillMoELayer",
    "WaybillTokenDispatcher",
    "install",
    "share_sequences",
    "uninstall",
]


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
    """The lengths of pieces whose positions are those of the rotary embeddings."""
    choice(rotary, f"{who}: rotary on rank {rank}", "by sequence", "by row")
    table = piece_table(held, rank, who)
    for i, offset in enumerate(table[:, 1].tolist()):
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
        del attention_mask  # it says nothing about packed sequences
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
        out: torch.Tensor = pieces.attend(
            ranks, query, key, value, _WHO, self.options, window=self.window,
            mask="causal" if mask in _CAUSAL else "full", scale=self.softmax_scale,
        )  # fmt: skip
        return out.flatten(1)

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


def _check_unpadded(params: PackedSeqParams, rank: int) -> None:
    """Causal rows look at no padding, which comes after them."""
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


class WaybillTokenDispatcher(MoETokenDispatcher):
    """Tokens to their experts by ``EPAll2AllLayer``: rows come grouped by expert, so that nothing
    is permuted before or after the experts. Layers of a model share one.

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
        for name in ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization"):
            if getattr(config, name, False):
                raise Unsupported(
                    f"WaybillTokenDispatcher: {name}, expected False: rows of an expert are not"
                    " padded"
                )
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.router_topk = config.moe_router_topk
        self.copied: Optional[CopiedExperts] = None  #: experts whose copies rows go to
        self.training = True

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Unsupported: they are not run during the dispatch."""
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
        experts = self.num_local_experts * self.tp_size * self.ep_size
        self._layer, rows, weights, self._layout = to_experts(
            self.tp_ep_group, (hidden_states, self._ids, probs), experts, "WaybillTokenDispatcher",
            self.max_tokens, self.copied, self.training,
        )  # fmt: skip
        return rows, weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, rows of each local expert in host memory, probabilities)"""
        counts = self._layout.recv_expert_counts
        assert counts is not None
        return hidden_states, counts.to("cpu", torch.int64), probs

    def compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Computes the outputs of the experts and copies on this rank."""
        assert self.copied is not None
        return self.copied.run(self._layer, self._layout, hidden_states, probs)

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


class _OneByOne(torch.nn.Module):
    """The experts of a ``SequentialMLP``, by the interface of two functions."""

    experts: Any

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self._used: Dict[int, Any] = {}

    def expert_tensors(self, expert: int) -> List[torch.Tensor]:
        return list(self.experts.local_experts[expert].parameters())

    def use_tensors(self, slot: int, tensors: Any) -> None:
        self._used[slot] = tensors

    def forward(self, rows: torch.Tensor, ends: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        local = self.experts.local_experts
        names = [name for name, _ in local[0].named_parameters()]
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        outputs = []
        for slot, given in enumerate(zip(*(torch.split(one, sizes) for one in (rows, probs)))):
            tensors = self._used.get(slot)
            if tensors is None:  # without a copy, so without rows
                continue
            expert = local[slot if slot < len(local) else 0]
            outputs.append(torch.func.functional_call(expert, dict(zip(names, tensors)), given)[0])
        return torch.cat(outputs)


class WaybillMoELayer(moe_layer.MoELayer):
    """After ``install()``: Megatron-Core's ``MoELayer`` with copies of hot experts on other ranks,
    as of ``ExpertParallel``. Its experts are a ``SequentialMLP``.
    """

    #: Before a layer is made: ``spare_experts``, ``limit``, ``min_rows``, ``keep_copies``.
    options: ClassVar[Dict[str, Any]] = {}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        who = "WaybillMoELayer"
        for name, expected in (
            ("moe_token_dispatcher_type", "alltoall"),
            ("moe_shared_expert_overlap", False),
            ("moe_apply_probs_on_input", False),
            ("gradient_accumulation_fusion", False),
            ("fp8", None),
            ("fp4", None),
        ):
            value = getattr(config, name, expected)
            if value != expected and (value or expected):
                raise Unsupported(f"{who}: {name} = {value!r}, expected {expected!r}")
        if moe_layer.MoEAlltoAllTokenDispatcher is not WaybillTokenDispatcher:
            raise InvalidArgument(
                f"{who}: got Megatron-Core's dispatcher, expected install() before"
            )
        super().__init__(config, *args, **kwargs)
        if not isinstance(self.experts, SequentialMLP):
            raise Unsupported(
                f"{who}: experts are {type(self.experts).__name__}, expected SequentialMLP"
                " (moe_grouped_gemm=False)"
            )
        self.token_dispatcher.copied = CopiedExperts(_OneByOne(self.experts), self.options, who)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Collective: rows of this rank's experts and copies."""
        self.token_dispatcher.training = self.training
        return super().dispatch(hidden_states, probs)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, None]:
        """Collective where there are copies: their outputs."""
        return self.token_dispatcher.compute(hidden_states, probs), None


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
