"""Plans of one's own in ContextParallelAttention: taken as they are, with their relay schedules."""

import pickle

import pytest
from packed import close, leaves_of, module, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

SIZES = (2, 1, 8, 8)


def own_plan(**options):
    """Two documents over three ranks, of which one has no token; the first lies in no order."""
    return waybill.QkvPlan(
        3, [0, 3, 5, 5], [40, 0, 30, 20, 9], [2, 0, 1, 1, 0], [0, 4, 5], [3, 1, 0, 2, 4], **options
    )


def results(plan, tensors, **options):
    def body(world):
        attend = module(world, *SIZES, **options)
        taken = attend.plan(plan)
        q, k, v = leaves_of(tensors[world.rank])
        out = attend(taken, q, k, v)
        (out * tensors[world.rank][3]).sum().backward()
        ways = attend._step(taken)._moves._plans
        way = ways["qkv"].way if "qkv" in ways else None
        return [out.detach(), q.grad, k.grad, v.grad], way

    return wt.run_threads(plan.world_size if hasattr(plan, "world_size") else 8, body)


def pieces_of(plan, **options):
    taken = wt.BatchPlanner(plan.world_size, *SIZES, **options).plan(plan)
    return [taken.pieces(rank) for rank in range(plan.world_size)]


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("in_place", [True, False])
def test_taken_as_it_is(mask, in_place):
    plan = own_plan(mask=mask)
    pieces = pieces_of(plan, mask=mask)
    assert pieces == [[(0, 20, 70)], [(0, 0, 20), (1, 0, 9)], []]
    tensors = tensors_of(pieces, *SIZES)
    found = results(plan, tensors, mask=mask, in_place=in_place)
    for (got, _), expected in zip(found, whole(pieces, tensors, mask=mask)):
        close(got, expected[:4])


def test_the_schedule_of_an_attention_plan():
    lengths = [[700], *([20] for _ in range(7))]
    plan = waybill.plan(lengths, 8, 0, q_hidden=16, kv_hidden=8, block_tokens=16)
    assert any(hop.after >= 0 for hop in plan.relay_hops)
    qkv = plan.to_qkv_plan()
    tensors = tensors_of(pieces_of(qkv), *SIZES)
    straight = results(plan, tensors, relay="never")
    forwarded = results(plan, tensors, relay="always")
    for (got, way), (expected, was) in zip(forwarded, straight):
        assert (way, was) == ("relay", "direct")
        assert torch.equal(got[0], expected[0])
        close(got, expected)
    planner = wt.BatchPlanner(8, *SIZES)
    taken = pickle.loads(pickle.dumps(planner.plan(plan)))
    assert taken.forwards and taken.qkv_plan == qkv
    assert taken.tables().relay.hops() == [tuple(hop) for hop in plan.relay_hops]
    assert waybill.predict_step(taken).transfer == "relay"


def test_what_does_not_fit_is_named():
    def fails(message, plan, world_size=3, **options):
        with pytest.raises(waybill.InvalidArgument, match=message):
            wt.BatchPlanner(world_size, *SIZES, **options).plan(plan)

    fails("world_size = 3, expected 2", own_plan(), 2)
    fails("mask = causal, expected full", own_plan(), mask="full")
    one_chunk = r"tokens 20\.\.59 of its document, gets keys 0\.\.59, expected those of one chunk"
    fails(f"shard 0, {one_chunk}: chunk = 8", own_plan(), chunk=8)
    fails("shard 3 has kv_end = 2, expected 1: mask = causal", own_plan(kv_end=[3, 2, 4, 2, 1]))
    begins = own_plan(kv_begin=[0, 0, 2, 0, 0])  # shard 2 begins with token 60, its keys with 20
    fails("shard 2 gets keys from token 20 of its document on, expected 0 or fewer", begins)
    fails("expected 19 or fewer: window = 42", begins, window=42)
    assert wt.BatchPlanner(3, *SIZES, window=41).plan(begins).qkv_plan == begins


@pytest.mark.parametrize("mask", ["causal", "full", "prefix"])
def test_no_documents(mask):
    """A plan of none does not say of which mask it is."""
    planner = wt.BatchPlanner(2, *SIZES, mask=mask)
    empty = planner.plan([[], []])
    assert planner.plan(empty.qkv_plan).home_tokens == [0, 0]
    prefix = 0 if mask == "prefix" else None
    assert planner.plan(waybill.plan([], 2, mask=mask, prefix=prefix)).home_tokens == [0, 0]


def test_windows_and_fixed_plans():
    plan = own_plan(kv_begin=[0, 0, 2, 0, 0])
    pieces = pieces_of(plan, window=30)
    tensors = tensors_of(pieces, *SIZES)
    for (got, _), expected in zip(
        results(plan, tensors, window=30), whole(pieces, tensors, window=30)
    ):
        close(got, expected[:4])

    def body(world):
        attend = module(world, *SIZES, window=30)
        taken = attend.plan(plan)
        fixed = attend.fixed_plan(taken, wt.Capacities.of(taken))
        out = attend(fixed, *(fixed.padded(t) for t in tensors[world.rank][:3]))
        return out[: taken.home_tokens[world.rank]]

    for got, expected in zip(wt.run_threads(3, body), whole(pieces, tensors, window=30)):
        close([got], expected[:1])


@pytest.mark.parametrize(
    ("ranks", "speed", "loses"),
    [(2, 0.95, 1.03), (2, 0.5, 1.50), (8, 0.9, 1.10), (8, 0.5, 1.88), (64, 0.9, 1.11)],
)
def test_what_one_slow_rank_costs(ranks, speed, loses):
    """Docs/decisions/attention.md: even work against work by speed; no rank makes it worse."""
    generator = torch.Generator().manual_seed(ranks)
    lengths = torch.randint(500, 4000, (ranks, 8), generator=generator).tolist()
    work = wt.BatchPlanner(ranks, 8).plan(lengths).work
    by_speed = work.sum() / (ranks - 1 + speed)
    even = [max(work.max(), work[slow] / speed) / by_speed for slow in range(ranks)]
    assert max(even) == pytest.approx(loses, rel=0.012)
