"""Inputs of all ranks for calls of the DeepEP interface, and what must come of them, in torch."""

from types import SimpleNamespace

import torch

from waybill.integrations.deep_ep import Buffer

WORLD, HIDDEN, TOPK, EXPERTS, MOST = 3, 16, 3, 12, 7
LOCAL = EXPERTS // WORLD
BYTES = 4 * WORLD * MOST * HIDDEN * 2  # of windows that hold MOST tokens of each rank


def everyone(seed=0, hidden=HIDDEN, topk=TOPK, tokens=(5, 0, 7), device="cpu"):
    """A namespace a rank: x, ids, weights, on which ranks tokens go."""
    draws = torch.Generator().manual_seed(seed)
    ranks = []
    for count in tokens:
        x = torch.randn(count, hidden, generator=draws).to(device, torch.bfloat16)
        scores = torch.rand(count, EXPERTS, generator=draws, dtype=torch.float32)
        ids = scores.topk(topk, dim=1).indices
        ids[torch.rand(count, topk, generator=draws) < 0.2] = -1
        weights = torch.rand(count, topk, generator=draws, dtype=torch.float32).to(device)
        goes = torch.stack([((ids // LOCAL == r) & (ids >= 0)).any(1) for r in range(WORLD)], 1)
        ranks.append(
            SimpleNamespace(x=x, ids=ids.to(device), weights=weights, goes=goes.to(device))
        )
    return ranks


def arrivals(ranks, me, field="x"):
    """What rank ``me`` must get of a field: by source rank, then token."""
    return torch.cat([getattr(one, field)[one.goes[:, me]] for one in ranks])


def local_choices(ranks, me):
    """(ids, weights) as rank ``me`` must get them."""
    ids = arrivals(ranks, me, "ids")
    here = (ids >= 0) & (ids // LOCAL == me)
    weights = arrivals(ranks, me, "weights").masked_fill(~here, 0)
    return torch.where(here, ids - me * LOCAL, -1), weights


def expert_counts(ranks, me):
    """Choices of each expert of rank ``me``."""
    ids = torch.cat([one.ids.reshape(-1) for one in ranks])
    return [int((ids == me * LOCAL + expert).sum()) for expert in range(LOCAL)]


def sums_of(one, factor, biases=()):
    """Of rows of which rank r has returned ``factor(r)`` times the token: float32, by rank."""
    total = torch.zeros(one.x.shape, dtype=torch.float32, device=one.x.device)
    for bias in biases:
        total += bias.float()
    for rank in range(WORLD):
        row = (one.x.float() * factor(rank)).bfloat16().float()
        total += row * one.goes[:, rank : rank + 1]
    return total.bfloat16()


def settle(device):
    """Waits: nothing copies to pageable memory behind a kernel that waits for other threads."""
    if device != "cpu":
        torch.cuda.current_stream().synchronize()


class Settled:
    """A buffer whose calls are done when they return, unless they are asked not to wait."""

    def __init__(self, buffer, device):
        self.buffer, self.device = buffer, device

    def __getattr__(self, name):
        value = getattr(self.buffer, name)
        if not name.endswith(("dispatch", "combine")):
            return value

        def call(*args, **options):
            result = value(*args, **options)
            if not options.get("async_finish") and not options.get("return_recv_hook"):
                settle(self.device)
            return result

        return call


def on_ranks(way, body, num_bytes=BYTES, **options):
    """body(buffer, rank) on each rank, which destroys its buffer."""

    def one_rank(world):
        buffer = Buffer(world, num_bytes, explicitly_destroy=True, **options)
        result = body(Settled(buffer, way.device), world.rank)
        buffer.destroy()
        return result

    return way.run(WORLD, one_rank)


def layout_of(buffer, mine, num_experts=EXPERTS):
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
    tokens, nodes, experts, inside, _ = buffer.get_dispatch_layout(mine.ids, num_experts)
    return {**dict(zip(names, (tokens, nodes, experts))), "is_token_in_rank": inside}
