"""Descriptors that outlive other dispatches by them, rows that do not fit, places of combine."""

import pytest
from error_texts import NO_WEIGHTS

import waybill

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 2, 16, 3, 8, 7


def layer_on(world, per_node=WORLD, **options):
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, per_node, WORLD, torch.float32, **options
    )


def inputs(world, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + world.rank)
    tokens = torch.randn(MAX, HIDDEN, generator=generator)
    ids = torch.randint(0, EXPERTS, (MAX, TOPK), generator=generator)
    return tokens, ids, torch.rand(MAX, TOPK, generator=generator)


@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("local", [False, True])
def test_an_old_descriptor_gives_what_it_gave(per_node, local):
    def body(world):
        layer = layer_on(world, per_node, enable_local_combine=local)
        tokens, ids, weights = inputs(world)
        rows, _, layout = layer.dispatch(tokens, ids, weights)
        expected = layer.combine(rows, layout, weighted=True)
        other, _, by_other_weights = layer.dispatch(
            tokens * 2, ids, weights * 3, layout_desc=layout
        )
        assert torch.equal(layer.combine(rows, layout, weighted=True), expected)
        bare, none, by_no_weights = layer.dispatch(tokens, ids, layout_desc=by_other_weights)
        assert none is None
        for _ in range(2):
            assert torch.equal(layer.combine(rows, layout, weighted=True), expected)
            tripled = layer.combine(other, by_other_weights, weighted=True)
            torch.testing.assert_close(tripled, 6 * expected)
            with pytest.raises(waybill.InvalidArgument, match=NO_WEIGHTS):
                layer.combine(bare, by_no_weights, weighted=True)
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node)


def test_the_backward_of_combine_leaves_the_weights():
    """It is a dispatch without weights, by the same descriptor."""

    def body(world):
        layer = layer_on(world)
        tokens, ids, weights = inputs(world)
        rows, _, layout = layer.dispatch(tokens.requires_grad_(), ids, weights)
        expected = layer.combine(rows.detach(), layout, weighted=True)
        layer.combine(rows, layout).sum().backward()
        assert torch.equal(layer.combine(rows.detach(), layout, weighted=True), expected)
        layer.finalize()

    run_threads(WORLD, body)


def test_rows_that_do_not_fit_make_nan_sums_on_all_ranks():
    def body(world):
        layer = layer_on(world, fixed_rows=8)
        tokens = inputs(world)[0][:4]
        ids = torch.tensor([[0, 4, 8], [0, 8, 8], [0, 4, 8], [0, 8, 8]])  # 8 to expert 0, 4 to 4
        if world.rank == 1:
            ids[3] = torch.tensor([0, 0, 8])  # the ninth row of rank 0
        rows, _, layout = layer.dispatch(tokens, ids)
        sums = layer.combine(rows, layout)
        lost = torch.tensor([False] * 4)
        lost[3] = world.rank == 1
        assert torch.equal(sums.isnan().all(1), lost) and torch.equal(sums.isnan().any(1), lost)
        with pytest.raises(
            waybill.InvalidArgument, match=r"dispatch 1: a rank was sent 9 rows, .* = 8"
        ):
            layer.synchronize()
        layer.synchronize()
        layer.finalize()

    run_threads(WORLD, body)


def test_too_few_rows_are_refused():
    def body(world):
        layer = layer_on(world, fixed_rows=MAX * TOPK * WORLD)
        tokens, ids, _ = inputs(world)
        rows, _, layout = layer.dispatch(tokens, ids)
        come = int(layout.num_recv_tokens_per_rank[world.rank])
        for count in (0, come - 1):
            with pytest.raises(waybill.InvalidArgument, match=f"expected at least {come}"):
                layer.combine(rows[:count], layout)
        assert torch.equal(layer.combine(rows[:come], layout), layer.combine(rows, layout))
        layer.finalize()

    run_threads(WORLD, body)


def test_places_of_two_combines():
    def body(world):
        layer = layer_on(world)
        for step in range(3):
            made = [layer.dispatch(*inputs(world, 2 * step + i)[:2]) for i in range(2)]
            places = [layer.combine_input(len(rows)) for rows, _, _ in made]
            for place, (rows, _, _) in zip(places, made):
                place.copy_(rows)
            with pytest.raises(waybill.InvalidArgument, match="combine_input: the memory"):
                layer.combine_input(1)
            in_place = [layer.combine(p, layout) for p, (_, _, layout) in zip(places, made)]
            copied = [layer.combine(rows, layout) for rows, _, layout in made]
            assert all(torch.equal(a, b) for a, b in zip(in_place, copied))
            with pytest.raises(waybill.InvalidArgument, match="is in the memory of another"):
                layer.combine(places[0], made[0][2])
        layer.finalize()

    run_threads(WORLD, body)
