"""Formats of rows against an independent model, in layers and alone."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from payload_models import MODELS

import waybill
import waybill.torch
from waybill.moe import (
    EPConfig,
    predict,
    quantize_rows,
    simulate_dispatch,
    summarize,
    tile_scales,
)
from waybill.torch.moe import EPAll2AllLayer

HIDDEN, TOPK, EXPERTS, MOST, WORLD = 256, 2, 4, 6, 2
FORMATS = ("float8", "float8_ue8m0", "mxfp8", "mxfp8_e5m2", "nvfp4")
SOURCES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def odd_rows(dtype):
    """Rows with everything that a float can be."""
    random = np.random.default_rng(7)
    rows = random.standard_normal((40, HIDDEN)).astype(np.float32)
    rows[1] *= 2.0 ** random.integers(-140, 120, HIDDEN).astype(np.float32)
    rows[2, 5], rows[2, 70] = np.nan, np.inf
    rows[3, 200] = -np.inf
    rows[4] = 0
    rows[5, ::2] = -0.0
    rows[6] = np.float32(1e-45)  # subnormals alone
    rows[7] = np.float32(1e-39) * random.integers(-9, 10, HIDDEN)
    rows[8] = 3e38 * np.sign(rows[8])
    rows[9], rows[9, 0] = 0, 448
    rows[10], rows[10, 0] = 0, np.nextafter(np.float32(448), np.float32(449))
    rows[11], rows[11, 0] = 0, 1.999
    rows[12] = np.nan
    rows[13, 16:32] *= np.float32(1e-9)  # a group that is nothing next to the others
    steps = np.linspace(-6, 6, HIDDEN // 2, dtype=np.float32)
    rows[14:20, ::2] = steps * 2.0 ** random.integers(-3, 3, (6, 1))
    rows[20] = random.integers(-12, 13, HIDDEN) / np.float32(2)  # ties
    rows[21] = np.where(np.arange(HIDDEN) % 16 == 0, 6, rows[20] / 2)
    rows[22] = np.where(np.arange(HIDDEN) % 32 == 0, 448, random.integers(0, 449, HIDDEN) / 8)
    with np.errstate(over="ignore"):
        return rows.astype(SOURCES[dtype])


def codes(array):
    bits = np.ascontiguousarray(array).view(np.uint8)
    return bits if bits.ndim == 2 else bits.reshape(len(array), -1)


def same(got, wanted):
    """Bits, and all NaN alike."""
    if isinstance(wanted, tuple):
        return all(same(g, w) for g, w in zip(got, wanted))
    got = np.asarray(got)
    if wanted.dtype == np.float32:
        return np.array_equal(got, wanted, equal_nan=True)
    return np.array_equal(codes(got), codes(wanted))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", FORMATS)
def test_quantises_as_the_model(name, source):
    rows = odd_rows(source)
    elements, scales = quantize_rows(rows, name)
    wanted, wanted_scales = MODELS[name](rows)
    for row in range(len(rows)):
        assert np.array_equal(codes(elements)[row], wanted[row]), row
    assert same(scales, wanted_scales)


def test_dtypes_and_shapes_of_what_arrives():
    rows = np.ones((3, HIDDEN), np.float32)
    elements, scales = quantize_rows(rows, "mxfp8_e5m2")
    assert elements.dtype == ml_dtypes.float8_e5m2 and elements.shape == (3, HIDDEN)
    assert scales.dtype == ml_dtypes.float8_e8m0fnu and scales.shape == (3, HIDDEN // 32)
    elements, (groups, of_rows) = quantize_rows(rows, "nvfp4")
    assert elements.dtype == np.uint8 and elements.shape == (3, HIDDEN // 2)
    assert groups.dtype == ml_dtypes.float8_e4m3fn and groups.shape == (3, HIDDEN // 16)
    assert of_rows.dtype == np.float32 and of_rows.shape == (3,)


def inputs(seed=0):
    random = np.random.default_rng(seed)
    tokens = [random.standard_normal((n, HIDDEN)).astype(np.float32) for n in (5, 3)]
    ids = [random.integers(0, EXPERTS + 1, (len(t), TOPK)) for t in tokens]
    return tokens, ids


def config(**options):
    sizes = (MOST, HIDDEN, TOPK, EXPERTS, 0, WORLD, WORLD)
    return EPConfig(*sizes, **{"token_dtype": "float32", **options})


def on_ranks(body):
    return waybill.torch.run_threads(WORLD, body)


def layer_of(world, payload, face=EPAll2AllLayer, **options):
    return face(
        world, MOST, options.pop("hidden", HIDDEN), TOPK, world.rank, EXPERTS, WORLD, WORLD,
        "float32", payload=payload, **options,
    )  # fmt: skip


@pytest.mark.parametrize("face", [EPAll2AllLayer, waybill.EPAll2AllLayer])
@pytest.mark.parametrize("name", FORMATS)
def test_given_is_quantised_on_the_way(name, face):
    """What a layer sends is what the simulation sends, and what a caller quantised himself."""
    tokens, ids = inputs()
    there = simulate_dispatch(config(), tokens, ids, payload=name)
    wrap = torch.from_numpy if face is EPAll2AllLayer else np.asarray

    def body(world):
        rank = world.rank
        layer, given = layer_of(world, name, face), layer_of(world, f"scaled_{name}", face)
        rows, _, layout = layer.dispatch(wrap(tokens[rank]), wrap(ids[rank]))
        # What has arrived may be sent on as it is.
        elements, scales = quantize_rows(tokens[rank], name)
        if face is EPAll2AllLayer:
            element_kind, scale_kind = rows.dtype, layout.recv_scales
            kinds = scale_kind if isinstance(scale_kind, tuple) else (scale_kind,)
            parts = scales if isinstance(scales, tuple) else (scales,)
            parts = tuple(
                torch.from_numpy(np.ascontiguousarray(part).view(np.int8)).view(kind.dtype)
                .reshape(part.shape) for part, kind in zip(parts, kinds)
            )  # fmt: skip
            scales = parts if isinstance(scales, tuple) else parts[0]
            elements = torch.from_numpy(np.asarray(elements).view(np.int8)).view(element_kind)
        again, _, other = given.dispatch(elements, wrap(ids[rank]), scales=scales)
        found = []
        for of_rows, of_scales in ((rows, layout.recv_scales), (again, other.recv_scales)):
            one = [of_rows, *(of_scales if isinstance(of_scales, tuple) else (of_scales,))]
            if face is EPAll2AllLayer:
                one = [part.contiguous().view(torch.int8).numpy() for part in one]
            found.append([codes(part) for part in one])
        sums = layer.combine(wrap(np.ones((len(rows), HIDDEN), np.float32)), layout)
        assert sums.shape == tokens[rank].shape
        for one in (layer, given):
            one.finalize()
        return found

    for rank, found in enumerate(on_ranks(body)):
        scales = there.recv_scales[rank]
        parts = scales if isinstance(scales, tuple) else (scales,)
        for one in found:
            for have, want in zip(one, (there.recv_tokens[rank], *parts)):
                assert have.tobytes() == codes(want).tobytes()


def test_bytes_travel_as_they_are():
    random = np.random.default_rng(3)
    _, ids = inputs()
    rows = [torch.from_numpy(random.integers(0, 99, (len(i), 26)).astype(np.int32)) for i in ids]
    scales = [torch.from_numpy(random.integers(0, 99, (len(i), 6)).astype(np.int16)) for i in ids]
    there = simulate_dispatch(
        config(), [r.numpy() for r in rows], ids, payload="bytes(104, 12)",
        scales=[s.numpy() for s in scales],
    )  # fmt: skip

    def body(world):
        rank = world.rank
        layer = layer_of(world, "bytes(104, 12)")
        got, _, layout = layer.dispatch(
            rows[rank], torch.from_numpy(ids[rank]), scales=scales[rank]
        )
        assert got.dtype == torch.uint8 and got.shape[1] == 104
        assert np.array_equal(got.numpy(), there.recv_tokens[rank])
        assert np.array_equal(layout.recv_scales.numpy(), there.recv_scales[rank])
        for row, (source, token, _) in enumerate(there.recv_origin[rank]):
            assert torch.equal(got.view(torch.int32)[row], rows[source][token])
            assert torch.equal(layout.recv_scales.view(torch.int16)[row], scales[source][token])
        with pytest.raises(waybill.InvalidArgument, match=r"bytes\(104, 12\).* has no combine"):
            layer.combine(torch.ones(len(got), HIDDEN), layout)
        layer.finalize()

    on_ranks(body)
    outputs = [np.ones((len(r), HIDDEN), np.float32) for r in there.recv_tokens]
    with pytest.raises(waybill.InvalidArgument, match="has no combine"):
        there.combine(outputs)


def test_one_scale_for_all_tokens():
    _, ids = inputs()

    def body(world):
        layer, rank = layer_of(world, "scaled_nvfp4"), world.rank
        elements = torch.zeros(len(ids[rank]), HIDDEN // 2, dtype=torch.uint8)
        groups = torch.ones(len(ids[rank]), HIDDEN // 16).to(torch.float8_e4m3fn)
        scales = (groups, torch.tensor([2.5]))
        rows, _, layout = layer.dispatch(elements, torch.from_numpy(ids[rank]), scales=scales)
        of_groups, of_rows = layout.recv_scales
        assert of_rows.eq(2.5).all() and of_groups.float().eq(1).all()
        assert len(of_rows) == len(rows) == len(of_groups)
        layer.finalize()

    on_ranks(body)


@pytest.mark.parametrize(
    ("payload", "hidden", "text"),
    [
        ("mxfp8", 80, 'hidden = 80, expected a multiple of 32 for payload = "mxfp8"'),
        ("scaled_nvfp4", 40, "hidden = 40, expected a multiple of 16"),
        ("float8_ue8m0", 192, "hidden = 192, expected a multiple of 128"),
        ("mxfp4", 256, 'payload = "mxfp4", expected "plain", "float8", '),
        ("bytes(0, 4)", 256, "bytes of a row"),
        ("scaled_plain", 256, "expected"),
    ],
)
def test_refuses_by_name(payload, hidden, text):
    tokens, ids = inputs()
    wrong = EPConfig(MOST, hidden, TOPK, EXPERTS, 0, WORLD, WORLD)
    with pytest.raises(waybill.InvalidArgument, match=text.replace("(", r"\(")):
        simulate_dispatch(wrong, [t[:, :hidden] for t in tokens], ids, payload=payload)

    def body(world):
        with pytest.raises(waybill.InvalidArgument, match=text.replace("(", r"\(")):
            layer_of(world, payload, hidden=hidden)

    on_ranks(body)


def test_layers_refuse_other_tensors():
    tokens, ids = inputs()

    def body(world):
        layer, of_rank = layer_of(world, "scaled_mxfp8"), torch.from_numpy(ids[world.rank])
        n = len(of_rank)
        good = torch.zeros(n, HIDDEN, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(n, HIDDEN // 32, dtype=torch.uint8)
        cases = (
            (good.to(torch.bfloat16), scales, "dispatch: input is torch.bfloat16, expected"),
            (good, scales[:, 1:], "dispatch: scales has shape"),
            (good, scales.float(), "dispatch: scales is torch.float32, expected torch.float8_e8m0"),
            (good, None, "dispatch: scales are not given, expected"),
            (good[:, 1:], scales, "dispatch: input has shape"),
        )
        for rows, of_rows, text in cases:
            with pytest.raises(waybill.InvalidArgument, match=text):
                layer.dispatch(rows, of_rank, scales=of_rows)
        other = layer_of(world, "mxfp8")
        with pytest.raises(waybill.InvalidArgument, match="scales are given, expected none"):
            other.dispatch(torch.from_numpy(tokens[world.rank]), of_rank, scales=scales)
        learns = torch.from_numpy(tokens[world.rank]).requires_grad_()
        with pytest.raises(waybill.InvalidArgument, match="payload = 'mxfp8' has none"):
            other.dispatch(learns, of_rank)
        layer.finalize()
        other.finalize()

    on_ranks(body)


def test_ranks_agree_on_the_format():
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match="payload"):
            layer_of(world, ("mxfp8", "mxfp8_e5m2")[world.rank])

    on_ranks(body)


BYTES = {
    "plain": 1024, "float8": 256 + 8, "float8_ue8m0": 256 + 2, "mxfp8": 256 + 8,
    "scaled_mxfp8_e5m2": 256 + 8, "nvfp4": 128 + 32, "bytes(100, 12)": 112,
}  # fmt: skip


@pytest.mark.parametrize("payload", BYTES)
def test_predictions_know_the_bytes(payload):
    _, ids = inputs()
    assert summarize(config(), ids, payload=payload).row_bytes == BYTES[payload]
    bytes_out = {
        call.call: int(call.nvlink_out.sum()) for call in predict(config(), ids, payload=payload)
    }
    plain = {call.call: int(call.nvlink_out.sum()) for call in predict(config(), ids)}
    assert bytes_out["cached_dispatch"] * 1024 == plain["cached_dispatch"] * BYTES[payload]


def model_of_tiles(scales):
    """Byte by byte: cuBLAS, 1D block scaling factors layout."""
    scales = codes(scales)
    tall, wide = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    out = np.zeros((tall * wide, 512), np.uint8)
    for (row, column), code in np.ndenumerate(scales):
        tile = row // 128 * wide + column // 4
        out[tile, row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = code
    return out.reshape(tall * 128, wide * 4)


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (130, 5), (1, 1), (0, 4), (0, 0), (3, 224)])
def test_tiles_of_scales(torch_way, shape):
    random = np.random.default_rng(5)
    scales = random.integers(0, 256, shape).astype(np.uint8)
    want = model_of_tiles(scales)
    on_device = torch.from_numpy(scales).to(torch_way.device)
    for dtype, torch_dtype in (
        (np.uint8, torch.uint8),
        (ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    ):
        got = tile_scales(scales.view(dtype))
        assert got.dtype == dtype and np.array_equal(codes(got), want)
        got = waybill.torch.moe.tile_scales(on_device.view(torch_dtype))
        assert got.dtype == torch_dtype
        assert np.array_equal(got.view(torch.uint8).cpu().numpy(), want)
    wider = np.zeros((shape[0], shape[1] + 3), np.uint8)
    wider[:, : shape[1]] = scales  # columns of a wider table
    assert np.array_equal(codes(tile_scales(wider[:, : shape[1]])), want)
    of_wider = torch.nn.functional.pad(on_device, (0, 3))[:, : shape[1]]
    for view in (of_wider, on_device.T.contiguous().T):
        assert np.array_equal(waybill.torch.moe.tile_scales(view).cpu().numpy(), want)


@pytest.mark.parametrize("face", [EPAll2AllLayer, waybill.EPAll2AllLayer])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "scaled_mxfp8_e5m2"])
@pytest.mark.parametrize("fixed", [None, 1.0])
def test_scales_arrive_in_tiles(name, face, fixed):
    """Those that arrive by row, at the same rows of each expert; also of a rank without tokens."""
    tokens, ids = inputs()
    tokens[1], ids[1] = tokens[1][:0], ids[1][:0]
    wrap = torch.from_numpy if face is EPAll2AllLayer else np.asarray
    tile = waybill.torch.moe.tile_scales if face is EPAll2AllLayer else tile_scales
    format_name = name.removeprefix("scaled_")

    def body(world):
        rank, options = world.rank, {"expert_alignment": 128, "fixed_rows": fixed}
        given, scales = wrap(tokens[rank]), None
        if name != format_name:
            given, scales = (wrap(codes(part)) for part in quantize_rows(tokens[rank], format_name))
        found = []
        for layout in ("rows", "128x4"):
            layer = layer_of(world, name, face, scale_layout=layout, **options)
            assert layer.scale_layout == layout
            rows, _, made = layer.dispatch(given, wrap(ids[rank]), scales=scales)
            live = int(made.recv_expert_offsets[-1])
            found.append((layer, rows, made.recv_scales, made, live))
        (by_row, _, scales, made, live), (in_tiles, rows, tiles, _, _) = found
        assert "scale_layout=128x4" in repr(in_tiles) and "scale_layout" not in repr(by_row)
        if isinstance(scales, tuple):
            assert same_bytes(scales[1][:live], tiles[1][:live])
            scales, tiles = scales[0], tiles[0]
        assert live % 128 == 0 and tiles.shape[0] % 128 == 0 and tiles.shape[0] >= len(rows)
        assert tiles.dtype == scales.dtype and tiles.shape[1] == -(-scales.shape[1] // 4) * 4
        assert np.array_equal(as_codes(tiles[:live]), model_of_tiles(as_codes(scales[:live])))
        offsets = [int(first) for first in made.recv_expert_offsets]
        for first, end in itertools.pairwise(offsets):  # a slice is what one expert's GEMM reads
            assert same_bytes(tiles[first:end], tile(scales[first:end]))
        for layer, *_ in found:
            layer.finalize()

    on_ranks(body)


def as_codes(array):
    return array.view(torch.uint8).numpy() if isinstance(array, torch.Tensor) else codes(array)


def same_bytes(a, b):
    return as_codes(a).tobytes() == as_codes(b).tobytes()


@pytest.mark.parametrize(
    ("payload", "options", "text"),
    [
        ("mxfp8", {}, "expert_alignment = 1, expected a multiple of 128 for scale_layout = "),
        ("mxfp8", {"expert_alignment": 192}, "expert_alignment = 192, expected a multiple of 128"),
        ("mxfp8", {"rows": "compact", "expert_alignment": 128}, 'rows = "compact", expected "gro'),
        ("float8", {"expert_alignment": 128}, 'payload = "float8", expected one whose scales are'),
        ("plain", {"expert_alignment": 128}, 'payload = "plain", expected one whose scales are'),
        ("bytes(8, 4)", {"expert_alignment": 128}, r'payload = "bytes\(8, 4\)", expected one who'),
        ("mxfp8", {"scale_layout": "4x128"}, 'scale_layout = "4x128", expected "rows" or "128x4"'),
    ],
)
def test_tiles_are_refused_by_name(payload, options, text):
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match=text):
            layer_of(world, payload, **{"scale_layout": "128x4", **options})

    on_ranks(body)
    for wrong in (np.zeros(4, np.uint8), np.zeros((4, 4), np.float32)):
        for function in (tile_scales, lambda x: waybill.torch.moe.tile_scales(torch.from_numpy(x))):
            with pytest.raises(waybill.InvalidArgument, match="tile_scales: scales has shape"):
                function(wrong)
