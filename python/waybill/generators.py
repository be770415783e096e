"""Random sequence lengths and plans, for tests and demonstrations."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from . import _core
from ._arrays import ArrayLike, IntArray, as_numpy, flag, integer, whole_numbers
from ._errors import shown
from .errors import InvalidArgument
from .layouts import RawQkvDispatch, attention_layout
from .metadata import Metadata

__all__ = [
    "create_qkv_dispatch",
    "create_qkv_dispatch_with_custom_mapping",
    "create_raw_qkv_dispatch",
    "gen_seq_lens",
]


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
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> RawQkvDispatch:
    """A random plan: each sequence is cut into a power of two of shards for different ranks.

    total_seq_len is the number of rows on every rank, a multiple of max_cp_degree.
    """
    who = "create_raw_qkv_dispatch"
    with_lens = flag(return_mlp_no_shard_seq_lens, f"{who}: return_mlp_no_shard_seq_lens")
    raw, seq_lens, _ = _core.create_raw_qkv_dispatch(
        world_size, total_seq_len, num_seqs, max_cp_degree, checked_seed(seed, who)
    )
    return RawQkvDispatch._make((*raw, (seq_lens,) if with_lens else ()))


def create_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> Tuple[Any, ...]:
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


def create_qkv_dispatch_with_custom_mapping(
    world_size: int,
    seq_lens: ArrayLike,
    cp_num: ArrayLike,
    cp_dst: ArrayLike,
    seq_shard_lens: ArrayLike,
    return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False,
    verbose: bool = False,
) -> Tuple[Any, ...]:
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
    lens = whole_numbers(seq_lens, f"{who}: seq_lens")
    fields, raw, _, _ = _core.create_qkv_dispatch_with_custom_mapping(
        world_size,
        lens,
        whole_numbers(cp_num, f"{who}: cp_num"),
        whole_numbers(cp_dst, f"{who}: cp_dst"),
        whole_numbers(seq_shard_lens, f"{who}: seq_shard_lens"),
        more[0],
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
    """What a plan brings beside its metadata."""
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
