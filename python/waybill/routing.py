"""From a dispatch plan to metadata: which rows go where."""

from __future__ import annotations

from typing import Any, Tuple, Union

import numpy as np

from . import _core
from ._arrays import ArrayLike, IntArray, choice, flag, integer, whole_numbers
from .errors import InvalidArgument
from .layouts import AttnLayout, PackedSeqParams, attention_layout
from .metadata import Fields, Metadata

__all__ = [
    "compute_attn_layout_seqlens",
    "compute_e2e_metadata",
    "compute_metadata",
    "compute_metadata_kv",
    "mlp_layout_packed_params",
]


def compute_metadata(
    seq_len: ArrayLike,
    global_dispatch: ArrayLike,
    return_intermediate: bool = False,
    *,
    undispatched: str = "reject",
) -> Any:
    """Routing of Q, or of any tensor whose shards go to one or several ranks.

    Every destination buffer is filled without gaps in the order (source rank, shard, copy). The
    reverse metadata is a send table of the receiving rank; rows return to ``copy * T + begin``,
    where T is the home rank's number of rows.

    Args:
        seq_len: (W, S) integers, rows of each shard in the MLP layout.
        global_dispatch: (W, S) or (W, S, C), destination rank of the shard (copy), -1 none.
        return_intermediate: also return (tokens_to_dst_per_dispatch (W, S, C, W), seq_to_dst
            (W, S, C, W) one-hot, num_received_seqs (W,)).
        undispatched: "reject" refuses a shard with rows but without destination, whose tokens would
            be lost; "keep" leaves it behind, as DistCA does.

    Returns:
        (forward, reverse) or (forward, reverse, intermediates).

    Raises:
        InvalidArgument: wrong shapes or dtypes, a rank outside -1..W-1, a negative length.
    """
    fwd, rev, intermediates = _fields_of_both(
        seq_len, global_dispatch, return_intermediate, undispatched
    )
    pair = Metadata._from_fields(fwd), Metadata._from_fields(rev)
    return (*pair, intermediates) if return_intermediate else pair


def _fields_of_both(
    seq_len: ArrayLike,
    global_dispatch: ArrayLike,
    return_intermediate: bool,
    undispatched: str,
    capsules: bool = False,
    callers_seq_len: bool = False,
    callers_dispatch: bool = False,
) -> Tuple[Fields, Fields, Any]:
    """compute_metadata for any face: with arrays or DLPack capsules. A face that puts the caller's
    own table into the result gets None there: for dst_rank, or for seq_len and recv_seq_lens.
    """
    choice(undispatched, "compute_metadata: undispatched", "reject", "keep")
    result: Tuple[Fields, Fields, Any] = _core.compute_metadata(
        whole_numbers(seq_len, "compute_metadata: seq_len"),
        whole_numbers(global_dispatch, "compute_metadata: global_dispatch"),
        flag(return_intermediate, "compute_metadata: return_intermediate"),
        undispatched == "keep",
        capsules,
        callers_seq_len,
        callers_dispatch,
    )
    return result


def compute_metadata_kv(
    kv_to_q_mapping: ArrayLike,
    kv_to_q_rank: ArrayLike,
    kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike,
    q_to_num_kv_token: ArrayLike,
    seq_len: ArrayLike,
    num_seqs: ArrayLike,
    q_dispatch: ArrayLike,
    q_seq_to_dst: ArrayLike = None,
    max_num_local_seqs: Union[int, None] = None,
    return_intermediate: bool = False,
) -> Any:
    """Routing of K and V when each query keeps a contiguous copy of its whole context.

    A KV copy goes where its query goes; the destination buffer is one group per query, in the
    global order of the queries; inside a group KV shards are in document order. Counts are kept
    by the KV shard's own rank, which also holds when queries live on other ranks.

    Args:
        kv_to_q_mapping: (W, S, C, 2), (query rank, query shard) that copy c serves; -1, -1 unused.
        kv_to_q_rank: (W, S, C), place among the query's KV shards, -1 unused.
        kv_context_size: (W, S), rows of the document before this KV shard.
        q_to_num_kv_seq: (W, S), KV shards of the query.
        q_to_num_kv_token: (W, S), their rows.
        seq_len: (W, S). num_seqs: (W,) or (W, 1). q_dispatch: (W, S), -1 none.
        q_seq_to_dst, max_num_local_seqs: what DistCA needs on its way; only their shape is
            checked, and they may be left out.

    Returns:
        (forward, reverse), and with return_intermediate a third, the 1-tuple
        (kv_dst_global_seq_id (W, S, C),).
    """
    dispatch = whole_numbers(q_dispatch, "compute_metadata_kv: q_dispatch")
    _check_hints(dispatch, q_seq_to_dst, max_num_local_seqs)
    tables = _kv_tables(
        "compute_metadata_kv", kv_to_q_mapping, kv_to_q_rank, kv_context_size, q_to_num_kv_seq,
        q_to_num_kv_token,
    )  # fmt: skip
    fwd, rev, ids = _core.compute_metadata_kv(
        tables,
        whole_numbers(seq_len, "compute_metadata_kv: seq_len"),
        whole_numbers(num_seqs, "compute_metadata_kv: num_seqs"),
        dispatch,
        flag(return_intermediate, "compute_metadata_kv: return_intermediate"),
    )
    pair = Metadata._from_fields(fwd), Metadata._from_fields(rev)
    return (*pair, (ids,)) if return_intermediate else pair


def compute_attn_layout_seqlens(
    seq_shard_len: ArrayLike,
    seq_shard_cumsum: ArrayLike,
    dispatch: ArrayLike,
    prepend_zero: bool = True,
    shard_to_tuple: bool = False,
) -> AttnLayout:
    """Sequence lengths of Q and of its KV context in the attention layout of every rank.

    Args:
        seq_shard_len: (W, S), rows of each query shard.
        seq_shard_cumsum: (W, S), rows of its KV context, itself included.
        dispatch: (W, S), destination rank, -1 none.
        prepend_zero: put a 0 in front, as attention kernels expect.
        shard_to_tuple: tuples of W arrays, each cut to what its rank receives.
    """
    who = "compute_attn_layout_seqlens"
    ragged = flag(shard_to_tuple, f"{who}: shard_to_tuple")
    fields = _core.compute_attn_layout_seqlens(
        whole_numbers(seq_shard_len, f"{who}: seq_shard_len"),
        whole_numbers(seq_shard_cumsum, f"{who}: seq_shard_cumsum"),
        whole_numbers(dispatch, f"{who}: dispatch"),
        flag(prepend_zero, f"{who}: prepend_zero"),
        ragged,
    )
    layout = attention_layout(fields, ragged)
    assert isinstance(layout, AttnLayout)
    return layout


def mlp_layout_packed_params(seq_lens: ArrayLike) -> PackedSeqParams:
    """Arguments of variable-length attention in the MLP layout of one rank; seq_lens (n,) rows."""
    lens = whole_numbers(seq_lens, "mlp_layout_packed_params: seq_lens")
    cu_seqlens, longest = _core.mlp_layout_packed_params(lens)
    most = lens.dtype.type(longest)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, most, most)


def compute_e2e_metadata(
    mlp_seq_len: ArrayLike,
    mlp_num_seqs: ArrayLike,
    mlp_q_dispatch: ArrayLike,
    kv_to_q_mapping: ArrayLike,
    kv_to_q_rank: ArrayLike,
    kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike,
    q_to_num_kv_token: ArrayLike,
    return_intermediate: bool = False,
) -> Tuple[Any, ...]:
    """compute_metadata, compute_metadata_kv and compute_attn_layout_seqlens in one call.

    Returns:
        (fwd_q, rev_q, fwd_kv, rev_kv, (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)),
        the layout ragged with a leading zero; with return_intermediate a sixth, the four
        intermediates of both.
    """
    who = "compute_e2e_metadata"
    fields = _core.compute_e2e_metadata(
        whole_numbers(mlp_seq_len, f"{who}: mlp_seq_len"),
        whole_numbers(mlp_num_seqs, f"{who}: mlp_num_seqs"),
        whole_numbers(mlp_q_dispatch, f"{who}: mlp_q_dispatch"),
        _kv_tables(who, kv_to_q_mapping, kv_to_q_rank, kv_context_size, q_to_num_kv_seq,
                   q_to_num_kv_token),
        flag(return_intermediate, "compute_e2e_metadata: return_intermediate"),
    )  # fmt: skip
    *tables, layout, q_intermediates, kv_ids = fields
    metadata = tuple(Metadata._from_fields(table) for table in tables)
    fa_params = tuple(attention_layout(layout, True))[:4]
    if return_intermediate:
        return (*metadata, fa_params, (*q_intermediates, kv_ids))
    return (*metadata, fa_params)


def _kv_tables(who: str, *tables: ArrayLike) -> Any:
    names = (
        "kv_to_q_mapping", "kv_to_q_rank", "kv_context_size", "q_to_num_kv_seq",
        "q_to_num_kv_token",
    )  # fmt: skip
    return tuple(whole_numbers(table, f"{who}: {name}") for table, name in zip(tables, names))


def _check_hints(dispatch: IntArray, q_seq_to_dst: ArrayLike, max_num_local_seqs: Any) -> None:
    """What DistCA takes beside the tables follows from q_dispatch."""
    if dispatch.ndim != 2:
        return  # the compiled part says what is wrong
    name = "compute_metadata_kv: max_num_local_seqs"
    if max_num_local_seqs is not None and integer(max_num_local_seqs, name) != dispatch.shape[1]:
        raise InvalidArgument(
            f"{name} = {int(max_num_local_seqs)}, expected {dispatch.shape[1]}, that of q_dispatch"
            f" {list(dispatch.shape)}"
        )
    if q_seq_to_dst is not None:
        shape = list(
            q_seq_to_dst.shape if hasattr(q_seq_to_dst, "shape") else np.shape(q_seq_to_dst)
        )
        expected = [dispatch.shape[0], dispatch.shape[1], dispatch.shape[0]]
        if shape != expected:
            raise InvalidArgument(
                f"compute_metadata_kv: q_seq_to_dst has shape {shape}, expected {expected}"
            )
