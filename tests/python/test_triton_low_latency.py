"""EPLowLatencyAllToAllLayer: the program of Triton-distributed's page, on CPU ranks and GPUs."""

import inspect

import pytest

pytest.importorskip("torch")

import torch
from deep_ep_cases import EXPERTS, LOCAL, TOPK, WORLD, everyone
from test_deep_ep_low_latency import cast_back, expected, weighted_sums

import waybill
from waybill.torch.compat import EPLowLatencyAllToAllLayer

MOST, HIDDEN = 7, 256


def made(world, **changed):
    options = {
        "max_m": MOST, "hidden": HIDDEN, "topk": TOPK, "online_quant_fp8": True,
        "rank": world.rank, "num_experts": EXPERTS, "local_world_size": WORLD, "world_size": WORLD,
    }  # fmt: skip
    return EPLowLatencyAllToAllLayer(**{**options, **changed}, ep_group=world)


def test_the_signature_is_the_original_one():
    names = list(inspect.signature(EPLowLatencyAllToAllLayer).parameters)
    assert names == [
        "max_m", "hidden", "topk", "online_quant_fp8", "rank", "num_experts", "local_world_size",
        "world_size", "fp8_gsize", "dtype", "enable_profiling", "ep_group",
    ]  # fmt: skip
    of = {name: list(inspect.signature(getattr(EPLowLatencyAllToAllLayer, name)).parameters)[1:]
          for name in ("dispatch", "combine")}  # fmt: skip
    assert of["dispatch"] == ["send_tokens", "send_scales", "topk_indices"]
    assert of["combine"] == [
        "send_tokens", "topk_indices", "topk_weights", "dispatch_meta", "zero_copy",
    ]  # fmt: skip


@pytest.mark.parametrize("quantized", [True, False])
def test_the_pages_program(torch_way, quantized):
    def body(world):
        ranks = everyone(3, hidden=HIDDEN, device=torch_way.device)
        mine = ranks[world.rank]
        layer = made(world, online_quant_fp8=quantized)
        for _ in range(3):
            recv_token, recv_scale, counts, meta = layer.dispatch(
                send_tokens=mine.x, send_scales=None, topk_indices=mine.ids
            )
            assert recv_token.shape == (LOCAL, WORLD * MOST, HIDDEN)
            wanted = expected(ranks, world.rank)
            assert counts.tolist() == [len(rows) for rows in wanted]
            output = torch.zeros(recv_token.shape, dtype=torch.bfloat16, device=mine.x.device)
            for expert, rows in enumerate(wanted):
                got = recv_token[expert, : len(rows)]
                indices = meta.recv_token_source_indices[expert]
                assert indices.tolist()[: len(rows)] == [token for _, token in rows]
                assert (indices[len(rows) :] == -1).all()
                for source in range(WORLD):
                    packed = int(meta.recv_token_source_count_and_start[expert, source])
                    assert packed & 0xFFFFFFFF == sum(one == source for one, _ in rows)
                sent = [ranks[source].x[token] for source, token in rows]
                if rows and quantized:
                    assert recv_scale.shape == (LOCAL, WORLD * MOST, HIDDEN // 128)
                    wide = cast_back(got, recv_scale[expert, : len(rows)])
                    torch.testing.assert_close(
                        wide, torch.stack(sent).float(), rtol=0.07, atol=0.01
                    )
                elif rows:
                    assert recv_scale is None and torch.equal(got, torch.stack(sent))
                if rows:
                    output[expert, : len(rows)] = (
                        torch.stack(sent).float() * (expert + 1)
                    ).bfloat16()
            combined = layer.combine(output, mine.ids, mine.weights, meta)
            assert torch.equal(combined, weighted_sums(mine, lambda expert: expert % LOCAL + 1))
        layer.dump_dispatch_trace()
        layer.finalize()
        layer.finalize()

    torch_way.run(WORLD, body)


def test_what_it_refuses():
    def body(world):
        for text, kind, changed in (
            ("fp8_gsize = 64, expected 128", waybill.Unsupported, {"fp8_gsize": 64}),
            ("expected torch.bfloat16", waybill.Unsupported, {"dtype": torch.float16}),
            ("enable_profiling = True", waybill.Unsupported, {"enable_profiling": True}),
            ("world_size = 4, expected 3", waybill.InvalidArgument, {"world_size": 4}),
            ("num_experts = 7", waybill.InvalidArgument, {"num_experts": 7}),
        ):
            with pytest.raises(kind, match=text):
                made(world, **changed)
        layer = made(world)
        mine = everyone(1, hidden=HIDDEN)[world.rank]
        with pytest.raises(waybill.Unsupported, match="send_scales is given"):
            layer.dispatch(mine.x, mine.x, mine.ids)
        with pytest.raises(waybill.InvalidArgument, match="expected at most"):
            layer.dispatch(mine.x.new_zeros(MOST + 1, HIDDEN), None, mine.ids)
        tokens, _, _, meta = layer.dispatch(mine.x, None, mine.ids)
        rows = tokens.new_zeros(tokens.shape, dtype=torch.bfloat16)
        with pytest.raises(waybill.InvalidArgument, match="dispatch_meta is a tuple"):
            layer.combine(rows, mine.ids, mine.weights, (1, 2))
        layer.combine(rows, mine.ids, mine.weights, meta, zero_copy=True)
        layer.finalize()

    waybill.torch.run_threads(WORLD, body)
