"""waybill.EPAll2AllLayer: numpy arrays through the layer that tensors go through."""

import inspect

import numpy as np
import pytest

import waybill
from waybill.moe import EPConfig, simulate_dispatch

WORLD, EXPERTS, HIDDEN, TOPK, MOST = 4, 8, 128, 2, 6
TOKENS = (4, 0, 6, 3)


def inputs(seed=0, dtype=np.float32):
    """(tokens, ids, weights) of each rank; id EXPERTS: dropped."""
    random = np.random.default_rng(seed)
    tokens = [random.random((n, HIDDEN)).astype(dtype) - dtype(0.5) for n in TOKENS]
    ids = [random.integers(0, EXPERTS + 1, (n, TOPK)) for n in TOKENS]
    weights = [random.random((n, TOPK)).astype(np.float32) for n in TOKENS]
    return tokens, ids, weights


def made(world, local=WORLD, **options):
    return waybill.EPAll2AllLayer(
        world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, local, WORLD, **options
    )


def on_ranks(body, local=WORLD):
    return waybill.run_threads(WORLD, body, ranks_per_node=local)


CASES = {
    "plain": {},
    "nodes": {"local": 2},
    "compact": {"rows": "compact"},
    "aligned": {"expert_alignment": 4},
    "minus one": {"dropped_id": -1},
    "float16": {"dtype": "float16"},
    "float64": {"dtype": "float64", "weight_dtype": "float64"},
    "float8": {"payload": "quantized"},
    "spare": {"spare_experts": 2},
}
OF_LAYER = ("local", "dtype", "weight_dtype")


@pytest.mark.parametrize("case", CASES)
def test_equals_the_simulation(case):
    options = {"dtype": "bfloat16", **CASES[case]}
    wide = np.float64 if options["dtype"] == "float64" else np.float32
    tokens, ids, weights = inputs(1, wide)
    if options.get("dropped_id") == -1:
        ids = [np.where(of_rank == EXPERTS, -1, of_rank) for of_rank in ids]
    local = options.get("local", WORLD)
    config = EPConfig(
        MOST, HIDDEN, TOPK, EXPERTS, 0, WORLD, local, options["dtype"],
        options.get("weight_dtype", "float32"),
    )  # fmt: skip
    simulated = {name: value for name, value in options.items() if name not in OF_LAYER}
    there = simulate_dispatch(config, tokens, ids, weights, **simulated)
    outputs = [np.asarray(rows, wide) * 2 for rows in there.recv_tokens]
    weighted = options.get("rows") != "compact"  # such rows are sums
    sums = there.combine(outputs, weighted=weighted, biases=[tokens])
    layer_options = {name: value for name, value in options.items() if name != "local"}

    def body(world):
        layer, mine = made(world, local, **layer_options), world.rank
        for _ in range(2):
            rows, row_weights, layout = layer.dispatch(tokens[mine], ids[mine], weights[mine])
            assert rows.dtype == there.recv_tokens[mine].dtype
            assert rows.tobytes() == there.recv_tokens[mine].tobytes()
            assert (row_weights == there.recv_weights[mine]).all()
            if there.recv_scales is not None:
                assert (layout.recv_scales == there.recv_scales[mine]).all()
            for name in ("recv_expert_offsets", "topk_indices_tensor", "slot_experts"):
                assert np.array_equal(getattr(layout, name), getattr(there.layout[mine], name)), (
                    name
                )
            got = layer.combine(outputs[mine], layout, weighted=weighted, biases=[tokens[mine]])
            assert got.tobytes() == sums[mine].tobytes()
        layer.ep_barrier_all()
        layer.finalize()
        layer.finalize()

    on_ranks(body, local)


def test_a_routing_again_views_and_positions():
    tokens, ids, _ = inputs(2)
    config = EPConfig(MOST, HIDDEN, TOPK, EXPERTS, 0, WORLD, WORLD, "float32")
    there = simulate_dispatch(config, tokens, ids)
    again = simulate_dispatch(config, [-rows for rows in tokens], ids)

    def body(world):
        layer, mine = made(world, dtype="float32", copy_out=False), world.rank
        rows, weights, layout = layer.dispatch(tokens[mine], ids[mine])
        assert weights is None and (rows == there.recv_tokens[mine]).all()
        others, _, _ = layer.dispatch(-tokens[mine], None, layout_desc=layout)
        assert (others == again.recv_tokens[mine]).all()
        assert (
            rows.base is not None and (rows == there.recv_tokens[mine]).all()
        )  # views of two windows
        place = layer.combine_input(len(others))
        np.multiply(others, 3, out=place)
        sums = layer.combine(place, layout)
        assert (sums == again.combine([rows * 3 for rows in again.recv_tokens])[mine]).all()
        assert layer.memory_bytes > 0 and layer.output_rows >= len(rows)

    on_ranks(body)


def test_too_few_rows():
    tokens, ids, _ = inputs(3)

    def body(world):
        layer, mine = made(world, dtype="float32", fixed_rows=2), world.rank
        _, _, layout = layer.dispatch(tokens[mine], ids[mine])
        assert layout.overflow.tolist() == [True]
        assert layer.take_overflow() > 2
        layer.dispatch(tokens[mine], ids[mine])
        with pytest.raises(waybill.InvalidArgument, match="fixed_rows"):
            layer.check_overflow()

    on_ranks(body)


def test_the_arguments_are_those_of_the_other_face():
    pytest.importorskip("torch")
    import waybill.torch.moe

    assert waybill.EPAll2AllLayer is waybill.moe.EPAll2AllLayer
    assert waybill.torch.EPAll2AllLayer is waybill.torch.moe.EPAll2AllLayer
    for name in ("__init__", "dispatch", "combine"):
        ours, theirs = (
            list(inspect.signature(getattr(module.EPAll2AllLayer, name)).parameters)
            for module in (waybill, waybill.torch)
        )
        assert ours == [one for one in theirs if one != "device"]


def test_wrong_arguments_are_named():
    tokens, ids, _ = inputs(4)
    with pytest.raises(
        waybill.InvalidArgument, match=r"ep_group is a NoneType, expected a waybill"
    ):
        waybill.EPAll2AllLayer(None, MOST, HIDDEN, TOPK, 0, EXPERTS, 1, 1)

    def body(world):
        with pytest.raises(waybill.InvalidArgument, match="dtype = 'float12'"):
            made(world, dtype="float12")
        layer, mine = made(world), world.rank
        for text, call in (
            ("dispatch: input has dtype", lambda: layer.dispatch([["a"]], ids[mine])),
            ("dispatch: input.* shape", lambda: layer.dispatch(tokens[mine][:, :7], ids[mine])),
            ("dispatch: exp_indices is None", lambda: layer.dispatch(tokens[mine], None)),
            ("dispatch: input is None", lambda: layer.dispatch(None, ids[mine])),
            ("exp_indices has dtype float", lambda: layer.dispatch(tokens[mine], ids[mine] + 0.5)),
            ("stream is given", lambda: layer.synchronize(3)),
            ("one that dispatch gave", lambda: layer.combine(tokens[mine], None)),
        ):
            with pytest.raises(waybill.InvalidArgument, match=text):
                call()
        rows, _, layout = layer.dispatch(tokens[mine], ids[mine])
        with pytest.raises(waybill.InvalidArgument, match="combine: input"):
            layer.combine(rows[:, :5], layout)
        with pytest.raises(waybill.InvalidArgument, match="combine: input is None"):
            layer.combine(None, layout)
        layer.combine(rows, layout)
        assert repr(layer).startswith("EPAll2AllLayer(max_tokens=6, hidden=128")
        assert layer.ep_group is world and layer.slots_per_rank == 2

    on_ranks(body)


def test_ranks_that_disagree_are_told():
    tokens, ids, weights = inputs(5)

    def body(world):
        layer, mine = made(world), world.rank
        given = weights[mine] if mine == 1 else None
        with pytest.raises(waybill.Disagreement, match="weights"):
            layer.dispatch(tokens[mine], ids[mine], given)

    on_ranks(body)
