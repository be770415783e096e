"""ExpertParallel beside DDP and FSDP2, with accumulation, against one process that has all."""

import pytest
import ranks
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from waybill import Unsupported
from waybill.torch.moe import ExpertParallel, SwiGLUExperts

HIDDEN, INNER, EXPERTS, TOPK, TOKENS, STEPS = 16, 32, 4, 2, 12, 2


class Gate(torch.nn.Module):
    """What all ranks have."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=draws) / 4)

    def forward(self, x):
        return (x @ self.weight.T).softmax(-1).topk(TOPK)


def experts_of(first, count):
    draws = torch.Generator().manual_seed(2)
    experts = SwiGLUExperts(count, HIDDEN, INNER)
    for weight in experts.parameters():
        whole = torch.randn(EXPERTS, *weight.shape[1:], generator=draws) / 4
        weight.data.copy_(whole[first : first + count])
    return experts


def batch(rank, step):
    draws = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(TOKENS, HIDDEN, generator=draws)
    return x, torch.randn(TOKENS, HIDDEN, generator=draws)


def alone(world_size):
    """Gradients of the mean of all ranks' losses, summed over the steps."""
    gate, experts = Gate(), experts_of(0, EXPERTS)
    for step in range(STEPS):
        for rank in range(world_size):
            x, goal = batch(rank, step)
            scores, ids = gate(x)
            out = torch.zeros_like(x)
            for k in range(TOPK):
                w_gate, up, down = (weight[ids[:, k]] for weight in experts.parameters())
                inside = torch.nn.functional.silu(torch.einsum("th,thi->ti", x, w_gate))
                inside = inside * torch.einsum("th,thi->ti", x, up)
                out = out + scores[:, k, None] * torch.einsum("ti,tih->th", inside, down)
            ((out - goal).square().mean() / world_size).backward()
    return gate.weight.grad, [weight.grad for weight in experts.parameters()]


def whole(gradient):
    """Of a sharded parameter."""
    full = getattr(gradient, "full_tensor", None)
    return gradient if full is None else full()


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="there torch._grouped_mm takes bfloat16 alone")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_gradients_of_two_by_two_ranks(wrapper):
    world_size, parallel = 4, 2

    def body(rank):
        mesh = torch.distributed.init_device_mesh(
            "cpu", (world_size // parallel, parallel), mesh_dim_names=("replicate", "experts")
        )
        local = EXPERTS // parallel
        first = mesh["experts"].get_local_rank() * local
        gate, experts = Gate(), experts_of(first, local)
        if wrapper == "ddp":
            gate = DistributedDataParallel(gate)
            experts = DistributedDataParallel(experts, process_group=mesh["replicate"].get_group())
        else:
            fully_shard(gate, mesh=torch.distributed.init_device_mesh("cpu", (world_size,)))
            fully_shard(experts, mesh=mesh["replicate"])
        layer = ExpertParallel(
            experts, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS,
            group=mesh["experts"], dtype=torch.float32, gradients="mean",
        )  # fmt: skip
        for step in range(STEPS):
            x, goal = batch(rank, step)
            (layer(x, *gate(x)) - goal).square().mean().backward()
        gate_gradient, gradients = alone(world_size)
        got = [whole(weight.grad) for module in (gate, experts) for weight in module.parameters()]
        for mine, want in zip(got, [gate_gradient, *(g[first : first + local] for g in gradients)]):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)
        layer.finalize()

    ranks.run(world_size, body)


class Block(torch.nn.Module):
    """A gate and a layer of experts."""

    def __init__(self, experts, group, **options):
        super().__init__()
        self.gate = Gate()
        with torch.no_grad():
            self.gate.weight[0] += 0.5  # expert 0 is hot
        self.layer = ExpertParallel(
            experts, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS, group=group,
            dtype=torch.float32, gradients="mean", **options,
        )  # fmt: skip

    def forward(self, x):
        return self.layer(x, *self.gate(x))


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="copies travel between CPU ranks alone")
@pytest.mark.parametrize("keep", [False, True])
def test_copies_of_hot_experts_in_a_block_that_fsdp_shards(keep):
    world_size, parallel = 4, 2
    copies = {"spare_experts": 2, "limit": 1.0, "min_rows": 1, "keep_copies": keep}

    def body(rank):
        mesh = torch.distributed.init_device_mesh(
            "cpu", (world_size // parallel, parallel), mesh_dim_names=("replicate", "experts")
        )
        local = EXPERTS // parallel
        first = mesh["experts"].get_local_rank() * local
        blocks = [
            fully_shard(
                Block(experts_of(first, local), mesh["experts"], **options), mesh=mesh["replicate"]
            )
            for options in (copies, {})
        ]
        steppers = [torch.optim.SGD(block.parameters(), lr=0.5) for block in blocks]
        for step in range(3):
            x, goal = batch(rank, step)
            losses = [(block(x) - goal).square().mean() for block in blocks]
            torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
            for loss, stepper in zip(losses, steppers):
                loss.backward()
                stepper.step()
                stepper.zero_grad()
        for mine, want in zip(*(block.parameters() for block in blocks)):
            torch.testing.assert_close(whole(mine), whole(want), rtol=1e-4, atol=1e-6)
        held = blocks[0].layer._copies[0]._pool().held
        assert (held >= 0).any()  # something was copied
        inside = Block(experts_of(first, local), mesh["experts"], **copies)
        fully_shard(inside.layer.experts, mesh=mesh["replicate"])
        with pytest.raises(Unsupported, match="experts is sharded by FSDP"):
            inside(batch(rank, 0)[0])

    ranks.run(world_size, body)
