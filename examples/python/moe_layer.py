"""A small mixture-of-experts layer whose experts lie on different ranks, trained.

    python examples/python/moe_layer.py [--ranks N] [--nodes N] [--device cpu|cuda] [--steps N]
    torchrun --nproc-per-node N examples/python/moe_layer.py [--nodes N] ...

Every rank has some tokens and some experts. A gate chooses experts for each token; dispatch takes
the tokens there, the experts work on the rows they got, combine brings the weighted sums home.
Autograd goes the same way back. The first loss and gradients are compared with those of one process
that has all experts; then the layer learns to imitate a random function, and the loss must fall.
Ranks are threads, or the processes of one job under torchrun.

Needs torch; without it, it says so and ends with status 77, which test runners show as skipped.
"""

import argparse
import os
import sys

try:
    import torch
    from torch import distributed, nn
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

from waybill import World, num_gpus
from waybill.torch import initialize_distributed, run_threads
from waybill.torch.moe import EPAll2AllLayer

HIDDEN, INNER, EXPERTS, TOPK, MAX_TOKENS = 32, 64, 8, 2, 48


class Experts(nn.Module):
    """Feed-forward networks of some experts, for rows grouped by expert."""

    def __init__(self, first, count, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # the same experts, however many ranks
        w_in = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / HIDDEN**0.5
        w_out = torch.randn(EXPERTS, INNER, HIDDEN, generator=generator) / INNER**0.5
        self.w_in = nn.Parameter(w_in[first : first + count].clone())
        self.w_out = nn.Parameter(w_out[first : first + count].clone())

    def forward(self, rows, counts):
        parts = rows.split(counts)
        return torch.cat([
            torch.relu(part @ w_in) @ w_out
            for part, w_in, w_out in zip(parts, self.w_in, self.w_out)
        ])  # fmt: skip


class MoELayer(nn.Module):
    """A gate that all ranks have, and this rank's experts."""

    def __init__(self, world):
        super().__init__()
        count = EXPERTS // world.world_size
        self.gate = make_gate()
        self.experts = Experts(world.rank * count, count)
        self.layer = EPAll2AllLayer(
            world, MAX_TOKENS, HIDDEN, TOPK, world.rank, EXPERTS,
            world.topology.ranks_per_node, world.world_size, dtype=torch.float32,
        )  # fmt: skip
        self.to(world.device)

    def forward(self, tokens):
        weights, ids = choose(self.gate(tokens))
        rows, row_weights, layout = self.layer.dispatch(tokens, ids, weights)
        counts = layout.recv_expert_counts.tolist()
        outputs = self.experts(rows, counts) * row_weights[:, None]
        return self.layer.combine(outputs, layout)


def gate_weight():
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5)) / 8


def make_gate():
    """The same on all ranks: threads share torch's generator, from which Linear draws."""
    gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    with torch.no_grad():
        gate.weight.copy_(gate_weight())
    return gate


def choose(logits):
    """The TOPK experts of each token, and their weights."""
    weights, ids = logits.softmax(-1).topk(TOPK)
    return weights / weights.sum(-1, keepdim=True), ids


def tokens_of(rank, step):
    """Another number of tokens for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = int(torch.randint(MAX_TOKENS // 2, MAX_TOKENS + 1, (1,), generator=generator))
    return torch.randn(count, HIDDEN, generator=generator)


def target_of(tokens):
    turn = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(6)) / HIDDEN**0.5
    return torch.tanh(tokens @ turn.to(tokens.device))


def first_step_alone(num_ranks):
    """Loss and the gradient of the gate of the first step, by one process with all experts."""
    gate = gate_weight().requires_grad_()
    experts = Experts(0, EXPERTS)
    loss = torch.zeros(())
    for rank in range(num_ranks):
        tokens = tokens_of(rank, 0)
        weights, ids = choose(tokens @ gate.T)
        out = torch.zeros_like(tokens)
        for k in range(TOPK):
            w_in, w_out = experts.w_in[ids[:, k]], experts.w_out[ids[:, k]]
            hidden = torch.relu(torch.einsum("th,thi->ti", tokens, w_in))
            out = out + weights[:, k, None] * torch.einsum("ti,tih->th", hidden, w_out)
        loss = loss + (out - target_of(tokens)).square().mean()
    loss.backward()
    return loss.detach(), gate.grad


def sum_over_ranks(world, shared, value):
    """All-reduce; of threads of one process through a list that all of them have."""
    if shared is None:
        total = value.detach().cpu()
        distributed.all_reduce(total)
        return total.to(value.device)
    shared[world.rank] = value.detach().cpu()
    world.barrier()
    total = torch.stack(shared).sum(0)
    world.barrier()
    return total.to(value.device)


def train(world, steps, shared):
    model = MoELayer(world)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses, first_gradient = [], None
    for step in range(steps):
        tokens = tokens_of(world.rank, step).to(world.device)
        loss = (model(tokens) - target_of(tokens)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.gate.weight.grad = sum_over_ranks(world, shared, model.gate.weight.grad)
        if step == 0:
            first_gradient = model.gate.weight.grad.cpu().clone()
        optimizer.step()
        losses.append(sum_over_ranks(world, shared, loss))
    model.layer.finalize()
    return torch.stack(losses).cpu(), first_gradient


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: 4; on GPUs as many as there are")
    parser.add_argument(
        "--nodes", type=int, help="logical nodes: two-stage dispatch; default: 2, on GPUs 1"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    launched = "RANK" in os.environ
    if launched:
        rank, options.ranks = initialize_distributed(device=options.device)
    elif options.ranks is None:
        options.ranks = num_gpus() if on_gpus else 4
    if options.nodes is None:
        options.nodes = 1 if on_gpus else min(2, options.ranks)
    torch.set_num_threads(1)

    per_node = options.ranks // options.nodes
    if launched:
        world = World.from_process_group(device=options.device, ranks_per_node=per_node)
        losses, gradient = train(world, options.steps, None)
        distributed.destroy_process_group()
        if rank != 0:  # all have the same sums
            return
    else:
        shared = [None] * options.ranks
        losses, gradient = run_threads(
            options.ranks, lambda world: train(world, options.steps, shared),
            device=options.device, ranks_per_node=per_node,
        )[0]  # fmt: skip
    loss_alone, gradient_alone = first_step_alone(options.ranks)
    torch.testing.assert_close(losses[0], loss_alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, gradient_alone, rtol=1e-3, atol=1e-4)
    print(f"{options.ranks} ranks on {options.nodes} nodes, {EXPERTS} experts, top {TOPK}")
    print(f"first loss {losses[0]:.4f}, as of one process; gradients of the gate agree")
    early, late = losses[:5].mean(), losses[-5:].mean()
    print(f"loss of the first steps {early:.4f}, of the last {late:.4f}")
    if not late < 0.8 * early:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
