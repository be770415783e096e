"""Plans in tables of one size: the results are those of plans as they come."""

import pytest
from packed import close, leaves_of, module, random_pieces, rng_of, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

MASKS = [{}, {"window": 7}, {"mask": "full"}, {"scale": 0.3}]
SIZES = (4, 2, 6, 4)


def padded(tensors, rows):
    """With NaN in rows behind, which nothing may look at."""
    return [
        torch.cat([t, t.new_full((rows - len(t), *t.shape[1:]), float("nan"))]) for t in tensors
    ]


def step(attend, plan, given):
    q, k, v = leaves_of(given)
    out, lse = attend(plan, q, k, v, return_lse=True)
    out.backward(given[3])
    return [out.detach(), q.grad, k.grad, v.grad, lse]


def run(world_size, batches, **options):
    """Results of all batches on each rank, through one FixedPlan, and how they were planned."""

    def body(world):
        attend = module(world, *SIZES, **options)
        plans = [attend.plan(pieces) for pieces, _ in batches]
        fits = wt.Capacities.of(*plans)
        fixed = attend.fixed_plan(plans[-1], fits)
        home, came = attend.varlen(fixed)
        places = [t.data_ptr() for s in (home, came) if s for t in (s.cu_seqlens_q, s.cu_seqlens_k)]
        results = []
        for plan, (_, tensors) in zip(plans, batches):
            fixed.replace(plan)
            assert fixed.plan is plan and fixed.capacities == fits
            given = padded(tensors[world.rank], fits.max_rows)
            given[3] = torch.nan_to_num(given[3])
            found = step(attend, fixed, given)
            rows = plan.home_tokens[world.rank]
            assert all(not t[rows:].any() for t in found[:4])
            results.append([t[:rows] for t in found])
        home, came = attend.varlen(fixed)
        assert places == [
            t.data_ptr() for s in (home, came) if s for t in (s.cu_seqlens_q, s.cu_seqlens_k)
        ]
        attend.close()
        return results

    return wt.run_threads(world_size, body)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_through_one_plan(seed):
    rng = rng_of(seed)
    world_size, mask = rng.choice((1, 2, 2, 4)), rng.choice(MASKS)
    batches = []
    for i in range(5):
        pieces = random_pieces(rng, world_size)
        batches.append((pieces, tensors_of(pieces, *SIZES, seed=10 * seed + i)))
    ranks = run(
        world_size, batches, **mask, in_place=rng.choice((True, True, False)),
        block_tokens=rng.choice((1, 4, 16)), overlap=rng.choice((True, False)),
    )  # fmt: skip
    for i, (pieces, tensors) in enumerate(batches):
        for rank, expected in enumerate(whole(pieces, tensors, **mask)):
            got = ranks[rank][i]
            close(got[:4], expected[:4])
            close(got[4:], [expected[4].float()], 1e-5)


def test_deterministic_algorithms():
    """Rows are put to their places in another way then: many ranges, and tables of one size."""
    pieces = [[(d, 0, 9) for d in range(12)] + [(20, 0, 150)], [(30, 0, 20)]]
    tensors = tensors_of(pieces, *SIZES)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        ranks = run(2, [(pieces, tensors)], in_place=True)

        def body(world):
            attend = module(world, *SIZES, in_place=True)
            plan = attend.plan([*pieces])
            return step(attend, plan, tensors[world.rank])

        usual = wt.run_threads(2, body)
    finally:
        torch.use_deterministic_algorithms(before)
    for rank, expected in enumerate(whole(pieces, tensors)):
        close(ranks[rank][0][:4], expected[:4])
        close(usual[rank][:4], expected[:4])


def test_plans_of_both_kinds_of_one_module():
    """ "auto" puts rows through the window or leaves them: the same tables take either."""
    pieces = [[[30, 10], [12]], [[700] * 8, [500] * 12], [[2500, 2000], [1700, 2400]]]

    def body(world):
        attend = module(world, 2, 1, 4, dtype=torch.float32, in_place="auto", block_tokens=64)
        plans = [attend.plan(held) for held in pieces]
        fixed = attend.fixed_plan(plans[0], wt.Capacities.of(*plans))
        for plan in (*plans, plans[0]):
            rows = plan.home_tokens[world.rank]
            draws = torch.Generator().manual_seed(world.rank)
            given = [torch.randn(rows, n, 4, generator=draws) for n in (2, 1, 1, 2)]
            want = step(attend, plan, given)
            fixed.replace(plan)
            got = step(attend, fixed, [fixed.padded(t) for t in given])
            for one, other in zip(got, want):
                torch.testing.assert_close(one[:rows], other, rtol=1e-5, atol=1e-5)
        return [plan.in_place for plan in plans]

    assert wt.run_threads(2, body)[0] == [False, True, True]


def test_what_does_not_fit_is_refused_on_all_ranks():
    few, many = [[20, 20], [20, 20]], [[200] + [3] * 30, [5]]

    def body(world):
        attend = module(world)
        fits = wt.Capacities.of(attend.plan(few), attend.plan([[90], [4]]))
        fixed = attend.fixed_plan(attend.plan(few), fits)
        found = []
        for name in wt.Capacities._fields[:-1]:  # more batches are no reason to refuse
            needs = wt.Capacities.of(attend.plan(many))
            roomy = needs._replace(**{name: getattr(needs, name) - 1})
            with pytest.raises(waybill.InvalidArgument) as error:
                attend.fixed_plan(attend.plan(many), roomy)
            found.append(f"needs {name} = " in str(error.value))
        with pytest.raises(waybill.InvalidArgument, match="max_rows = 290, expected at most 90"):
            fixed.replace(attend.plan(many))
        assert fixed.plan.home_tokens == [40, 40]
        with pytest.raises(waybill.InvalidArgument, match=r"shape \[40, 2, 8\], expected \[90"):
            attend(fixed, *(torch.ones(40, n, 8).double() for n in (2, 1, 1)))
        q, k, v = (torch.ones(90, n, 8).double() for n in (2, 1, 1))
        assert attend(fixed, q, k, v).shape == q.shape  # as before
        return found

    assert wt.run_threads(2, body) == [[True] * 6] * 2


def test_backward_has_the_plan_of_its_forward():
    def body(world):
        attend = module(world)
        plans = [attend.plan(held) for held in ([[40], [9]], [[12], [33]])]
        fits = wt.Capacities.of(*plans)
        first, second = (attend.fixed_plan(plan, fits) for plan in plans)
        q, k, v = (torch.ones(fits.max_rows, n, 8).double().requires_grad_() for n in (2, 1, 1))
        outs = [attend(fixed, q, k, v) for fixed in (first, second)]  # two in flight
        for out in outs:
            out.sum().backward()
        out = attend(first, q, k, v)
        first.replace(plans[1])
        with pytest.raises(waybill.InvalidArgument, match="one FixedPlan for each microbatch"):
            out.sum().backward()
        return True

    assert wt.run_threads(2, body) == [True, True]


def test_wrong_capacities_and_modules():
    def body(world):
        attend, other = module(world), module(world)
        plan = attend.plan([[40], [9]])
        fits = wt.Capacities.of(plan)
        for given, message in (
            ((1, 2), "expected Capacities"),
            (fits._replace(max_seqlen=0), "max_seqlen = 0, expected 1"),
            (fits._replace(max_rows="a"), "max_rows"),
        ):
            with pytest.raises(waybill.InvalidArgument, match=message):
                attend.fixed_plan(plan, given)
        fixed = attend.fixed_plan(plan, fits)
        assert "max_rows=40" in repr(fixed) and fits.scaled(1.5).max_rows == 60
        q, k, v = (torch.ones(40, n, 8).double() for n in (2, 1, 1))
        with pytest.raises(waybill.InvalidArgument, match="of another module"):
            other(fixed, q, k, v)
        with pytest.raises(waybill.Unsupported, match="got a FixedPlan"):
            attend.ticket(fixed)
        with pytest.raises(waybill.InvalidArgument, match="got 41 rows"):
            fixed.padded(torch.ones(41, 2))
        with pytest.raises(waybill.InvalidArgument, match="no plans"):
            wt.Capacities.of()
        function = module(world, kernel=lambda q, k, v, sequences, shape: q)
        with pytest.raises(waybill.Unsupported, match="looks at lengths on the host"):
            function.fixed_plan(plan, fits)
        return True

    assert wt.run_threads(2, body) == [True, True]


def test_what_cannot_be_replaced_is_refused():
    def body(world):
        options = {} if world.topology.num_nodes > 1 else {"num_sms": 0}
        attend = module(world, **options)
        plan = attend.plan([[40], [9]])
        with pytest.raises(waybill.Unsupported, match=r"2 nodes, expected one|copy engine cannot"):
            attend.fixed_plan(plan, wt.Capacities.of(plan))
        if options:
            latent = module(world, latent_dim=4)
            plan = latent.plan([[40], [9]])
            with pytest.raises(waybill.Unsupported, match="latent_dim is set"):
                latent.fixed_plan(plan, wt.Capacities.of(plan))
        return True

    for per_node in (1, 2):
        assert wt.run_threads(2, body, ranks_per_node=per_node) == [True, True]
