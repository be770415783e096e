"""Counts and destinations of a router's choices."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from ...errors import InvalidArgument
from ...torch.moe.tensors import require_known_ids
from .arguments import check_memory

__all__ = ["checked_ids", "counts_of", "first_wrong", "too_many", "topk_idx_t"]

topk_idx_t = torch.int64  #: of expert ids; int32 is taken too


def checked_ids(topk_idx: Any, who: str, rank: int, device: torch.device) -> torch.Tensor:
    """[num_tokens, num_topk], int64 or int32."""
    name = f"{who}: topk_idx of rank {rank}"
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.ndim != 2 or topk_idx.shape[1] < 1:
        shape = tuple(topk_idx.shape) if isinstance(topk_idx, torch.Tensor) else type(topk_idx)
        raise InvalidArgument(f"{name} is {shape}, expected a tensor [num_tokens, num_topk]")
    if topk_idx.dtype not in (torch.int64, torch.int32):
        raise InvalidArgument(f"{name} has dtype {topk_idx.dtype}, expected int64 or int32")
    check_memory(topk_idx, f"{who}: topk_idx", rank, device)
    return topk_idx


def first_wrong(topk_idx: torch.Tensor, num_experts: int, who: str, rank: int) -> None:
    """Raises for an id that is neither -1 nor an expert. The host looks: it waits for a device."""
    require_known_ids(topk_idx, num_experts, -1, f"{who}: topk_idx", rank)


def too_many(topk_idx: torch.Tensor, num_experts: int, most: int, who: str, rank: int) -> None:
    """Raises where tokens have chosen an expert twice, and so more often than rows have places."""
    flat = topk_idx.reshape(-1).to(torch.int64)
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    expert = int(counts.argmax())
    if int(counts[expert]) > most:
        raise InvalidArgument(
            f"{who}: topk_idx of rank {rank} has expert {expert} {int(counts[expert])} times,"
            f" expected at most {most}, as there are places for: a token's choices are different"
        )


def counts_of(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens for each rank, topk slots of each expert, and [num_tokens, num_ranks] whether a token
    goes to a rank. Ids out of range count as none.
    """
    num_tokens, device = topk_idx.shape[0], topk_idx.device
    none = (topk_idx < 0) | (topk_idx >= num_experts)
    ids = topk_idx.to(torch.int64).masked_fill(none, num_experts)
    ranks = ids // (num_experts // num_ranks)  # num_ranks: of none
    inside = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool, device=device)
    inside = inside.scatter_(1, ranks, True)[:, :num_ranks].contiguous()
    choices = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    flat = ids.reshape(-1)
    choices.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return inside.sum(0, dtype=torch.int32), choices[:num_experts], inside
