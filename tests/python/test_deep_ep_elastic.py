"""deep_ep.ElasticBuffer: dispatch and combine of experts, on CPU ranks and GPUs."""

import pytest
from error_texts import NOT_TO_BE_DESTROYED

pytest.importorskip("torch")

import torch
from deep_ep_cases import (
    EXPERTS,
    LOCAL,
    MOST,
    TOPK,
    WORLD,
    Settled,
    arrivals,
    everyone,
    expert_counts,
    local_choices,
    settle,
)

import waybill
from waybill.integrations.deep_ep import ElasticBuffer, EPHandle

HIDDEN = 128


def on_ranks(way, body):
    """body(buffer, rank) on each rank."""

    def one_rank(world):
        buffer = ElasticBuffer(
            world, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK,
            deterministic=True, explicitly_destroy=True,
        )  # fmt: skip
        body(Settled(buffer, way.device), world.rank)
        buffer.barrier()
        buffer.destroy()

    way.run(WORLD, one_rank)


def with_float8(ranks):
    for one in ranks:
        one.f8, one.scales = one.x.to(torch.float8_e4m3fn), one.x[:, :1].float().contiguous()
    return ranks


def choices(ranks, me):
    """For each expert of rank ``me`` [(source, token, k), ...] in order."""
    return [
        [
            (source, token, k)
            for source, one in enumerate(ranks)
            for token, ids in enumerate(one.ids.tolist())
            for k, expert in enumerate(ids)
            if expert == me * LOCAL + local
        ]
        for local in range(LOCAL)
    ]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_compact_rows(torch_way, scaled, sync):
    def body(buffer, rank):
        for seed in range(2):
            ranks = with_float8(everyone(seed, HIDDEN, device=torch_way.device))
            mine = ranks[rank]
            stats = torch.ones(LOCAL, dtype=torch.int32, device=torch_way.device)
            x = (mine.f8, mine.scales) if scaled else mine.x
            got, ids, weights, handle, event = buffer.dispatch(
                x, mine.ids, mine.weights, stats, num_experts=EXPERTS, do_cpu_sync=sync,
                expert_alignment=4, previous_event=buffer.capture(),
                async_with_compute_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            settle(torch_way.device)
            assert isinstance(handle, EPHandle) and not handle.do_expand
            live = len(arrivals(ranks, rank))
            want_ids, want_weights = local_choices(ranks, rank)
            counts = expert_counts(ranks, rank)
            aligned = [-(-count // 4) * 4 for count in counts]
            check_rows(got, ranks, rank, scaled, live)
            assert len(ids) == (live if sync else WORLD * MOST) == handle.num_recv_tokens
            assert torch.equal(ids[:live], want_ids) and (ids[live:] == -1).all()
            assert torch.equal(weights[:live], want_weights)
            assert handle.num_recv_tokens_per_expert_list == (aligned if sync else [])
            tokens = torch.tensor([int(one.goes[:, rank].sum()) for one in ranks]).cumsum(0)
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == tokens.tolist()
            ends = torch.tensor(aligned).cumsum(0).tolist()
            assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
            assert (stats - 1).tolist() == counts
            metadata = handle.recv_src_metadata
            assert metadata[:, 0].tolist() == sources(ranks, rank)
            assert metadata[:, 1].tolist() == list(range(live))
            assert handle.dst_buffer_slot_idx.shape[0] == len(mine.x)
            combine_by(buffer, handle, ranks, rank, weights)
            # The routing again: other rows, other weights.
            for one in ranks:
                one.x, one.weights = one.x * 2, one.weights + 1
            again = buffer.dispatch(mine.x, handle=handle, topk_weights=mine.weights)
            assert torch.equal(again[0][:live], arrivals(ranks, rank))
            assert torch.equal(again[1][:live], want_ids)
            assert torch.equal(again[2][:live], local_choices(ranks, rank)[1])
            assert buffer.dispatch(mine.x, handle=handle)[2] is None

    on_ranks(torch_way, body)


def check_rows(got, ranks, rank, scaled, live):
    if not scaled:
        assert torch.equal(got[:live], arrivals(ranks, rank))
        return
    want = arrivals(ranks, rank, "f8")
    assert torch.equal(got[0][:live].view(torch.int8), want.view(torch.int8))
    assert torch.equal(got[1][:live], arrivals(ranks, rank, "scales"))


def sums_by_last_choice(mine, biases):
    """Of rows of which rank r has returned r + 2 times the token: as DeepEP adds them."""
    total = biases[0].float() + biases[1].float()
    for token, ids in enumerate(mine.ids.tolist()):
        homes = [-1 if expert < 0 else expert // LOCAL for expert in ids]
        for k, home in enumerate(homes):
            if home >= 0 and home not in homes[k + 1 :]:
                total[token] += (mine.x[token].float() * (home + 2)).bfloat16().float()
    return total.bfloat16()


def sources(ranks, me):
    """Of each token that comes: its number among those of all ranks."""
    return [
        source * MOST + token
        for source, one in enumerate(ranks)
        for token in one.goes[:, me].nonzero()[:, 0].tolist()
    ]


def combine_by(buffer, handle, ranks, rank, weights):
    mine, want = ranks[rank], arrivals(ranks, rank)
    rows = torch.full((handle.rows_out, HIDDEN), float("nan")).to(want)
    rows[: len(want)] = (want.float() * (rank + 2)).bfloat16()
    biases = (mine.x, mine.x + 1)
    sums, home, _ = buffer.combine(rows, handle, weights, bias=biases)
    assert torch.equal(sums, sums_by_last_choice(mine, biases))
    assert torch.equal(home, mine.weights.masked_fill(mine.ids < 0, 0))


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_expanded_rows(torch_way, scaled, sync, alignment):
    def body(buffer, rank):
        ranks = with_float8(everyone(3, HIDDEN, device=torch_way.device))
        mine, want = ranks[rank], choices(ranks, rank)
        x = (mine.f8, mine.scales) if scaled else mine.x
        got, ids, weights, handle, _ = buffer.dispatch(
            x, mine.ids, mine.weights, num_experts=EXPERTS, do_cpu_sync=sync, do_expand=True,
            expert_alignment=alignment, do_zero_padding=True,
        )  # fmt: skip
        assert ids is None and handle.do_expand
        counts = [len(places) for places in want]
        aligned = [-(-count // alignment) * alignment for count in counts]
        ends = torch.tensor(aligned).cumsum(0)
        starts = (ends - torch.tensor(aligned)).tolist()
        psum = [start + count for start, count in zip(starts, counts)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == psum
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert handle.num_recv_tokens_per_expert_list == (aligned if sync else [])
        tokens = torch.tensor([int(one.goes[:, rank].sum()) for one in ranks]).cumsum(0)
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == tokens.tolist()
        rows = got[0] if scaled else got
        assert len(rows) == len(weights) == handle.num_expanded_tokens
        assert not sync or len(rows) == ends[-1]
        back = torch.full((len(rows), HIDDEN), float("nan")).to(mine.x)
        for local, places in enumerate(want):
            at = slice(starts[local], starts[local] + len(places))
            if places:
                field = "f8" if scaled else "x"
                there = torch.stack([getattr(ranks[s], field)[t].float() for s, t, _ in places])
                assert torch.equal(rows[at].float(), there)
                carried = torch.stack([ranks[s].weights[t, k] for s, t, k in places])
                assert torch.equal(weights[at], carried)
                clear = torch.stack([ranks[s].x[t] for s, t, _ in places])
                back[at] = (clear.float() * (rank * LOCAL + local + 1)).bfloat16()
            padding = rows[starts[local] + len(places) : starts[local] + aligned[local]]
            assert (padding.float() == 0).all()
        metadata = handle.recv_src_metadata
        assert metadata[:, 0].tolist() == sources(ranks, rank)
        for number, places in zip(metadata[:, 0].tolist(), metadata[:, 2:].tolist()):
            for k, row in enumerate(places):
                key = (number // MOST, number % MOST, k)
                here = [e for e in range(LOCAL) if key in want[e]]
                assert row == (starts[here[0]] + want[here[0]].index(key) if here else -1)
        sums = buffer.combine(back, handle)[0]
        total = torch.zeros(mine.x.shape, device=mine.x.device)
        for k in range(TOPK):
            for token, expert in enumerate(mine.ids[:, k].tolist()):
                if expert >= 0:
                    total[token] += (mine.x[token].float() * (expert + 1)).bfloat16().float()
        assert torch.equal(sums, total.bfloat16())
        cached = buffer.dispatch(x, handle=handle, topk_weights=mine.weights, do_expand=True)
        again = cached[0][0] if scaled else cached[0]
        end = starts[-1] + counts[-1]
        assert torch.equal(again[:end].float(), rows[:end].float())
        assert torch.equal(cached[2][:end], weights[:end])

    on_ranks(torch_way, body)


def test_bad_input_comes_before_communication(torch_way):
    def body(buffer, rank):
        mine = everyone(1, HIDDEN, device=torch_way.device)[rank]
        handle = buffer.dispatch(mine.x, mine.ids, mine.weights, num_experts=EXPERTS)[3]
        expanded = buffer.dispatch(mine.x, mine.ids, num_experts=EXPERTS, do_expand=True)[3]
        other = ElasticBuffer(buffer._world, 2**20)
        long = torch.zeros(MOST + 1, HIDDEN, dtype=torch.bfloat16, device=torch_way.device)
        rows = long[:1].expand(handle.rows_out, -1)

        def dispatch(*args, to=buffer, **options):
            return lambda: to.dispatch(*args, **{"num_experts": EXPERTS, **options})

        def combine(*args, to=buffer, **options):
            return lambda: to.combine(*args, **options)

        many = torch.zeros(MOST + 1, TOPK, dtype=torch.int64, device=torch_way.device)
        for call, text in (
            (dispatch(mine.x, mine.ids, num_experts=13), "num_experts = 13 on rank"),
            (dispatch(mine.x, mine.ids, num_experts=None), "num_experts = 0 on rank"),
            (dispatch(mine.x, mine.ids, expert_alignment=0), "expert_alignment = 0 on rank"),
            (dispatch(mine.x, mine.ids, to=other), "num_max_tokens_per_rank = 0"),
            (dispatch(mine.x, None), "topk_idx of rank"),
            (dispatch(mine.x, many), f"topk_idx of rank {rank} is"),
            (dispatch(mine.x, mine.ids, mine.weights[:, :1]), f"topk_weights of rank {rank}"),
            (dispatch(long, many), f"x of rank {rank} has 8 tokens of 128, expected at most 7"),
            (
                dispatch(long, many, do_expand=True),
                f"x of rank {rank} has 8 tokens, expected at most num_max",
            ),
            (dispatch(mine.x, mine.ids, handle=handle), f"of rank {rank} with a handle"),
            (dispatch(mine.x, handle=handle, to=other), f"handle of rank {rank} is of another"),
            (dispatch(long, handle=handle), f"x of rank {rank} has 8 tokens, expected"),
            (combine(rows, handle, to=other), f"handle of rank {rank} is of another buffer"),
            (combine(rows.float(), handle), f"x of rank {rank} is"),
            (combine(rows, handle, mine.weights[:0, 0]), f"topk_weights of rank {rank}"),
            (combine(rows, handle, bias=[mine.x] * 3), "expected at most two"),
        ):
            with pytest.raises(waybill.InvalidArgument, match=text):
                call()
        weights = torch.zeros(expanded.rows_out, device=torch_way.device)
        back = long[:1].expand(expanded.rows_out, -1)
        for call in (
            combine(back, expanded, weights),
            lambda: ElasticBuffer(buffer._world, num_cpu_bytes=2),
            lambda: buffer.all_gather(rows),
            lambda: buffer.engram_fetch(rows),
        ):
            with pytest.raises(waybill.Unsupported):
                call()
        with pytest.raises(AttributeError, match="ElasticBuffer has no runtime"):
            buffer.runtime  # noqa: B018
        assert buffer.get_logical_domain_size() == (1, WORLD)
        assert ElasticBuffer.get_buffer_size_hint(buffer._world, MOST, HIDDEN, TOPK) == (
            buffer.num_bytes
        )

    on_ranks(torch_way, body)


def test_destroyed():
    def one_rank(world):
        buffer = ElasticBuffer(world, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
        with pytest.raises(waybill.InvalidArgument, match=NOT_TO_BE_DESTROYED):
            buffer.destroy()
        buffer.explicitly_destroy = True
        buffer.destroy()
        with pytest.raises(waybill.InvalidArgument, match="was destroyed"):
            buffer.dispatch(None)

    waybill.run_threads(WORLD, one_rank)
