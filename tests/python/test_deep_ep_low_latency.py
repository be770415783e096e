"""The low-latency calls of deep_ep.Buffer, on CPU ranks and, where they are, GPUs."""

import pytest
from error_texts import columns_of

pytest.importorskip("torch")

import torch
from deep_ep_cases import EXPERTS, LOCAL, TOPK, WORLD, Settled, everyone, settle

import waybill
from waybill.integrations.deep_ep import Buffer

MOST, HIDDEN = 7, 512
SLOTS = WORLD * MOST


def on_ranks(way, body):
    """body(buffer, rank) on each rank, which destroys its buffer."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, WORLD, EXPERTS)

    def one_rank(world):
        buffer = Buffer(
            world, num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=LOCAL,
            explicitly_destroy=True,
        )  # fmt: skip
        body(Settled(buffer, way.device), world.rank)
        buffer.destroy()

    way.run(WORLD, one_rank)


def expected(ranks, me):
    """For each expert of rank ``me`` [(source rank, token), ...] in order."""
    return [
        [
            (source, token)
            for source, one in enumerate(ranks)
            for token, ids in enumerate(one.ids.tolist())
            for k in ids
            if k == me * LOCAL + expert
        ]
        for expert in range(LOCAL)
    ]


def cast_back(rows, scales):
    """float32 of float8 rows [n, hidden]."""
    if scales.dtype == torch.int32:
        bits = scales.contiguous().view(torch.uint8).to(torch.int32) << 23
        scales = bits.view(torch.float32)
    return rows.float() * scales.repeat_interleave(128, dim=1)


def weighted_sums(mine, factor):
    """Of rows of which expert e has returned ``factor(e)`` times the token."""
    total = torch.zeros(mine.x.shape, dtype=torch.float32, device=mine.x.device)
    for k in range(TOPK):
        for token, expert in enumerate(mine.ids[:, k].tolist()):
            if expert >= 0:
                row = (mine.x[token].float() * factor(expert)).bfloat16().float()
                total[token] += mine.weights[token, k] * row
    return total.bfloat16()


FORMS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "rounded": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wait", ["event", "hook", "none"])
def test_dispatch_and_combine(torch_way, form, wait):
    how = {"async_finish": wait == "event", "return_recv_hook": wait == "hook"}

    def finish(event, hook):
        if wait == "event":
            event.current_stream_wait()
        elif wait == "hook":
            hook()
        else:
            assert event.event is None and hook is None
        settle(torch_way.device)

    def body(buffer, rank):
        kept = []
        for seed in range(3):
            ranks = everyone(seed, HIDDEN, device=torch_way.device)
            mine = ranks[rank]
            stats = torch.ones(LOCAL, dtype=torch.int32, device=torch_way.device)
            got, counts, handle, event, hook = buffer.low_latency_dispatch(
                mine.x, mine.ids, MOST, EXPERTS, cumulative_local_expert_recv_stats=stats,
                **FORMS[form], **how,
            )  # fmt: skip
            finish(event, hook)
            check_rows(got, counts, handle, ranks, rank, form)
            assert torch.equal(stats, counts + 1)
            rows = rows_to_return(got, counts, rank, form)
            out = torch.empty_like(mine.x)
            sums, event, hook = buffer.low_latency_combine(
                rows, mine.ids, mine.weights, handle, use_logfmt=seed == 1, out=out, **how
            )
            finish(event, hook)
            assert sums is out
            check_sums(sums, mine, form)
            kept.append((mine, rows, handle, sums.clone()))
        for mine, rows, handle, sums in kept:  # by the same handle, in another order
            buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
            again, event, hook = buffer.low_latency_combine(
                None, mine.ids, mine.weights, handle, zero_copy=True, **how
            )
            finish(event, hook)
            assert torch.equal(again, sums)

    on_ranks(torch_way, body)


def check_rows(got, counts, handle, ranks, rank, form):
    rows, scales = got if form != "bf16" else (got, None)
    assert rows.shape == (LOCAL, SLOTS, HIDDEN)
    groups = {"ue8m0": HIDDEN // 512}.get(form, HIDDEN // 128)
    if scales is not None:
        assert scales.shape == (LOCAL, SLOTS, groups)
        assert scales.stride(1) == 1  # slots side by side
    want = expected(ranks, rank)
    assert counts.tolist() == [len(places) for places in want]
    src_info, ranges, most, hidden, experts = handle
    assert (most, hidden, experts) == (MOST, HIDDEN, EXPERTS)
    for e, places in enumerate(want):
        n = len(places)
        assert src_info[e, :n].tolist() == [token for _, token in places]
        for source in range(WORLD):
            first, count = int(ranges[e, source] >> 32), int(ranges[e, source] & (2**32 - 1))
            assert [p for p in places if p[0] == source] == places[first : first + count]
        if n == 0:
            continue
        x = torch.stack([ranks[source].x[token] for source, token in places])
        if scales is None:
            assert torch.equal(rows[e, :n], x)
            continue
        back = cast_back(rows[e, :n], scales[e, :n])
        largest = x.float().view(n, -1, 128).abs().amax(-1, keepdim=True)
        error = (back - x.float()).view(n, -1, 128).abs()
        assert (error <= largest / 14).all()  # 3 bits behind the point, of the largest
        if form != "fp8":
            powers = cast_back(torch.ones_like(rows[e, :n]), scales[e, :n])
            assert (torch.frexp(powers)[0] == 0.5).all()
            assert (powers.view(n, -1, 128)[..., :1] * 448 >= largest).all()
            assert (powers.view(n, -1, 128)[..., :1] * 224 < largest.clamp(min=1e-4)).all()


def rows_to_return(got, counts, rank, form):
    """Expert e's factor times what it got; NaN where it got nothing."""
    rows = got if form == "bf16" else cast_all(*got)
    factors = torch.arange(1, LOCAL + 1, device=rows.device) + rank * LOCAL
    out = (rows.float() * factors[:, None, None]).bfloat16()
    nothing = torch.arange(SLOTS, device=rows.device)[None] >= counts[:, None]
    return out.masked_fill(nothing[..., None], float("nan"))


def cast_all(rows, scales):
    flat = cast_back(rows.reshape(-1, HIDDEN), scales.reshape(-1, scales.shape[-1]))
    return flat.view(rows.shape)


def check_sums(sums, mine, form):
    want = weighted_sums(mine, lambda expert: expert + 1)
    if form == "bf16":
        assert torch.equal(sums, want)
    else:
        error = (sums.float() - want.float()).norm()
        assert error <= 0.06 * want.float().norm()


def test_zeros_and_other_sizes(torch_way):
    """Rows of zeros in float8, other numbers of choices and tokens by the same buffer."""

    def body(buffer, rank):
        for topk, most in ((1, MOST), (5, 4), (3, 7)):
            ranks = everyone(topk, HIDDEN, topk, (4, 1, 3), torch_way.device)
            mine = ranks[rank]
            mine.x.zero_()
            for form in FORMS.values():
                got, counts, handle, *_ = buffer.low_latency_dispatch(
                    mine.x, mine.ids, most, EXPERTS, **form
                )
                rows = cast_all(*got) if isinstance(got, tuple) else got
                for e in range(LOCAL):
                    assert (rows[e, : int(counts[e])] == 0).all()
                ones = torch.ones(rows.shape, dtype=torch.bfloat16, device=rows.device)
                sums = buffer.low_latency_combine(ones, mine.ids, mine.weights, handle)[0]
                live = mine.weights.masked_fill(mine.ids < 0, 0).sum(1, keepdim=True)
                torch.testing.assert_close(sums.float(), live.expand(sums.shape), rtol=1e-2, atol=0)

    on_ranks(torch_way, body)


def test_bad_input_comes_before_communication(torch_way):
    def body(buffer, rank):
        mine = everyone(1, HIDDEN, device=torch_way.device)[rank]
        many = Buffer(buffer._layers.world, low_latency_mode=True)
        *_, handle, _, _ = buffer.low_latency_dispatch(mine.x, mine.ids, MOST, EXPERTS)
        rows = torch.zeros(LOCAL, SLOTS, HIDDEN, dtype=torch.bfloat16, device=torch_way.device)
        small = mine.x[:, :128].contiguous()
        long = torch.zeros(MOST + 1, HIDDEN, dtype=torch.bfloat16, device=torch_way.device)

        def dispatch(*args, buffer=buffer, **options):
            buffer.low_latency_dispatch(*args, **options)

        def combine(*args, buffer=buffer, **options):
            buffer.low_latency_combine(*args, **options)

        ids, weights, fit = mine.ids, mine.weights, (MOST, EXPERTS)
        half, both = rows[:, :3], {"async_finish": True, "return_recv_hook": True}
        for call, args, options, text in (
            (dispatch, (long, ids, *fit), {}, "has 8 tokens, expected at most num_max_dispatch_to"),
            (dispatch, (mine.x, ids, 99, EXPERTS), {}, "num_rdma_bytes = .* of the buffer, expect"),
            (dispatch, (mine.x, ids, MOST, 13), {}, "expected a multiple of num_ranks = 3"),
            (dispatch, (mine.x, ids, *fit), {"use_ue8m0": True}, "expected both"),
            (dispatch, (mine.x[:, :100], ids, *fit), {}, columns_of(100, 128)),
            (dispatch, (small, ids, *fit), {"round_scale": True, "use_ue8m0": True}, "128 columns"),
            (dispatch, (mine.x, ids.float(), *fit), {}, "expected int64 or int32"),
            (dispatch, (mine.x, long.long(), *fit), {}, f"topk_idx of rank {rank} is"),
            (dispatch, (mine.x, ids, *fit), both, "expected one of them"),
            (dispatch, (mine.x, ids, *fit), {"buffer": many}, "num_rdma_bytes = 0 of the buffer"),
            (combine, (rows, ids, weights, handle), {"buffer": many}, "handle of rank . is of ano"),
            (combine, (rows, ids, weights, ()), {}, "handle of rank . is of another buffer, or no"),
            (combine, (half, ids, weights, handle), {}, f"x of rank {rank} is .4, 3, 512."),
            (combine, (rows, ids, weights.double(), handle), {}, "topk_weights of rank"),
            (combine, (rows, long.long(), weights, handle), {}, "topk_idx of rank"),
            (combine, (rows, ids, weights, handle), {"out": rows}, "out of rank"),
            (combine, (None, ids, weights, handle), {"zero_copy": True}, "nobody asked for"),
        ):
            with pytest.raises(waybill.InvalidArgument, match=text):
                call(*args, **options)
        stats = torch.zeros(WORLD, WORLD, dtype=torch.int64)
        for call in (
            lambda: dispatch(mine.x, ids, *fit, dispatch_wait_recv_cost_stats=stats),
            lambda: combine(rows, ids, weights, handle, combine_wait_recv_cost_stats=stats),
        ):
            with pytest.raises(waybill.Unsupported, match="is not measured"):
                call()
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        if torch_way.device == "cpu" and len(ids):
            wrong = ids.clone()
            wrong[2, 0] = EXPERTS
            text = rf"topk_idx\[2, 0\] of rank {rank} is 12, expected 0..11"
            with pytest.raises(waybill.InvalidArgument, match=text):
                dispatch(mine.x, wrong, *fit)
        buffer.low_latency_combine(rows, ids, weights, handle)

    on_ranks(torch_way, body)
