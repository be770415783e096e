"""Random sequence lengths and plans as torch tensors. See ``waybill`` for what each returns.

Without a seed they draw from torch's global generator, in DistCA's order: after the same
``torch.manual_seed`` they give what DistCA gives.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .. import _core, generators
from .._arrays import flag, int64
from .._graphs import outside_graphs
from ..layouts import RawQkvDispatch
from ._tensors import host_array, on_host, tensor, tensors
from .metadata import metadata_of

__all__ = [
    "create_qkv_dispatch",
    "create_qkv_dispatch_with_custom_mapping",
    "create_raw_qkv_dispatch",
    "gen_seq_lens",
]


@outside_graphs
def gen_seq_lens(
    world_size: int,
    num_seqs: int,
    total_len: int,
    seed: Optional[int] = None,
    uniforms: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Random sequence lengths: (world_size, num_seqs) int32, every row sums to total_len."""
    if seed is None and uniforms is None:
        world_size, num_seqs, total_len = (
            int64(value, f"gen_seq_lens: {name}")
            for name, value in (
                ("world_size", world_size), ("num_seqs", num_seqs), ("total_len", total_len)
            )
        )  # fmt: skip
        in_range = 1 <= world_size <= 2**20 and num_seqs >= 1 and 0 <= total_len < 2**31
        if not in_range or world_size * num_seqs >= 2**31:  # an error, before anything is drawn
            generators.gen_seq_lens(world_size, num_seqs, total_len)
        uniforms = torch.rand((world_size, num_seqs))
    draws = None if uniforms is None else host_array(uniforms, "gen_seq_lens: uniforms")
    result: torch.Tensor = tensor(
        generators.gen_seq_lens(world_size, num_seqs, total_len, seed, draws)
    )
    return result


@outside_graphs
def create_raw_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> RawQkvDispatch:
    """A random plan: each sequence is cut into a power of two of shards for different ranks."""
    who = "create_raw_qkv_dispatch"
    sizes = (world_size, total_seq_len, num_seqs, max_cp_degree)
    if seed is not None:
        raw = generators.create_raw_qkv_dispatch(*sizes, return_mlp_no_shard_seq_lens, seed)
    else:
        asked = flag(return_mlp_no_shard_seq_lens, f"{who}: return_mlp_no_shard_seq_lens")
        tables, seq_lens = _drawn(who, *sizes)
        raw = RawQkvDispatch._make((*tables, (seq_lens,) if asked else ()))
    result: RawQkvDispatch = tensors(raw)
    return result


@outside_graphs
def create_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> Tuple[Any, ...]:
    """A random plan with all its metadata: (fwd_q, rev_q, fwd_k, rev_k, attention layout, ...)."""
    who = "create_qkv_dispatch"
    sizes = (world_size, total_seq_len, num_seqs, max_cp_degree)
    asked = (return_intermediate, return_mlp_no_shard_seq_lens)
    if seed is not None:
        return _with_tensors(generators.create_qkv_dispatch(*sizes, *asked, seed))
    more = generators.asked_for(who, *asked)
    raw, seq_lens = _drawn(who, *sizes)
    result = generators.dispatch_of_raw(raw, more[0])
    return _with_tensors((*result, *((seq_lens,) if more[1] else ())))


@outside_graphs
def create_qkv_dispatch_with_custom_mapping(
    world_size: int,
    seq_lens: torch.Tensor,
    cp_num: torch.Tensor,
    cp_dst: torch.Tensor,
    seq_shard_lens: torch.Tensor,
    return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False,
    verbose: bool = False,
) -> Tuple[Any, ...]:
    """The same for given shards, which may be uneven and share destinations."""
    result = on_host(
        generators.create_qkv_dispatch_with_custom_mapping,
        world_size,
        seq_lens,
        cp_num,
        cp_dst,
        seq_shard_lens,
        return_intermediate=return_intermediate,
        return_mlp_no_shard_seq_lens=return_mlp_no_shard_seq_lens,
        verbose=verbose,
    )
    return _with_tensors(result)


def _with_tensors(result: Tuple[Any, ...]) -> Tuple[Any, ...]:
    return (*(metadata_of(m) for m in result[:4]), *tensors(result[4:]))


def _drawn(
    who: str, world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int
) -> Tuple[Any, Any]:
    """The eight tables and the lengths before sharding, drawn for the function ``who``."""
    names = ("world_size", "total_seq_len", "num_seqs", "max_cp_degree")
    world_size, total_seq_len, num_seqs, max_cp_degree = (
        int64(value, f"{who}: {name}")
        for name, value in zip(names, (world_size, total_seq_len, num_seqs, max_cp_degree))
    )
    in_range = (
        1 <= max_cp_degree <= world_size <= 2**20
        and 0 <= total_seq_len // max_cp_degree < 2**31
        and 1 <= num_seqs < 2**31 // world_size
    )
    if not in_range or total_seq_len % max_cp_degree:  # an error, before anything is drawn
        getattr(generators, who)(world_size, total_seq_len, num_seqs, max_cp_degree)
    seq_lens = gen_seq_lens(world_size, num_seqs, total_seq_len // max_cp_degree).long()
    seq_lens *= max_cp_degree
    log_degree = torch.randint(0, max_cp_degree.bit_length(), (world_size, num_seqs))
    order = torch.rand((world_size, num_seqs, world_size)).argsort(dim=2)
    raw, lens, _ = _core.create_raw_qkv_dispatch_from(
        seq_lens.numpy(), torch.pow(2, log_degree).numpy(),
        order[:, :, :max_cp_degree].contiguous().numpy(),
    )  # fmt: skip
    return raw, lens
