"""Trains a small model with layers of experts: what all ranks have, and experts that each has.

    torchrun --nproc-per-node N examples/python/train_moe.py [--device cpu|cuda] [--steps N]

Each block is attention, then a gate and ExpertParallel, with an expert that every token has beside
it; all blocks share one layer's memory, as they have the same sizes. Gradients of the experts are
complete when backward is done, as tokens of all ranks came to them; the others are averaged, as DDP
does. Needs torch 2.8; without torch it ends with status 77.
"""

import argparse
import sys

try:
    import torch
    from torch import distributed, nn
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

from waybill import num_gpus
from waybill.torch import initialize_distributed
from waybill.torch.moe import ExpertParallel, SwiGLUExperts

VOCABULARY, LENGTH, BATCH, BLOCKS = 32, 24, 8, 3
HIDDEN, HEADS, EXPERTS, TOPK, INNER = 64, 4, 8, 2, 64


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.before, self.between = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = ExpertParallel(
            SwiGLUExperts(EXPERTS // distributed.get_world_size(), HIDDEN, INNER),
            num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=BATCH * LENGTH,
            device=device,
            shared=nn.Sequential(nn.Linear(HIDDEN, INNER), nn.SiLU(), nn.Linear(INNER, HIDDEN)),
        )  # fmt: skip

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        scores, ids = self.gate(y).softmax(-1, dtype=torch.float32).topk(TOPK)
        return x + self.experts(y, scores, ids)


class Model(nn.Module):
    """Logits of the next number."""

    def __init__(self, device):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.blocks = nn.ModuleList(Block(device) for _ in range(BLOCKS))
        self.to(device)

    def forward(self, numbers):
        x = self.embed(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def of_all_ranks(self):
        """The parameters that are the same everywhere."""
        return [p for name, p in self.named_parameters() if "experts.experts" not in name]


def batch(step, rank, device):
    """Numbers that go up by a step of their own, around the vocabulary."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    first, stride = torch.randint(0, VOCABULARY, (2, BATCH, 1), generator=draws)
    numbers = (first + (1 + stride % 5) * torch.arange(LENGTH + 1)) % VOCABULARY
    return numbers[:, :-1].to(device), numbers[:, 1:].to(device)


def train(rank, world_size, device, steps):
    torch.manual_seed(rank)  # experts differ
    model = Model(device)
    for parameter in model.of_all_ranks():
        distributed.broadcast(parameter.data, 0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        numbers, wanted = batch(step, rank, device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(numbers)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        for value in (loss.data, *(p.grad for p in model.of_all_ranks())):
            distributed.all_reduce(value.div_(world_size))
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}: loss {losses[-1]:.3f}", flush=True)
    for block in model.blocks:
        block.experts.finalize()
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda" if num_gpus() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    rank, world_size = initialize_distributed(device=options.device)
    losses = train(rank, world_size, options.device, options.steps)
    distributed.destroy_process_group()
    early, late = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    sys.exit(None if late < 0.8 * early else "the loss did not fall")


if __name__ == "__main__":
    main()
