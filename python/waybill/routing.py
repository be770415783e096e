"""DistCA's functions for arrays: from a dispatch plan to metadata, random plans, index helpers."""

from __future__ import annotations

from typing import Any, Literal, Optional, Tuple, Union, overload

import numpy as np

from . import _core
from ._arrays import (
    AnyArray,
    ArrayLike,
    IntArray,
    as_numpy,
    choice,
    flag,
    integer,
    plain_array,
    whole_numbers,
)
from ._errors import shown
from .errors import InvalidArgument
from .metadata import (
    AttnLayout,
    Fields,
    Metadata,
    PackedSeqParams,
    RawQkvDispatch,
    attention_layout,
)

__all__ = [
    "compute_attn_layout_seqlens",
    "compute_e2e_metadata",
    "compute_metadata",
    "compute_metadata_kv",
    "create_qkv_dispatch",
    "create_qkv_dispatch_with_custom_mapping",
    "create_raw_qkv_dispatch",
    "exclusive_cumsum",
    "gen_seq_lens",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "mlp_layout_packed_params",
    "prepend_zero",
    "prepend_zero_fn",
]


@overload
def compute_metadata(
    seq_len: ArrayLike, global_dispatch: ArrayLike, return_intermediate: Literal[False] = ..., *,
    undispatched: str = ...,
) -> Tuple[Metadata, Metadata]: ...  # fmt: skip
@overload
def compute_metadata(
    seq_len: ArrayLike, global_dispatch: ArrayLike, return_intermediate: Literal[True], *,
    undispatched: str = ...,
) -> Tuple[Metadata, Metadata, Tuple[IntArray, IntArray, IntArray]]: ...  # fmt: skip
@overload
def compute_metadata(
    seq_len: ArrayLike, global_dispatch: ArrayLike, return_intermediate: bool, *,
    undispatched: str = ...,
) -> Tuple[Any, ...]: ...  # fmt: skip
def compute_metadata(
    seq_len: ArrayLike,
    global_dispatch: ArrayLike,
    return_intermediate: bool = False,
    *,
    undispatched: str = "reject",
) -> Tuple[Any, ...]:
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
            be lost; "keep" leaves it there, as DistCA does.

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
    seq_len: ArrayLike, global_dispatch: ArrayLike, return_intermediate: bool, undispatched: str,
    capsules: bool = False, callers_seq_len: bool = False, callers_dispatch: bool = False,
) -> Tuple[Fields, Fields, Any]:  # fmt: skip
    """compute_metadata for any face: with arrays or DLPack capsules. A face that puts the caller's
    own table into the result gets None there: for dst_rank, or for seq_len and recv_seq_lens.
    """
    choice(undispatched, "compute_metadata: undispatched", "reject", "keep")
    intermediate = flag(return_intermediate, "compute_metadata: return_intermediate")
    lens, ranks = _tables("compute_metadata", seq_len=seq_len, global_dispatch=global_dispatch)
    return _core.compute_metadata(
        lens, ranks, intermediate, undispatched == "keep", capsules, callers_seq_len,
        callers_dispatch,
    )  # fmt: skip


@overload
def compute_metadata_kv(
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, seq_len: ArrayLike,
    num_seqs: ArrayLike, q_dispatch: ArrayLike, q_seq_to_dst: ArrayLike = ...,
    max_num_local_seqs: Union[int, None] = ..., return_intermediate: Literal[False] = ...,
) -> Tuple[Metadata, Metadata]: ...  # fmt: skip
@overload
def compute_metadata_kv(
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, seq_len: ArrayLike,
    num_seqs: ArrayLike, q_dispatch: ArrayLike, q_seq_to_dst: ArrayLike = ...,
    max_num_local_seqs: Union[int, None] = ..., *, return_intermediate: Literal[True],
) -> Tuple[Metadata, Metadata, Tuple[IntArray]]: ...  # fmt: skip
@overload
def compute_metadata_kv(
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, seq_len: ArrayLike,
    num_seqs: ArrayLike, q_dispatch: ArrayLike, q_seq_to_dst: ArrayLike = ...,
    max_num_local_seqs: Union[int, None] = ..., return_intermediate: bool = ...,
) -> Tuple[Any, ...]: ...  # fmt: skip
def compute_metadata_kv(
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, seq_len: ArrayLike,
    num_seqs: ArrayLike, q_dispatch: ArrayLike, q_seq_to_dst: ArrayLike = None,
    max_num_local_seqs: Union[int, None] = None, return_intermediate: bool = False,
) -> Tuple[Any, ...]:  # fmt: skip
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
    who = "compute_metadata_kv"
    (dispatch,) = _tables(who, q_dispatch=q_dispatch)
    _check_hints(dispatch, q_seq_to_dst, max_num_local_seqs)
    *tables, lens, counts = _tables(
        who, kv_to_q_mapping=kv_to_q_mapping, kv_to_q_rank=kv_to_q_rank,
        kv_context_size=kv_context_size, q_to_num_kv_seq=q_to_num_kv_seq,
        q_to_num_kv_token=q_to_num_kv_token, seq_len=seq_len, num_seqs=num_seqs,
    )  # fmt: skip
    intermediate = flag(return_intermediate, f"{who}: return_intermediate")
    fwd, rev, ids = _core.compute_metadata_kv(tuple(tables), lens, counts, dispatch, intermediate)
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
    lens, contexts, ranks = _tables(
        who, seq_shard_len=seq_shard_len, seq_shard_cumsum=seq_shard_cumsum, dispatch=dispatch
    )
    leading = flag(prepend_zero, f"{who}: prepend_zero")
    fields = _core.compute_attn_layout_seqlens(lens, contexts, ranks, leading, ragged)
    layout = attention_layout(fields, ragged)
    assert isinstance(layout, AttnLayout)
    return layout


def mlp_layout_packed_params(seq_lens: ArrayLike) -> PackedSeqParams:
    """Arguments of variable-length attention in the MLP layout of one rank; seq_lens (n,) rows."""
    lens = whole_numbers(seq_lens, "mlp_layout_packed_params: seq_lens")
    cu_seqlens, longest = _core.mlp_layout_packed_params(lens)
    most = lens.dtype.type(longest)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, most, most)


@overload
def compute_e2e_metadata(
    mlp_seq_len: ArrayLike, mlp_num_seqs: ArrayLike, mlp_q_dispatch: ArrayLike,
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike,
    return_intermediate: Literal[False] = ...,
) -> Tuple[
    Metadata, Metadata, Metadata, Metadata, Tuple[Tuple[IntArray, ...], Tuple[IntArray, ...],
    IntArray, IntArray],
]: ...  # fmt: skip
@overload
def compute_e2e_metadata(
    mlp_seq_len: ArrayLike, mlp_num_seqs: ArrayLike, mlp_q_dispatch: ArrayLike,
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, return_intermediate: Literal[True],
) -> Tuple[
    Metadata, Metadata, Metadata, Metadata, Tuple[Tuple[IntArray, ...], Tuple[IntArray, ...],
    IntArray, IntArray], Tuple[IntArray, ...],
]: ...  # fmt: skip
@overload
def compute_e2e_metadata(
    mlp_seq_len: ArrayLike, mlp_num_seqs: ArrayLike, mlp_q_dispatch: ArrayLike,
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, return_intermediate: bool,
) -> Tuple[Any, ...]: ...  # fmt: skip
def compute_e2e_metadata(
    mlp_seq_len: ArrayLike, mlp_num_seqs: ArrayLike, mlp_q_dispatch: ArrayLike,
    kv_to_q_mapping: ArrayLike, kv_to_q_rank: ArrayLike, kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike, q_to_num_kv_token: ArrayLike, return_intermediate: bool = False,
) -> Tuple[Any, ...]:  # fmt: skip
    """compute_metadata, compute_metadata_kv and compute_attn_layout_seqlens in one call.

    Returns:
        (fwd_q, rev_q, fwd_kv, rev_kv, (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)),
        the layout ragged with a leading zero; with return_intermediate a sixth, the four
        intermediates of both.
    """
    who = "compute_e2e_metadata"
    lens, counts, ranks, *tables = _tables(
        who, mlp_seq_len=mlp_seq_len, mlp_num_seqs=mlp_num_seqs, mlp_q_dispatch=mlp_q_dispatch,
        kv_to_q_mapping=kv_to_q_mapping, kv_to_q_rank=kv_to_q_rank,
        kv_context_size=kv_context_size, q_to_num_kv_seq=q_to_num_kv_seq,
        q_to_num_kv_token=q_to_num_kv_token,
    )  # fmt: skip
    intermediate = flag(return_intermediate, f"{who}: return_intermediate")
    fields = _core.compute_e2e_metadata(lens, counts, ranks, tuple(tables), intermediate)
    *made, layout, q_intermediates, kv_ids = fields
    metadata = tuple(Metadata._from_fields(table) for table in made)
    fa_params = tuple(attention_layout(layout, True))[:4]
    if return_intermediate:
        return (*metadata, fa_params, (*q_intermediates, kv_ids))
    return (*metadata, fa_params)


def _tables(who: str, **arrays: ArrayLike) -> Any:
    """Arguments of ``who`` that are tables of integers, by name."""
    return tuple(whole_numbers(array, f"{who}: {name}") for name, array in arrays.items())


def _check_hints(dispatch: IntArray, q_seq_to_dst: ArrayLike, max_num_local_seqs: Any) -> None:
    """These arguments of DistCA follow from q_dispatch."""
    if dispatch.ndim != 2:
        return  # the compiled part says what is wrong
    name = "compute_metadata_kv: max_num_local_seqs"
    if max_num_local_seqs is not None and integer(max_num_local_seqs, name) != dispatch.shape[1]:
        raise InvalidArgument(
            f"{name} = {int(max_num_local_seqs)}, expected {dispatch.shape[1]}, that of q_dispatch"
            f" {list(dispatch.shape)}"
        )
    if q_seq_to_dst is not None:
        shape = list(np.shape(q_seq_to_dst))
        expected = [dispatch.shape[0], dispatch.shape[1], dispatch.shape[0]]
        if shape != expected:
            raise InvalidArgument(
                f"compute_metadata_kv: q_seq_to_dst has shape {shape}, expected {expected}"
            )


def gen_seq_lens(
    world_size: int,
    num_seqs: int,
    total_len: int,
    seed: Optional[int] = None,
    uniforms: ArrayLike = None,
) -> IntArray:
    """Random sequence lengths: (world_size, num_seqs) int32, every row sums to total_len exactly.

    Args:
        seed: None is 0: the same call gives the same lengths. All are >= 1 where total_len allows.
        uniforms: world_size * num_seqs draws in [0, 1) in place of a seed; gives what DistCA
            makes of the same draws (which may round to 0), but for its negative lengths.
    """
    if uniforms is None:
        return _core.gen_seq_lens(
            world_size, num_seqs, total_len, checked_seed(seed, "gen_seq_lens")
        )
    if seed is not None:
        raise InvalidArgument("gen_seq_lens: got seed and uniforms, expected one of them")
    given = as_numpy(uniforms, "gen_seq_lens: uniforms")
    if given.dtype.kind not in "fiu":
        raise InvalidArgument(f"gen_seq_lens: uniforms has dtype {given.dtype}, expected float32")
    with np.errstate(over="ignore"):  # infinity is refused below
        draws = np.ascontiguousarray(given, dtype=np.float32)
    return _core.gen_seq_lens_from(world_size, num_seqs, total_len, draws.reshape(-1))


def create_raw_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_mlp_no_shard_seq_lens: bool = False, seed: Optional[int] = None,
) -> RawQkvDispatch:  # fmt: skip
    """A random plan: each sequence is cut into a power of two of shards for different ranks.

    total_seq_len is the number of rows on every rank, a multiple of max_cp_degree.
    """
    who = "create_raw_qkv_dispatch"
    with_lens = flag(return_mlp_no_shard_seq_lens, f"{who}: return_mlp_no_shard_seq_lens")
    raw, seq_lens, _ = _core.create_raw_qkv_dispatch(
        world_size, total_seq_len, num_seqs, max_cp_degree, checked_seed(seed, who)
    )
    return RawQkvDispatch._make((*raw, (seq_lens,) if with_lens else ()))


@overload
def create_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_intermediate: Literal[False] = ..., return_mlp_no_shard_seq_lens: Literal[False] = ...,
    seed: Optional[int] = ...,
) -> Tuple[Metadata, Metadata, Metadata, Metadata, AttnLayout]: ...  # fmt: skip
@overload
def create_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_intermediate: bool = ..., return_mlp_no_shard_seq_lens: bool = ...,
    seed: Optional[int] = ...,
) -> Tuple[Any, ...]: ...  # fmt: skip
def create_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_intermediate: bool = False, return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> Tuple[Any, ...]:  # fmt: skip
    """A random plan with all its metadata.

    Returns:
        (fwd_q, rev_q, fwd_k, rev_k, attention layout), then the intermediates and the sequence
        lengths before sharding, each when asked for.
    """
    who = "create_qkv_dispatch"
    more = asked_for(who, return_intermediate, return_mlp_no_shard_seq_lens)
    fields, _, seq_lens, _ = _core.create_qkv_dispatch(
        world_size, total_seq_len, num_seqs, max_cp_degree, checked_seed(seed, who), more[0]
    )
    return (*dispatch_tuple(fields, more[0]), *((seq_lens,) if more[1] else ()))


@overload
def create_qkv_dispatch_with_custom_mapping(
    world_size: int, seq_lens: ArrayLike, cp_num: ArrayLike, cp_dst: ArrayLike,
    seq_shard_lens: ArrayLike, return_intermediate: Literal[False] = ...,
    return_mlp_no_shard_seq_lens: Literal[False] = ..., verbose: bool = ...,
) -> Tuple[Metadata, Metadata, Metadata, Metadata, AttnLayout]: ...  # fmt: skip
@overload
def create_qkv_dispatch_with_custom_mapping(
    world_size: int, seq_lens: ArrayLike, cp_num: ArrayLike, cp_dst: ArrayLike,
    seq_shard_lens: ArrayLike, return_intermediate: bool = ...,
    return_mlp_no_shard_seq_lens: bool = ..., verbose: bool = ...,
) -> Tuple[Any, ...]: ...  # fmt: skip
def create_qkv_dispatch_with_custom_mapping(
    world_size: int, seq_lens: ArrayLike, cp_num: ArrayLike, cp_dst: ArrayLike,
    seq_shard_lens: ArrayLike, return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False, verbose: bool = False,
) -> Tuple[Any, ...]:  # fmt: skip
    """The same for given shards, which may be uneven and share destinations.

    Args:
        seq_lens: (W, n), zeros only after the last sequence of a rank.
        cp_num: (W, n), shards of each sequence.
        cp_dst: (W, n, C), destination of each shard, -1 after the first cp_num.
        seq_shard_lens: (W, n, C), rows of each shard; they sum to seq_lens.
        verbose: print the plan.
    """
    who = "create_qkv_dispatch_with_custom_mapping"
    more = asked_for(who, return_intermediate, return_mlp_no_shard_seq_lens)
    lens, nums, dst, shard_lens = _tables(
        who, seq_lens=seq_lens, cp_num=cp_num, cp_dst=cp_dst, seq_shard_lens=seq_shard_lens
    )
    fields, raw, _, _ = _core.create_qkv_dispatch_with_custom_mapping(
        world_size, lens, nums, dst, shard_lens, more[0]
    )
    if flag(verbose, f"{who}: verbose"):
        for name, value in zip(RawQkvDispatch._fields, raw):
            print(name, "=", value)
    return (*dispatch_tuple(fields, more[0]), *((lens,) if more[1] else ()))


def length_distributions() -> list[str]:
    """Names of the built-in distributions of document lengths."""
    return _core.length_distributions()


def sample_documents(distribution: str, num_tokens: int, seed: int = 0) -> IntArray:
    """Document lengths, (n,) int64, drawn until they fill num_tokens exactly; the last is cut."""
    return _core.sample_documents(distribution, num_tokens, seed)


def dispatch_of_raw(raw: Any, return_intermediate: bool) -> Tuple[Any, ...]:
    """All metadata of a plan in dense form, of which ``raw`` has the eight tables."""
    lens, num_shards, dst, *tables = raw
    fields = _core.compute_e2e_metadata(lens, num_shards, dst, tuple(tables), return_intermediate)
    return dispatch_tuple(fields, return_intermediate)


def dispatch_tuple(fields: Any, return_intermediate: bool) -> Tuple[Any, ...]:
    """(fwd_q, rev_q, fwd_k, rev_k, attention layout[, intermediates])"""
    *tables, layout, q_intermediates, kv_ids = fields
    result = (*(Metadata._from_fields(t) for t in tables), attention_layout(layout, True))
    return (*result, (*q_intermediates, kv_ids)) if return_intermediate else result


def asked_for(who: str, intermediate: Any, seq_lens: Any) -> Tuple[bool, bool]:
    """The results that a plan gives besides its metadata."""
    return (
        flag(intermediate, f"{who}: return_intermediate"),
        flag(seq_lens, f"{who}: return_mlp_no_shard_seq_lens"),
    )


def checked_seed(seed: Optional[int], who: str) -> int:
    if seed is None:
        return 0
    if not 0 <= integer(seed, f"{who}: seed") < 2**64:
        raise InvalidArgument(f"{who}: seed = {shown(seed)}, expected 0..2^64 - 1")
    return int(seed)


def exclusive_cumsum(tensor: ArrayLike, dim: int = 0) -> AnyArray:
    """Prefix sums along ``dim``, shifted by one: first slice 0, the last never enters.

    ``[0, 1, 2, 3, 4, 5]`` gives ``[0, 0, 1, 3, 6, 10]``. Sums of integers are int64, as torch's;
    floats keep their dtype, and are summed in float64.
    """
    who = "exclusive_cumsum"
    array = _numbers(tensor, f"{who}: tensor")
    if array.dtype.kind != "f":
        return _core.exclusive_cumsum(whole_numbers(array, f"{who}: tensor"), dim)
    axis = _axis(array, dim, who)
    sums = np.zeros(array.shape, np.float64)
    after, before = ([slice(None)] * array.ndim for _ in range(2))
    after[axis], before[axis] = slice(1, None), slice(None, -1)
    np.cumsum(array[tuple(before)], axis=axis, dtype=np.float64, out=sums[tuple(after)])
    with np.errstate(over="ignore"):  # too large for the dtype is inf, as torch's
        return sums.astype(array.dtype)


def prepend_zero(tensor: ArrayLike, dim: int = 0) -> AnyArray:
    """One slice of zeros in front along ``dim``; the dtype is kept."""
    array = _numbers(tensor, "prepend_zero: tensor")
    axis = _axis(array, dim, "prepend_zero")
    zeros = np.zeros((*array.shape[:axis], 1, *array.shape[axis + 1 :]), array.dtype)
    return np.concatenate([zeros, array], axis=axis)


prepend_zero_fn = prepend_zero


def mask_by_neg(tensor: ArrayLike, mask: ArrayLike) -> AnyArray:
    """``tensor`` where ``mask`` is true (not 0), -1 elsewhere; one may be broadcast to the other.

    Integers with a sign and floats keep their dtype; what cannot hold -1 becomes int64.
    """
    who = "mask_by_neg"
    array, keep = _numbers(tensor, f"{who}: tensor"), _numbers(mask, f"{who}: mask")
    try:
        shape = np.broadcast_shapes(array.shape, keep.shape)
    except ValueError:
        raise InvalidArgument(
            f"{who}: mask has shape {list(keep.shape)}, expected {list(array.shape)}, or one that"
            " can be broadcast with it"
        ) from None
    if array.dtype.kind in "bu":
        signed = whole_numbers(np.broadcast_to(array, shape), f"{who}: tensor")
        return _core.mask_by_neg(signed, np.ascontiguousarray(np.broadcast_to(keep != 0, shape)))
    return np.asarray(np.where(keep != 0, array, array.dtype.type(-1)))


def index_put_with_neg_padding_1d(tensor: ArrayLike, src: ArrayLike, index: ArrayLike) -> AnyArray:
    """A copy of ``tensor`` with ``tensor[index[i]] = src[i]`` in order, over flattened elements.

    Index -1 is dropped; of repeated indices the last wins; any other index outside the array is an
    InvalidArgument. The shape and dtype of ``tensor``, which must hold ``src``: one value, or as
    many as there are indices.
    """
    who = "index_put_with_neg_padding_1d"
    result = np.array(_numbers(tensor, f"{who}: tensor"), order="C")
    given = _numbers(src, f"{who}: src")
    # Which element of src each place gets, -1 for none.
    chosen = _core.index_put_with_neg_padding_1d(
        np.full(result.shape, -1), np.arange(given.size), whole_numbers(index, f"{who}: index")
    )
    taken = chosen >= 0
    result[taken] = _as_dtype(given.reshape(-1)[chosen[taken]], result.dtype, f"{who}: src")
    return result


def _numbers(value: Any, name: str) -> AnyArray:
    """Integers, floats or bools of any size."""
    array = plain_array(value, name)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name} has dtype {array.dtype}, expected integers or floats")
    return array


def _axis(array: AnyArray, dim: Any, who: str) -> int:
    axis = integer(dim, f"{who}: dim")
    if array.ndim == 0:
        raise InvalidArgument(f"{who}: got a scalar, expected at least one dimension")
    if not -array.ndim <= axis < array.ndim:
        raise InvalidArgument(
            f"{who}: dim = {shown(axis)}, expected {-array.ndim}..{array.ndim - 1} for an array of"
            f" {array.ndim} dimensions"
        )
    return axis % array.ndim


def _as_dtype(values: AnyArray, dtype: Any, name: str) -> AnyArray:
    """The values in a dtype that holds them; among floats they are rounded."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    if values.dtype.kind == "f":
        raise InvalidArgument(f"{name} has dtype {values.dtype}, expected {dtype}, that of tensor")
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for value in (int(values.min(initial=0)), int(values.max(initial=0))):
        if not low <= value <= high:
            raise InvalidArgument(f"{name} has {value}, which {dtype}, that of tensor, cannot hold")
    return values.astype(dtype)
