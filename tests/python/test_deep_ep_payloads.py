"""The formats of rows in deep_ep's calls against an independent model, on CPU ranks and GPUs."""

import numpy as np
import pytest
import torch
from deep_ep_cases import (
    EXPERTS,
    LOCAL,
    MOST,
    WORLD,
    Settled,
    arrivals,
    everyone,
    layout_of,
    on_ranks,
    settle,
    sums_of,
)
from payload_models import MODELS

import waybill
from waybill.integrations.deep_ep import Buffer, ElasticBuffer

HIDDEN = 512

# How a caller has rows: the format, the dtype of elements, and the dtype of scales.
FORMS = {
    "float8": ("float8", torch.float8_e4m3fn, torch.float32),
    "ue8m0": ("float8_ue8m0", torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "ue8m0_packed": ("float8_ue8m0", torch.float8_e4m3fn, torch.int32),
    "mxfp8": ("mxfp8", torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "mxfp8_packed": ("mxfp8", torch.float8_e4m3fn, torch.int32),
    "mxfp8_e5m2_packed": ("mxfp8_e5m2", torch.float8_e5m2, torch.int32),
}


def modelled(x, form):
    """(rows, scales) of the form, by the model."""
    name, element, scale = FORMS[form]
    with_one = torch.nn.functional.pad(x.float().cpu(), (0, 0, 0, 1))  # for a rank without tokens
    rows, scales = (
        torch.from_numpy(np.ascontiguousarray(part)).view(dtype)[: len(x)].to(x.device)
        for part, dtype in zip(MODELS[name](with_one.numpy()), (element, scale))
    )
    return rows, scales


def ranks_in(form, device, seed=4):
    ranks = everyone(seed, HIDDEN, device=device)
    for one in ranks:
        one.rows, one.scales = modelled(one.x, form)
    return ranks


def same(got, want):
    return got.dtype == want.dtype and torch.equal(
        got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_each_format(torch_way, form):
    def body(buffer, rank):
        ranks = ranks_in(form, torch_way.device)
        mine = ranks[rank]
        for scales in (mine.scales, mine.scales.T.contiguous().T):  # also column by column
            got, *_, handle, _ = buffer.dispatch(
                (mine.rows, scales), topk_idx=mine.ids, topk_weights=mine.weights,
                **layout_of(buffer, mine),
            )  # fmt: skip
            settle(torch_way.device)
            assert same(got[0], arrivals(ranks, rank, "rows"))
            assert same(got[1], arrivals(ranks, rank, "scales"))
            plain = buffer.dispatch(mine.x, handle=handle)[0]
            sums = buffer.combine(plain, handle)[0]
            assert torch.equal(sums, sums_of(mine, lambda r: 1))

    on_ranks(torch_way, body, 2**20)


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("form", ["float8", "ue8m0_packed", "mxfp8"])
def test_elastic_rows_of_each_format(torch_way, form, expands):
    def one_rank(world):
        buffer = ElasticBuffer(
            world, num_max_tokens_per_rank=MOST, hidden=HIDDEN, explicitly_destroy=True
        )
        body(Settled(buffer, torch_way.device), world.rank)
        buffer.destroy()

    def body(buffer, rank):
        ranks = ranks_in(form, torch_way.device)
        mine, options = ranks[rank], {"do_expand": expands}
        x = (mine.rows, mine.scales)
        (rows, scales), _, _, handle, _ = buffer.dispatch(
            x, mine.ids, num_experts=EXPERTS, **options
        )
        source = handle.recv_src_metadata
        of_all = [
            torch.cat([torch.nn.functional.pad(bytes_of(part), (0, 0, 0, MOST - len(part)))
                       for part in parts])
            for parts in ([one.rows for one in ranks], [one.scales for one in ranks])
        ]  # fmt: skip
        for number, *places in source.tolist():
            for row in places[1:] if expands else places[:1]:
                if row >= 0:
                    for part, want in zip((rows, scales), of_all):
                        assert torch.equal(bytes_of(part)[row], want[number])
        assert len(source) == len(arrivals(ranks, rank))
        columns, again = (
            buffer.dispatch(x, **how, use_tma_aligned_col_major_sf=True, **options)[0][1]
            for how in ({"topk_idx": mine.ids, "num_experts": EXPERTS}, {"handle": handle})
        )
        step = 16 // scales.itemsize
        for one in (columns, again):
            live = source[:, 2:][source[:, 2:] >= 0] if expands else source[:, 1]
            assert one.stride() == (1, -(-len(rows) // step) * step) and one.dtype == scales.dtype
            assert same(one[live.long()], scales[live.long()])

    torch_way.run(WORLD, one_rank)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("form", ["float8", "rounded", "ue8m0"])
def test_low_latency_quantises_as_the_model(torch_way, form):
    """Bit for bit, rows of zeros, of small and of large numbers among them."""
    options = {"round_scale": form != "float8", "use_ue8m0": form == "ue8m0"}
    model = MODELS["float8" if form == "float8" else "float8_ue8m0"]

    def one_rank(world):
        size = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, WORLD, EXPERTS)
        buffer = Buffer(world, 0, size, low_latency_mode=True, explicitly_destroy=True)
        body(Settled(buffer, torch_way.device), world.rank)
        buffer.destroy()

    def body(buffer, rank):
        ranks = everyone(2, HIDDEN, device=torch_way.device)
        for one in ranks:
            for token, factor in enumerate((0.0, 1e-6, 448.0, 3e30)[: len(one.x)]):
                one.x[token] *= factor
        mine = ranks[rank]
        (rows, scales), counts, handle, *_ = buffer.low_latency_dispatch(
            mine.x, mine.ids, MOST, EXPERTS, **options
        )
        settle(torch_way.device)
        assert scales.shape[2] == HIDDEN // (512 if form == "ue8m0" else 128)
        assert scales.stride(1) == 1  # slots side by side
        src_info, ranges = handle[0], handle[1]
        for expert in range(LOCAL):
            for source in range(WORLD):
                first, count = int(ranges[expert, source] >> 32), int(ranges[expert, source] & 255)
                for slot in range(first, first + count):
                    x = ranks[source].x[src_info[expert, slot]].float().cpu().numpy()
                    codes, wanted = model(x[None])
                    if form == "rounded":
                        wanted = (wanted.astype(np.int32) << 23).view(np.float32)
                    assert bytes_of(rows[expert, slot]).cpu().numpy().tobytes() == codes.tobytes()
                    got = scales[expert, slot].contiguous().view(torch.uint8).cpu().numpy()
                    assert got.tobytes() == wanted.tobytes()
        assert counts.sum() == sum(int(((one.ids // LOCAL) == rank).sum()) for one in ranks)

    torch_way.run(WORLD, one_rank)


def test_refuses_by_name(torch_way):
    def body(buffer, rank):
        ranks = ranks_in("mxfp8_packed", torch_way.device)
        mine, place = ranks[rank], f"Buffer.dispatch: scales of rank {rank} is"
        n, good = len(mine.x), {**layout_of(buffer, mine)}
        for x, scales, text in (
            (
                mine.rows,
                mine.scales[:, :3],
                rf"{place} \({n}, 3\) of torch.int32, expected",
            ),
            (mine.rows, mine.scales.float()[:, :2], rf"{place} .* or \({n}, 4\) of torch.int32"),
            (mine.rows, 1.0, f"{place} a float"),
            (
                mine.rows[:, :100],
                mine.scales,
                "x of rank . has 100 columns, expected a",
            ),
            (mine.x, mine.scales, "expected torch.float8_e4m3fn or torch.float8_e5m2 "),
            (mine.rows.view(torch.int8), mine.scales, "x of rank . has dtype torch.int8, "),
            (mine.rows, None, "has dtype torch.float8_e4m3fn, expected torch.bfloat16 without"),
        ):
            with pytest.raises(waybill.InvalidArgument, match=text):
                buffer.dispatch((x, scales) if scales is not None else x, **good)
        got = buffer.dispatch((mine.rows, mine.scales), **good)[0]  # the buffer is as it was
        assert same(got[0], arrivals(ranks, rank, "rows"))

    on_ranks(torch_way, body, 2**20)
