"""Plans, routings, tables and formats travel between processes; what cannot says why."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
from error_texts import cannot_be_copied
from hypothesis import given
from hypothesis import strategies as st

import waybill
from waybill import moe

LENGTHS = [700, 64, 300, 1, 900, 83]


def again(value):
    return pickle.loads(pickle.dumps(value))


def planned(relay=True):
    lengths = [40000, 3000, 2000, 3000]
    return waybill.plan(
        lengths, 8, tokens_per_rank=6000, relay=relay, ranks_per_node=4, block_tokens=64
    )


def values():
    """One of each kind."""
    attention = planned()
    plan = waybill.plan(LENGTHS, 4, 512).to_qkv_plan()
    per_query = waybill.plan(LENGTHS, 4, 512, kv_layout="per_query").to_qkv_plan()
    routing = attention.to_routing()
    forward, reverse = waybill.compute_metadata([[3, 4], [5, 0]], [[[1, 0], [0, -1]], [[0, 1]] * 2])
    return {
        "AttentionPlan": attention,
        "QkvPlan": plan,
        "per query": per_query,
        "without relay": planned(relay=False),
        "QkvRouting": routing,
        "routing of a plain plan": per_query.to_routing(),
        "SparseMetadata": routing.fwd_kv,
        "from_dense": waybill.SparseMetadata.from_dense(forward),
        "Metadata": reverse,
        "slice": reverse.get_slice(1),
        "device dtypes": forward.normalize_dtype(),
        "QkvMetadata": plan.to_metadata(),
        "per query metadata": per_query.to_metadata(),
        "RawQkvDispatch": per_query.to_raw_dispatch(),
        "RankAttention": routing.attention(3),
        "PackedSeqParams": waybill.mlp_layout_packed_params([3, 4]),
        "TensorFormat": waybill.TensorFormat(np.dtype("float16"), (8, 64)),
        "Topology": waybill.Topology(16, 8),
        "Finding": waybill.validate(waybill.Metadata([[0]], [[7]], [[3]], [[3, 3]]))[0],
        "StepCause": waybill.predict_step(plan).bottleneck,
        "PhasePrediction": waybill.predict_step(plan).phases[0],
        "EPConfig": moe.EPConfig(8, 64, 2, 8, 0, 2, 2, "float16"),
    }


NAMES = sorted(values())


def facts(value):
    """What a value is, in what == compares deeply."""
    if isinstance(value, waybill.QkvRouting):
        tables = [getattr(value, name) for name in ("fwd_q", "rev_q", "fwd_kv", "rev_kv")]
        rows = [facts(value.attention(rank)) for rank in range(value.world_size)]
        return value.kv_layout, value._relay is None, [facts(table) for table in tables], rows
    if isinstance(value, waybill.SparseMetadata):
        return value._relay is None, repr(value), value == value, facts(value.to_dense())
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [facts(item) for item in value]
    if isinstance(value, waybill.Metadata):
        return type(value).__name__, [facts(field) for field in value._fields()]
    if isinstance(value, waybill.PackedSeqParams):
        return [facts(field) for field in vars(value).values()]
    return value


@pytest.mark.parametrize("name", NAMES)
def test_pickles_and_copies_are_the_same(name):
    value = values()[name]
    for other in (again(value), copy.copy(value), copy.deepcopy(value)):
        assert type(other) is type(value)
        assert facts(other) == facts(value)
        if isinstance(value, (waybill.AttentionPlan, waybill.QkvPlan, waybill.SparseMetadata)):
            assert other == value


def test_a_pickled_plan_has_its_schedule_and_options():
    plan = planned()
    assert plan.relay_hops
    other = again(plan)
    assert other.relay_hops == plan.relay_hops and other.validate() == []
    assert other.to_json() == plan.to_json() and str(other) == str(plan)
    seconds = [waybill.predict_step(p).seconds for p in (plan, other)]
    assert seconds[0] == seconds[1]


def test_a_routing_pickles_as_its_plan():
    """Once, however many of its tables are in the same pickle, and smaller than they are."""
    routing = planned().to_routing()
    tables = [routing.fwd_q, routing.rev_q, routing.fwd_kv, routing.rev_kv]
    assert len(pickle.dumps([routing, *tables])) < len(pickle.dumps(routing)) + 200
    again_routing, *again_tables = again([routing, *tables])
    assert again_tables == tables
    assert again_routing.fwd_kv._relay is not None


@given(data=st.data())
def test_tables_from_dense_metadata(data):
    world = data.draw(st.integers(1, 4))
    shards, copies = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    lens = data.draw(
        st.lists(st.lists(st.integers(0, 5), min_size=shards, max_size=shards),
                 min_size=world, max_size=world)
    )  # fmt: skip
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (world, shards, copies) if copies else (world, shards)
    dispatch = rng.integers(-1, world, shape)
    for metadata in waybill.compute_metadata(
        np.array(lens, np.int64).reshape(world, shards), dispatch, undispatched="keep"
    ):
        table = waybill.SparseMetadata.from_dense(metadata)
        assert again(table) == table


def test_changing_the_dense_metadata_does_not_change_the_pickle():
    forward, _ = waybill.compute_metadata([[3, 4], [5, 0]], [[1, 0], [0, 1]])
    table = waybill.SparseMetadata.from_dense(forward)
    forward.dst_offset[:] = 99
    assert again(table) == table


def of_this_process(world):
    dispatcher = waybill.SequenceDispatcher(world)
    routing = waybill.plan(LENGTHS, world.world_size, 1024).to_routing()
    fmt = waybill.TensorFormat("float32", (2,))
    yield world, "from_environment"
    yield dispatcher, "make one on each rank's world"
    yield dispatcher.plan_dispatch((routing.fwd_q, fmt)), "plan_dispatch"


def refuses(value, hint):
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(waybill.WrongType) as caught:
            attempt(value)
        text = str(caught.value)
        assert text.startswith(f"{cannot_be_copied(type(value).__name__)}, as it holds ")
        assert hint in text and "\n" not in text


def test_what_cannot_says_why_and_what_to_do():
    def body(world):
        for value, hint in of_this_process(world):
            refuses(value, hint)
        world.barrier()

    waybill.run_threads(2, body)
    refuses(waybill.predict_step(planned()), "predict_step")
    config = moe.EPConfig(4, 4, 1, 2, 0, 1, 1, "float32")
    ids = [np.zeros((2, 1), np.int64)]
    refuses(moe.simulate_dispatch(config, [np.ones((2, 4), np.float32)], ids), "simulate_dispatch")
    refuses(moe.summarize(config, ids), "summarize")


def work_of_a_worker(seed):
    """Plans, as a worker that loads data may."""
    rng = np.random.default_rng(seed)
    plan = waybill.plan(rng.integers(100, 900, 12).tolist(), 4, tokens_per_rank=0)
    routing = plan.to_routing()
    return plan, routing, routing.rev_kv, plan.to_metadata()


def test_a_started_process_gives_its_plans_back():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(work_of_a_worker, [3, 4])
    for seed, (plan, routing, table, metadata) in zip([3, 4], found):
        want = work_of_a_worker(seed)
        assert (plan, table) == (want[0], want[2])
        assert facts(routing) == facts(want[1]) and facts(metadata) == facts(want[3])
