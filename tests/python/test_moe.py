"""Experts: the golden cases through Python, kinds of arrays, and wrong inputs."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from error_texts import a_multiple

import waybill
from waybill.moe import EPConfig, quantize_fp8, simulate_dispatch

CASES = sorted((Path(__file__).parent.parent / "golden" / "expert_parallel").glob("*.json"))
assert len(CASES) == 38
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def config_of(given):
    return EPConfig(
        max_tokens=given["max_tokens"],
        hidden=given["hidden"],
        topk=given["topk"],
        num_experts=given["num_experts"],
        rank=0,
        world_size=given["world_size"],
        local_world_size=given["local_world_size"],
        token_dtype=given["dtype"],
        weight_dtype=given.get("weight_dtype", "float32"),
    )


def matrices(lists, dtype, columns):
    if lists is None:
        return None
    return [
        np.array(rows, dtype=dtype).reshape(len(rows), -1 if rows else columns) for rows in lists
    ]


def dispatch(config, inputs, dtype, id_dtype=np.int32, **options):
    positions = inputs.get("full_scatter_indices")
    return simulate_dispatch(
        config,
        matrices(inputs["tokens"], dtype, config.hidden),
        matrices(inputs["exp_indices"], id_dtype, config.topk),
        matrices(inputs["weights"], np.float32, config.topk),
        None if positions is None else np.array(positions, id_dtype).reshape(-1, config.topk),
        **options,
    )


def same(got, wanted):
    got = np.asarray(got).astype(np.float64)
    wanted = np.asarray(wanted, np.float64).reshape(got.shape)
    return np.array_equal(got, wanted)


def check_layout(layout, wanted):
    assert layout.num_dispatch_token_cur_rank == wanted["num_dispatch_token_cur_rank"]
    for node, tokens in enumerate(wanted["token_dst_scatter_idx"]):
        assert same(layout.token_dst_scatter_idx[node, : len(tokens)], tokens)
    ids = wanted["topk_indices_tensor"]
    if ids is not None:
        for node, tokens in enumerate(ids):
            assert same(layout.topk_indices_tensor[node, : len(tokens)], tokens)
    if wanted["send_reqs_recv"] is None:
        assert layout.send_reqs_recv_tensor is None
    else:
        table = np.full(layout.send_reqs_recv_tensor.shape, -1)
        for node, runs in enumerate(wanted["send_reqs_recv"]):
            for slot, start, end in runs:
                table[node, :, slot] = start, end
        assert same(layout.send_reqs_recv_tensor, table)
    for name in ("skipped_token_mapping_indices", "skipped_token_topk_mapping_indices"):
        got = getattr(layout, name)
        assert (got is None) == (wanted[name] is None)
        assert got is None or (got.dtype == np.int64 and same(got, wanted[name]))


def check_rows(result, wanted):
    for name in (
        "num_input_tokens_per_rank",
        "num_recv_tokens_per_rank",
        "splits",
        "recv_buf_offset_per_expert",
    ):
        assert same(getattr(result, name), wanted[name]), name
    for r in range(result.config.world_size):
        assert same(result.recv_tokens[r], wanted["recv_tokens"][r])
        assert same(result.recv_origin[r], wanted["recv_origin"][r])
        if wanted["recv_weights"] is None:
            assert result.recv_weights is None
        else:
            assert same(result.recv_weights[r], wanted["recv_weights"][r])
        check_layout(result.layout[r], wanted["layout"][r])
    for name, table in wanted["traffic"].items():
        assert same(result.traffic[name], table), name


def experts(result, function, inputs, dtype):
    """y = scale x + bias, then perhaps y = weight y, rounded each time."""
    outputs = []
    for r, rows in enumerate(result.recv_tokens):
        source, token, choice = result.recv_origin[r].T
        ids = [inputs["exp_indices"][s][t][k] for s, t, k in zip(source, token, choice)]
        scale = np.array(function["scale"], np.float32)[ids][:, None]
        bias = np.array(function["bias"], np.float32)[ids][:, None]
        y = (scale * rows.astype(np.float32) + bias).astype(dtype)
        if function["apply_weight"]:
            weight = result.recv_weights[r].astype(np.float32)[:, None]
            y = (weight * y.astype(np.float32)).astype(dtype)
        outputs.append(y)
    return outputs


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_golden_case(path):
    case = load(path)
    if case.get("expect_error"):
        with pytest.raises(waybill.InvalidArgument):
            config = config_of(case["config"])
            for step in case["steps"]:
                dispatch(config, step["inputs"], np.float32)
        return
    config = config_of(case["config"])
    exact = NUMPY[case["config"]["dtype"]]
    for step in case["steps"]:
        inputs, wanted = step["inputs"], step["expected"]
        for dtype, id_dtype in ((np.float32, np.int32), (exact, np.int64)):
            result = dispatch(config, inputs, dtype, id_dtype)
            assert all(rows.dtype == dtype for rows in result.recv_tokens)
            check_rows(result, wanted)
            outputs = experts(result, step["expert_fn"], inputs, exact)
            for local, name in ((False, "combine"), (True, "combine_local")):
                if wanted[name] is None:
                    continue
                for got, sums in zip(result.combine(outputs, local), wanted[name]):
                    assert got.dtype == exact and same(got, sums)
                widened = [y.astype(np.float32) for y in outputs]
                for got, sums in zip(result.combine(widened, local_combine=local), wanted[name]):
                    assert got.dtype == np.float32 and same(got, sums)


GOOD = {
    "max_tokens": 4,
    "hidden": 8,
    "topk": 2,
    "num_experts": 8,
    "rank": 0,
    "world_size": 2,
    "local_world_size": 2,
}


def good_inputs(dtype=np.float32, hidden=8):
    rng = np.random.default_rng(5)
    tokens = [rng.standard_normal((3, hidden)).astype(dtype) for _ in range(2)]
    ids = [rng.integers(0, 9, (3, 2)) for _ in range(2)]
    weights = [rng.random((3, 2)).astype(np.float32) for _ in range(2)]
    return tokens, ids, weights


def test_config_has_the_properties():
    config = EPConfig(**GOOD)
    assert (config.num_experts_per_rank, config.is_intra_node, config.num_nodes) == (4, True, 1)
    assert (config.token_dtype, config.weight_dtype, config.offset_dtype) == (
        "bfloat16",
        "float32",
        "int32",
    )
    assert EPConfig(**{**GOOD, "token_dtype": np.float16}).token_dtype_name == "float16"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_tokens", 0, "max_tokens = 0"),
        ("hidden", -8, "hidden = -8"),
        ("topk", 33, "topk = 33, expected 1..32"),
        ("num_experts", 7, a_multiple("num_experts", 7, "world_size = 2")),
        ("num_experts", 2**40, "num_experts"),
        ("rank", 2, "rank = 2, expected 0..1"),
        ("world_size", 0, "world_size = 0"),
        ("local_world_size", 3, "local_world_size = 3"),
        ("token_dtype", "int32", "token_dtype = int32"),
        ("token_dtype", "nonsense", "nonsense"),
        ("weight_dtype", "int64", "weight_dtype = int64"),
        ("topk", 2.5, "topk = 2.5"),
        ("hidden", 2**70, "hidden"),
        ("hidden", "8", "hidden"),
        ("token_dtype", object(), "token_dtype"),
    ],
)
def test_config_names_what_is_wrong(name, value, text):
    with pytest.raises(waybill.InvalidArgument, match=text):
        EPConfig(**{**GOOD, name: value})


def change(entries, rank, value):
    entries = list(entries)
    entries[rank] = value
    return entries


WRONG = {
    "config": (lambda t, e, w: ({}, t, e, w), "config is a dict"),
    "few tokens": (lambda t, e, w: (None, t[:1], e, w), "tokens has 1 entries"),
    "no list": (lambda t, e, w: (None, 3, e, w), "tokens is a int"),
    "few ids": (lambda t, e, w: (None, t, e[:1], w), "exp_indices has 1 entries"),
    "few weights": (lambda t, e, w: (None, t, e, w[:1]), "weights has 1 entries"),
    "hidden": (
        lambda t, e, w: (None, change(t, 1, np.zeros((3, 9), np.float32)), e, w),
        r"tokens\[1\] has shape \[3, 9\], expected \[3, 8\]",
    ),
    "one axis": (lambda t, e, w: (None, change(t, 1, np.zeros(8)), e, w), r"tokens\[1\]"),
    "text": (lambda t, e, w: (None, change(t, 0, np.array(["a"])), e, w), r"tokens\[0\] has dtype"),
    "ragged": (lambda t, e, w: (None, change(t, 0, [[1.0], [1.0, 2.0]]), e, w), r"tokens\[0\]"),
    "too many": (
        lambda t, e, w: (
            None,
            change(t, 0, np.zeros((5, 8), np.float32)),
            change(e, 0, np.zeros((5, 2), np.int64)),
            None,
        ),
        "5 tokens, expected at most max_tokens = 4",
    ),
    "float ids": (lambda t, e, w: (None, t, change(e, 1, np.zeros((3, 2))), w), "exp_indices"),
    "bool ids": (lambda t, e, w: (None, t, change(e, 1, np.zeros((3, 2), bool)), w), "exp_indices"),
    "ids of another length": (
        lambda t, e, w: (None, t, change(e, 1, np.zeros((2, 2), np.int64)), w),
        r"exp_indices\[1\] has shape \[2, 2\], expected \[3, 2\]",
    ),
    "id": (
        lambda t, e, w: (None, t, change(e, 1, np.full((3, 2), 9)), w),
        r"rank 1: exp_indices\[0\]\[0\] = 9, expected 0..7, or 8",
    ),
    "negative id": (lambda t, e, w: (None, t, change(e, 0, np.full((3, 2), -1)), w), "= -1"),
    "huge id": (lambda t, e, w: (None, t, change(e, 0, np.full((3, 2), 2**62)), w), "exp_indices"),
    "weights' shape": (
        lambda t, e, w: (None, t, e, change(w, 0, np.zeros((3, 1), np.float32))),
        r"weights\[0\] has shape",
    ),
    "complex": (lambda t, e, w: (None, t, e, change(w, 0, np.zeros((3, 2), complex))), "complex"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_named(name):
    make, text = WRONG[name]
    config, tokens, ids, weights = make(*good_inputs())
    with pytest.raises(waybill.InvalidArgument, match=text):
        simulate_dispatch(EPConfig(**GOOD) if config is None else config, tokens, ids, weights)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropped_id": 3}, "dropped_id = 3"),
        ({"dropped_id": "x"}, "dropped_id"),
        ({"rows": "sorted"}, 'rows = "sorted"'),
        ({"expert_alignment": 0}, "expert_alignment = 0"),
        ({"expert_alignment": 2**62}, "expert_alignment"),
        ({"payload": "zip"}, 'payload = "zip"'),
        ({"payload": "quantized"}, "multiple of 128"),
        ({"scales": [np.ones((3, 1))] * 2}, "scales"),
        ({"full_scatter_indices": np.zeros((6, 2), np.int64)}, "full_scatter_indices"),
        ({"full_scatter_indices": np.zeros((2, 2), np.int64)}, r"\[2, 2\], expected \[6, 2\]"),
        ({"full_scatter_indices": np.zeros((6, 2))}, "full_scatter_indices has dtype float64"),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(waybill.InvalidArgument, match=text):
        simulate_dispatch(EPConfig(**GOOD), *good_inputs(), **options)


def test_combine_names_what_is_wrong():
    result = simulate_dispatch(EPConfig(**GOOD), *good_inputs())
    rows = result.recv_tokens
    with pytest.raises(waybill.InvalidArgument, match="expert_outputs has 1 entries"):
        result.combine(rows[:1])
    with pytest.raises(waybill.InvalidArgument, match=r"expert_outputs\[1\] has shape"):
        result.combine([rows[0], rows[1][:-1]])
    with pytest.raises(waybill.InvalidArgument, match="3 biases"):
        result.combine(rows, biases=[good_inputs()[0]] * 3)
    plain = simulate_dispatch(EPConfig(**GOOD), *good_inputs()[:2])
    with pytest.raises(waybill.InvalidArgument, match="no weights"):
        plain.combine(plain.recv_tokens, weighted=True)
    with pytest.raises(waybill.InvalidArgument, match="simulate_dispatch"):
        type(result)()


def test_float32_is_rounded_as_bfloat16_is():
    tokens, ids, weights = good_inputs()
    rounded = [t.astype(ml_dtypes.bfloat16) for t in tokens]
    one = simulate_dispatch(EPConfig(**GOOD), tokens, ids, weights)
    other = simulate_dispatch(EPConfig(**GOOD), rounded, ids, weights)
    for a, b in zip(one.recv_tokens, other.recv_tokens):
        assert a.dtype == np.float32 and np.array_equal(a, b.astype(np.float32))
    sums = one.combine([t * np.float32(1.1) for t in one.recv_tokens])
    exact = one.combine([(t * np.float32(1.1)).astype(ml_dtypes.bfloat16) for t in one.recv_tokens])
    for a, b in zip(sums, exact):
        assert np.array_equal(a, b.astype(np.float32))


def test_special_values_survive():
    tokens = [np.array([[np.nan, np.inf, -np.inf, -0.0, 1, 2, 3, 3.4e38]], np.float32)] * 2
    ids = [np.array([[0, 8]])] * 2
    result = simulate_dispatch(EPConfig(**GOOD), tokens, ids)
    wanted = tokens[0].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(result.recv_tokens[0][0], wanted[0])
    assert np.signbit(result.recv_tokens[0][0, 3])


def test_dropped_minus_one():
    tokens, ids, weights = good_inputs()
    usual = simulate_dispatch(EPConfig(**GOOD), tokens, ids, weights)
    other = simulate_dispatch(
        EPConfig(**GOOD), tokens, [np.where(i == 8, -1, i) for i in ids], weights, dropped_id=-1
    )
    for a, b in zip(usual.recv_origin, other.recv_origin):
        assert np.array_equal(a, b)


def test_padding_and_compact_rows():
    tokens, ids, weights = good_inputs()
    config = EPConfig(**GOOD)
    padded = simulate_dispatch(config, tokens, ids, weights, expert_alignment=4)
    compact = simulate_dispatch(config, tokens, ids, weights, rows="compact", expert_alignment=4)
    for r in range(2):
        offsets = padded.layout[r].recv_expert_offsets
        assert (offsets % 4 == 0).all() and offsets[-1] == len(padded.recv_tokens[r])
        filler = padded.recv_origin[r][:, 0] < 0
        assert (padded.recv_tokens[r][filler] == 0).all()
        assert (padded.recv_weights[r][filler] == 0).all()
        to_compact = compact.layout[r].grouped_to_compact
        assert np.array_equal(to_compact < 0, filler)
        gathered = compact.recv_tokens[r][to_compact[~filler]]
        assert np.array_equal(gathered, padded.recv_tokens[r][~filler])
        assert compact.recv_weights[r].shape == (len(compact.recv_tokens[r]), 2)


def test_quantized_payload():
    tokens, ids, weights = good_inputs(hidden=256)
    tokens[0][0, :128] = 0
    config = EPConfig(**{**GOOD, "hidden": 256, "token_dtype": "float32"})
    sent = simulate_dispatch(config, tokens, ids, weights, payload="quantized")
    made = [quantize_fp8(t) for t in tokens]
    given = simulate_dispatch(
        config,
        [elements for elements, _ in made],
        ids,
        weights,
        payload="scaled",
        scales=[scales for _, scales in made],
    )
    for r in range(2):
        assert sent.recv_tokens[r].dtype == ml_dtypes.float8_e4m3fn
        assert np.array_equal(
            sent.recv_tokens[r].view(np.uint8), given.recv_tokens[r].view(np.uint8)
        )
        assert np.array_equal(sent.recv_scales[r], given.recv_scales[r])
        assert not np.isnan(sent.recv_tokens[r].astype(np.float32)).any()
        for row, (source, token, _) in enumerate(sent.recv_origin[r]):
            back = sent.recv_tokens[r][row].astype(np.float32).reshape(2, 128)
            back = (back * sent.recv_scales[r][row][:, None]).reshape(256)
            largest = np.abs(tokens[source][token]).max()
            assert np.abs(back - tokens[source][token]).max() <= largest / 16


@pytest.mark.parametrize(
    ("shape", "dtype", "text"), [((2, 100), "f4", "multiple of 128"), ((2, 128), "i8", "int64")]
)
def test_quantize_names_what_is_wrong(shape, dtype, text):
    with pytest.raises(waybill.InvalidArgument, match=text):
        quantize_fp8(np.zeros(shape, dtype))


def test_weighted_combine_and_biases():
    tokens, ids, weights = good_inputs()
    config = EPConfig(**{**GOOD, "token_dtype": "float32"})
    result = simulate_dispatch(config, tokens, ids, weights)
    bias = good_inputs()[0]
    got = result.combine(result.recv_tokens, weighted=True, biases=[bias, bias])
    for r in range(2):
        live = np.where(ids[r] < 8, weights[r], 0).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got[r], live * tokens[r] + 2 * bias[r], rtol=1e-6, atol=1e-6)


def test_strided_inputs():
    tokens, ids, weights = good_inputs()
    wide = [np.repeat(t, 2, axis=1)[:, ::2] for t in tokens]
    fortran = [np.asfortranarray(i) for i in ids]
    one = simulate_dispatch(EPConfig(**GOOD), wide, fortran, [w[:, ::-1][:, ::-1] for w in weights])
    other = simulate_dispatch(EPConfig(**GOOD), tokens, ids, weights)
    for a, b in zip(one.recv_tokens, other.recv_tokens):
        assert np.array_equal(a, b)
