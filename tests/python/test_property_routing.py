"""Random dispatches and plans: metadata and layouts against the slow model."""

import model
import numpy as np
import pytest
from compare import expect_same_array, expect_same_metadata
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import dispatches, kv_plans

import waybill


@given(case=dispatches())
def test_compute_metadata(face, case):
    seq_len, dispatch = case
    arguments = face.array(seq_len), face.array(dispatch)
    fwd, rev, inside = face.module.compute_metadata(*arguments, return_intermediate=True)
    want_fwd, want_rev = model.compute_metadata(seq_len, dispatch)
    expect_same_metadata(face, "fwd", fwd, want_fwd)
    expect_same_metadata(face, "rev", rev, want_rev)
    for number, want in enumerate(model.intermediates(seq_len, dispatch)):
        expect_same_array(face, f"intermediate {number}", inside[number], want)
    assert face.module.compute_metadata(*arguments) == (fwd, rev)


@given(case=dispatches(), data=st.data())
def test_compute_metadata_of_shards_that_stay_behind(face, case, data):
    seq_len, dispatch = case
    where = np.argwhere((model.with_copy_axis(dispatch) < 0).all(axis=2))
    if not len(where):
        return
    rank, shard = where[data.draw(st.integers(0, len(where) - 1))]
    seq_len[rank, shard] = 7
    arguments = face.array(seq_len), face.array(dispatch)
    with pytest.raises(waybill.InvalidArgument) as caught:
        face.module.compute_metadata(*arguments)
    assert f"rank {rank}, shard {shard} = 7 rows" in str(caught.value)
    fwd, rev = face.module.compute_metadata(*arguments, undispatched="keep")
    want_fwd, want_rev = model.compute_metadata(seq_len, dispatch)
    expect_same_metadata(face, "fwd", fwd, want_fwd)
    expect_same_metadata(face, "rev", rev, want_rev)


@given(plan=kv_plans())
def test_compute_metadata_kv(face, plan):
    tables = [face.array(table) for table in plan.tables()]
    fwd, rev, (ids,) = face.module.compute_metadata_kv(*tables, return_intermediate=True)
    want_fwd, want_rev, want_ids = model.compute_metadata_kv(plan)
    expect_same_metadata(face, "fwd", fwd, want_fwd)
    expect_same_metadata(face, "rev", rev, want_rev)
    expect_same_array(face, "ids", ids, want_ids)
    hints = face.array(plan.one_hot()), plan.seq_len.shape[1]
    assert face.module.compute_metadata_kv(*tables, *hints) == (fwd, rev)


layout_options = {"prepend_zero": st.booleans(), "shard_to_tuple": st.booleans()}


@given(case=dispatches(with_copies=False), data=st.data(), **layout_options)
def test_compute_attn_layout_seqlens(face, case, data, prepend_zero, shard_to_tuple):
    seq_len, dispatch = case
    before = data.draw(st.integers(0, 50))
    tables = seq_len, seq_len + before, dispatch
    layout = face.module.compute_attn_layout_seqlens(
        *map(face.array, tables), prepend_zero, shard_to_tuple
    )
    want = model.attention_layout(*tables, prepend_zero, shard_to_tuple)
    assert isinstance(layout, waybill.AttnLayout)
    for name, got, expected in zip(waybill.AttnLayout._fields, layout, want, strict=True):
        if isinstance(expected, tuple):
            assert isinstance(got, tuple) and len(got) == len(expected)
            for r, (a, b) in enumerate(zip(got, expected)):
                expect_same_array(face, f"{name}[{r}]", a, b)
        else:
            expect_same_array(face, name, got, expected)


@given(plan=kv_plans())
def test_compute_e2e_metadata_is_the_three_in_one(face, plan):
    mapping = [face.array(table) for table in plan.tables()[:5]]
    lens, counts, dispatch = (face.array(table) for table in plan.tables()[5:])
    *four, fa_params, inside = face.module.compute_e2e_metadata(
        lens, counts, dispatch, *mapping, return_intermediate=True
    )
    fwd_q, rev_q, q_inside = face.module.compute_metadata(lens, dispatch, True)
    fwd_kv, rev_kv, kv_inside = face.module.compute_metadata_kv(
        *mapping, lens, counts, dispatch, return_intermediate=True
    )
    assert four == [fwd_q, rev_q, fwd_kv, rev_kv]
    assert len(inside) == 4
    for got, want in zip(inside, (*q_inside, *kv_inside)):
        expect_same_array(face, "intermediate", got, face.host(want))
    layout = face.module.compute_attn_layout_seqlens(lens, mapping[4], dispatch, True, True)
    assert len(fa_params) == 4
    for part, whole in zip(fa_params, layout):
        assert [p.tolist() for p in part] == [p.tolist() for p in whole]


@given(case=dispatches(), data=st.data())
def test_get_slice_and_normalize_dtype(face, case, data):
    seq_len, dispatch = case
    got_pair = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    rank = data.draw(st.integers(0, len(seq_len) - 1))
    for got, want in zip(got_pair, model.compute_metadata(seq_len, dispatch)):
        want_slice = model.get_slice(want, rank)
        expect_same_metadata(face, "slice", got.get_slice(rank), want_slice)
        assert got.get_slice(rank).is_slice and not got.is_slice
        normal = model.normalize_dtype(want)
        expect_same_metadata(face, "normalized", got.normalize_dtype(), normal)
        small = model.normalize_dtype(want_slice)
        expect_same_metadata(face, "small", got.get_slice(rank).normalize_dtype(), small)
        expect_same_metadata(face, "small", got.normalize_dtype().get_slice(rank), small)


@given(case=dispatches(), normalize=st.booleans(), compact=st.booleans(), data=st.data())
def test_metadata_json_round_trip(face, case, normalize, compact, data):
    seq_len, dispatch = case
    both = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    for table in both:
        table = table.normalize_dtype() if normalize else table
        if data.draw(st.booleans()):
            table = table.get_slice(data.draw(st.integers(0, len(seq_len) - 1)))
        text = table.to_json(compact=compact)
        again = face.module.Metadata.from_json(text)
        assert type(again) is face.module.Metadata
        assert again == table and again.to_json(compact=compact) == text
        assert ("\n" in text.strip()) is not compact


@given(case=dispatches())
@settings(max_examples=10)
def test_metadata_json_files(face, tmp_path_factory, case):
    table, _ = face.module.compute_metadata(*map(face.array, case))
    path = tmp_path_factory.mktemp("json") / "metadata.json"
    text = table.to_json(path)
    assert path.read_text(encoding="utf-8") == text
    assert face.module.Metadata.from_json(path) == table
    assert face.module.Metadata.from_json(str(path)) == table


@given(case=dispatches(), data=st.data())
def test_equality_sees_every_field(face, case, data):
    seq_len, dispatch = case
    table, _ = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    same, _ = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    assert table == same
    changed = {
        "world_size": 77,
        "normalized": True,
        "num_total_recv_tokens": None,
        "num_seqs": None,
    }
    name = data.draw(st.sampled_from([*changed, "num_recv_tokens", "dst_offset", "seq_len"]))
    if name in changed:
        setattr(same, name, changed[name])
    else:
        value = face.host(getattr(same, name)).copy()
        if value.size == 0:
            return
        value.flat[data.draw(st.integers(0, value.size - 1))] += 1
        setattr(same, name, face.array(value))
    assert table != same
    assert table != "text"


def test_equality_sees_the_dtype(face):
    table, _ = face.module.compute_metadata(*map(face.array, np.array([[[4, 2]], [[0, 0]]])))
    same = face.module.Metadata(*table._fields())
    assert table == same
    same.num_seqs = face.array(np.array([2], np.int32))
    assert table != same
