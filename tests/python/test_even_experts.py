"""Copies of hot experts: equal to the rule, valid, even, and few."""

import collections
import json
import re
import subprocess

import numpy as np
import pytest
from error_texts import a_multiple, a_number, an_integer
from expert_loads import ROWS_PER_RANK, SHAPES, families, lognormal_shares, zipf_shares

import waybill
from waybill.moe import even_experts
from waybill.moe import even_experts_rule as rule

SEEDS = range(20)


def check(rows, plan, spare, present=None):
    """The plan holds together: every row has one slot, no rank holds an expert twice."""
    rows = np.asarray(rows)
    num_ranks, num_experts = rows.shape
    homes = num_experts // num_ranks
    assert plan.slots.shape == (num_ranks, homes + spare)
    assert (plan.slots[:, :homes] == np.arange(num_experts).reshape(num_ranks, homes)).all()
    for slots in plan.slots:
        held = slots[slots >= 0]
        assert len(set(held.tolist())) == len(held)
    assert (plan.quotas >= 0).all() and (plan.quotas[plan.slots < 0] == 0).all()
    sums = np.zeros(num_experts, np.int64)
    np.add.at(sums, plan.slots[plan.slots >= 0], plan.quotas[plan.slots >= 0])
    assert (sums == rows.sum(axis=0)).all()
    assert plan.max_rows == plan.rank_rows.max() >= plan.bound >= plan.mean_rows
    assert plan.mean_rows == rows.sum() / num_ranks
    taken = delivered(rows, plan)
    assert (taken == plan.quotas).all()
    lying = np.full((num_ranks, spare), -1) if present is None else np.asarray(present)
    new = [
        (rank, expert)
        for rank in range(num_ranks)
        for expert, quota in zip(plan.slots[rank, homes:], plan.quotas[rank, homes:])
        if quota > 0 and expert not in lying[rank]
    ]
    assert plan.weights_in.tolist() == [sum(r == rank for r, _ in new) for rank in range(num_ranks)]
    assert plan.weights_out.tolist() == [
        sum(expert // homes == rank for _, expert in new) for rank in range(num_ranks)
    ]


def delivered(rows, plan):
    """Rows that each slot gets if every row of every rank is sent as the plan says."""
    taken = np.zeros_like(plan.quotas)
    for expert in range(rows.shape[1]):
        left = rows[:, expert].copy()
        places = np.argwhere(plan.slots == expert)
        for rank, slot in places:
            local = plan.local_rows[rank, slot]
            left[rank] -= local
            taken[rank, slot] += local
        assert (left >= 0).all()
        begin = 0
        for rank, slot in places:
            count = plan.quotas[rank, slot] - plan.local_rows[rank, slot]
            if plan.quotas[rank, slot] == 0:
                continue
            assert plan.first_row[rank, slot] == begin
            assert plan.local_rows[rank, slot] == min(rows[rank, expert], plan.quotas[rank, slot])
            taken[rank, slot] += count
            begin += count
        assert begin == left.sum()
    return taken


def by_rule(rows, spare, present=None, **options):
    rows = np.asarray(rows).tolist()
    num_ranks, num_experts = len(rows), len(rows[0])
    loads = [sum(row[e] for row in rows) for e in range(num_experts)]
    lying = [] if present is None else np.asarray(present).tolist()
    pairs = [(r, e) for r, row in enumerate(lying) for e in row if e >= 0]
    copies, bound = rule.choose_copies(loads, num_ranks, spare, pairs, **options)
    slots = rule.fill_slots(copies, num_ranks, num_experts, spare, lying)
    return slots, *rule.share_rows(rows, slots, copies), bound


def expect_rule(rows, plan, spare, present=None, **options):
    slots, quotas, local, first, bound = by_rule(rows, spare, present, **options)
    assert plan.slots.tolist() == slots
    assert plan.quotas.tolist() == quotas
    assert plan.local_rows.tolist() == local
    assert plan.first_row.tolist() == first
    assert plan.bound == bound


def random_case(rng):
    num_ranks, homes = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    num_experts, spare = num_ranks * homes, int(rng.integers(0, 4))
    spare = min(spare, num_experts)
    rows = rng.integers(0, 10 ** int(rng.integers(1, 6)), (num_ranks, num_experts))
    rows[rng.random(rows.shape) < rng.random()] = 0
    rows[:, rng.random(num_experts) < rng.random() / 2] = 0
    if rng.random() < 0.3:
        rows[int(rng.integers(num_ranks))] = 0  # a rank without tokens
    options = {}
    if rng.random() < 0.5:
        options["limit"] = float(rng.choice([1.0, 1.02, 1.3, 100.0]))
    if rng.random() < 0.4:
        options["min_rows"] = int(rng.integers(0, 300))
    if rng.random() < 0.5:
        options["num_nodes"] = int(rng.choice([n for n in range(1, 9) if num_ranks % n == 0]))
    if rng.random() < 0.4:
        options["alignment"] = int(rng.choice([1, 2, 16, 128]))
    present = None
    if rng.random() < 0.6 and num_ranks > 1:
        present = np.full((num_ranks, spare), -1, np.int32)
        for rank in range(num_ranks):
            others = [e for e in range(num_experts) if e // homes != rank]
            chosen = rng.permutation(others)[:spare]
            present[rank, : len(chosen)] = np.where(rng.random(len(chosen)) < 0.7, chosen, -1)
    return rows, spare, present, options


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_rule(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        rows, spare, present, options = random_case(rng)
        plan = even_experts(rows, spare_experts=spare, present=present, **options)
        check(rows, plan, spare, present)
        expect_rule(rows, plan, spare, present, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_rule_on_families(shape):
    for _, rows in families(*shape, seed=3):
        expect_rule(rows, even_experts(rows, spare_experts=2), 2)


@pytest.mark.parametrize("limit", [1.0, 1.02])
def test_copies_stay_on_nodes_that_have_the_expert(limit):
    """On 8 nodes of 8 ranks fewer weights cross, and ranks are as even as without nodes."""
    crossing, senders = collections.Counter(), collections.Counter()
    copies, plans = collections.Counter(), collections.Counter()
    for seed in SEEDS[:3]:
        for name, rows in families(256, 64, seed):
            family = name.split()[0]
            plans[family] += 1
            for nodes in (1, 8):
                plan = even_experts(rows, spare_experts=2, limit=limit, num_nodes=nodes)
                ranks, slots = np.nonzero(plan.quotas[:, 4:])
                pairs = {(e, r // 8) for r, e in zip(ranks, plan.slots[ranks, slots + 4])}
                crossing[family, nodes] += sum(e // 32 != node for e, node in pairs)
                senders[family, nodes] += int(plan.weights_out.max())
                copies[family, nodes] += len(ranks)
                assert plan.max_rows <= limit * plan.bound * 1.0005 + 1, (name, seed)
            if seed == 0:
                check(rows, plan, 2)
                expect_rule(rows, plan, 2, limit=limit, num_nodes=8)
    for family, most in (("lognormal", 0.7), ("zipf", 0.75), ("hot", 0.75), ("few", 0.9)):
        assert crossing[family, 8] <= most * crossing[family, 1], family
        assert senders[family, 8] <= senders[family, 1] + plans[family], family
        assert copies[family, 8] <= copies[family, 1] + plans[family], family


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_spare_slots_even_out_every_family(shape):
    exact = collections.Counter()
    for seed in SEEDS:
        for name, rows in families(*shape, seed):
            plan = even_experts(rows, spare_experts=2)
            if seed < 2:
                check(rows, plan, 2)
            mean = ROWS_PER_RANK
            if plan.bound == mean:
                assert plan.max_rows <= max(1.005 * mean, mean + 2), (name, seed)
            else:
                assert plan.max_rows <= max(1.02 * plan.bound, plan.bound + 2), (name, seed)
            exact[name.split()[0], plan.max_rows == mean] += 1
    hits = exact["lognormal", True] + exact["zipf", True]
    assert hits >= 0.95 * (hits + exact["lognormal", False] + exact["zipf", False])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] >= 64], ids=str)
def test_one_spare_slot_evens_out_many_ranks(shape):
    for seed in SEEDS:
        for name, rows in families(*shape, seed):
            if name.split()[0] in ("lognormal", "zipf"):
                plan = even_experts(rows, spare_experts=1)
                assert plan.max_rows <= 1.005 * plan.bound, (name, seed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_many_spare_slots_as_experts_reach_the_mean(shape):
    num_experts, num_ranks = shape
    for seed in SEEDS[:5]:
        for _, rows in families(*shape, seed):
            plan = even_experts(rows, spare_experts=num_experts // num_ranks)
            assert plan.max_rows == -(-int(rows.sum()) // num_ranks)


def test_any_loads_reach_the_mean_with_as_many_spare_slots_as_experts():
    rng = np.random.default_rng(8)
    for _ in range(3000):
        num_ranks, homes = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        rows = rng.integers(0, 10 ** int(rng.integers(1, 6)), (num_ranks, num_ranks * homes))
        rows[rng.random(rows.shape) < rng.random()] = 0
        plan = even_experts(rows, spare_experts=homes)
        assert plan.max_rows == -(-int(rows.sum()) // num_ranks)


def plain_greedy(loads, num_ranks, spare):
    """Rows of the fullest rank and weights of the fullest sender if the fullest rank always gives
    its largest expert."""
    bound = rule.lower_bound(loads, num_ranks, spare)
    fullest = max(sum(part) for part in np.reshape(loads, (num_ranks, -1)).tolist())
    for rung in range(rule.RUNGS):
        limit = bound + (fullest - bound) * rung**3 // (rule.RUNGS - 1) ** 3
        tried = rule.Pass(limit, loads, num_ranks, spare, 0, 1, set())
        if tried.settle(spread=False, whole=False):
            tried.send_home()
            homes = collections.Counter(e // tried.homes for _, e in tried.copies)
            return max(tried.load), max(homes.values(), default=0)
    raise AssertionError("the last limit needs no copy")


def test_the_fullest_sender_sends_fewer_weights_than_in_the_plain_greedy():
    ours, plain = collections.defaultdict(list), collections.defaultdict(list)
    for shape in SHAPES:
        for seed in SEEDS[:4]:
            for name, rows in families(*shape, seed):
                family = name.split()[0]
                loads = rows.sum(axis=0).tolist()
                plan = even_experts(rows, spare_experts=2)
                max_rows, theirs = plain_greedy(loads, shape[1], 2)
                if max_rows > plan.max_rows:
                    continue  # less even
                sent = int(plan.weights_out.max())
                keys = [family]
                if family == "lognormal" and shape[1] >= 32:
                    keys.append("lognormal, 32 ranks and more")
                for key in keys:
                    ours[key].append(sent)
                    plain[key].append(theirs)
    for key, sent in ours.items():
        limit = 0.9 if "32" in key else 1.0
        assert np.mean(sent) <= limit * np.mean(plain[key]), key


def test_a_limit_above_one_needs_fewer_copies():
    copies = collections.Counter()
    for seed in SEEDS:
        rows = dict(families(256, 64, seed))["lognormal 1"]
        for limit in (1.0, 1.02):
            plan = even_experts(rows, spare_experts=2, limit=limit)
            assert plan.max_rows <= limit * plan.bound
            copies[limit] += int((plan.quotas[:, 4:] > 0).sum())
    assert copies[1.02] <= 0.6 * copies[1.0]


@pytest.mark.parametrize("spare", [1, 2])
@pytest.mark.parametrize("shape", [(256, 8), (256, 32), (256, 64), (128, 64)], ids=str)
def test_present_copies_are_used_again_when_the_router_drifts(shape, spare):
    """A router whose loads drift by 10 % a step."""
    num_experts, num_ranks = shape
    homes = num_experts // num_ranks
    fresh, kept = 0, 0
    for seed in SEEDS[:8]:
        for start in (lambda r: lognormal_shares(num_experts, 1, r),
                      lambda r: zipf_shares(num_experts, 1.0, r)):  # fmt: skip
            rng = np.random.default_rng(seed)
            shares, before, lying = start(rng), None, None
            for _ in range(6):
                rows = [rng.multinomial(ROWS_PER_RANK, shares) for _ in range(num_ranks)]
                alone = even_experts(rows, spare_experts=spare)
                plan = even_experts(rows, spare_experts=spare, present=lying)
                if before is not None:
                    if seed == 0:
                        check(rows, plan, spare, lying)
                    used = alone.quotas[:, homes:] > 0
                    fresh += sum(
                        expert not in before[rank]
                        for rank in range(num_ranks)
                        for expert in alone.slots[rank, homes:][used[rank]]
                    )
                    kept += int(plan.weights_in.sum())
                    assert plan.max_rows <= 1.005 * alone.max_rows
                before, lying = alone.slots[:, homes:], plan.slots[:, homes:]
                shares = shares * np.exp(0.1 * rng.standard_normal(num_experts))
                shares /= shares.sum()
    assert kept <= 0.6 * fresh


def test_copies_take_min_rows_and_whole_tiles():
    rows = dict(families(256, 32, 1))["lognormal 4"]
    plan = even_experts(rows, spare_experts=2, min_rows=2000, alignment=128)
    copies = plan.quotas[:, 8:][plan.quotas[:, 8:] > 0]
    assert len(copies) and copies.min() >= 2000
    whole = np.isin(copies, rows.sum(axis=0))
    assert (copies[~whole] % 128 == 0).all()


def test_edges():
    plan = even_experts([[5, 3]], spare_experts=1)  # one rank
    assert plan.slots.tolist() == [[0, 1, -1]] and plan.quotas.tolist() == [[5, 3, 0]]
    plan = even_experts(np.zeros((4, 8), np.int64), spare_experts=2)  # no rows at all
    assert plan.max_rows == plan.bound == 0 and not plan.quotas.any()
    plan = even_experts(np.eye(3, dtype=np.int64) * 7, spare_experts=0)
    assert plan.slots.tolist() == [[0], [1], [2]] and plan.max_rows == 7
    rows = np.arange(64, dtype=np.int32).reshape(8, 8)
    check(rows.T, even_experts(rows.T, spare_experts=1), 1)  # not contiguous
    assert even_experts(rows.astype(float), spare_experts=1).max_rows == 252
    plan = even_experts([[10, 0], [0, 0]], spare_experts=1)  # all to one expert
    assert plan.quotas.tolist() == [[5, 0], [0, 5]] and plan.slots.tolist() == [[0, -1], [1, 0]]


ROWS = [[4, 1, 0, 2], [3, 1, 5, 0]]
REFUSED = [
    (([[1, -1], [0, 0]],), {}, "rows of rank 0 for expert 1 = -1, expected 0 to 2\\^53"),
    (([[0.5, 1], [0, 0]],), {}, "rows\\[0, 0\\] = 0.5, expected a whole number"),
    (([[float("nan"), 1], [0, 0]],), {}, "rows\\[0, 0\\] = nan, expected a whole"),
    (([[2**53, 1], [0, 0]],), {}, "all rows are more than 9007199254740992"),
    (([[2**62, 2**62], [2**62, 2**62]],), {}, "expected 0 to 2\\^53"),
    (([1, 2],), {}, "rows has shape \\[2\\], expected \\[num_ranks, num_experts\\]"),
    (([[1, 2, 3], [4, 5, 6]],), {}, a_multiple("num_experts", 3, "the 2 ranks")),
    ((np.zeros((0, 4), np.int64),), {}, "num_ranks = 0"),
    ((ROWS,), {"spare_experts": -1}, "spare_experts = -1, expected 0 to num_experts = 4"),
    ((ROWS,), {"spare_experts": 5}, "spare_experts = 5, expected 0 to num_experts = 4"),
    ((ROWS,), {"spare_experts": 1.0}, an_integer("spare_experts", 1.0)),
    ((ROWS,), {"limit": 0.99}, "limit = 0.99, expected >= 1"),
    ((ROWS,), {"limit": float("nan")}, "limit = .*nan, expected >= 1"),
    ((ROWS,), {"limit": "x"}, a_number("limit", "'x'")),
    ((ROWS,), {"min_rows": -1}, "min_rows = -1, expected >= 0"),
    ((ROWS,), {"alignment": 0}, "alignment = 0, expected >= 1"),
    ((ROWS,), {"num_nodes": 0}, "num_nodes = 0, expected a divisor of num_ranks = 2"),
    ((ROWS,), {"num_nodes": 4}, "num_nodes = 4, expected a divisor of num_ranks = 2"),
    ((ROWS,), {"num_nodes": 2.0}, an_integer("num_nodes", 2.0)),
    ((ROWS,), {"present": [[0], [0]]}, "present of rank 0, slot 0 is 0, a home expert"),
    ((ROWS,), {"present": [[4], [0]]}, "present of rank 0, slot 0 is 4, expected -1 to 3"),
    ((ROWS,), {"present": [[-1, 2]]}, "present has shape \\[1, 2\\], expected \\[2, 1\\]"),
    ((ROWS,), {"spare_experts": 2, "present": [[2, 2], [-1, 0]]}, "expert 2 twice on rank 0"),
]


@pytest.mark.parametrize(("given", "options", "text"), REFUSED, ids=[t for *_, t in REFUSED])
def test_refused(given, options, text):
    with pytest.raises(waybill.InvalidArgument, match=text):
        even_experts(*given, **{"spare_experts": 1, **options})


@pytest.mark.parametrize("form", ["json", "npy", "npz"])
def test_the_program_reads_counts_of_numpy(form, tmp_path):
    """``waybill experts --counts FILE --spare N`` plans as the function does."""
    from waybill.__main__ import program

    rng = np.random.default_rng(5)
    rows = np.floor(rng.lognormal(3, 1, (8, 32))).astype(np.int32)
    rows[:, 5] += 400
    file = tmp_path / f"rows.{form}"
    if form == "json":
        file.write_text(json.dumps(rows.tolist()))
    elif form == "npy":
        np.save(file, np.asfortranarray(rows))
    else:
        np.savez(file, other=rows[0], rows=rows)
    command = [program(), "experts", "--counts", str(file), "--spare", "2", "--hidden", "512"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    plan = even_experts(rows, spare_experts=2)
    before = rows.sum(axis=0).reshape(8, 4).sum(axis=1)
    text = " ".join(done.stdout.split())
    assert f"computes {plan.max_rows:,} rows instead of {before.max():,}" in text
    picture = done.stdout.partition("rows before")[2].splitlines()[1:9]
    counts = [[int(word.replace(",", "")) for word in re.findall(r"[\d,]+", line)]
              for line in picture]  # fmt: skip
    expected = zip(range(8), before, plan.rank_rows, plan.weights_in)
    assert [[*line[:3], line[4]] for line in counts] == [list(line) for line in expected]
    sent = [line[3] for line in counts]  # ranks that received a copy forward it
    assert sum(sent) == plan.weights_out.sum() and max(sent) <= plan.weights_out.max()
