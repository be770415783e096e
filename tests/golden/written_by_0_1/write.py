"""Writes this folder: JSON and pickles of one value of each kind that users keep or send, and
facts.json with what each holds. Written once, by the code at 91713afc (version 0.1); the files stay
as they are, and every later version reads them (tests/python/test_written_before.py).
"""

import json
import pathlib
import pickle
import subprocess
import sys

import numpy as np

import waybill
from waybill import moe

HERE = pathlib.Path(__file__).resolve().parent
LENGTHS = [70, 64, 30, 1, 90, 83]


def plain_values():
    """What needs no torch."""
    attention = waybill.plan(
        [400, 30, 20, 30], 4, tokens_per_rank=120, ranks_per_node=2, block_tokens=8, q_hidden=16,
        kv_hidden=8,
    )  # fmt: skip
    windowed = waybill.plan([300, 40], 2, tokens_per_rank=170, window=50, relay=False)
    plan = waybill.plan_documents(LENGTHS, 4, 128, 16)
    per_query = waybill.plan_documents(LENGTHS, 4, 128, 16, kv_layout="per_query")
    forward, reverse = waybill.compute_metadata([[3, 4], [5, 0]], [[[1, 0], [0, -1]], [[0, 1]] * 2])
    return {
        "attention_plan": attention,
        "attention_plan_window": windowed,
        "plan": plan,
        "plan_per_query": per_query,
        "routing": attention.to_routing(),
        "sparse_metadata": per_query.to_routing().fwd_kv,
        "metadata": reverse,
        "metadata_slice": forward.get_slice(1),
        "metadata_device_dtypes": forward.normalize_dtype(),
        "qkv_metadata": plan.to_metadata(),
        "raw_dispatch": per_query.to_raw_dispatch(),
        "rank_attention": attention.to_routing().attention(3),
        "packed_seq_params": waybill.mlp_layout_packed_params([3, 4]),
        "tensor_format": waybill.TensorFormat(np.dtype("float16"), (8, 64)),
        "topology": waybill.Topology(16, 8),
        "finding": waybill.validate(waybill.Metadata([[0]], [[7]], [[3]], [[3, 3]]))[0],
        "links": waybill.LinkSpeeds(2e10, 3e9, 1e10, "a GPU"),
        "attention_costs": waybill.AttentionCosts(2e12, 128, 4096, 2.25, 0.03, {"kernel": "k"}),
        "ep_config": moe.EPConfig(8, 64, 2, 8, 0, 2, 2, "float16"),
        "error": waybill.InvalidArgument("plan: tokens_per_rank = -1, expected >= 0"),
    }


def torch_values():
    import torch

    import waybill.torch as wt

    plan = waybill.plan_documents(LENGTHS, 4, 128, 16)
    planner = wt.BatchPlanner(2, 4, 2, 64, dtype=torch.bfloat16, window=32, block_tokens=16)
    return {
        "torch_metadata": wt.plan_metadata(plan).fwd_q,
        "torch_format": wt.TensorFormat(torch.bfloat16, (4, 8)),
        "torch_ep_config": moe.EPConfig(8, 64, 2, 8, 0, 2, 2, torch.float16, torch.bfloat16),
        "batch_planner": planner,
        "batch_plan": planner.plan([[(0, 0, 100), 40], [(0, 100, 60), 30]]),
    }


def facts(value):
    """What a value holds, as JSON."""
    name = type(value).__name__
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return [value.dtype.name, value.tolist()]
    if hasattr(value, "to_json"):
        return [name, json.loads(value.to_json())]
    if isinstance(value, waybill.QkvRouting):
        tables = [value.fwd_q, value.rev_q, value.fwd_kv, value.rev_kv]
        ranks = [value.attention(rank) for rank in range(value.world_size)]
        return [name, value.kv_layout, facts(tables), facts(ranks)]
    if isinstance(value, waybill.SparseMetadata):
        return [name, facts(value.to_dense())]
    if isinstance(value, Exception):
        return [name, str(value)]
    if name == "BatchPlanner":
        return [name, value.world_size, {key: str(fact) for key, fact in value.facts().items()}]
    if name == "BatchPlan":
        ranks = [[*map(list, value.pieces(rank))] for rank in range(value.world_size)]
        return [name, facts(value.planner), facts(value.qkv_plan), ranks]
    if hasattr(value, "_fields") and not callable(value._fields):
        return [name, {field: facts(getattr(value, field)) for field in value._fields}]
    if isinstance(value, (tuple, list)):
        return [facts(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        fields = value.__dataclass_fields__
        return [name, {field: facts(getattr(value, field)) for field in fields}]
    return [name, str(value)]


def main():
    found = {}
    for name, value in {**plain_values(), **torch_values()}.items():
        (HERE / f"{name}.pickle").write_bytes(pickle.dumps(value, protocol=4))
        found[name] = json.loads(json.dumps(facts(value)))
        if hasattr(value, "to_json"):
            (HERE / f"{name}.json").write_text(value.to_json(), encoding="utf-8")
    (HERE / "facts.json").write_text(json.dumps(found), encoding="utf-8")
    program = pathlib.Path(sys.executable).parent / "waybill"
    command = [program, "metadata", HERE / "plan.json", "-o", HERE / "dispatch.json"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
