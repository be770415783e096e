"""validate() says nothing about what is right, and finds what is wrong; plans and their tables."""

import copy

import model
import numpy as np
import pytest
from compare import expect_same_metadata
from faces import NumpyFace
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import dispatches, kv_plans, sparse_arguments

import waybill

kv_layouts = st.sampled_from(["per_rank", "per_query"])


@given(case=dispatches())
def test_metadata_of_a_dispatch_is_clean(face, case):
    fwd, rev = face.module.compute_metadata(*map(face.array, case))
    assert face.module.validate(fwd) == []
    assert face.module.validate(fwd, rev) == []
    assert face.module.validate(fwd.normalize_dtype(), rev.normalize_dtype()) == []


@given(plan=kv_plans())
def test_metadata_of_a_plan_is_clean(face, plan):
    tables = [face.array(table) for table in plan.tables()]
    q = face.module.compute_metadata(tables[5], tables[7])
    kv = face.module.compute_metadata_kv(*tables)
    assert face.module.validate(*kv) == []
    assert face.module.validate(kv[0]) == face.module.validate(kv[1]) == []
    assert face.module.validate(*q, *kv) == []


def _change(name, add):
    def damage(m, rng):
        array = getattr(m, name)
        array.flat[rng.integers(array.size)] += add

    return damage


def _swap_offsets(m, _):
    where = np.argwhere(m.dst_rank >= 0)
    m.dst_offset[tuple(where[0])] += 1


def _send_elsewhere(m, _):
    at = tuple(np.argwhere((m.dst_rank >= 0) & (m.seq_len > 0))[0])
    m.dst_rank[at] = (m.dst_rank[at] + 1) % len(m.seq_len)


def _lose_a_shard(m, _):
    at = tuple(np.argwhere((m.dst_rank >= 0) & (m.seq_len > 0))[0])
    m.dst_rank[at], m.dst_offset[at] = -1, 0


def _total(m, _):
    m.num_total_recv_tokens = [m.num_total_recv_tokens[0] + 1, *m.num_total_recv_tokens[1:]]


def _shape(m, _):
    m.dst_offset = m.dst_offset[:, :-1]


DAMAGES = {
    "negative length": (_change("seq_len", -(10**6)), "negative"),
    "a rank outside the world": (_change("dst_rank", 1000), "rank_range"),
    "one row further": (_swap_offsets, None),
    "another destination": (_send_elsewhere, None),
    "a shard that stays": (_lose_a_shard, None),
    "a count": (_change("num_recv_tokens", 1), "count"),
    "a total": (_total, "count"),
    "the number of shards": (_change("num_seqs", 1000), "count"),
    "a shape": (_shape, "shape"),
}


@pytest.mark.parametrize("name", DAMAGES)
@settings(max_examples=20)
@given(case=dispatches(with_copies=False, every_rank_sends=True), seed=st.integers(0, 999))
def test_damage_is_found(face, name, case, seed):
    damage, kind = DAMAGES[name]
    seq_len, dispatch = case
    seq_len[0, 0] = 5  # something moves
    if len(seq_len) == 1 and name == "another destination":
        return
    both = waybill.compute_metadata(seq_len, dispatch)
    damaged = copy.deepcopy(both[0])
    damage(damaged, np.random.default_rng(seed))
    fwd = as_face(face, damaged)
    findings = face.module.validate(fwd, as_face(face, both[1]))
    assert findings
    assert all(type(f) is waybill.Finding and str(f) == f.text and f.text for f in findings)
    if kind is not None:
        assert kind in {f.kind for f in findings}, findings
    assert len(face.module.validate(fwd, as_face(face, both[1]), max_findings=1)) == 1


def as_face(face, metadata):
    return metadata if face.name == "numpy" else face.module.Metadata.from_numpy(metadata)


def test_a_finding_says_where(face):
    seq_len, dispatch = np.array([[4, 2], [3, 0]]), np.array([[1, 0], [1, -1]])
    fwd, rev = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    fwd.dst_offset[1, 0] = 5
    findings = face.module.validate(fwd, rev)
    assert ("fwd", "dst_offset", 1, 0) in {(f.table, f.field, f.rank, f.shard) for f in findings}


@given(case=dispatches(with_copies=False, every_rank_sends=True))
def test_capacity(face, case):
    seq_len, dispatch = case
    seq_len[0, 0] = 5
    fwd, rev = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    most = max(fwd.num_total_recv_tokens)
    assert face.module.validate(fwd, rev, q_capacity=most) == []
    (finding, *_) = face.module.validate(fwd, rev, q_capacity=most - 1)
    assert finding.kind == "capacity"


@given(kv=kv_plans(spare_copies=False), layout=kv_layouts)
def test_sparse_plan_json_and_checks(kv, layout):
    plan = waybill.QkvPlan(**sparse_arguments(kv), kv_layout=layout)
    assert plan.kv_layout == layout and plan.num_documents == len(kv.documents)
    assert waybill.validate(plan) == []
    assert waybill.validate(plan, plan.to_metadata()) == []
    again = waybill.QkvPlan.from_json(plan.to_json(compact=True))
    assert again == plan and again.to_json() == plan.to_json()
    for name, value in sparse_arguments(kv).items():
        assert np.array_equal(getattr(plan, name), value), name
        if np.size(value) > 0 and name != "world_size":
            assert not getattr(plan, name).flags.writeable


@given(kv=kv_plans(spare_copies=False))
def test_sparse_plan_becomes_the_dense_tables(kv):
    """The c-th query from a KV shard on takes copy c, as in DistCA's generator."""
    kv.fill_in_order()
    plan = waybill.QkvPlan(**sparse_arguments(kv), kv_layout="per_query")
    raw = plan.to_raw_dispatch()
    mapping, place, context, num_seq, num_token, seq_len, num_seqs, dispatch = kv.tables()
    want = (seq_len, num_seqs, dispatch, mapping, place, context, num_seq, num_token)
    for name, got, expected in zip(raw._fields[:-1], raw, want, strict=False):
        np.testing.assert_array_equal(got, expected, err_msg=name)
    metadata = plan.to_metadata()
    q = model.compute_metadata(seq_len, dispatch)
    both = (*q, *model.compute_metadata_kv(kv)[:2])
    for name, got, expected in zip(metadata._fields, metadata, both):
        expect_same_metadata(NumpyFace(), name, got, expected)
    layout = model.attention_layout(seq_len, num_token, dispatch, True, True)
    for got, expected in zip(metadata.attention, layout):
        assert [np.asarray(g).tolist() for g in got] == [np.asarray(e).tolist() for e in expected]


@given(kv=kv_plans(spare_copies=False), layout=kv_layouts)
def test_work_and_traffic_of_a_plan(kv, layout):
    plan = waybill.QkvPlan(**sparse_arguments(kv), kv_layout=layout)
    world = plan.world_size
    work = np.zeros(world, np.int64)
    q_rows = np.zeros((world, world), np.int64)
    needed = np.zeros((world, world), np.int64)
    seen = set()
    for a, b in kv.shards_in_order():
        rows, r = int(kv.seq_len[a, b]), int(kv.q_dispatch[a, b])
        before = int(kv.q_to_num_kv_token[a, b]) - rows
        work[r] += rows * before + rows * (rows + 1) // 2
        q_rows[a, r] += rows
        for w, s in kv.context_of(a, b):
            if layout == "per_query" or (r, w, s) not in seen:
                needed[w, r] += int(kv.seq_len[w, s])
            seen.add((r, w, s))
    np.testing.assert_array_equal(plan.work, work)
    assert plan.shard_work.sum() == work.sum()
    q, kv_rows = plan.traffic()
    np.testing.assert_array_equal(q, q_rows)
    np.testing.assert_array_equal(kv_rows, needed)
    assert plan.imbalance == (work.max() / work.mean() if work.any() else 1.0)


def test_a_damaged_plan_is_refused_and_a_tampered_layout_found():
    plan = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 1], [0, 2, 3], [0, 1, 2])
    metadata = plan.to_metadata()
    metadata.attention.max_seqlen_q[1] += 1
    assert {f.table for f in waybill.validate(plan, metadata)} == {"attention"}
    other = waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 1, 1], [0, 2, 3], [0, 1, 2])
    assert waybill.validate(other, plan.to_metadata())
    with pytest.raises(waybill.InvalidArgument, match=r"plan\.q_dst: rank 1, shard 2: got 2"):
        waybill.QkvPlan(2, [0, 2, 3], [4, 2, 3], [1, 0, 2], [0, 2, 3], [0, 1, 2])


def test_damage_is_found_in_each_of_four_tables(face):
    for position in range(4):
        *tables, layout = face.module.create_qkv_dispatch(4, 64, 3, 4, seed=1)
        assert face.module.validate(*tables) == face.module.validate(*tables, layout) == []
        tables[position].num_recv_tokens[1, 2] += 1
        assert face.module.validate(*tables), position
        assert face.module.validate(*tables, layout), position
