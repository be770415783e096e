"""The calls of deep_ep.Buffer for many tokens, on CPU ranks and, where they are, GPUs."""

import pytest
from error_texts import NOT_TO_BE_DESTROYED

pytest.importorskip("torch")

import torch
from deep_ep_cases import (
    BYTES,
    EXPERTS,
    HIDDEN,
    MOST,
    WORLD,
    arrivals,
    everyone,
    expert_counts,
    layout_of,
    local_choices,
    on_ranks,
    settle,
    sums_of,
)

import waybill
from waybill.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_layout(torch_way, ids_dtype):
    def body(buffer, rank):
        mine = everyone(device=torch_way.device)[rank]
        tokens, nodes, experts, inside, event = buffer.get_dispatch_layout(
            mine.ids.to(ids_dtype), EXPERTS, async_finish=True
        )
        event.current_stream_wait()
        assert nodes is None and tokens.dtype == experts.dtype == torch.int32
        assert torch.equal(inside, mine.goes) and torch.equal(tokens, mine.goes.sum(0).int())
        assert experts.tolist() == [int((mine.ids == e).sum()) for e in range(EXPERTS)]

    on_ranks(torch_way, body)


@pytest.mark.parametrize("async_finish", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_dispatch_and_combine(torch_way, scaled, async_finish):
    """All that comes with choices: rows, ids, weights, counts, prefix matrix; sums and weights."""
    hidden = 256 if scaled else HIDDEN

    def body(buffer, rank):
        for seed in range(3):
            ranks = everyone(seed, hidden, device=torch_way.device)
            mine = ranks[rank]
            for one in ranks:
                one.f8 = one.x.to(torch.float8_e4m3fn)
                one.scales = one.x[:, ::128].float().abs().contiguous()
            x = (mine.f8, mine.scales.T.contiguous().T) if scaled else mine.x
            event = buffer.capture()
            got, ids, weights, counts, handle, event = buffer.dispatch(
                x, topk_idx=mine.ids, topk_weights=mine.weights, previous_event=event,
                async_finish=async_finish, allocate_on_comm_stream=async_finish,
                config=Config(24, 8, 256), expert_alignment=4, **layout_of(buffer, mine),
            )  # fmt: skip
            if async_finish:
                event.current_stream_wait()
                settle(torch_way.device)
            if scaled:
                want = arrivals(ranks, rank, "f8")
                assert torch.equal(got[0].view(torch.int8), want.view(torch.int8))
                assert torch.equal(got[1], arrivals(ranks, rank, "scales"))
            else:
                assert torch.equal(got, arrivals(ranks, rank))
            want_ids, want_weights = local_choices(ranks, rank)
            assert torch.equal(ids, want_ids) and torch.equal(weights, want_weights)
            assert counts == [-(-count // 4) * 4 for count in expert_counts(ranks, rank)]
            prefix = torch.stack([one.goes.sum(0) for one in ranks]).cumsum(0)
            assert torch.equal(handle[0], prefix.int()) and len(handle) == 6
            rows = (arrivals(ranks, rank).float() * (rank + 2)).bfloat16()
            with buffer.combine(
                rows, handle, weights, previous_event=buffer.capture(), async_finish=async_finish
            )[2]:
                pass
            sums, home, event = buffer.combine(rows, handle, topk_weights=weights)
            assert torch.equal(sums, sums_of(mine, lambda r: r + 2)) and event.event is None
            assert torch.equal(home, mine.weights.masked_fill(mine.ids < 0, 0))

    on_ranks(torch_way, body, 2**20)


def test_without_choices(torch_way):
    """Only where tokens go, and how many each expert gets; then the handle, for other rows."""

    def body(buffer, rank):
        ranks = everyone(device=torch_way.device)
        mine = ranks[rank]
        got, ids, weights, counts, handle, _ = buffer.dispatch(mine.x, **layout_of(buffer, mine))
        assert ids is None and weights is None and counts == expert_counts(ranks, rank)
        assert torch.equal(got, arrivals(ranks, rank))
        for one in ranks:
            one.x = one.x * 2
        got, *nothing, _ = buffer.dispatch(mine.x, handle=handle)
        assert torch.equal(got, arrivals(ranks, rank)) and nothing == [None] * 4
        biases = (mine.x + 1, mine.x - 3)
        sums, home, _ = buffer.combine(got, handle, bias=biases)
        assert torch.equal(sums, sums_of(mine, lambda r: 1, biases)) and home is None
        sums, _, _ = buffer.combine(got, handle, bias=biases[0])
        assert torch.equal(sums, sums_of(mine, lambda r: 1, biases[:1]))
        # Weights go home without choices, too: sums over the ranks that a token went to.
        home = buffer.combine(got, handle, torch.ones(len(got), 5, device=got.device))[1]
        assert torch.equal(home, mine.goes.sum(1, keepdim=True).float().expand(-1, 5))

    on_ranks(torch_way, body)


def test_a_handle_serves_both_payloads(torch_way):
    def body(buffer, rank):
        ranks = everyone(1, 128, device=torch_way.device)
        mine = ranks[rank]
        for one in ranks:
            one.f8, one.scales = one.x.to(torch.float8_e4m3fn), one.x[:, :1].float()
        layout = layout_of(buffer, mine)
        *_, handle, _ = buffer.dispatch((mine.f8, mine.scales), **layout)
        for _ in range(2):
            plain = buffer.dispatch(mine.x, handle=handle)[0]
            f8, scales = buffer.dispatch((mine.f8, mine.scales), handle=handle)[0]
            assert torch.equal(plain, arrivals(ranks, rank))
            want = arrivals(ranks, rank, "f8")
            assert torch.equal(f8.view(torch.int8), want.view(torch.int8))
            assert torch.equal(scales, arrivals(ranks, rank, "scales"))

    on_ranks(torch_way, body, 2**20)


@pytest.mark.parametrize("more", [0, 9])
def test_num_worst_tokens(torch_way, more):
    """The rows that came, in results of a fixed size: also more than the windows have."""

    def body(buffer, rank):
        for seed in (3, 4):
            ranks = everyone(seed, tokens=(7, 2, 4), device=torch_way.device)
            mine = ranks[rank]
            worst = WORLD * MOST + more
            got, ids, weights, counts, handle, _ = buffer.dispatch(
                mine.x, topk_idx=mine.ids, topk_weights=mine.weights, num_worst_tokens=worst,
                **layout_of(buffer, mine),
            )  # fmt: skip
            want, (want_ids, want_weights) = arrivals(ranks, rank), local_choices(ranks, rank)
            live = len(want)
            assert counts == [] and {len(got), len(ids), len(weights)} == {worst}
            assert torch.equal(got[:live], want)
            assert torch.equal(ids[:live], want_ids) and torch.equal(weights[:live], want_weights)
            assert (ids[live:] == -1).all() and (weights[live:] == 0).all()
            got[live:] = float("nan")
            sums, home, _ = buffer.combine(got, handle, weights)
            assert torch.equal(sums, sums_of(mine, lambda r: 1))
            assert torch.equal(home, mine.weights.masked_fill(mine.ids < 0, 0))

    on_ranks(torch_way, body)


def test_what_a_handle_says(torch_way):
    def body(buffer, rank):
        ranks = everyone(5, device=torch_way.device)
        mine = ranks[rank]
        *_, handle, _ = buffer.dispatch(mine.x, **layout_of(buffer, mine))
        prefix, channels, theirs, tokens, inside, heads = handle
        assert prefix.shape == (WORLD, WORLD)
        assert torch.equal(channels, mine.goes.sum(0).int()[:, None])
        assert torch.equal(theirs, torch.zeros_like(theirs)) and theirs.shape == (WORLD, 1)
        want = [one.goes[:, rank].nonzero()[:, 0] for one in ranks]
        assert torch.equal(tokens, torch.cat(want).int()) and torch.equal(inside, mine.goes)
        assert torch.equal(heads >= 0, mine.goes)
        for to in range(WORLD):
            places = heads[mine.goes[:, to], to]
            assert places.tolist() == list(range(len(places)))
        assert handle[-1] is handle[5] and handle[:1][0] is prefix
        with pytest.raises(IndexError):
            handle[6]

    on_ranks(torch_way, body)


def test_gradients_of_a_caller_are_not_recorded(torch_way):
    def body(buffer, rank):
        mine = everyone(device=torch_way.device)[rank]
        x, weights = mine.x.requires_grad_(), mine.weights.requires_grad_()
        got, _, there, _, handle, _ = buffer.dispatch(
            x, topk_idx=mine.ids, topk_weights=weights, **layout_of(buffer, mine)
        )
        assert not got.requires_grad and not there.requires_grad
        sums, home, _ = buffer.combine(got.requires_grad_(), handle, there)
        assert not sums.requires_grad and not home.requires_grad

    on_ranks(torch_way, body)


def test_default_dtype_and_device_do_not_matter():
    """DeepEP's own tests set them."""

    def one_rank(world):
        ranks = everyone()
        mine = ranks[world.rank]
        buffer = Buffer(world, BYTES)
        got, _, weights, counts, handle, _ = buffer.dispatch(
            mine.x, topk_idx=mine.ids, topk_weights=mine.weights, **layout_of(buffer, mine)
        )
        assert torch.equal(got, arrivals(ranks, world.rank))
        assert torch.equal(weights, local_choices(ranks, world.rank)[1])
        assert counts == expert_counts(ranks, world.rank)
        assert buffer.combine(got, handle, weights)[1].dtype == torch.float32

    torch.set_default_dtype(torch.bfloat16)
    try:
        waybill.run_threads(WORLD, one_rank)
    finally:
        torch.set_default_dtype(torch.float32)


def test_life_of_a_buffer():
    def one_rank(world):
        buffer = Buffer(world, BYTES)
        assert buffer.group is world and buffer.group_size == WORLD and buffer.rank == world.rank
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (BYTES, 0)
        with pytest.raises(waybill.InvalidArgument, match=NOT_TO_BE_DESTROYED):
            buffer.destroy()
        buffer = Buffer(world, BYTES, explicitly_destroy=True)
        mine = everyone()[world.rank]
        buffer.dispatch(mine.x, **layout_of(buffer, mine))
        buffer.destroy()
        buffer.destroy()
        with pytest.raises(waybill.InvalidArgument, match=f"rank {world.rank} was destroyed"):
            buffer.dispatch(mine.x, **layout_of(buffer, mine))

    waybill.run_threads(WORLD, one_rank)


def test_settings(monkeypatch):
    from waybill.integrations import deep_ep

    assert Config(24, 8, 256).num_sms == 24 and Config().get_rdma_buffer_size_hint(32, 2) == 0
    hint = Config().get_nvl_buffer_size_hint(HIDDEN * 2, WORLD)
    assert hint == 4096 * BYTES // MOST
    monkeypatch.setenv("WAYBILL_DEEP_EP_MAX_TOKENS", str(MOST))
    assert Buffer.get_dispatch_config(WORLD).get_nvl_buffer_size_hint(HIDDEN * 2, WORLD) == BYTES
    monkeypatch.setenv("WAYBILL_DEEP_EP_MAX_TOKENS", "many")
    with pytest.raises(waybill.InvalidArgument, match="'many', expected a number of tokens"):
        Config().get_nvl_buffer_size_hint(1, 1)
    monkeypatch.setattr("waybill.integrations.deep_ep.arguments._set", [])
    deep_ep.set_max_tokens(2 * MOST)
    assert Buffer.get_combine_config(2).get_nvl_buffer_size_hint(HIDDEN * 2, WORLD) == 2 * BYTES
    with pytest.raises(waybill.InvalidArgument, match="expected an even number"):
        Buffer.set_num_sms(7)
    monkeypatch.setattr(Buffer, "num_sms", 20)
    Buffer.set_num_sms(32)
    assert Buffer.get_dispatch_config(2).num_sms == 32 and Buffer.is_sm90_compiled()
    with pytest.raises(waybill.InvalidArgument, match="multiple of num_ranks = 3"):
        Buffer.get_low_latency_rdma_size_hint(4, 8, 3, 13)


def test_events():
    event = EventOverlap(EventHandle())
    calls = []
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(waybill.InvalidArgument, match="a hook already"):
        event.register_hook_after_wait(calls.clear)
    with event(release_handle=True) as same:
        assert same is event and not calls
    assert calls == [1] and event.event is None
    with pytest.raises(waybill.InvalidArgument, match="no event to wait for"):
        event.current_stream_wait()
    with EventOverlap():
        pass


def test_install():
    import sys

    from waybill.integrations import deep_ep as ours

    before = {name for name in sys.modules if name.startswith("deep_ep")}
    ours.install()
    ours.install()
    try:
        import deep_ep
        from deep_ep import Buffer as Found
        from deep_ep.buffer import Buffer as Again
        from deep_ep.utils import EventHandle as Handle
        from deep_ep.utils import EventOverlap as Overlap

        assert Found is Again is ours.Buffer and deep_ep.topk_idx_t == torch.int64
        assert Handle is EventHandle and Overlap is EventOverlap
        assert deep_ep.ElasticBuffer is ours.ElasticBuffer
        with pytest.raises(ImportError):
            from deep_ep import HybridEPBuffer  # noqa: F401
    finally:
        ours.uninstall()
    assert {name for name in sys.modules if name.startswith("deep_ep")} == before
    sys.modules["deep_ep"] = sys
    try:
        with pytest.raises(waybill.InvalidArgument, match="replace=True"):
            ours.install()
        ours.install(replace=True)
        assert sys.modules["deep_ep"].Buffer is ours.Buffer
        ours.uninstall()
        assert sys.modules["deep_ep"] is sys
    finally:
        del sys.modules["deep_ep"]
