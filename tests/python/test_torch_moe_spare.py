"""Layers with spare experts: rows land in slots, as the simulation says; gradients go home."""

import numpy as np
import pytest

import waybill
from waybill.moe import EPConfig, even_experts, simulate_dispatch

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 4, 16, 3, 8, 12


def layer_on(world, per_node=WORLD, dtype=torch.float32, **options):
    options.setdefault("spare_experts", 2)
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, per_node, WORLD, dtype, **options
    )


def inputs_of(rank, seed=0):
    """Tokens, ids of a router that likes expert 0 or 1, weights. Rank 2 is empty in round 1."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = 0 if (rank, seed) == (2, 1) else MAX - rank
    tokens = torch.randn(count, HIDDEN, generator=generator)
    ids = torch.randint(0, EXPERTS + 1, (count, TOPK), generator=generator)
    hot = torch.rand(count, TOPK, generator=generator) < 0.5
    return tokens, ids.masked_fill(hot, seed % 2), torch.rand(count, TOPK, generator=generator)


def simulated(per_node, seed, **options):
    options.setdefault("spare_experts", 2)
    config = EPConfig(MAX, HIDDEN, TOPK, EXPERTS, 0, WORLD, per_node, token_dtype="float32")
    given = [[one.numpy() for one in inputs_of(rank, seed)] for rank in range(WORLD)]
    return simulate_dispatch(config, *zip(*given), **options)


def expect_as_simulated(made, rank, wanted):
    rows, weights, layout = made
    assert np.array_equal(rows.numpy(), wanted.recv_tokens[rank])
    assert np.array_equal(weights.numpy(), wanted.recv_weights[rank])
    of = wanted.layout[rank]
    for name in (
        "topk_indices_tensor", "token_dst_scatter_idx", "recv_expert_counts",
        "recv_expert_offsets", "slot_experts", "all_slot_experts", "all_slot_quotas",
    ):  # fmt: skip
        assert np.array_equal(getattr(layout, name).numpy(), getattr(of, name)), name


@pytest.mark.parametrize("per_node", [4, 2])
@pytest.mark.parametrize("rows", ["grouped", "compact"])
def test_rows_and_tables_are_those_of_the_simulation(per_node, rows):
    wanted = [simulated(per_node, seed, rows=rows) for seed in range(3)]

    def body(world):
        layer = layer_on(world, per_node, rows=rows)
        for seed in range(3):
            made = layer.dispatch(*inputs_of(world.rank, seed))
            expect_as_simulated(made, world.rank, wanted[seed])
        assert layer.slots_per_rank == 4 and "spare_experts=2" in repr(layer)
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node)
    assert wanted[0].num_recv_tokens_per_rank.max() < wanted[0].splits[:, :-1].sum()


def test_the_plan_is_that_of_even_experts():
    rows = np.array(
        [
            np.bincount(inputs_of(r)[1].ravel(), minlength=EXPERTS + 1)[:EXPERTS]
            for r in range(WORLD)
        ]
    )
    plan = even_experts(rows, spare_experts=2, limit=1.1, min_rows=3, alignment=4)
    wanted = simulated(WORLD, 0, limit=1.1, min_rows=3, expert_alignment=4)
    layout = wanted.layout[0]
    assert np.array_equal(layout.all_slot_experts, plan.slots)
    assert np.array_equal(layout.all_slot_quotas, plan.quotas)


def test_copies_that_are_present_are_used_again():
    first = simulated(WORLD, 0)
    present = first.layout[0].all_slot_experts[:, -2:]
    wanted = simulated(WORLD, 3, present=present)
    assert not np.array_equal(
        wanted.layout[0].all_slot_experts, simulated(WORLD, 3).layout[0].all_slot_experts
    )

    def body(world):
        layer = layer_on(world)
        *_, layout = layer.dispatch(*inputs_of(world.rank, 0))
        made = layer.dispatch(*inputs_of(world.rank, 3), present=layout)
        expect_as_simulated(made, world.rank, wanted)
        layer.finalize()

    run_threads(WORLD, body)


@pytest.mark.parametrize("options", [{}, {"fixed_rows": 200}])
def test_gradients_are_those_without_copies(options):
    """On one node sums go by topk slot: the same bits."""

    def body(world):
        found = []
        for spare in (0, 2):
            layer = layer_on(world, spare_experts=spare, **options)
            tokens, ids, weights = inputs_of(world.rank, 1)
            tokens.requires_grad_()
            weights.requires_grad_()
            rows, _, layout = layer.dispatch(tokens, ids, weights)
            slots = torch.arange(2 * world.rank, 2 * world.rank + 2)
            experts = layout.slot_experts if spare else slots
            ends = layout.recv_expert_offsets
            factor = torch.zeros(len(rows))
            for s, expert in enumerate(experts.tolist()):
                factor[ends[s] : ends[s + 1]] = 1 + expert
            sums = layer.combine(rows * factor[:, None], layout, weighted=True)
            (sums * sums).sum().backward()
            found.append((sums.detach(), tokens.grad, weights.grad))
            layer.finalize()
        for plain, even in zip(*found):
            assert torch.equal(plain, even)

    run_threads(WORLD, body)


def test_bad_values_are_refused_by_name():
    bad = [
        ({"spare_experts": -1}, "spare_experts = -1, expected 0..num_experts = 8"),
        ({"spare_experts": 9}, "spare_experts = 9, expected 0..num_experts = 8"),
        ({"spare_experts": 1.5}, "spare_experts = 1.5"),
        ({"limit": 0.5}, "limit = 0.5, expected >= 1"),
        ({"limit": float("nan")}, "limit = nan, expected >= 1"),
        ({"limit": "1"}, "limit = '1', expected a number"),
        ({"min_rows": -1}, "min_rows = -1, expected >= 0"),
    ]
    for options, text in bad:
        with pytest.raises(waybill.InvalidArgument) as error:
            simulated(WORLD, 0, **options)
        assert str(error.value).startswith(f"simulate_dispatch: {text}")
    for present, text in (
        ([[0, 1]], r"present has shape \[1, 2\], expected \[4, 2\]"),
        ([[1, -1]] + [[-1, -1]] * 3, "present of rank 0, slot 0 is 1, a home expert"),
        ([[5, 5]] + [[-1, -1]] * 3, "present names expert 5 twice on rank 0"),
    ):
        with pytest.raises(waybill.InvalidArgument, match=text):
            simulated(WORLD, 0, present=present)

    def body(world):
        for options, text in bad:
            with pytest.raises(waybill.InvalidArgument) as error:
                layer_on(world, **options)
            said = str(error.value).replace("num_tot_experts", "num_experts")
            assert said.startswith(f"EPAll2AllLayer: {text}")
        plain, layer = layer_on(world, spare_experts=0), layer_on(world)
        given = inputs_of(world.rank)
        *_, of_plain = plain.dispatch(*given)
        *_, layout = layer.dispatch(*given)
        assert of_plain.slot_experts is None and of_plain.all_slot_quotas is None
        for call, text in (
            (
                lambda: plain.dispatch(*given, present=of_plain),
                "expected none without spare experts",
            ),
            (lambda: layer.dispatch(*given, present=of_plain), "present belongs to another layer"),
            (lambda: layer.dispatch(*given, present=[[1]]), "dispatch: present"),
            (
                lambda: layer.dispatch(*given, layout_desc=layout, present=layout),
                "present is given, expected none with layout_desc",
            ),
        ):
            with pytest.raises(waybill.InvalidArgument, match=text):
                call()
        layer.dispatch(*given)
        plain.finalize()
        layer.finalize()

    run_threads(WORLD, body)


def test_ranks_that_differ_are_told():
    def body(world):
        odd = world.rank == WORLD - 1
        for name, value in (("spare_experts", 1), ("limit", 1.02), ("min_rows", 4)):
            with pytest.raises(waybill.InvalidArgument, match=f"rank 3 with {name} = {value}"):
                layer_on(world, **({name: value} if odd else {}))
        layer = layer_on(world)
        *_, first = layer.dispatch(*inputs_of(world.rank))
        *_, second = layer.dispatch(*inputs_of(world.rank))
        with pytest.raises(waybill.Disagreement, match="present is that of dispatch"):
            layer.dispatch(*inputs_of(world.rank), present=first if odd else second)

    run_threads(WORLD, body)
