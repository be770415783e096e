"""What deep_ep.Buffer refuses, and that it does so before any communication."""

import pytest
from error_texts import columns_of

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
    layout_of,
    on_ranks,
)

import waybill
from waybill.integrations.deep_ep import Buffer, EventHandle, EventOverlap


def bad(buffer, rank, way):
    """(what is wrong, call, part of the text)"""
    mine = everyone(device=way.device)[rank]
    layout = layout_of(buffer, mine)
    given = {**layout, "topk_idx": mine.ids, "topk_weights": mine.weights}
    *_, handle, _ = buffer.dispatch(mine.x, **given)
    rows = torch.zeros(handle.rows_out, HIDDEN, dtype=torch.bfloat16, device=way.device)
    other = Buffer(buffer._layers.world, BYTES)
    long = torch.zeros(MOST + 1, HIDDEN, dtype=torch.bfloat16, device=way.device)
    event = EventOverlap(EventHandle())
    event.event.device = torch.device("cuda:7")
    of = f"rank {rank}"

    def call(name, *args, buffer=buffer, **options):
        return lambda: getattr(buffer, name)(*args, **options)

    dispatch, combine = "dispatch", "combine"
    yield call(dispatch, mine.x.float(), **given), f"x of {of} has dtype torch.float32"
    yield call(dispatch, mine.x[0:0].view(-1), **given), r"expected a tensor \[num_tokens, hidden"
    yield call(dispatch, long, **given), f"x of {of} has 8 tokens of 16, expected at most 7"
    yield (
        call(dispatch, (mine.x, rows), **given),
        "expected torch.float8_e4m3fn or torch.float8_e5m2 with scales",
    )
    f8 = mine.x.to(torch.float8_e4m3fn)
    yield call(dispatch, (f8, rows), **given), columns_of("has 16", 32)
    yield call(dispatch, mine.x), f"is_token_in_rank of {of} is a NoneType"
    wrong = {**given, "num_tokens_per_expert": None}
    yield call(dispatch, mine.x, **wrong), "expected that of get_dispatch_layout"
    wrong = {**given, "num_tokens_per_expert": layout["num_tokens_per_expert"][:4]}
    yield call(dispatch, mine.x, **wrong), f"of {of} has 4 entries, expected a multiple of 3"
    wrong = {**given, "topk_idx": None}
    yield call(dispatch, mine.x, **wrong), f"topk_weights of {of} without topk_idx"
    wrong = {**given, "topk_weights": mine.weights.double()}
    yield call(dispatch, mine.x, **wrong), f"topk_weights of {of} is .* of torch.float64"
    wrong = {**given, "topk_idx": mine.ids.float()}
    yield call(dispatch, mine.x, **wrong), "expected int64 or int32"
    yield call(dispatch, mine.x, handle=handle, topk_idx=mine.ids), f"of {of} with a handle"
    yield call(dispatch, mine.x, handle=tuple(handle)), f"handle of {of} is of another buffer"
    yield call(dispatch, mine.x, handle=handle, buffer=other), "handle of .* is of another buffer"
    yield call(dispatch, torch.cat([mine.x[:0], long[:6]]), handle=handle), "has 6 tokens, expected"
    yield call(dispatch, mine.x, **given, expert_alignment=0), "expert_alignment = 0"
    yield call(dispatch, long[:7], **given, num_worst_tokens=5), "or at least 21: all tokens"
    yield call(combine, rows, handle, buffer=other), f"handle of {of} is of another buffer"
    yield call(combine, rows.float(), handle), f"x of {of} is .* of torch.float32"
    yield call(combine, long[:1].expand(99, -1), handle), f"x of {of} is .99, 16. of"
    yield call(combine, rows, handle, bias=[mine.x] * 3), "expected at most two"
    yield call(combine, rows, handle, bias=long), f"bias of {of} is .8, 16."
    yield call(combine, rows, handle, mine.weights[0:0, 0]), f"topk_weights of {of}"
    yield call("get_dispatch_layout", mine.ids, 13), "expected a multiple of 3 ranks"
    yield call("get_dispatch_layout", mine.ids[0:0, 0], 12), r"expected a tensor \[num_tokens, num_"
    if way.device != "cpu":
        late = {"previous_event": event, "async_finish": True}
        yield call(combine, rows, handle, **late), "previous_event is of cuda:7"
    yield (
        call(combine, rows, handle, allocate_on_comm_stream=True),
        "allocate_on_comm_stream = True with async_finish = False",
    )


def test_bad_input_comes_before_communication(torch_way):
    """On one rank alone: the others wait for nothing, and the buffer goes on."""

    def body(buffer, rank):
        if rank == 2:
            cases = list(bad(buffer, rank, torch_way))
            assert len(cases) > 20
            for call, text in cases:
                with pytest.raises(waybill.InvalidArgument, match=text):
                    call()
        else:  # the calls of bad() that are right
            mine = everyone(device=torch_way.device)[rank]
            given = {"topk_idx": mine.ids, "topk_weights": mine.weights}
            buffer.dispatch(mine.x, **given, **layout_of(buffer, mine))
            Buffer(buffer._layers.world, BYTES)
        ranks = everyone(8, device=torch_way.device)
        got = buffer.dispatch(ranks[rank].x, **layout_of(buffer, ranks[rank]))[0]
        assert torch.equal(got, arrivals(ranks, rank))

    on_ranks(torch_way, body)


@pytest.mark.parametrize("value", [-2, EXPERTS, 2**40])
def test_ids_out_of_range(value):
    def one_rank(world):
        mine = everyone(tokens=(5, 4, 7))[world.rank]
        buffer = Buffer(world, BYTES)
        layout = layout_of(buffer, mine)
        mine.ids[3, 1] = value
        text = rf"topk_idx\[3, 1\] of rank {world.rank} is {value}, expected 0..11, or -1"
        with pytest.raises(waybill.InvalidArgument, match=text):
            buffer.get_dispatch_layout(mine.ids, EXPERTS)
        with pytest.raises(waybill.InvalidArgument, match=text):
            buffer.dispatch(mine.x, topk_idx=mine.ids, topk_weights=mine.weights, **layout)

    waybill.run_threads(WORLD, one_rank)


def test_what_is_not_served():
    def one_rank(world):
        buffer = Buffer(world, BYTES)
        for call in (
            lambda: Buffer(world, BYTES, enable_shrink=True),
            lambda: Buffer(None, BYTES, comm=1),
            buffer.internode_dispatch, buffer.internode_combine, buffer.get_local_buffer_tensor,
            lambda: buffer.low_latency_update_mask_buffer(1, True),
            lambda: buffer.low_latency_query_mask_buffer(torch.zeros(WORLD, dtype=torch.int32)),
            buffer.low_latency_clean_mask_buffer,
        ):  # fmt: skip
            with pytest.raises(waybill.Unsupported):
                call()

    waybill.run_threads(WORLD, one_rank)
    with pytest.raises(waybill.Unsupported, match="the group has 3 nodes, expected one"):
        waybill.run_threads(WORLD, lambda world: Buffer(world, BYTES), ranks_per_node=1)
