"""A small language model, trained on packed documents whose attention is spread over ranks.

    python examples/python/training.py [--ranks N]
    torchrun --nproc-per-node N examples/python/training.py [--wrap none|ddp|fsdp] [--dp N]

Every rank loads documents of its own, and knows how long those of the others are. A worker of its
loader plans them together, so that all ranks have equal attention work; what the other layers do
stays where the rows are. Loss and gradients of the first
step are compared with those of one process; then the model is trained, and its loss must fall.
docs/training.md explains each part.

Needs torch; without it, it says so and ends with status 77, which test runners show as skipped.
"""

import argparse
import contextlib
import functools
import os
import sys

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

import waybill.torch as waybill

VOCABULARY, HEADS, KV_HEADS, HEAD, LAYERS = 31, 4, 2, 16, 2
HIDDEN = HEADS * HEAD
MAX_ROWS = 192
IGNORED = -100  # cross_entropy's: no label


def documents_of(step, rank):
    """A rank's documents in a step, a list of tensors: arithmetic series, which can be learnt."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    documents, room = [], MAX_ROWS - 32 * draw(0, 3)  # not all ranks have as many rows
    while room > 0:
        length = min(room, draw(2, 140))
        series = draw(0, VOCABULARY) + draw(1, 4) * torch.arange(length)
        documents.append(series % VOCABULARY)
        room -= length
    return documents


class Documents(torch.utils.data.IterableDataset):
    """A rank's batches, packed, with their plans, which are the same on the ranks that share them.

    A corpus has an index of the lengths of its documents; here these are drawn.
    """

    def __init__(self, rank, together, planner, steps):
        self.rank, self.together, self.planner, self.steps = rank, together, planner, steps

    def __iter__(self):
        for step in range(self.steps):
            lengths = [[len(d) for d in documents_of(step, rank)] for rank in self.together]
            plan = self.planner.plan(lengths)
            yield waybill.pack(documents_of(step, self.rank)), plan


def rotate(x, positions):
    """Rotary embedding of (rows, heads, head): of the position in the document, at home."""
    half = HEAD // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    a, b = x.float().split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


def dot_product(q, k, v):
    """Causal attention of queries that stand at the end of their keys: (queries, heads, head)."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    visible = visible.tril(k.shape[1] - q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1)


class Block(nn.Module):
    """Attention, then a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(self, x, positions, attention):
        qkv = self.qkv(self.before_attention(x)).view(-1, HEADS + 2 * KV_HEADS, HEAD)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        heads = attention(rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(heads.flatten(1))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Tokens to logits. `attention` is all that differs between one process and many ranks."""

    def __init__(self, checkpoint=False):
        super().__init__()
        self.checkpoint = checkpoint
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens, positions, attention):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpoint:  # keeps x alone; backward computes the block again, calls and all
                x = torch.utils.checkpoint.checkpoint(
                    block, x, positions, attention, use_reentrant=False
                )
            else:
                x = block(x, positions, attention)
        return self.head(x)


def sum_of_losses(logits, labels):
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


class ThreadRanks:
    """What ranks that are threads tell each other beside Waybill."""

    def __init__(self, world, shared):
        self.world, self.shared = world, shared
        self.rank, self.size = world.rank, world.world_size

    def gather(self, value):
        self.shared[self.rank] = value
        self.world.barrier()
        everyone = list(self.shared)
        self.world.barrier()
        return everyone

    def add(self, tensor):
        return torch.stack(self.gather(tensor.detach().clone())).sum(0)


class ProcessRanks:
    """The same of processes: the mesh's "cp" ranks plan together, "dp" is how often."""

    def __init__(self, mesh):
        import torch.distributed as dist

        self.dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value):
        everyone = [None] * self.size
        self.dist.all_gather_object(everyone, value)
        return everyone

    def add(self, tensor):
        total = tensor.detach().clone()
        self.dist.all_reduce(total)
        return total


def wrapped(model, options, mesh):
    """The model as the framework replicates or shards it."""
    if options.wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if options.wrap == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def full_gradient(parameter):
    gradient = parameter.grad
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


def train(world, ranks, options, mesh=None):
    """One rank. Returns the losses, and the gradients of the first step by name."""
    model = Model(options.checkpoint)
    model.load_state_dict(options.state)
    model.to(world.device)
    if options.compile is not None:
        model.compile(backend=options.compile, dynamic=True)
    model = wrapped(model, options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    attend = waybill.ContextParallelAttention(
        world, HEADS, KV_HEADS, HEAD, dtype=torch.bfloat16 if options.bf16 else torch.float32,
        block_tokens=16, in_place=True, kernel="auto" if options.bf16 else "dot_product",
    )  # fmt: skip
    first_rank = ranks.rank - world.rank  # of those that plan together
    together = range(first_rank, first_rank + world.world_size)
    loader = torch.utils.data.DataLoader(
        Documents(ranks.rank, together, attend.planner, options.steps), batch_size=None,
        num_workers=options.workers,
    )  # fmt: skip
    losses, first, batches = [], {}, iter(loader)
    following = next(batches, None)
    while following is not None:
        batch, plan = following
        tokens, labels, positions, _ = batch.to(world.device)
        attention = functools.partial(attend, plan)  # of q, k and v, in every layer

        num_labels = sum(ranks.gather(int((labels != IGNORED).sum())))
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=options.bf16):
            logits = model(tokens, positions, attention)
        loss = sum_of_losses(logits, labels) / num_labels  # this rank's part of the mean

        # DDP and FSDP take the mean over ranks, where the sum is wanted.
        scale = 1 if options.wrap == "none" else ranks.size
        (loss * scale).backward()

        # All calls of this batch are queued: now the next one's tables, which a GPU gets meanwhile.
        following = next(batches, None)
        if following is not None:
            attend.prepare(following[1])

        if options.wrap == "none":
            for parameter in model.parameters():
                parameter.grad = ranks.add(parameter.grad)
        if not first:
            named = model.named_parameters()
            first = {n.removeprefix("module."): full_gradient(p).cpu() for n, p in named}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(ranks.add(loss)))
    return losses, first


def one_process(options, num_ranks):
    """Loss and gradients of the first step, with all documents in one place."""
    model = Model()
    model.load_state_dict(options.state)
    batches = [waybill.pack(documents_of(0, rank)) for rank in range(num_ranks)]
    num_labels = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    total = 0.0
    for tokens, labels, positions, pieces in batches:

        def attention(q, k, v, pieces=pieces):
            documents = zip(*(waybill.unpack(t, pieces) for t in (q, k, v)))
            return torch.cat([dot_product(*document) for document in documents])

        loss = sum_of_losses(model(tokens, positions, attention), labels) / num_labels
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def check(options, losses, gradients, num_ranks):
    """Against one process; under autocast all is rounded to bfloat16 on the way."""
    loss, expected = one_process(options, num_ranks)
    close = {"rtol": 0.05, "atol": 0.02} if options.bf16 else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(losses[0], loss, **close)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, **close)
    print(f"first loss {losses[0]:.4f}, and all gradients, as of one process")
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    if not losses[-1] < 0.75 * losses[0]:
        sys.exit("the loss did not fall")


def run_threads(options):
    shared = [None] * options.ranks
    results = waybill.run_threads(
        options.ranks, lambda world: train(world, ThreadRanks(world, shared), options),
        device=options.device,
    )  # fmt: skip
    print(f"{options.ranks} ranks as threads on {options.device}")
    check(options, *results[0], options.ranks)


def run_processes(options):
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(
        options.device, (options.dp, size // options.dp), mesh_dim_names=("dp", "cp")
    )
    world = waybill.World.from_process_group(mesh.get_group("cp"), device=options.device)
    shards = mesh["cp"] if options.dp == 1 else mesh  # two axes: replicated, then sharded
    losses, gradients = train(world, ProcessRanks(mesh), options, shards)
    if dist.get_rank() == 0:
        print(f"{size} ranks as processes on {options.device}, {options.dp} data-parallel")
        check(options, losses, gradients, size)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="of threads")
    parser.add_argument("--dp", type=int, default=1, help="of processes: groups that plan apart")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wrap", default="none", choices=("none", "ddp", "fsdp"))
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--checkpoint", action="store_true", help="of each block")
    parser.add_argument("--compile", metavar="BACKEND", help='such as "inductor"')
    parser.add_argument("--workers", type=int, default=1, help="processes that load and plan")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options.state = Model().state_dict()  # the same on all ranks
    if "RANK" in os.environ:  # under torchrun
        with contextlib.suppress(BrokenPipeError):
            run_processes(options)
    elif options.wrap != "none" or options.dp != 1:
        parser.error("--wrap and --dp need processes: start it with torchrun")
    else:
        run_threads(options)


if __name__ == "__main__":
    main()
