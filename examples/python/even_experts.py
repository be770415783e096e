"""Trains a small mixture with a skewed router on CPU ranks, with copies of hot experts and without.

    python examples/python/even_experts.py [--ranks N] [--steps N] [--spare N]

Prints the rows of each rank in the first step before and after, and the losses of both trainings,
which are alike. Ranks are threads. Needs torch 2.8; without torch it ends with status 77.
"""

import argparse
import sys

try:
    import torch
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

import waybill.torch as waybill
from waybill.torch.moe import ExpertParallel, SwiGLUExperts

HIDDEN, INNER, LOCAL, TOPK, TOKENS = 32, 64, 2, 2, 64


def fill(parameters, seed):
    """Numbers of a generator of the rank's own: ranks are threads."""
    draws = torch.Generator().manual_seed(seed)
    for weight in parameters:
        weight.data.copy_(torch.randn(weight.shape, generator=draws) / HIDDEN**0.5)


def train(world, steps, spare):
    """Losses of this rank, the rows that it computed in the first step, and its memory."""
    num_experts = world.world_size * LOCAL
    experts = SwiGLUExperts(LOCAL, HIDDEN, INNER)
    router = [torch.nn.Parameter(torch.empty(n)) for n in ((num_experts, HIDDEN), num_experts)]
    fill(experts.parameters(), 10 + world.rank)
    fill(router, 3)
    router[1].data[0] += 3  # most tokens choose expert 0
    layer = ExpertParallel(
        experts, num_experts=num_experts, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS, group=world,
        gradients="sum", dtype=torch.float32, spare_experts=spare, min_rows=8 if spare else 128,
    )  # fmt: skip
    rows = []
    experts.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    optimizer = torch.optim.SGD([*experts.parameters(), *router], lr=0.02)
    draws = torch.Generator().manual_seed(world.rank)
    losses, in_first = [], 0
    for step in range(steps):
        x = torch.randn(TOKENS, HIDDEN, generator=draws)
        scores, ids = torch.nn.functional.linear(x, *router).softmax(-1).topk(TOPK)
        loss = (x + layer(x, scores, ids) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        in_first = in_first if step else sum(rows)
    memory = layer.memory()
    layer.finalize()
    return losses, in_first, memory


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--spare", type=int, default=2)
    given = parser.parse_args()
    plain, copied = (
        waybill.run_threads(given.ranks, lambda world, n=spare: train(world, given.steps, n))
        for spare in (0, given.spare)
    )
    for title, ranks in (("without copies", plain), ("with copies", copied)):
        loads = [rows for _, rows, _ in ranks]
        over = max(loads) * len(loads) / sum(loads)
        first, last = (sum(losses[step] for losses, *_ in ranks) / len(ranks) for step in (0, -1))
        print(f"{title:>15}: rows of the ranks {loads}, fullest {over:.2f} times the mean,"
              f" loss {first:.4f} -> {last:.4f}")  # fmt: skip
    print("bytes on rank 0:", copied[0][2])
    for (one, *_), (other, *_) in zip(plain, copied):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    print("losses are alike")


if __name__ == "__main__":
    main()
