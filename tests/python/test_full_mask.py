"""mask="full": every query meets all keys of its document, on both faces, against brute force."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import waybill

HEAD = 8


@st.composite
def plans(draw):
    world = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    rows = -(-sum(lengths) // world)
    return lengths, waybill.plan(
        lengths, world, rows, mask="full", block_tokens=draw(st.sampled_from([1, 4, 32])),
        kv_layout=draw(st.sampled_from(["per_rank", "per_query"])), relay=draw(st.booleans()),
        ranks_per_node=draw(st.integers(1, 4)),
    )  # fmt: skip


def documents_of(plan):
    """By shard: its document's number and length."""
    sparse = plan.to_qkv_plan()
    result = {}
    for d in range(sparse.num_documents):
        shards = sparse.doc_shards[sparse.doc_shard_offsets[d] : sparse.doc_shard_offsets[d + 1]]
        length = int(sparse.shard_len[shards].sum())
        result.update({int(s): (d, length) for s in shards})
    return result


def ends_of(sparse):
    """By shard: how many its document has."""
    counts = np.diff(sparse.doc_shard_offsets)
    ends = np.empty(sparse.num_shards, int)
    ends[sparse.doc_shards] = np.repeat(counts, counts)
    return ends.tolist()


@settings(max_examples=60, deadline=None)
@given(plans())
def test_plans_against_brute_force(drawn):
    lengths, plan = drawn
    sparse, documents = plan.to_qkv_plan(), documents_of(plan)
    assert sparse.kv_end.tolist() == ends_of(sparse) and waybill.validate(plan) == []
    assert [documents[int(s)][1] for s in sparse.doc_shards[sparse.doc_shard_offsets[:-1]]] == (
        lengths
    )
    work = np.zeros(sparse.world_size, np.int64)
    for s, rank in enumerate(sparse.q_dst):
        for _query in range(int(sparse.shard_len[s])):
            work[rank] += documents[s][1]
    assert plan.work.tolist() == work.tolist() == sparse.work.tolist()
    routing = sparse.to_routing()
    for r in range(sparse.world_size):
        attention = routing.attention(r)
        assert attention.kv_len.tolist() == [documents[int(s)][1] for s in attention.shard]
    assert waybill.predict_step(plan).work.tolist() == work.tolist()


def rows_by_rank(plan, tensor):
    sparse = plan.to_qkv_plan()
    ends = np.cumsum([0, *sparse.shard_len])[sparse.rank_shard_offsets]
    return [tensor[a:b] for a, b in pairwise(ends)]


def attended(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / HEAD**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("kv_layout", ["per_rank", "per_query"])
def test_attention_of_ranks_is_attention_alone(kv_layout):
    lengths = [37, 5, 90, 24]
    plan = waybill.plan(lengths, 4, 39, mask="full", kv_layout=kv_layout, block_tokens=4)
    q, k, v = np.random.default_rng(0).standard_normal((3, sum(lengths), HEAD))
    ends = np.cumsum([0, *lengths])
    want = np.concatenate([attended(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(ends)])
    parts = [rows_by_rank(plan, tensor) for tensor in (q, k, v)]
    routing = plan.to_qkv_plan().to_routing()
    assert len(set(plan.to_qkv_plan().q_dst.tolist())) > 1

    def body(world):
        mine = [part[world.rank] for part in parts]
        dispatcher = waybill.SequenceDispatcher(world)
        there = dispatcher.plan_dispatch((routing.fwd_q, mine[0]), (routing.fwd_kv, *mine[1:]))
        back = dispatcher.plan_dispatch((routing.rev_q, mine[0]))
        q, k, v = (x.copy() for x in dispatcher.dispatch(there, *mine))
        at = routing.attention(world.rank)
        out = np.zeros_like(q)
        for a, n, b, m in zip(at.q_begin, at.q_len, at.kv_begin, at.kv_len):
            out[a : a + n] = attended(q[a : a + n], k[b : b + m], v[b : b + m])
        (home,) = dispatcher.dispatch(back, out)
        return home.copy()

    got = np.concatenate(waybill.run_threads(4, body))
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_plans_keep_their_mask():
    sparse = waybill.plan([8, 4], 2, 6, mask="full").to_qkv_plan()
    for same in (
        copy.deepcopy(sparse),
        pickle.loads(pickle.dumps(sparse)),
        waybill.QkvPlan.from_json(sparse.to_json()),
    ):
        assert same == sparse and same.kv_end.tolist() == ends_of(sparse)
    tables = ("rank_shard_offsets", "shard_len", "q_dst", "doc_shard_offsets", "doc_shards")
    given = {name: getattr(sparse, name) for name in tables}
    assert waybill.QkvPlan(2, **given, mask="full") == sparse
    assert waybill.QkvPlan(2, **given, kv_end=ends_of(sparse)) == sparse
    assert waybill.QkvPlan(2, **given).kv_end.tolist() == []
    with pytest.raises(waybill.InvalidArgument, match="expected none: the mask is full"):
        waybill.QkvPlan(2, **given, kv_begin=[0] * sparse.num_shards, mask="full")
    with pytest.raises(waybill.InvalidArgument, match='mask = "half", expected "causal" or "full"'):
        waybill.QkvPlan(2, **given, mask="half")
    with pytest.raises(waybill.InvalidArgument, match=r"kv_end has .* values, expected none"):
        sparse.to_raw_dispatch()


def test_static_plans_and_comparisons():
    lengths = [300, 20, 64]
    for plan in (
        waybill.plan(lengths, 4, 96, block_tokens=16, mask="full").to_qkv_plan(),
        waybill.zigzag_plan(lengths, 4, 96, mask="full"),
        waybill.per_document_plan(lengths, 4, 96, mask="full"),
    ):
        assert plan.kv_end.tolist() == ends_of(plan) and plan.work.sum() == sum(
            n * n for n in lengths
        )
        assert waybill.validate(plan) == []
    steps = waybill.compare(lengths, 4, 96, mask="full")
    assert {int(step.work.sum()) for step in steps.values()} == {sum(n * n for n in lengths)}
    with pytest.raises(waybill.InvalidArgument, match="the plan needs whole documents"):
        waybill.predict_step(plan, window=8)
