"""Plans of causal masks and of windows are those that were recorded before there were others."""

import hashlib
import json
import random
from pathlib import Path

import pytest

import waybill

RECORD = Path(__file__).parent.parent / "golden" / "attention_plans.json"
COUNT = 120


def drawn(seed):
    """Documents and options of waybill.plan; the same numbers with every version of Python."""
    draw = random.Random(seed).random

    def below(most):
        return int(draw() * most)

    world, rows = 1 + below(16), 1 + below(2000)
    left, lengths = int(draw() * world * rows), []
    longest = 1 + below(3 * rows)
    while left > 0:
        most = longest if below(4) == 0 else max(1, longest // 20)
        lengths.append(min(left, 1 + below(most)))
        left -= lengths[-1]
    options = {
        "q_hidden": 1 + below(512),
        "kv_hidden": 1 + below(256),
        "window": 1 + below(1500) if below(2) else None,
        "kv_layout": "per_query" if below(3) == 0 else "per_rank",
        "imbalance_target": 1.2 if below(2) else 1.01,
        "block_tokens": 2 ** below(8),
        "ranks_per_node": 1 + below(8),
        "relay": below(4) > 0,
    }
    return lengths, world, rows, options


def digest(seed):
    lengths, world, rows, options = drawn(seed)
    plan = waybill.plan(lengths, world, rows, **options)
    step = waybill.predict_step(  # the speed of attention as it was when these were recorded
        plan, forward_flops_per_second=600e12, backward_flops_per_second=450e12
    )
    routing = plan.to_qkv_plan().to_metadata()
    parts = [plan.to_json(compact=True), repr(step.seconds), routing.fwd_kv.to_json(compact=True)]
    parts.append(json.dumps([[table.tolist() for table in layout] for layout in layouts(routing)]))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def layouts(routing):
    attention = routing.attention
    cu_kv = getattr(attention, "cu_seqlens_kv", None)
    return [attention.cu_seqlens_q, *([cu_kv] if cu_kv is not None else [])]


@pytest.mark.parametrize("part", range(4))
def test_recorded_plans(part):
    recorded = json.loads(RECORD.read_text())
    assert len(recorded) == COUNT
    for seed in range(part, COUNT, 4):
        assert digest(seed) == recorded[seed], f"seed {seed}"


if __name__ == "__main__":  # writes the record: only when plans are meant to change
    RECORD.write_text(json.dumps([digest(seed) for seed in range(COUNT)], indent=1) + "\n")
