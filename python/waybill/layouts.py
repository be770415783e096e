"""Plain records that the functions return; tuples, so that they unpack as DistCA's."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Tuple, Union

from .errors import InvalidArgument, Unsupported
from .metadata import Metadata

Ragged = Union[Any, Tuple[Any, ...]]


class AttnLayout(NamedTuple):
    """Arguments of variable-length attention after the forward dispatch, rows.

    Padded: arrays (W, N + 1), where the last sum repeats over the padding. Ragged: tuples of W
    arrays (n_r + 1,). Without the leading zero each is one shorter.
    """

    cu_seqlens_q: Ragged
    cu_seqlens_kv: Ragged
    max_seqlen_q: Any  #: (W,)
    max_seqlen_kv: Any  #: (W,)
    num_local_seqs_recv: Any  #: (W,): query shards that each rank receives


class RankKvLayout(NamedTuple):
    """The attention layout where KV lies once per rank: query shards read ranges of it, rows."""

    cu_seqlens_q: Tuple[Any, ...]  #: W arrays (n_r + 1,)
    kv_begin: Tuple[Any, ...]  #: W arrays (n_r,): first row of the shard's context
    kv_len: Tuple[Any, ...]  #: W arrays (n_r,): rows of the context, the shard included
    max_seqlen_q: Any  #: (W,)
    max_seqlen_kv: Any  #: (W,)
    num_local_seqs_recv: Any  #: (W,)


class QkvMetadata(NamedTuple):
    """All that a step needs: four metadata and the attention layout."""

    fwd_q: Metadata
    rev_q: Metadata
    fwd_kv: Metadata
    rev_kv: Metadata
    attention: Union[AttnLayout, RankKvLayout]


class RawQkvDispatch(NamedTuple):
    """A plan in DistCA's dense form. P = most shards on a rank, C = most copies. int64."""

    cp_seq_lens: Any  #: (W, P): rows of each shard; padding 0
    num_cp_shards: Any  #: (W,): shards on the rank
    cp_query_dst: Any  #: (W, P): destination rank; padding -1
    kv_to_q_mapping: Any  #: (W, P, C, 2): (query rank, query shard); -1, -1 unused
    kv_to_q_rank: Any  #: (W, P, C): place among the query's KV shards, -1 unused
    kv_context_size: Any  #: (W, P): rows of the document before this shard
    q_to_num_kv_seq: Any  #: (W, P): KV shards of the query
    q_to_num_kv_tokens: Any  #: (W, P): their rows
    seq_lens: Tuple[Any, ...]  #: (lengths before sharding,) when asked for, else ()


@dataclass
class PackedSeqParams:
    """Arguments of variable-length attention in the MLP layout, under Megatron's names."""

    qkv_format: str  #: "thd": tokens, heads, head size
    cu_seqlens_q: Any  #: (n + 1,) int64, leading 0
    cu_seqlens_kv: Any  #: the same
    max_seqlen_q: Any
    max_seqlen_kv: Any

    def to_megatron(self, device: Any = None) -> Any:
        """The same as Megatron's ``PackedSeqParams``, as Transformer Engine takes it: tensors of
        int32, maxima that are integers. On ``device``, else where the tensors lie.

        Raises Unsupported where Megatron Core is not installed.
        """
        try:
            theirs = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise Unsupported(
                f"PackedSeqParams.to_megatron: {error}, expected megatron-core to be installed"
            ) from None
        if int(self.cu_seqlens_q[-1]) >= 2**31:
            raise InvalidArgument(
                f"PackedSeqParams.to_megatron: {int(self.cu_seqlens_q[-1])} rows, expected fewer"
                " than 2^31, as Megatron's offsets are int32"
            )
        q, kv = (
            torch.as_tensor(lengths, dtype=torch.int32, device=device)
            for lengths in (self.cu_seqlens_q, self.cu_seqlens_kv)
        )
        return theirs(
            qkv_format=self.qkv_format,
            cu_seqlens_q=q,
            cu_seqlens_kv=kv,
            max_seqlen_q=int(self.max_seqlen_q),
            max_seqlen_kv=int(self.max_seqlen_kv),
        )


LayoutFields = Tuple[List[Any], List[Any], Any, Any, Any, List[Any], List[Any]]


def attention_layout(fields: LayoutFields, ragged: bool) -> Union[AttnLayout, RankKvLayout]:
    """From what the compiled part returns."""
    cu_q, cu_kv, max_q, max_kv, num_recv, kv_begin, kv_len = fields
    if ragged and not cu_kv and len(cu_q) > 0:
        return RankKvLayout(tuple(cu_q), tuple(kv_begin), tuple(kv_len), max_q, max_kv, num_recv)
    if ragged:
        return AttnLayout(tuple(cu_q), tuple(cu_kv), max_q, max_kv, num_recv)
    return AttnLayout(cu_q[0], cu_kv[0], max_q, max_kv, num_recv)


def layout_fields(layout: Union[AttnLayout, RankKvLayout]) -> LayoutFields:
    """The inverse of attention_layout for the ragged form."""
    if isinstance(layout, RankKvLayout):
        return (
            list(layout.cu_seqlens_q), [], layout.max_seqlen_q, layout.max_seqlen_kv,
            layout.num_local_seqs_recv, list(layout.kv_begin), list(layout.kv_len),
        )  # fmt: skip
    return (
        list(layout.cu_seqlens_q), list(layout.cu_seqlens_kv), layout.max_seqlen_q,
        layout.max_seqlen_kv, layout.num_local_seqs_recv, [], [],
    )  # fmt: skip
