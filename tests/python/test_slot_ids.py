"""Tokens go to the slots of a plan: quotas are met, local rows come first, sums stay."""

import numpy as np
import pytest
from expert_loads import families

import waybill
from waybill.moe import EPConfig, even_experts, simulate_dispatch, slot_ids

DROPPED = -1


def ids_of(rows, rng, topk=1, dropped=0):
    """Per rank ids [T, topk] in a random order, with these numbers of rows."""
    result = []
    for counts in rows:
        ids = np.concatenate([np.repeat(np.arange(len(counts)), counts), [DROPPED] * dropped])
        ids = rng.permutation(ids)[: len(ids) // topk * topk]
        result.append(ids.reshape(-1, topk).astype(np.int32))
    return result


def counted(ids, num_experts):
    return np.array([np.bincount(i[i >= 0], minlength=num_experts) for i in ids])


def by_the_words(plan, ids, num_experts):
    """What EvenExperts says, row by row."""
    slots_per_rank = plan.slots.shape[1]
    result = [np.full(i.size, DROPPED, np.int64) for i in ids]
    for expert in range(num_experts):
        rest = []
        for rank, mine in enumerate(ids):
            places = np.flatnonzero(mine.ravel() == expert)
            local = 0
            for slot in np.flatnonzero(plan.slots[rank] == expert):
                local = plan.local_rows[rank, slot]
                result[rank][places[:local]] = rank * slots_per_rank + slot
            rest += [(rank, place) for place in places[local:]]
        for rank, slot in zip(*np.nonzero(plan.slots == expert)):
            first = plan.first_row[rank, slot]
            for source, place in rest[first : first + plan.quotas[rank, slot]
                                      - plan.local_rows[rank, slot]]:  # fmt: skip
                result[source][place] = rank * slots_per_rank + slot
    return [r.reshape(i.shape) for r, i in zip(result, ids)]


def expect_slots(ids, num_experts, **options):
    rows = counted(ids, num_experts)
    plan = even_experts(rows, **options)
    got = [slot_ids(plan, rows, mine, rank=rank) for rank, mine in enumerate(ids)]
    for mine, expected in zip(got, by_the_words(plan, ids, num_experts)):
        assert mine.dtype == np.int32
        np.testing.assert_array_equal(mine, expected)
    in_slots = counted(got, plan.slots.size).sum(axis=0)
    np.testing.assert_array_equal(in_slots.reshape(plan.slots.shape), plan.quotas)
    return plan, got


@pytest.mark.parametrize("spare", [0, 1, 2, 8])
def test_quotas_are_met_local_first(spare):
    rng = np.random.default_rng(spare)
    for _, rows in families(64, 8, spare):
        expect_slots(ids_of(rows // 64, rng, dropped=3), 64, spare_experts=spare)


def test_edges():
    rng = np.random.default_rng(5)
    no_rows = np.zeros((4, 8), int)
    all_to_one = np.zeros((4, 8), int)
    all_to_one[:, 3] = 50
    one_token = np.zeros((4, 8), int)
    one_token[2, 5] = 1
    for rows in (no_rows, all_to_one, one_token):
        for spare in (0, 1, 2):
            expect_slots(ids_of(rows, rng), 8, spare_experts=spare)
    for empty in range(4):
        rows = rng.integers(0, 60, (4, 8))
        rows[empty] = 0
        expect_slots(ids_of(rows, rng), 8, spare_experts=2)
    expect_slots(ids_of(np.full((1, 4), 7), rng), 4, spare_experts=1)
    present = np.array([[4, -1], [0, 6], [-1, -1], [2, 3]])
    rows = rng.integers(0, 60, (4, 8))
    expect_slots(ids_of(rows, rng), 8, spare_experts=2, present=present)


def test_dropped_slots_stay_dropped():
    rows = np.array([[3, 1], [0, 2]])
    plan = even_experts(rows, spare_experts=1)
    ids = np.array([[0, 2], [-1, 0], [1, 0]])
    got = slot_ids(plan, rows, ids, rank=0)
    assert got[0, 1] == plan.slots.size and got[1, 0] == -1


@pytest.mark.parametrize("nodes", [1, 2])
def test_sums_are_those_without_copies(nodes):
    """Experts are functions of rows; where a row is computed changes nothing."""
    rng = np.random.default_rng(nodes)
    ranks, experts, topk, hidden = 4, 8, 3, 16
    shares = np.array([40, 5, 2, 1, 9, 1, 1, 1]) / 60
    ids = [rng.choice(experts, (tokens, topk), p=shares) for tokens in (50, 0, 31, 1)]
    tokens = [rng.standard_normal((len(i), hidden)).astype(np.float32) for i in ids]
    factor = rng.standard_normal((experts, hidden)).astype(np.float32)
    plan, slots = expect_slots(ids, experts, spare_experts=2)
    assert plan.max_rows < counted(ids, experts).sum(axis=0).reshape(ranks, -1).sum(axis=1).max()

    def combined(num_experts, ids, expert_of):
        config = EPConfig(64, hidden, topk, num_experts, 0, ranks, ranks // nodes, "float32")
        dispatched = simulate_dispatch(config, tokens, ids)
        outputs = []
        for rank, received in enumerate(dispatched.recv_tokens):
            source, token, k = dispatched.recv_origin[rank].T
            chosen = [ids[s][t, j] for s, t, j in zip(source, token, k)]
            outputs.append(received * factor[expert_of(np.array(chosen, int))])
        return dispatched.combine(outputs)

    without = combined(experts, ids, lambda chosen: chosen)
    with_copies = combined(plan.slots.size, slots, lambda chosen: plan.slots.ravel()[chosen])
    if nodes == 1:  # sums go by topk slot; over nodes by node, and copies lie on other nodes
        for one, other in zip(without, with_copies):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(without, with_copies):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused_by_name():
    rows = np.array([[3, 1], [0, 2]])
    plan = even_experts(rows, spare_experts=1)
    ids = np.array([[0, 0], [0, 1]])
    assert slot_ids(plan, rows, ids, rank=0).shape == (2, 2)
    for given, text in (
        ({"rank": 2}, "rank = 2, expected 0..1"),
        ({"rank": 0.5}, "rank = 0.5, expected an integer"),
        ({"ids": np.array([[0, 0], [1, 1]])}, "more than rows[0][1] = 1 of expert 1"),
        ({"ids": np.array([[0, 0]])}, "ids have 2 of expert 0, expected rows[0][0] = 3"),
        ({"ids": np.array([[0, 3]])}, "ids[1] = 3, expected 0..1"),
        ({"rows": rows + 1}, "the plan is not one of these rows: expert 0"),
        ({"rows": rows[:1]}, "rows has shape [1, 2], expected [2, num_experts]"),
        ({"rows": rows / 2}, "expected a whole number"),
    ):
        arguments = {"rows": rows, "ids": ids, "rank": 0, **given}
        with pytest.raises(waybill.InvalidArgument) as caught:
            slot_ids(plan, arguments["rows"], arguments["ids"], rank=arguments["rank"])
        assert str(caught.value).startswith("slot_ids: ") and text in str(caught.value)
