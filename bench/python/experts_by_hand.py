"""A layer of experts over ranks as a user writes it by hand, with torch.distributed.

Each way takes tokens [T, hidden], ids [T, topk] (int64), weights [T, topk] and a function of
(rows, ends of the experts), and gives [T, hidden]. Backward is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from collectives import AllToAll, Gathered, Scattered, exchanged, gathered
from torch import distributed

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _weighted_sums(rows: Any, weights: Any, tokens: Any, like: torch.Tensor) -> torch.Tensor:
    """Of rows times weights, by token, in float32."""
    sums = torch.zeros(like.shape, device=like.device, dtype=torch.float32)
    return sums.index_add(0, tokens, rows.float() * weights[:, None])


def all_to_all(x: Any, ids: Any, weights: Any, experts: Experts, num_experts: int) -> Any:
    """Sort by expert, counts by all_to_all with a host read, a row per topk slot there, permuted,
    and the same back.
    """
    ranks, topk = distributed.get_world_size(), ids.shape[1]
    local, flat = num_experts // ranks, ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    theirs = torch.empty_like(counts)
    distributed.all_to_all_single(theirs, counts)
    by_source = theirs.view(ranks, local)
    sent, received = counts.view(ranks, local).sum(1).tolist(), by_source.sum(1).tolist()
    rows = AllToAll.apply(x[order // topk], received, sent)
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(theirs)
    grouped = expert.argsort(stable=True)
    outputs = experts(rows[grouped], by_source.sum(0).cumsum(0).to(torch.int32))
    back = torch.empty_like(outputs).index_copy(0, grouped, outputs)
    home = AllToAll.apply(back, sent, received)
    return _weighted_sums(home, weights.flatten()[order], order // topk, x).to(x.dtype)


def all_gather(x: Any, ids: Any, weights: Any, experts: Experts, num_experts: int) -> Any:
    """All tokens to all ranks, the experts of this one, sums scattered: no counts are exchanged."""
    local, topk = num_experts // distributed.get_world_size(), ids.shape[1]
    every_x, every_weight, every_id = Gathered.apply(x), Gathered.apply(weights), gathered(ids)
    mine = every_id.flatten() - distributed.get_rank() * local
    here = ((mine >= 0) & (mine < local)).nonzero().squeeze(1)
    here = here[mine[here].argsort(stable=True)]
    ends = torch.bincount(mine[here], minlength=local).cumsum(0).to(torch.int32)
    outputs = experts(every_x[here // topk], ends)
    outputs = (outputs.float() * every_weight.flatten()[here][:, None]).to(x.dtype)
    sums = torch.zeros(every_x.shape, device=x.device, dtype=x.dtype)
    return Scattered.apply(sums.index_add(0, here // topk, outputs))


def deduplicated(x: Any, ids: Any, weights: Any, experts: Experts, num_experts: int) -> Any:
    """Each token once to each rank that has one of its experts, with its ids and weights; its rows
    are made and summed there, and one sum comes back.
    """
    ranks, topk = distributed.get_world_size(), ids.shape[1]
    local = num_experts // ranks
    goes = torch.zeros(ranks, x.shape[0], dtype=torch.bool, device=x.device)
    goes.scatter_(0, (ids // local).T, True)
    rank_and_token = goes.nonzero()  # by rank, then token
    tokens = rank_and_token[:, 1]
    counts = goes.sum(1)
    theirs = torch.empty_like(counts)
    distributed.all_to_all_single(theirs, counts)
    sent, received = torch.stack([counts, theirs]).tolist()
    rows = AllToAll.apply(x[tokens], received, sent)
    their_weights = AllToAll.apply(weights[tokens], received, sent)
    mine = exchanged(ids[tokens], received, sent).flatten() - distributed.get_rank() * local
    here = ((mine >= 0) & (mine < local)).nonzero().squeeze(1)
    here = here[mine[here].argsort(stable=True)]
    ends = torch.bincount(mine[here], minlength=local).cumsum(0).to(torch.int32)
    outputs = experts(rows[here // topk], ends)
    sums = _weighted_sums(outputs, their_weights.flatten()[here], here // topk, rows)
    home = AllToAll.apply(sums.to(x.dtype), sent, received)
    ones = torch.ones(len(tokens), device=x.device)
    return _weighted_sums(home, ones, tokens, x).to(x.dtype)


WAYS: dict[str, Callable[..., Any]] = {
    "all_to_all": all_to_all,
    "all_gather": all_gather,
    "deduplicated": deduplicated,
}
