"""Token dispatchers of Megatron-Core with Waybill: its flexible one behind deep_ep's interface, and
one of Waybill's own. Round trips and gradients, as its dispatcher tests ask.
"""

# ruff: noqa: E402
import os
from types import SimpleNamespace

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # each rank would compile small functions

import pytest
import ranks
import torch

from waybill import InvalidArgument, Unsupported
from waybill.integrations import deep_ep

deep_ep.install()

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import fused_a2a, moe_layer, moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from waybill.integrations import megatron as ours

HIDDEN, EXPERTS, TOPK, LENGTH, BATCH = 16, 8, 3, 5, 2


def config_of(**options):
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_router_topk=TOPK, moe_router_dtype="fp32", use_cpu_initialization=True,
        add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16,
        **{"moe_token_dispatcher_type": "alltoall", **options},
    )  # fmt: skip


def groups_of(tp_size=1):
    """Process groups of experts, of the parts of an expert, and of both."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    found = {"tp_ep": torch.distributed.group.WORLD}
    tensor = [list(range(r, r + tp_size)) for r in range(0, world, tp_size)]
    expert = [list(range(t, world, tp_size)) for t in range(tp_size)]
    for name, all_ranks in (("expt_tp", tensor), ("ep", expert)):
        for some in all_ranks:
            group = torch.distributed.new_group(some)
            if rank in some:
                found[name] = group
    return SimpleNamespace(**found)


def dispatcher_of(kind, tp_size=1, **options):
    groups = groups_of(tp_size)
    local = EXPERTS // groups.ep.size()
    first = groups.ep.rank() * local
    indices = list(range(first, first + local))
    return kind(local, indices, config_of(**options), pg_collection=groups), indices


def routing(seed, tokens):
    """(map [T, experts], probabilities, 0 elsewhere), each token with TOPK experts."""
    draws = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=draws)
    chosen = scores.topk(TOPK, dim=1).indices
    routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    probs = (scores + 0.1).masked_fill(~routing_map, 0)
    return routing_map, probs / probs.sum(1, keepdim=True)


def step(dispatcher, experts, rank, seed, tp_size=1):
    """One forward and backward; expert e multiplies by e + 1, of which each part does its share."""
    draws = torch.Generator().manual_seed(1000 + 10 * seed + rank)
    shape = (LENGTH, BATCH, HIDDEN)
    hidden = torch.randn(shape, generator=draws).to(ranks.DEVICE, torch.bfloat16).requires_grad_()
    routing_map, probs = (one.to(ranks.DEVICE) for one in routing(10 * seed + rank, LENGTH * BATCH))
    probs.requires_grad_()
    rows, weights = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
    assert counts.device.type == "cpu" and int(counts.sum()) == len(rows) == len(weights)
    factors = torch.tensor([e + 1.0 for e in experts]) / tp_size
    factors = torch.repeat_interleave(factors, counts).to(ranks.DEVICE)
    outputs = (rows.float() * factors[:, None] * weights[:, None]).bfloat16()
    outputs = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
    back = dispatcher.combine_postprocess(outputs)
    assert back.shape == shape
    gradient = torch.randn(shape, generator=draws).to(ranks.DEVICE, torch.bfloat16)
    back.backward(gradient)

    # The same in one go, in float32.
    plain, choice = hidden.detach().float().requires_grad_(), probs.detach().requires_grad_()
    numbers = torch.arange(1.0, EXPERTS + 1, device=ranks.DEVICE)
    scale = (choice * numbers).sum(1).view(LENGTH, BATCH, 1)
    (plain * scale).backward(gradient.float())
    wanted = choice.grad * routing_map
    for got, want in ((back, plain * scale), (hidden.grad, plain.grad), (probs.grad, wanted)):
        got, want = got.detach().float(), want.detach()
        assert (got - want).norm() <= 0.01 * want.norm(), (got, want)


@pytest.mark.parametrize("world_size", [2, 4])
def test_flex_dispatcher_behind_deep_ep(world_size, monkeypatch):
    monkeypatch.setenv("WAYBILL_DEEP_EP_MAX_TOKENS", "16")
    assert fused_a2a.HAVE_DEEP_EP

    def body(rank):
        dispatcher, experts = dispatcher_of(
            MoEFlexTokenDispatcher, moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="deepep", moe_deepep_num_sms=20,
        )  # fmt: skip
        for seed in range(3):
            step(dispatcher, experts, rank, seed)
        assert isinstance(fused_a2a._buffer, deep_ep.Buffer)

    ranks.run(world_size, body)


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (4, 1), (4, 2)])
def test_own_dispatcher(world_size, tp_size):
    def body(rank):
        dispatcher, experts = dispatcher_of(ours.WaybillTokenDispatcher, tp_size)
        for seed in range(3):
            step(dispatcher, experts, rank, seed, tp_size)

    ranks.run(world_size, body)


def test_more_tokens_than_the_first_call_had():
    def body(rank):
        dispatcher, _ = dispatcher_of(ours.WaybillTokenDispatcher)
        for tokens in (4, 2, 5):
            hidden = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16, device=ranks.DEVICE)
            routing_map, probs = (one.to(ranks.DEVICE) for one in routing(rank, tokens))
            given = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
            if tokens < 5:
                dispatcher.token_combine(dispatcher.token_dispatch(*given)[0])
                continue
            with pytest.raises(InvalidArgument, match=r"5 tokens on rank ., expected at most 4"):
                dispatcher.token_dispatch(*given)

    ranks.run(2, body)


def test_other_numbers_of_tokens_in_the_first_call():
    def body(rank):
        dispatcher, _ = dispatcher_of(ours.WaybillTokenDispatcher)
        tokens = 3 + rank
        hidden = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16, device=ranks.DEVICE)
        given = (one.to(ranks.DEVICE) for one in routing(rank, tokens))
        given = dispatcher.dispatch_preprocess(hidden, *given)
        with pytest.raises(InvalidArgument, match="first call need max_tokens, the same on all"):
            dispatcher.token_dispatch(*given)

    ranks.run(2, body)


def test_dropped_choices():
    """A map with fewer experts for some tokens: what it has not goes nowhere."""

    def body(rank):
        dispatcher, experts = dispatcher_of(ours.WaybillTokenDispatcher)
        hidden = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=ranks.DEVICE)
        routing_map = torch.zeros(4, EXPERTS, dtype=torch.bool, device=ranks.DEVICE)
        routing_map[0, [1, 6]] = routing_map[1, 7] = True
        probs = routing_map * 0.5
        rows, weights = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        (
            rows,
            weights,
        ) = dispatcher.token_dispatch(rows, weights)
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        assert counts.tolist() == [2 * int(e in (1, 6, 7)) for e in experts]
        assert (weights == 0.5).all()
        sums = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        assert sums[:, 0].tolist() == [2, 1, 0, 0]

    ranks.run(2, body)


def layer_step(rank, kind, made=moe_layer.MoELayer, **options):
    """(output, gradients) of a whole MoELayer with that dispatcher."""
    config = config_of(
        moe_token_dispatcher_type=kind, moe_flex_dispatcher_backend="deepep", moe_deepep_num_sms=20,
        expert_model_parallel_size=2, moe_router_load_balancing_type="none", ffn_hidden_size=32,
        gated_linear_unit=True, **options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(7 + rank)
    layer = made(config, spec.submodules.mlp.submodules).to(ranks.DEVICE)
    layer.set_layer_number(1)
    draws = torch.Generator().manual_seed(3)  # the same gate on all ranks
    weight = layer.router.weight
    weight.data.copy_(torch.randn(weight.shape, generator=draws))
    weight.data[:2] += 0.5  # hot experts
    draws = torch.Generator().manual_seed(rank)
    x = torch.randn(LENGTH, BATCH, HIDDEN, generator=draws) + 1
    x = x.to(ranks.DEVICE, torch.bfloat16)
    out, _ = layer(x.requires_grad_())
    out.float().square().sum().backward()
    if made is not moe_layer.MoELayer:  # copies have rows
        layout = layer.token_dispatcher._layout
        assert int(layout.all_slot_quotas[:, EXPERTS // 2 :].sum()) > 0
    found = [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return type(layer.token_dispatcher), [one.float().cpu() for one in found]


def test_a_whole_layer(monkeypatch):
    """Router, dispatch, experts, combine, beside Megatron-Core's dispatcher by all_gather."""
    monkeypatch.setenv("WAYBILL_DEEP_EP_MAX_TOKENS", "16")
    # Without TransformerEngine its router names what it has not imported.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    if ranks.DEVICE == "cpu":  # the router asks for torch's current device
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))

    def body(rank):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        if ranks.DEVICE != "cpu":
            model_parallel_cuda_manual_seed(11)
        kind, want = layer_step(rank, "allgather")
        assert kind.__module__.startswith("megatron")
        kind, got = layer_step(rank, "flex")
        assert kind is MoEFlexTokenDispatcher
        for mine, theirs in zip(got, want):
            assert (mine - theirs).norm() <= 0.01 * theirs.norm()
        ours.install()
        kind, got = layer_step(rank, "alltoall")
        ours.uninstall()
        assert kind is ours.WaybillTokenDispatcher
        for mine, theirs in zip(got, want):
            assert (mine - theirs).norm() <= 0.01 * theirs.norm()
        parallel_state.destroy_model_parallel()

    ranks.run(2, body)


@pytest.mark.parametrize("keep", [False, True])
def test_copies_of_hot_experts(keep, monkeypatch):
    """A whole layer is as without copies."""
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    if ranks.DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    copies = {"spare_experts": 2, "limit": 1.0, "min_rows": 1, "keep_copies": keep}
    monkeypatch.setattr(ours.WaybillMoELayer, "options", copies)

    def body(rank):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        if ranks.DEVICE != "cpu":
            model_parallel_cuda_manual_seed(11)
        ours.install()
        _, want = layer_step(rank, "alltoall")
        kind, got = layer_step(rank, "alltoall", ours.WaybillMoELayer)
        assert kind is ours.WaybillTokenDispatcher
        for mine, theirs in zip(got, want):
            assert (mine - theirs).norm() <= 0.01 * theirs.norm()
        for options, text in (
            ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap = True"),
            ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion = True"),
        ):
            with pytest.raises(Unsupported, match=text):
                layer_step(rank, "alltoall", ours.WaybillMoELayer, **options)
        with pytest.raises(Unsupported, match="moe_token_dispatcher_type = 'allgather'"):
            layer_step(rank, "allgather", ours.WaybillMoELayer)
        monkeypatch.setattr(ours.WaybillMoELayer, "options", {"spare": 1})
        with pytest.raises(InvalidArgument, match="got the option 'spare', expected some of"):
            layer_step(rank, "alltoall", ours.WaybillMoELayer)
        ours.uninstall()
        with pytest.raises(InvalidArgument, match=r"dispatcher, expected install\(\)"):
            layer_step(rank, "alltoall", ours.WaybillMoELayer)
        parallel_state.destroy_model_parallel()

    ranks.run(2, body)


def test_install_puts_it_in():
    before = moe_layer.MoEAlltoAllTokenDispatcher
    ours.install()
    ours.install()
    assert moe_layer.MoEAlltoAllTokenDispatcher is ours.WaybillTokenDispatcher
    ours.uninstall()
    ours.uninstall()
    assert moe_layer.MoEAlltoAllTokenDispatcher is before


def test_what_is_not_served():
    def body(rank):
        dispatcher, _ = dispatcher_of(ours.WaybillTokenDispatcher)
        with pytest.raises(Unsupported, match="moe_shared_expert_overlap"):
            dispatcher.set_shared_experts(None)
        with pytest.raises(Unsupported, match="moe_pad_expert_input_to_capacity"):
            dispatcher_of(
                ours.WaybillTokenDispatcher, moe_pad_expert_input_to_capacity=True,
                moe_expert_capacity_factor=1.0,
            )  # fmt: skip
        dispatcher.config.moe_router_padding_for_quantization = True  # which asks for Transformer
        with pytest.raises(Unsupported, match="moe_router_padding_for_quantization"):  # Engine
            ours.WaybillTokenDispatcher(2, [0, 1], dispatcher.config, groups_of())
        if ranks.DEVICE != "cpu":
            return
        everything = torch.ones(4, EXPERTS, dtype=torch.bool)  # an expert's padding does that
        with pytest.raises(InvalidArgument, match=r"routing_map has \d+ experts of a token, expec"):
            dispatcher.dispatch_preprocess(torch.ones(4, HIDDEN), everything, everything * 0.1)

    ranks.run(1, body)
