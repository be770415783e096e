"""The simulation against the slow model: any strides and dtypes, overlaps, round trips."""

import model
import numpy as np
import pytest
from compare import as_metadata
from hypothesis import given
from hypothesis import strategies as st
from payloads import DTYPES, as_dtype, bits, laid_out
from plans import dispatches, kv_plans

import waybill

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(DTYPES))


@st.composite
def move_tables(draw):
    """(table, n, m): any lengths and offsets that fit; copies may overlap, shards may stay."""
    world, shards, copies = (
        draw(st.integers(1, 4)),
        draw(st.integers(0, 4)),
        draw(st.integers(0, 3)),
    )
    rng = np.random.default_rng(draw(seeds))
    seq_len = rng.integers(0, 6, (world, shards))
    n = int(seq_len.sum(axis=1).max(initial=0)) + draw(st.integers(0, 3))
    m = draw(st.integers(5, 30))
    shape = (world, shards, copies) if copies else (world, shards)
    dst_rank = rng.integers(-1, world, shape)
    longest = seq_len[..., None] if copies else seq_len
    dst_offset = (rng.random(shape) * (m - longest + 1)).astype(np.int64)
    counts = np.zeros((world, world + 1), np.int64)  # not read
    table = model.table(
        dst_rank=dst_rank, dst_offset=dst_offset, seq_len=seq_len, num_recv_tokens=counts
    )
    return table, n, m


layouts = st.tuples(
    st.permutations(range(3)), st.tuples(*[st.sampled_from([1, 1, 2, 3, -1, -2])] * 3)
)


def stored(face, values, layout, dtype):
    order, steps = layout
    if face.name == "torch":  # has no negative strides
        steps = [abs(step) for step in steps]
    view, memory = laid_out(face, values, order, steps)
    return as_dtype(face, view, dtype), view, memory


@given(
    case=move_tables(), hidden=st.integers(0, 5), dtype=dtypes, seed=seeds, source_layout=layouts,
    output_layout=layouts, num_threads=st.integers(0, 3), normalize=st.booleans(),
)  # fmt: skip
def test_orchestrate_simulate(
    face, case, hidden, dtype, seed, source_layout, output_layout, num_threads, normalize
):
    table, n, m = case
    world = len(table.seq_len)
    rng = np.random.default_rng(seed)
    source, before = bits(rng, (world, n, hidden), dtype), bits(rng, (world, m, hidden), dtype)
    tensor, _, _ = stored(face, source, source_layout, dtype)
    output, output_bits, memory = stored(face, before, output_layout, dtype)
    metadata = as_metadata(face, model.normalize_dtype(table) if normalize else table)
    overlapping = model.has_overlap(table, m)
    gaps = memory_outside(face, memory, output_bits)
    if overlapping:
        with pytest.raises(waybill.ShapeMismatch, match="are also written by"):
            face.module.orchestrate_simulate(tensor, output, metadata, overlap="reject")
        np.testing.assert_array_equal(face.host(output_bits), before)
    got = face.module.orchestrate_simulate(
        tensor, output, metadata, overlap="last_wins" if overlapping else "reject",
        num_threads=num_threads,
    )  # fmt: skip
    assert got is output
    want = model.orchestrate_simulate(source, before, table)
    np.testing.assert_array_equal(face.host(output_bits), want)
    assert memory_outside(face, memory, output_bits) == gaps


def memory_outside(face, memory, view):
    """How many elements of the memory hold the filling of the gaps beside those of the view."""
    return int((memory == -7).sum()) - int((view == -7).sum())


@given(
    case=dispatches(),
    tail=st.sampled_from([(), (1,), (4,), (2, 3), (0,)]),
    dtype=dtypes,
    seed=seeds,
)
def test_simulate_communication(face, case, tail, dtype, seed):
    seq_len, dispatch = case
    rng = np.random.default_rng(seed)
    rows_of = seq_len.sum(axis=1) + rng.integers(0, 2, len(seq_len))
    sources = [bits(rng, (int(rows), *tail), dtype) for rows in rows_of]
    fwd, _ = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    tensors = [as_dtype(face, face.array(source), dtype) for source in sources]
    received = face.module.simulate_communication(tensors, fwd)
    want_fwd, _ = model.compute_metadata(seq_len, dispatch)
    want = [np.zeros((total, *tail), sources[0].dtype) for total in want_fwd.num_total_recv_tokens]
    for i, row, r, at, rows, _, _ in model.moves(want_fwd):
        want[r][at : at + rows] = sources[i][row : row + rows]
    assert len(received) == len(want)
    for got, rows in zip(received, want):
        assert got.dtype == tensors[0].dtype
        name = str(rows.dtype) if face.name == "numpy" else getattr(face.torch, str(rows.dtype))
        np.testing.assert_array_equal(face.host(got.view(name)), rows)


@given(case=dispatches(with_copies=False), seed=seeds)
def test_q_comes_back_to_the_row_it_left(face, case, seed):
    seq_len, dispatch = case
    n, hidden = int(seq_len.sum(axis=1).max(initial=0)), 3
    fwd, rev = face.module.compute_metadata(face.array(seq_len), face.array(dispatch))
    q = np.random.default_rng(seed).random((len(seq_len), n, hidden), np.float32) + 1
    q[np.arange(n) >= seq_len.sum(axis=1)[:, None]] = 0  # past a rank's last row
    there = np.zeros((len(seq_len), max(fwd.num_total_recv_tokens), hidden), np.float32)
    there = face.module.orchestrate_simulate(face.array(q), face.array(there), fwd)
    back = face.module.orchestrate_simulate(there, face.zeros_like(face.array(q)), rev)
    np.testing.assert_array_equal(face.host(back), q)


@given(plan=kv_plans(), seed=seeds)
def test_kv_comes_back_once_a_copy_and_sums(face, plan, seed):
    tables = [face.array(table) for table in plan.tables()]
    fwd, rev = face.module.compute_metadata_kv(*tables)
    world, _, copies = plan.kv_to_q_rank.shape
    totals = plan.seq_len.sum(axis=1)
    n, hidden = int(totals.max(initial=0)), 2
    k = np.random.default_rng(seed).integers(1, 9, (world, n, hidden)).astype(np.float32)
    there = np.zeros((world, max(fwd.num_total_recv_tokens), hidden), np.float32)
    there = face.module.orchestrate_simulate(face.array(k), face.array(there), fwd)
    planes = face.array(np.zeros((world, copies * n, hidden), np.float32))
    planes = face.host(face.module.orchestrate_simulate(there, planes, rev))
    used = plan.kv_to_q_rank >= 0
    for w in range(world):
        total = int(totals[w])
        mine = planes[w, : copies * total].reshape(copies, total, hidden)
        came_back = np.repeat(used[w], plan.seq_len[w], axis=0).T  # (copies, rows)
        np.testing.assert_array_equal(mine, np.where(came_back[..., None], k[w, :total], 0))
        flat = face.array(mine.reshape(copies * total, hidden).copy())
        want = k[w, :total] * came_back.sum(axis=0)[:, None]
        for table in (rev, rev.get_slice(w)):
            got = face.module.sum_kv_copies(flat, table, w)
            np.testing.assert_array_equal(face.host(got), want)


floats = st.sampled_from(["float32", "float64", "float16", "bfloat16"])


@given(plan=kv_plans(), dtype=floats, to_float32=st.booleans(), seed=seeds)
def test_sum_kv_copies(face, plan, dtype, to_float32, seed):
    _, rev = face.module.compute_metadata_kv(*(face.array(table) for table in plan.tables()))
    copies = plan.kv_to_q_rank.shape[2]
    rng = np.random.default_rng(seed)
    for w, lens in enumerate(plan.seq_len):
        total = int(lens.sum())
        planes = rng.integers(-9, 10, (copies * total, 3)).astype(np.float64)
        want = model.sum_kv_copies(planes, plan.kv_to_q_rank[w] >= 0, lens)
        given_planes = of_dtype(face, planes, dtype)
        output = None
        if to_float32 and dtype != "float64":
            output = of_dtype(face, np.full((total, 3), 77.0), "float32")
        got = face.module.sum_kv_copies(given_planes, rev, w, output)
        if output is not None:
            assert got is output
        else:
            assert got.dtype == given_planes.dtype
        np.testing.assert_array_equal(to_float64(face, got), want)


def of_dtype(face, values, dtype):
    """Small integers, which all floats can hold."""
    if face.name == "torch":
        return face.array(values).to(getattr(face.torch, dtype))
    if dtype == "bfloat16":
        import ml_dtypes

        return values.astype(ml_dtypes.bfloat16)
    return values.astype(dtype)


def to_float64(face, value):
    return value.double().numpy() if face.name == "torch" else value.astype(np.float64)


@given(case=dispatches(), seed=seeds)
def test_source_rows_is_what_moves(case, seed):
    seq_len, dispatch = case
    fwd, _ = waybill.compute_metadata(seq_len, dispatch)
    world, n = len(seq_len), int(seq_len.sum(axis=1).max(initial=0))
    m = max(fwd.num_total_recv_tokens) + seed % 3
    numbers = np.arange(world * n).reshape(world, n, 1)
    nothing = np.full((world, m, 1), -1)
    want = model.orchestrate_simulate(
        numbers, nothing, model.compute_metadata(seq_len, dispatch)[0]
    )
    rows = waybill.source_rows((world, n, 8), (world, m, 8), fwd)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(rows, want[:, :, 0])
