"""What ranks must have the same, and what one of them finds wrong: all hear of it at once."""

import time

import pytest
from error_texts import CLOSED
from packed import close, leaves_of, module, pieces_in_order, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

OTHER = {
    "scale": (0.3, 0.5), "mask": ("causal", "full"), "window": (None, 5), "heads": (2, 4),
    "dtype": (torch.float64, torch.float32), "v_head_dim": (8, 4), "in_place": (True, False),
    "block_tokens": (4, 8), "imbalance_target": (1.01, 1.02), "latent_dim": (None, 4),
}  # fmt: skip


def errors_of(body, world_size=2, timeout_s=20):
    """What each rank raises; within a moment."""

    def each(world):
        begin = time.perf_counter()
        with pytest.raises(waybill.Error) as error:
            body(world)
        assert time.perf_counter() - begin < timeout_s / 2, str(error.value)
        return type(error.value), str(error.value)

    return wt.run_threads(world_size, each, timeout_s=timeout_s)


@pytest.mark.parametrize("name", OTHER)
def test_other_arguments_of_one_rank(name):
    """Also those by which no plan and no format differs: results would be wrong silently."""
    errors = errors_of(lambda world: module(world, **{name: OTHER[name][world.rank]}))
    said = f"ContextParallelAttention: rank 1 with {name} = {OTHER[name][1]}, the others"
    assert all(text.startswith(said) for _, text in errors), errors


def test_other_costs():
    costs = (None, waybill.AttentionCosts(1e12, row_pairs=300))
    errors = errors_of(lambda world: module(world, costs=costs[world.rank]))
    assert all("rank 1 with row_pairs = 300, the others 0" in text for _, text in errors)


@pytest.mark.parametrize(
    "wrong", [{"heads": 0}, {"kernel": "fast"}, {"overlap": "no"}, {"num_sms": -1}]
)
def test_a_wrong_argument_of_one_rank(wrong):
    errors = errors_of(lambda world: module(world, **(wrong if world.rank == 1 else {})))
    (name,) = wrong
    assert name in errors[1][1] and "rank 1" not in errors[1][1]
    assert "rank 1 with arguments = wrong (" in errors[0][1] and name in errors[0][1]


def test_a_wrong_argument_of_all_ranks_and_a_right_one_after():
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match="heads = 0, expected >= 1"):
            module(world, heads=0)
        attend = module(world)
        plan = attend.plan([[30], [5]])
        rows = (torch.ones(plan.home_tokens[world.rank], n, 8).double() for n in (2, 1, 1))
        return float(attend(plan, *rows).sum())

    assert wt.run_threads(2, body) == [480.0, 80.0]


@pytest.mark.parametrize("held", ["x", [4, 0], [(0, -1, 3)], [(0, 0, 0)], [1.5], 7])
def test_wrong_pieces_of_one_rank(held):
    def body(world):
        module(world).gather([5] if world.rank == 0 else held)

    errors = errors_of(body)
    assert all("ContextParallelAttention.gather: " in text for _, text in errors)
    assert "rank 1 with arguments = wrong (held: pieces of rank 1" in errors[0][1]
    assert "pieces of rank 1" in errors[1][1]


def test_pieces_are_gathered_after_wrong_ones():
    def body(world):
        attend = module(world)
        with pytest.raises(waybill.InvalidArgument):
            attend.gather([5] if world.rank == 0 else [0])
        return [len(held) for held in attend.gather([5] * (1 + world.rank))]

    assert wt.run_threads(2, body) == [[1, 2], [1, 2]]


def test_capacities_differ_or_are_wrong_on_one_rank():
    def differ(world):
        attend = module(world)
        plan = attend.plan([[30], [5]])
        fits = wt.Capacities.of(plan)
        attend.fixed_plan(plan, fits._replace(max_kv_rows=fits.max_kv_rows + 9 * world.rank))

    assert all("rank 1 with max_kv_rows = " in text for _, text in errors_of(differ))

    def small(world):
        attend = module(world)
        plan = attend.plan([[30], [5]])
        fits = wt.Capacities.of(plan)
        attend.fixed_plan(plan, fits if world.rank == 0 else fits._replace(max_rows=7))

    errors = errors_of(small)
    assert "needs max_rows = 30, expected at most 7" in errors[1][1]
    assert "rank 1 with arguments = wrong (" in errors[0][1]


def test_a_ticket_of_another_module():
    """Layers with and without a window: the other one's mask would be taken silently."""
    pieces = pieces_in_order([40, 9], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def layer(attend, ticket, q, k, v):
        return attend(ticket, q, k, v) * 2

    def body(world):
        causal, windowed = module(world), module(world, window=5)
        ticket = causal.ticket(causal.plan(pieces))
        q, k, v = leaves_of(tensors[world.rank])
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        for call in (layer, compiled):
            with pytest.raises(waybill.InvalidArgument, match="is of another module on rank"):
                call(windowed, ticket, q, k, v)
        out = compiled(windowed, windowed.ticket(windowed.plan(pieces)), q, k, v)
        close([out / 2], [whole(pieces, tensors, window=5)[world.rank][0]])

    wt.run_threads(2, body, timeout_s=100)


def test_a_module_that_was_closed():
    """Also for a batch that moves nothing, where no call would notice."""

    def body(world):
        attend = module(world)
        plan = attend.plan([[5], [5]])
        fixed = attend.fixed_plan(plan, wt.Capacities.of(plan))
        ticket = attend.ticket(plan)
        q, k, v = (torch.ones(5, n, 8).double() for n in (2, 1, 1))
        attend.close()
        attend.close()
        for given in (plan, fixed, ticket):
            with pytest.raises(waybill.TransportError, match=CLOSED):
                attend(given, q, k, v)

    wt.run_threads(2, body)


def test_a_device_beside_a_world():
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match="device = 'cuda:3', expected cpu"):
            module(world, device="cuda:3")
        assert module(world, device="cpu").device.type == "cpu"

    wt.run_threads(1, body)
