"""waybill.plan: quality, figures, errors, and the way to metadata."""

import pickle

import numpy as np
import pytest
from error_texts import an_integer

import waybill


def documents(world=8, seed=0, tokens=65536):
    return waybill.sample_documents("wlbllm", world * tokens, seed)


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("kv_layout", ["per_rank", "per_query"])
def test_a_plan_is_right_and_balanced(relay, kv_layout):
    made = waybill.plan(documents(), 8, relay=relay, kv_layout=kv_layout)
    assert made.validate() == [] == waybill.validate(made)
    assert made.imbalance <= 1.01 and made.balanced
    assert made.work.sum() == sum(n * (n + 1) // 2 for n in documents().tolist())
    assert made.imbalance == pytest.approx(made.work.max() / made.work.mean())
    assert (made.relay_hops != []) == relay
    plan = made.to_qkv_plan()
    assert plan.kv_layout == kv_layout and plan.world_size == 8
    metadata = made.to_metadata()
    assert waybill.validate(plan, metadata) == [] == waybill.validate(made, metadata)
    metadata.fwd_q.dst_offset[0, 0] += 1
    assert waybill.validate(made, metadata) == waybill.validate(plan, metadata) != []
    metadata.fwd_q.dst_offset[0, 0] -= 1
    assert made.attention_tokens.tolist() == metadata.fwd_q.num_recv_tokens[:, -1].tolist()
    assert made.kv_tokens.tolist() == metadata.fwd_kv.num_recv_tokens[:, -1].tolist()


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16")])
def test_bytes_are_the_rows_that_cross(dtype):
    made = waybill.plan(documents(4), 4, q_hidden=512, kv_hidden=128, dtype=dtype)
    q, kv = made.to_qkv_plan().traffic()
    for rows in (q, kv):
        np.fill_diagonal(rows, 0)
    row_bytes = q * 512 * 2 + kv * 2 * 128 * 2
    assert made.bytes_in.tolist() == row_bytes.sum(axis=0).tolist()
    assert made.bytes_out.tolist() == row_bytes.sum(axis=1).tolist()
    assert made.relay_bytes_out.max() < made.bytes_out.max()
    assert made.relay_bytes_out.sum() == made.bytes_out.sum()
    limit = max(made.bytes_in.max(), made.bytes_out.max()) / 345e9
    assert made.limit_seconds(relay=False) == pytest.approx(limit)
    assert made.limit_seconds() == made.limit_seconds(relay=True) < limit


def test_lists_a_rank_and_a_window():
    made = waybill.plan([[3000, 96], [], [1], [500]], 4, tokens_per_rank=0, window=128)
    assert made.home_tokens.tolist() == [3096, 0, 1, 500]
    assert made.validate() == []
    full = sum(n * (n + 1) // 2 for n in (3000, 96, 1, 500))
    assert made.work.sum() < full


def test_the_same_call_gives_the_same_plan_and_json_keeps_it(tmp_path):
    made = waybill.plan(documents(), 8)
    assert made == waybill.plan(documents().tolist(), 8)
    assert made != waybill.plan(documents(seed=1), 8)
    path = tmp_path / "plan.json"
    assert waybill.AttentionPlan.from_json(made.to_json(path)) == made
    assert waybill.AttentionPlan.from_json(path) == made
    assert "imbalance" in repr(made) and "<table" in made._repr_html_() and str(made)


def test_summary_and_page_speak_of_what_was_planned(tmp_path):
    made = waybill.plan(documents(), 8, q_hidden=512, kv_hidden=256, dtype="float32")
    text, page = made.summary(345.0), made.to_html(tmp_path / "page.html", title="A <title>")
    assert "Q 2.00 KiB, K and V together 2.00 KiB" in text and "with relay" in text
    assert "a row is 2.00 KiB of Q and 2.00 KiB of K and V" in page and "with relay" in page
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page and "&lt;title" in page
    direct = waybill.plan(documents(), 8, relay=False).summary()
    assert "relay" not in direct and direct.splitlines() != text.splitlines()


def test_chunks_are_of_documents():
    lens = [30000, 900, 12000, 5000]
    made = waybill.plan(lens, 4, 0, relay=False, chunk=4096)
    assert made.validate() == [] and made.imbalance <= 1.01
    assert made.to_qkv_plan().num_documents == 4
    chunks = [min(4096, n - at) for n in lens for at in range(0, n, 4096)]
    assert made.work.sum() == sum(n * (n + 1) // 2 for n in chunks)
    assert made.work.sum() == made.to_qkv_plan().work.sum()
    assert pickle.loads(pickle.dumps(made)) == made
    alone = waybill.predict_step(made)
    assert alone.seconds == waybill.predict_step(made.to_qkv_plan(), chunk=4096).seconds
    steps = waybill.compare(lens, 4, 12000, chunk=4096)
    whole = waybill.compare(lens, 4, 12000)
    assert all(steps[way].seconds < whole[way].seconds for way in steps)


def test_capacity_is_kept_or_refused():
    lens = [16384] * 4 + [1024] * 48
    made = waybill.plan(lens, 8, tokens_per_rank=16384, max_tokens_per_rank=24000)
    assert max(made.attention_tokens.max(), made.kv_tokens.max()) <= 24000
    with pytest.raises(waybill.InvalidArgument, match=r"infeasible: rank .* needs .* tokens"):
        waybill.plan(lens, 8, tokens_per_rank=16384, max_tokens_per_rank=8000)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"world_size": 0}, "world_size = 0"),
        ({"world_size": "8"}, an_integer("plan: world_size", "'8'")),
        ({"mask": "fuller"}, 'plan: mask = "fuller", expected "causal", "full" or "prefix"'),
        ({"mask": "full", "window": 9}, 'plan: window = 9, expected None with mask = "full"'),
        ({"window": 0}, "plan: window = 0, expected >= 1, or None"),
        ({"chunk": 0}, "plan: chunk = 0, expected >= 1, or None"),
        ({"dtype": "float12"}, "float12"),
        ({"dtype": np.dtype("complex64")}, "complex64"),
        ({"dtype": np.floating}, "dtype = 'floating', expected one of"),
        ({"dtype": dict}, "dtype = 'dict', expected one of"),
        ({"kv_layout": "x"}, 'kv_layout = "x"'),
        ({"doc_lengths": [[1], 2]}, "doc_lengths"),
        ({"doc_lengths": [1.5]}, "doc_lengths has dtype float64, expected int64"),
        ({"doc_lengths": [0]}, "= 0"),
        ({"doc_lengths": [10**6]}, "1000000"),
        ({"imbalance_target": 1.0}, "imbalance_target = 1"),
    ],
)
def test_mistakes_are_named(change, text):
    arguments = {"doc_lengths": [100, 200], "world_size": 2, **change}
    with pytest.raises(waybill.InvalidArgument) as caught:
        waybill.plan(**arguments)
    assert text in str(caught.value)


def test_torch_gets_tensors():
    torch = pytest.importorskip("torch")
    import waybill.torch

    made = waybill.torch.plan(torch.tensor([5000, 3000, 192]), 2, tokens_per_rank=4096)
    metadata = waybill.torch.plan_metadata(made)
    assert metadata.fwd_q.dst_rank.dtype == torch.int64
    assert waybill.validate(metadata.fwd_q, metadata.rev_q) == []
