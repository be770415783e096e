"""Trains a small model whose ranks share attention and experts; FSDP2 shards all else.

    torchrun --nproc-per-node N examples/python/train_moe.py [--device cpu|cuda] [--dp N]
    ... --folder FOLDER    # goes on from what is saved there, by any number of ranks, and saves

A rank's loss is its part of the mean over the labels of all ranks, times the number of ranks, as
FSDP takes the mean of gradients; "mean" makes those of the experts alike. The ranks of an axis
"cp" plan attention together; experts are spread over all ranks. With --dp there are that many
such axes, and FSDP replicates over them. Needs torch 2.8; without torch it ends with status 77.
"""

import argparse
import pathlib
import sys

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import distributed, nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard
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


def parameters(model):
    """Those that are the same on all ranks, and those of a rank's own experts, by name."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, ExpertParallel)}
    own = {
        f"{n}.experts.{k}": p for n, m in layers.items() for k, p in m.experts.named_parameters()
    }
    return {n: p for n, p in model.named_parameters() if n not in own}, own


def make_model(mesh, dtype):
    """Attention, which plans the batches, and a model with it.

    :param mesh: of the axes "dp" and "cp"
    """
    device = mesh.device_type
    attention = waybill.ContextParallelAttention(
        mesh["cp"], HEADS, head_dim=HEAD_DIM, dtype=dtype, block_tokens=16, device=device
    )
    world = waybill.World.from_process_group(device=device)  # of all ranks

    def make_experts():
        return ExpertParallel(
            SwiGLUExperts(EXPERTS // world.world_size, HIDDEN, INNER), group=world,
            num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=DOCUMENTS * LONGEST,
            dtype=dtype, gradients="mean",  # as FSDP
            shared=nn.Sequential(nn.Linear(HIDDEN, INNER), nn.SiLU(), nn.Linear(INNER, HIDDEN)),
        )  # fmt: skip

    torch.manual_seed(world.rank)  # experts differ; a process has a generator of its own
    model = Model(attention, make_experts).to(device)
    of_all, own = parameters(model)
    for parameter in of_all.values():
        distributed.broadcast(parameter.data, 0)

    shards = mesh["cp"] if mesh["dp"].size() == 1 else mesh  # two axes: replicated, then sharded
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=shards, mp_policy=precision, ignored_params=set(own.values()))
    return attention, model


def documents(step, rank):
    """Of a rank's batch: series that go up by a number of their own, around the vocabulary."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(2, LONGEST, (DOCUMENTS,), generator=draws).tolist()
    strides = torch.randint(1, 5, (DOCUMENTS,), generator=draws).tolist()
    return [(n + stride * torch.arange(n)) % VOCABULARY for n, stride in zip(lengths, strides)]


def gradients(attention, model, documents):
    """A step's gradients, and the mean loss of the tokens of all ranks."""
    batch = waybill.pack(documents).to(attention.world.device)
    plan = attention.plan(attention.gather(batch.pieces))  # the same on all ranks of "cp"
    labels = (batch.labels >= 0).sum()
    distributed.all_reduce(labels)
    logits = model(plan, batch.tokens, batch.positions)
    loss = nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum") / labels
    (loss * distributed.get_world_size()).backward()
    total = loss.detach()
    distributed.all_reduce(total)
    return float(total)


def clip(of_all, own, most, group=None):  # gradients; group: of the experts
    norms = [nn.utils.get_total_norm(gradients) for gradients in (of_all, own)]
    squares = [(n.full_tensor() if isinstance(n, DTensor) else n) ** 2 for n in norms]
    distributed.all_reduce(squares[1], group=group)
    norm = (squares[0] + squares[1]).sqrt()
    for gradient in (*of_all, *own):  # DTensors themselves, not what full_tensor() returns
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


class State:
    """Model, optimizer and step, as torch.distributed.checkpoint saves and loads them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0
        self.own = parameters(model)[1]
        device = next(iter(self.own.values())).device.type
        self.ranks = init_device_mesh(device, (distributed.get_world_size(),))

    def of_experts(self, change, model, optimizer):
        for name in self.own:
            model[name], state = change(model[name]), optimizer["state"][name]
            optimizer["state"][name] = {k: change(v) if v.ndim else v for k, v in state.items()}
        return model, optimizer

    def state_dict(self):
        def whole(local):  # a rank's experts are a shard of those of all ranks
            return DTensor.from_local(local, self.ranks, [Shard(0)])

        model, optimizer = self.of_experts(whole, *get_state_dict(self.model, self.optimizer))
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, loaded):
        self.step = loaded["step"]
        model, optimizer = self.of_experts(DTensor.to_local, loaded["model"], loaded["optimizer"])
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


def train(mesh, dtype, steps, folder=None):
    attention, model = make_model(mesh, dtype)
    of_all, own = (list(part.values()) for part in parameters(model))
    # Two groups: on GPUs an optimizer joins a group's tensors, and DTensors join no others.
    optimizer = torch.optim.AdamW([{"params": of_all}, {"params": own}], lr=3e-3)
    state, losses = State(model, optimizer), []
    if folder is not None and (folder / ".metadata").exists():
        dcp.load({"training": state}, checkpoint_id=folder)
    for step in range(state.step, state.step + steps):
        optimizer.zero_grad()
        batch = documents(step, distributed.get_rank())
        losses.append(gradients(attention, model, batch))
        clip([p.grad for p in of_all], [p.grad for p in own], 1.0)
        optimizer.step()
        state.step = step + 1
        if distributed.get_rank() == 0 and state.step % 10 == 0:
            print(f"step {state.step:3}: loss {losses[-1]:.3f}", flush=True)
    if folder is not None:
        writer = dcp.FileSystemWriter(folder, overwrite=True)
        dcp.save({"training": state}, storage_writer=writer)
    for block in model.blocks:
        block.experts.finalize()
    attention.close()
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda" if waybill.num_gpus() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dp", type=int, default=1, help="groups that plan apart")
    parser.add_argument("--folder", type=pathlib.Path, help="of a checkpoint")
    options = parser.parse_args()
    _, size = waybill.initialize_distributed(device=options.device)
    mesh = init_device_mesh(
        options.device, (options.dp, size // options.dp), mesh_dim_names=("dp", "cp")
    )
    losses = train(mesh, torch.bfloat16, options.steps, options.folder)
    distributed.destroy_process_group()
    early, late = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    sys.exit(None if late < 0.8 * early else "the loss did not fall")


if __name__ == "__main__":
    main()
