"""Waybill's token dispatcher in torchtitan's own MoE, beside torchtitan's all_to_all."""

# ruff: noqa: E402
import functools
from dataclasses import dataclass

import pytest
import ranks
import torch
from torch.distributed.tensor import DTensor, Shard

from waybill import Unsupported
from waybill.integrations import deep_ep

deep_ep.install()

from torchtitan.config import Configurable, OverrideConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.deepep import deepep as theirs
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
)

from waybill.integrations import torchtitan as ours

DIM, HIDDEN, EXPERTS, TOPK, BATCH, LENGTH = 32, 64, 8, 2, 2, 24


def linear(inside, outside):
    return Linear.Config(in_features=inside, out_features=outside)


@dataclass(kw_only=True, slots=True)
class Model(Configurable.Config):
    """What an override looks through, as the trainer's config is."""

    first: MoE.Config
    second: MoE.Config


ALL_TO_ALL = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK)
DEEP_EP = DeepEPTokenDispatcher.Config(
    num_experts=EXPERTS, top_k=TOPK, num_max_tokens_per_rank=BATCH * LENGTH, hidden_dim=DIM
)


def layer_config(dispatcher, **router):
    return MoE.Config(
        num_experts=EXPERTS,
        load_balance_coeff=None,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS),
            token_dispatcher=dispatcher,
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS, gate=linear(DIM, EXPERTS), top_k=TOPK, **router
        ),
        shared_experts=FeedForward.Config(
            w1=linear(DIM, HIDDEN), w2=linear(HIDDEN, DIM), w3=linear(DIM, HIDDEN)
        ),
    )


def configs(imports, dispatcher=ALL_TO_ALL):
    model = Model(
        first=layer_config(dispatcher), second=layer_config(dispatcher, score_func="softmax")
    )
    lines = apply_overrides(OverrideConfig(imports=imports), model)
    return model, lines


class Net(torch.nn.Module):
    """Two layers of experts of which each rank has its own, also as parts of DTensors."""

    def __init__(self, config, mesh, sharded=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([config.first.build(), config.second.build()])
        rank, size = mesh.get_local_rank(), EXPERTS // mesh.size()
        draws = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=draws)
        for layer in self.layers:
            experts = layer.routed_experts.inner_experts
            for name, whole in list(experts.named_parameters()):
                own = whole.detach()[rank * size : (rank + 1) * size].clone()
                if sharded:
                    own = DTensor.from_local(own, mesh, [Shard(0)])
                setattr(experts, name, torch.nn.Parameter(own))
            layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(
    rank, imports, world_size, lengths=(LENGTH,) * 4, dispatcher=ALL_TO_ALL, dtype=torch.float32,
    sharded=False,
):  # fmt: skip
    """Losses of some steps; gradients of the first, of what all ranks have and of experts."""
    set_spmd_backend("default")
    mesh = torch.distributed.init_device_mesh(ranks.DEVICE, (world_size,), mesh_dim_names=("ep",))
    config, _ = configs(imports, dispatcher)
    net = Net(config, mesh, sharded).to(ranks.DEVICE, dtype)
    kinds = {type(layer.routed_experts.token_dispatcher) for layer in net.layers}
    assert kinds == {ours.WaybillTokenDispatcher if imports else dispatcher._owner}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses, gradients = [], []
    for length in lengths:
        draws = torch.Generator().manual_seed(rank)
        x, goal = (torch.randn(BATCH, length, DIM, generator=draws) for _ in range(2))
        x, goal = x.to(ranks.DEVICE, dtype).requires_grad_(), goal.to(ranks.DEVICE, dtype)
        loss = (net(x) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if not gradients:
            gradients = [x.grad, *(local_part(p.grad) for p in net.parameters())]
            gradients = [g.cpu().float().clone().numpy() for g in gradients]
        for p in net.parameters():
            if local_part(p).shape[0] != EXPERTS // world_size:  # the same on all ranks
                torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)
        optimizer.step()
        losses.append(float(loss))
    copied = [
        getattr(layer.routed_experts.token_dispatcher, "copied", None) for layer in net.layers
    ]
    assert all(one is None or one.memory()["copies"] > 0 for one in copied)
    return losses, gradients


def local_part(value):
    return value.to_local() if isinstance(value, DTensor) else value


OURS = ["waybill.integrations.torchtitan.waybill_dispatcher"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_trains_as_with_all_to_all(world_size):
    mine, theirs = (
        ranks.run(world_size, lambda rank, imports=imports: train(rank, imports, world_size))
        for imports in (OURS, [])
    )
    for (losses, gradients), (want, want_gradients) in zip(mine, theirs):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)
        for got, expected in zip(gradients, want_gradients):
            got, expected = map(torch.from_numpy, (got, expected))
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-4)  # experts are bfloat16
        assert losses[-1] < losses[0]


@functools.cache
def trained_without_copies(world_size):
    return ranks.run(world_size, lambda rank: train(rank, OURS, world_size))


@pytest.mark.parametrize(("keep", "sharded"), [(False, False), (True, True)])
def test_copies_of_hot_experts_train_as_without(keep, sharded):
    copies = {"spare_experts": 2, "limit": 1.0, "min_rows": 1, "keep_copies": keep}
    imports = [("waybill.integrations.torchtitan.waybill_experts", copies)]
    mine = ranks.run(4, lambda rank: train(rank, imports, 4, sharded=sharded))
    for (losses, gradients), (want, want_gradients) in zip(mine, trained_without_copies(4)):
        torch.testing.assert_close(losses, want, rtol=1e-4, atol=0)
        for got, expected in zip(gradients, want_gradients):
            got, expected = map(torch.from_numpy, (got, expected))
            assert (got - expected).norm() <= 0.01 * expected.norm()  # experts are bfloat16


def test_copies_in_place_of_what_they_replace():
    path = "waybill.integrations.torchtitan.waybill_experts"
    model, _ = configs([(path, {"spare_experts": 2, "num_max_tokens_per_rank": 64})])
    routed = model.first.routed_experts
    assert isinstance(routed, ours.WaybillRoutedExperts.Config)
    assert (routed.spare_experts, routed.min_rows, routed.inner_experts.dim) == (2, 128, DIM)
    assert isinstance(routed.token_dispatcher, ours.WaybillTokenDispatcher.Config)
    assert routed.token_dispatcher.num_max_tokens_per_rank == 64
    with pytest.raises(Unsupported, match=r"waybill_experts: token_dispatcher is DeepEPToken"):
        configs([path], DEEP_EP)


@functools.cache
def register_for_cpu_ranks():
    """Its operations are there for GPUs alone."""
    for name in ("dispatch", "combine") if ranks.DEVICE == "cpu" else ():
        torch.library.impl(theirs._lib, name, "CPU")(getattr(theirs, f"_{name}_op_impl"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_its_own_deep_ep_dispatcher(world_size):
    """With Waybill as deep_ep's ElasticBuffer: as with all_to_all, but for bfloat16's rounding."""
    register_for_cpu_ranks()

    def run(dispatcher):
        def body(rank):
            options = {"dispatcher": dispatcher, "dtype": torch.bfloat16}
            return train(rank, [], world_size, **options)

        return ranks.run(world_size, body)

    for (losses, gradients), (want, want_gradients) in zip(run(DEEP_EP), run(ALL_TO_ALL)):
        torch.testing.assert_close(losses, want, rtol=1e-2, atol=0)
        for got, expected in zip(gradients, want_gradients):
            got, expected = map(torch.from_numpy, (got, expected))
            assert (got - expected).norm() <= 0.02 * expected.norm()


def test_longer_batches_later():
    lengths = (6, 24, 12, 48)
    mine, theirs = (
        ranks.run(2, lambda rank, imports=imports: train(rank, imports, 2, lengths))
        for imports in (OURS, [])
    )
    for (losses, _), (want, _) in zip(mine, theirs):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)


def test_settings_come_with_the_override():
    imports = [(OURS[0], {"num_max_tokens_per_rank": 64})]
    model, lines = configs(imports)
    for layer in (model.first, model.second):
        dispatcher = layer.routed_experts.token_dispatcher
        assert isinstance(dispatcher, ours.WaybillTokenDispatcher.Config)
        assert (dispatcher.num_max_tokens_per_rank, dispatcher.top_k) == (64, TOPK)
    assert len(lines) >= 2


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="of one rank in host memory")
def test_without_a_mesh_tokens_stay():
    """One rank: torchtitan's own way."""

    def moe(imports):
        config, _ = configs(imports)
        layer = config.first.build()
        draws = torch.Generator().manual_seed(3)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=draws)
        x = torch.randn(BATCH, LENGTH, DIM, generator=draws)
        return layer(x)

    assert torch.equal(moe(OURS), moe([]))
