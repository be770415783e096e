"""waybill.predict_step, explain, compare and the static plans."""

import itertools
import json

import numpy as np
import pytest
from error_texts import a_divisor

import waybill


def documents(world=8, seed=0):
    return waybill.sample_documents("wlbllm", world * 65536, seed)


def test_a_prediction_has_seven_phases_that_fit_together():
    made = waybill.plan(documents(16), 16)
    step = waybill.predict_step(made)
    assert step.transfer == "relay" and step.world_size == 16
    assert step.work.tolist() == made.work.tolist()
    phases = step.phases
    assert len(phases) == 7
    assert phases[0].begin.tolist() == [0.0] * 16
    for before, after in itertools.pairwise(phases):
        assert before.end.tolist() == after.begin.tolist()
    assert step.seconds == phases[-1].end.max()
    assert step.forward_seconds == phases[2].end.max()
    assert sum(cause.seconds for cause in step.path) == pytest.approx(step.seconds)
    assert step.bottleneck in step.path
    out = phases[0].nvlink_out + phases[0].network_out
    assert out.tolist() == made.relay_bytes_out.tolist()
    assert (phases[0].nvlink_in + phases[0].network_in).tolist() == made.bytes_in.tolist()
    for phase in phases:
        assert (phase.end - phase.begin >= phase.seconds * (1 - 1e-9)).all()
        assert phase.slowest.seconds == phase.seconds.max()
    assert "dispatch Q K V" in str(step) and "relay" in repr(step)


def test_by_hand():
    # Rank 1 attends to the last 40 of 100 tokens: 40 rows of Q, 100 of K and V cross.
    plan = waybill.QkvPlan(2, [0, 2, 2], [60, 40], [0, 1], [0, 2], [0, 1])
    step = waybill.predict_step(
        plan, q_hidden=10, kv_hidden=2, nvlink_bytes_per_second=10, message_seconds=3,
        pairs_per_second=50, phase_seconds=7,
    )  # fmt: skip
    dispatch = step.phases[0]
    assert dispatch.nvlink_out.tolist() == [1600, 0]
    assert dispatch.end.tolist() == [170.0, 170.0]
    assert dispatch.slowest == waybill.StepCause(
        "dispatch Q K V", 0, "NVLink out", 170, 1600, 0, 1600
    )
    assert step.phases[1].end[1] == 170 + 3220 / 50
    assert step.phases[2].waits_for.tolist() == [1, 1]


def pairs_in_chunks(begin, end, chunk):
    """(query, key) pairs of queries [begin, end) of a document, counted one by one."""
    return sum(key // chunk == query // chunk
               for query in range(begin, end) for key in range(query + 1))  # fmt: skip


def test_chunks_by_hand():
    """A document of 100 tokens in chunks of 25, of which rank 1 attends to the last 40: the first
    of these, token 60, needs keys from 50 on.
    """
    plan = waybill.QkvPlan(
        2, [0, 3, 3], [50, 10, 40], [0, 0, 1], [0, 3], [0, 1, 2], kv_begin=[0, 1, 1]
    )
    step = waybill.predict_step(
        plan, chunk=25, q_hidden=10, kv_hidden=2, nvlink_bytes_per_second=10, message_seconds=3,
        pairs_per_second=50, phase_seconds=7, pull_share=0.5,
    )  # fmt: skip
    # Three chunks of 325 pairs, and of the third one 10 queries on rank 0, 15 on rank 1.
    assert step.work.tolist() == [2 * 325 + 55, 270 + 325]
    assert step.work.tolist() == [pairs_in_chunks(0, 60, 25), pairs_in_chunks(60, 100, 25)]
    q, kv = 40 * 10 * 2, 50 * 2 * 2 * 2  # bytes of the rows that travel
    sent = [phase.nvlink_out.tolist() for phase in step.phases]
    assert sent == [[q + kv, 0], [0, 0], [0, q], [q, 0], [0, 0], [0, q], [0, kv]]
    end = (q + kv) / 10 + 3 + 7
    assert step.phases[0].end.tolist() == [end, end]
    assert step.phases[1].end.tolist() == pytest.approx([end + 705 / 50, end + 595 / 50])
    assert step.phases[6].seconds[0] == pytest.approx(kv / 5 + 3 + 7)
    slowest = step.phases[1].slowest
    assert (slowest.rank, slowest.amount, slowest.document_amount) == (0, 705, 705)


def test_chunks_of_a_planned_batch_are_those_that_are_counted():
    """Pairs of each rank, and rows that leave it, from the shards alone."""
    lengths = [[100, 30], [60, 70], [7, 93]]
    made = waybill.plan(lengths, 3, chunk=25, block_tokens=4, q_hidden=10, kv_hidden=2, relay=False)
    plan, work, out = made.to_qkv_plan(), [0] * 3, [0] * 3
    home = [r for r in range(3) for _ in range(*plan.rank_shard_offsets[r : r + 2])]
    needed = set()  # (shard, rank): K and V that a rank gets from elsewhere
    for first, last in itertools.pairwise(plan.doc_shard_offsets.tolist()):
        shards = plan.doc_shards[first:last].tolist()
        begins = np.cumsum([0, *(plan.shard_len[s] for s in shards)]).tolist()
        for place, shard in enumerate(shards):
            begin, end, to = begins[place], begins[place + 1], int(plan.q_dst[shard])
            work[to] += pairs_in_chunks(begin, end, 25)
            if to != home[shard]:
                out[home[shard]] += 20 * (end - begin)
            first_key = begin // 25 * 25
            needed |= {(s, to) for s, till in zip(shards, begins[1:])
                       if till > first_key and begins[shards.index(s)] < end}  # fmt: skip
    for shard, to in needed:
        if to != home[shard]:
            out[home[shard]] += 8 * int(plan.shard_len[shard])
    step = waybill.predict_step(made, "direct")
    every = [n for of_rank in lengths for n in of_rank]
    assert step.work.tolist() == work and sum(work) == sum(pairs_in_chunks(0, n, 25) for n in every)
    assert any(out) and step.phases[0].nvlink_out.tolist() == out


def test_what_is_given_takes_the_place_of_the_plans_own():
    made = waybill.plan(documents(16), 16, ranks_per_node=4, network_bytes_per_second=25e9)
    own = waybill.predict_step(made)
    assert own == waybill.predict_step(
        made, "relay", network_bytes_per_second=25e9, ranks_per_node=4
    )
    assert waybill.predict_step(made, network_bytes_per_second=50e9).seconds < own.seconds
    direct = waybill.predict_step(made, "direct")
    once = waybill.predict_step(made, "once_per_node")
    assert own.seconds < once.seconds < direct.seconds
    sparse = waybill.predict_step(
        made.to_qkv_plan(), ranks_per_node=4, network_bytes_per_second=25e9
    )
    assert sparse == direct


def test_explain_and_remedies():
    made = waybill.plan(documents(64), 64)
    step = waybill.predict_step(made, "direct")
    remedies = step.remedies()
    assert [r.seconds for r in remedies] == sorted(r.seconds for r in remedies)
    relay = next(r for r in remedies if r.kind == "relay")
    assert relay.seconds == waybill.predict_step(made).seconds
    sentences = step.explain()
    assert sentences == waybill.explain(made, "direct")
    assert sentences[0].startswith("The step takes ")
    assert any("relay schedule says would save" in s for s in sentences)
    assert "rank 3" in step.rank_table(3)


def test_compare_is_a_table_of_predictions():
    found = waybill.compare(documents(16), 16, ranks_per_node=8)
    assert list(found) == ["zigzag", "per document", "Ulysses", "planner"]
    zigzag = waybill.zigzag_plan(documents(16), 16)
    assert found["zigzag"] == waybill.predict_step(zigzag)
    by_document = waybill.per_document_plan(documents(16), 16, degree=8)
    assert found["per document"].work.tolist() == by_document.work.tolist()
    assert found["planner"].work.max() < 1.02 * found["planner"].work.mean()
    text = str(found)
    assert "work, max / mean" in text and "Ulysses" in text
    assert "zigzag" in repr(found)
    static = ["zigzag", "per document"]
    assert list(waybill.compare([500, 20], 2, relay=False)) == [*static, "Ulysses", "planner"]
    odd = waybill.compare([500, 20], 2, relay=False, head_dim=1000)
    assert list(odd) == [*static, "planner"] and "ranks of a group" in str(odd)
    with pytest.raises(waybill.InvalidArgument, match="no plan"):
        found["zigzag"].explain()


def test_traces_are_json(tmp_path):
    step = waybill.predict_step(waybill.plan(documents(), 8))
    trace = json.loads(step.to_trace(tmp_path / "t.json"))
    assert json.loads((tmp_path / "t.json").read_text()) == trace
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 8 * 7
    all_of_them = json.loads(waybill.compare(documents(), 8).to_trace())
    assert sum(event["ph"] == "X" for event in all_of_them["traceEvents"]) == 4 * 8 * 7


def test_static_plans_are_right():
    for make in (waybill.zigzag_plan, waybill.per_document_plan):
        plan = make([600, 30, 1], 4, tokens_per_rank=200, degree=2)
        assert waybill.validate(plan, plan.to_metadata()) == []
        assert plan.shard_len.sum() == 631
        assert np.array_equal(plan.work.sum(), 600 * 601 // 2 + 30 * 31 // 2 + 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: waybill.predict_step(p, "by_mail"), 'transfer = "by_mail", expected "auto"'),
        (lambda p: waybill.predict_step(p.to_qkv_plan(), "relay"), "no relay schedule"),
        (
            lambda p: waybill.predict_step(p, network_bytes_per_second=0),
            "network_bytes_per_second = 0",
        ),
        (lambda p: waybill.predict_step(p, phase_seconds=-1), "phase_seconds = -1"),
        (lambda p: waybill.predict_step(p, q_hidden="x"), "predict_step: q_hidden"),
        (lambda p: waybill.predict_step([1]), "plan is a list"),
        (lambda p: waybill.predict_step(p).rank_table(8), "rank = 8, expected 0..7"),
        (lambda p: waybill.zigzag_plan([5], 6, degree=4), a_divisor("degree", 4)),
        (lambda p: waybill.compare([5], 8, degree=0), "compare: degree = 0"),
        (lambda p: waybill.compare([5], 8, head_dim=0), "compare: head_dim = 0"),
        (lambda p: waybill.StepPrediction(), "expected waybill.predict_step"),
    ],
)
def test_errors_name_the_argument(call, text):
    made = waybill.plan(documents(), 8)
    with pytest.raises(waybill.InvalidArgument) as error:
        call(made)
    assert text in str(error.value)
