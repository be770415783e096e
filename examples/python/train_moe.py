"""Trains a small model on packed documents, with attention and experts that the ranks share.

    torchrun --nproc-per-node N examples/python/train_moe.py [--device cpu|cuda] [--steps N]

Gradients are sums everywhere. A rank's loss is its part of the mean over the labels of all ranks;
gradients of what all ranks have are added over the ranks; those of a rank's experts are whole when
backward is done, as tokens of all ranks came to them. Both modules use one world, and all layers
one memory. Needs torch 2.8; without torch it ends with status 77.
"""

import argparse
import sys

try:
    import torch
    from torch import distributed, nn
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

import waybill.torch as waybill
from waybill.torch.moe import ExpertParallel, SwiGLUExperts

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, BLOCKS = 32, 64, 4, 16, 2
EXPERTS, TOPK, INNER, DOCUMENTS, LONGEST = 8, 2, 64, 6, 60


class Block(nn.Module):
    """`attention` and `experts` are all that differs from a model of one process."""

    def __init__(self, attention, experts):
        super().__init__()
        self.attention, self.experts = attention, experts
        self.before, self.between = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, plan, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
        x = x + self.out(self.attention(plan, q, k, v).flatten(1))
        y = self.between(x)
        scores, ids = self.gate(y).softmax(-1, dtype=torch.float32).topk(TOPK)
        return x + self.experts(y, scores, ids)


class Model(nn.Module):
    """Logits of the next token."""

    def __init__(self, attention, make_experts):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.blocks = nn.ModuleList(Block(attention, make_experts()) for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, plan, tokens, positions):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(plan, x)
        return self.head(x)

    def of_all_ranks(self):
        """The parameters that are the same everywhere."""
        return [p for name, p in self.named_parameters() if "experts.experts" not in name]


def make_model(world, dtype):
    """Attention, which plans the batches, and a model with it."""
    attention = waybill.ContextParallelAttention(
        world, HEADS, head_dim=HEAD_DIM, dtype=dtype, block_tokens=16
    )

    def make_experts():
        return ExpertParallel(
            SwiGLUExperts(EXPERTS // world.world_size, HIDDEN, INNER), group=world,
            num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=DOCUMENTS * LONGEST,
            dtype=dtype, gradients="sum",  # as the others, which are added over the ranks
            shared=nn.Sequential(nn.Linear(HIDDEN, INNER), nn.SiLU(), nn.Linear(INNER, HIDDEN)),
        )  # fmt: skip

    torch.manual_seed(world.rank)  # experts differ; a process has a generator of its own
    model = Model(attention, make_experts).to(world.device)
    for parameter in model.of_all_ranks():
        distributed.broadcast(parameter.data, 0)
    return attention, model


def documents(step, rank):
    """Of a rank's batch: series that go up by a number of their own, around the vocabulary."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(2, LONGEST, (DOCUMENTS,), generator=draws).tolist()
    strides = torch.randint(1, 5, (DOCUMENTS,), generator=draws).tolist()
    return [(n + stride * torch.arange(n)) % VOCABULARY for n, stride in zip(lengths, strides)]


def gradients(world, attention, model, dtype, documents):
    """A step's gradients, and the mean loss of the tokens of all ranks."""
    batch = waybill.pack(documents).to(world.device)
    plan = attention.plan(attention.gather(batch.pieces))  # the same on all ranks
    labels = (batch.labels >= 0).sum()
    distributed.all_reduce(labels)
    kind = torch.device(world.device).type
    with torch.autocast(kind, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(plan, batch.tokens, batch.positions)
    loss = nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum") / labels
    loss.backward()
    total = loss.detach()
    for value in (total, *(p.grad for p in model.of_all_ranks())):
        distributed.all_reduce(value)  # sums; those of the experts are whole
    return float(total)


def train(world, dtype, steps):
    attention, model = make_model(world, dtype)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(gradients(world, attention, model, dtype, documents(step, world.rank)))
        optimizer.step()
        if world.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}: loss {losses[-1]:.3f}", flush=True)
    for block in model.blocks:
        block.experts.finalize()
    attention.close()
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda" if waybill.num_gpus() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    waybill.initialize_distributed(device=options.device)
    world = waybill.World.from_process_group(device=options.device)
    losses = train(world, torch.bfloat16, options.steps)
    distributed.destroy_process_group()
    early, late = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    sys.exit(None if late < 0.8 * early else "the loss did not fall")


if __name__ == "__main__":
    main()
