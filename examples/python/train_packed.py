"""Trains a small language model on packed documents, whose attention the ranks share.

    python examples/python/train_packed.py                                  # one process
    torchrun --nproc-per-node 2 examples/python/train_packed.py [--gpus]    # ranks on CPU or GPUs

Pack, gather, plan, and one module in place of attention. Without torch it ends with status 77.
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

import waybill.torch as waybill

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS, STEPS = 32, 4, 2, 16, 2, 25
HIDDEN = HEADS * HEAD_DIM


class Documents(torch.utils.data.IterableDataset):
    """A rank's batches: lists of documents of any lengths. Here series that can be learnt."""

    def __init__(self, rank, steps):
        self.rank, self.steps = rank, steps

    def __iter__(self):
        for number in range(self.steps):
            random = torch.Generator().manual_seed(1000 * number + self.rank)
            lengths = torch.randint(2, 120, (6,), generator=random).tolist()
            series = torch.randint(1, 5, (6,), generator=random).tolist()
            yield [(n + step * torch.arange(n)) % VOCABULARY for n, step in zip(lengths, series)]


def rotate(x, positions):
    """Rotary embedding of [rows, heads, head_dim], by the positions in the documents."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=x.device)
    angles = positions[:, None, None] * frequencies
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, plan, x, positions):
        qkv = self.qkv(self.norms[0](x)).unflatten(1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        heads = self.attention(plan, rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(heads.flatten(1))
        return x + self.down(nn.functional.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, plan, tokens, positions):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(plan, x, positions)
        return self.head(x)


def train(device, rank):
    attention = waybill.ContextParallelAttention(
        None, HEADS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, block_tokens=16, device=device
    )  # all layers share it; None is the default group, or give a process group or mesh["cp"]
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model(attention).to(device))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for documents in torch.utils.data.DataLoader(Documents(rank, STEPS), batch_size=None):
        batch = waybill.pack(documents).to(device)
        plan = attention.plan(attention.gather(batch.pieces))  # the same on all ranks
        labels = (batch.labels >= 0).sum()
        dist.all_reduce(labels)
        with torch.autocast(device, torch.bfloat16):
            logits = model(plan, batch.tokens, batch.positions)
        loss = nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum") / labels
        (loss * dist.get_world_size()).backward()  # DDP takes the mean, where the sum is wanted
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
        if rank == 0 and len(losses) % 5 == 0:
            print(f"step {len(losses):3}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    options = parser.parse_args()
    device = "cuda" if options.gpus else "cpu"
    rank, _ = waybill.initialize_distributed(device=device)  # by torchrun's "RANK" etc.
    losses = train(device, rank)
    dist.destroy_process_group()
    if not losses[-1] < 0.5 * losses[0]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
