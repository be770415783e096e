"""Ranks that forward K and V: the same bits as without, and only in batches that gain from it."""

import pickle

import pytest
from packed import close, leaves_of, module, pieces_zigzag, random_pieces, rng_of, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

#: A kernel that takes next to no time, as if ranks were much faster at attention than at moving.
FAST = waybill.AttentionCosts(1e15)
SIZES = {"heads": 4, "kv_heads": 4, "head_dim": 32, "v_head_dim": 32}
ONE_LONG = [[(0, 0, 700)], *([(d, 0, 20)] for d in range(1, 8))]


def results(pieces, tensors, per_node=None, **options):
    """(output, gradients of q, k and v), and the ways of K and V and of their gradients."""

    def body(world):
        attend = module(world, **options)
        q, k, v = leaves_of(tensors[world.rank])
        plan = attend.plan(attend.gather(pieces[world.rank]))
        out = attend(plan, q, k, v)
        (out * tensors[world.rank][3]).sum().backward()
        plans = attend._step(plan)._moves._plans
        ways = [plans[name].way if name in plans else None for name in ("qkv", "sums")]
        assert plan.forwards or "relay" not in ways
        return [out.detach(), q.grad, k.grad, v.grad], ways

    found = wt.run_threads(len(pieces), body, ranks_per_node=per_node)
    return [one for one, _ in found], [ways for _, ways in found]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_same_bits_where_it_pays(in_place):
    tensors = tensors_of(ONE_LONG, *SIZES.values(), dtype=torch.float32)
    options = {**SIZES, "dtype": torch.float32, "costs": FAST, "in_place": in_place}
    straight, ways = results(ONE_LONG, tensors, relay="never", **options)
    assert ways == [["direct", "direct"]] * 8
    forwarded, ways = results(ONE_LONG, tensors, relay="auto", **options)
    assert ways == [["relay", "direct"]] * 8  # on one node sums are made at home
    for got, expected in zip(forwarded, straight):
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_straight_where_nothing_is_gained():
    pieces = pieces_zigzag([900], 4)
    tensors = tensors_of(pieces, *SIZES.values())
    got, ways = results(pieces, tensors, **SIZES, costs=FAST)
    assert ways == [["direct", "direct"]] * 4
    for rank, expected in enumerate(whole(pieces, tensors)):
        close(got[rank], expected[:4])
    slow = waybill.AttentionCosts(1e7)  # the step is its kernel
    assert not wt.BatchPlanner(8, **SIZES, costs=slow).plan(ONE_LONG).forwards


@pytest.mark.parametrize("seed", range(8))
def test_always_with_random_batches(seed):
    """Forward, and gradients that are added up on the way, on one node and on two."""
    rng = rng_of(300 + seed)
    pieces = random_pieces(rng, 4)
    tensors = tensors_of(pieces, 2, 1, 8, 8, seed)
    mask = rng.choice(({}, {"window": 9}, {"mask": "full"}))
    got, ways = results(
        pieces, tensors, rng.choice((None, 2, 1)), relay="always",
        in_place=rng.choice((True, False)), **mask,
    )  # fmt: skip
    assert all(way in (["relay", "relay"], [None, None]) for way in ways) or not any(
        rank[0] == "relay" for rank in ways
    )
    for rank, expected in enumerate(whole(pieces, tensors, **mask)):
        close(got[rank], expected[:4])


def test_latent_rows_are_forwarded():
    def project(rows, weight):
        k, v = (rows @ weight).unflatten(1, (2, 8)).chunk(2, 1)
        return k, v

    weight = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def body(world):
        outs = []
        for relay in ("never", "always"):
            attend = module(world, kv_heads=1, latent_dim=16, in_place=True, relay=relay)
            plan = attend.plan([[300], [5], [7], [9]])
            generator = torch.Generator().manual_seed(world.rank)
            n = plan.home_tokens[world.rank]
            q = torch.randn(n, 2, 8, dtype=torch.float64, generator=generator)
            rows = torch.randn(n, 16, dtype=torch.float64, generator=generator)
            outs.append(attend.latent(plan, q, rows, project, weight))
        return outs

    for never, always in wt.run_threads(4, body):
        assert torch.equal(never, always)


#: Of one rank, then even: nobody forwards in these.
EVEN = [[(8 * w + d, 0, 30) for d in range(4)] for w in range(8)]


def fixed_results(batches, relay, capacities=None, **options):
    """Results and ways of batches that one FixedPlan gets one after another."""
    rows = [tensors_of(pieces, *SIZES.values(), dtype=torch.float32) for pieces in batches]

    def body(world):
        attend = module(world, **SIZES, dtype=torch.float32, relay=relay, **options)
        plans = [attend.plan(pieces) for pieces in batches]
        fits = capacities or wt.Capacities.of(*plans)
        fixed = attend.fixed_plan(plans[0], fits)
        found, ways = [], []
        for plan, tensors in zip(plans, rows):
            fixed.replace(plan)
            given = [fixed.padded(t) for t in tensors[world.rank]]
            q, k, v = leaves_of(given)
            out = attend(fixed, q, k, v)
            out.backward(given[3])
            found += [out.detach(), q.grad, k.grad, v.grad]
            handles = fixed._step._moves._plans
            ways.append([handles[name].way for name in ("qkv", "sums")])
        return found, ways, fits.max_batches

    return wt.run_threads(len(batches[0]), body)


def test_fixed_plans_forward():
    batches = [EVEN, ONE_LONG, EVEN, ONE_LONG]
    straight = fixed_results(batches, "never", costs=FAST)
    forwarded = fixed_results(batches, "auto", costs=FAST)
    relayed = [["direct", "direct"], ["relay", "direct"]]
    for (got, ways, room), (expected, were, none) in zip(forwarded, straight):
        assert ways == 2 * relayed and were == 4 * [relayed[0]]
        assert room > 0 == none
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("seed", range(4))
def test_fixed_plans_always_forward(seed):
    """Random batches of which each needs other hops; gradients go straight."""
    rng = rng_of(500 + seed)
    batches = [random_pieces(rng, 4) for _ in range(3)]
    options = {"in_place": rng.choice((True, False))}
    straight = fixed_results(batches, "never", **options)
    for (got, ways, room), (expected, _, _) in zip(
        fixed_results(batches, "always", **options), straight
    ):
        assert all(way[1] == "direct" for way in ways)
        assert room > 0 or all(way[0] == "direct" for way in ways)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_fixed_plans_without_room():
    plan = wt.BatchPlanner(8, **SIZES, costs=FAST).plan(ONE_LONG)
    fits = wt.Capacities.of(plan)
    assert fits.max_batches > 1 and fits._replace(max_batches=0).scaled(2).max_batches == 0
    few = fits._replace(max_batches=fits.max_batches - 1)
    assert fixed_results([ONE_LONG], "auto", few, costs=FAST)[0][1] == [["direct", "direct"]]
    with pytest.raises(waybill.InvalidArgument, match="the plan needs max_batches = "):
        fixed_results([ONE_LONG], "always", few, costs=FAST)
    with pytest.raises(waybill.InvalidArgument, match=r"max_batches = -1, expected 0\.\.2"):
        fixed_results([ONE_LONG], "auto", fits._replace(max_batches=-1))


def test_explain_says_what_it_gains():
    planner = wt.BatchPlanner(8, **SIZES, costs=FAST)
    plan = planner.plan(ONE_LONG)
    assert plan.forwards
    step = waybill.predict_step(plan)
    assert step.transfer == "relay" and step.world_size == 8
    straight = waybill.predict_step(plan, "direct")
    remedy = next(r for r in step.remedies() if r.kind == "no_relay")
    assert remedy.seconds == straight.seconds > 1.01 * step.seconds
    saved = [s for s in waybill.explain(plan) if s.startswith("Forwarding K and V saves")]
    assert len(saved) == 1
    never = wt.BatchPlanner(8, **SIZES, costs=FAST, relay="never").plan(ONE_LONG)
    assert not never.forwards
    assert waybill.predict_step(never).seconds == straight.seconds
    assert not any(s.startswith("Forwarding") for s in waybill.explain(never))


def test_planners_carry_it():
    for relay in ("auto", "never", "always"):
        planner = wt.BatchPlanner(8, **SIZES, costs=FAST, relay=relay, ranks_per_node=4)
        again = pickle.loads(pickle.dumps(planner))
        assert again.relay == relay and again.facts() == planner.facts()
        plan = pickle.loads(pickle.dumps(planner.plan(ONE_LONG)))
        assert plan.forwards == (relay != "never")
    facts = {wt.BatchPlanner(8, 4, relay=relay).fingerprint for relay in ("auto", "never")}
    assert len(facts) == 2


def test_edges():
    for world, pieces in ((1, [[9]]), (3, [[], [], []]), (2, [[], [5]]), (4, [[1], [1], [1], [1]])):
        for relay in ("auto", "always"):
            plan = wt.BatchPlanner(world, 2, relay=relay).plan(pieces)
            assert not plan.forwards or len(plan.routing().fwd_q.dst_rank) > 0
            assert waybill.predict_step(plan).seconds > 0


def test_wrong_options_are_named():
    with pytest.raises(waybill.InvalidArgument, match='relay = "sometimes", expected "auto"'):
        wt.BatchPlanner(2, 4, relay="sometimes")
    with pytest.raises(waybill.WrongType, match="relay = True"):
        wt.BatchPlanner(2, 4, relay=True)
    with pytest.raises(waybill.InvalidArgument, match="ranks_per_node = 0"):
        wt.BatchPlanner(2, 4, ranks_per_node=0)

    def body(world):
        relay = "auto" if world.rank == 0 else "never"
        with pytest.raises(waybill.InvalidArgument, match="relay"):
            module(world, relay=relay)

    wt.run_threads(2, body)
