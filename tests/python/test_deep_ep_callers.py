"""The calls that programs which serve models make of deep_ep, in their order and with their
arguments: vLLM's two backends, deepep_high_throughput and deepep_low_latency (bytes of
VLLM_DEEPEP_BUFFER_SIZE_MB), each a FusedMoEPrepareAndFinalize (DeepEPHTPrepareAndFinalize,
DeepEPLLPrepareAndFinalize), and SGLang's DeepEPDispatcher, a BaseDispatcher, in its two modes.
"""

import pytest

pytest.importorskip("torch")

import torch
from deep_ep_cases import EXPERTS, LOCAL, WORLD, everyone, settle

from waybill.integrations.deep_ep import Buffer, EventHandle, EventOverlap
from waybill.integrations.deep_ep.events import Queue

HIDDEN, MOST = 512, 7
GIB = 2**30


def weighted(mine):
    """A token's experts give it back 1 + their number times: in float32, rounded."""
    factors = (mine.ids + 1).clamp(min=0) * mine.weights
    return (mine.x.float() * factors.sum(1, keepdim=True)).bfloat16()


def local_sums(x, ids, weights, rank):
    """What a rank's experts make of the rows that came: one row each."""
    here = ids >= 0
    factors = torch.where(here, (ids + rank * LOCAL + 1) * weights, 0.0)
    return (x.float() * factors.sum(1, keepdim=True)).bfloat16()


def near(got, want):
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.05)


def on_ranks(way, body):
    def one_rank(world):
        body(world, everyone(3, HIDDEN, device=way.device)[world.rank])

    way.run(WORLD, one_rank)


def test_vllm_high_throughput(torch_way):
    def body(world, mine):
        buffer = Buffer(
            group=world, num_nvl_bytes=GIB // 64, num_rdma_bytes=0, low_latency_mode=False,
            num_qps_per_rank=1,
        )  # fmt: skip
        Buffer.set_num_sms(20)
        plain = {"previous_event": None, "async_finish": False, "allocate_on_comm_stream": False}
        tokens, nodes, experts, inside, _ = buffer.get_dispatch_layout(
            topk_idx=mine.ids, num_experts=EXPERTS, **plain
        )
        x, ids, weights, counts, handle, _ = buffer.dispatch(
            x=mine.x, handle=None, num_tokens_per_rank=tokens, num_tokens_per_rdma_rank=nodes,
            is_token_in_rank=inside, num_tokens_per_expert=experts, topk_idx=mine.ids,
            topk_weights=mine.weights, expert_alignment=1,
            config=Buffer.get_dispatch_config(WORLD), **plain,
        )  # fmt: skip
        settle(torch_way.device)
        assert len(counts) == LOCAL and ids.dtype == torch.int64
        sums, _, _ = buffer.combine(
            x=local_sums(x, ids, weights, world.rank), handle=handle, topk_weights=None,
            config=Buffer.get_combine_config(WORLD), **plain,
        )  # fmt: skip
        settle(torch_way.device)
        near(sums, weighted(mine))

    on_ranks(torch_way, body)


def test_vllm_low_latency(torch_way):
    def body(world, mine):
        num_bytes = Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_ranks=WORLD,
            num_experts=EXPERTS,
        )  # fmt: skip
        buffer = Buffer(
            group=world, num_nvl_bytes=GIB // 64, num_rdma_bytes=num_bytes, low_latency_mode=True,
            num_qps_per_rank=LOCAL, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
        )  # fmt: skip
        plain = {"async_finish": False, "return_recv_hook": False}
        x, counts, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.ids, MOST, EXPERTS, use_fp8=False, **plain
        )
        settle(torch_way.device)
        assert x.shape == (LOCAL, WORLD * MOST, HIDDEN) and counts.shape == (LOCAL,)
        factors = torch.arange(1, LOCAL + 1, device=x.device) + world.rank * LOCAL
        outputs = (x.float() * factors[:, None, None]).bfloat16()
        out = torch.empty_like(mine.x)
        buffer.low_latency_combine(
            outputs, mine.ids, mine.weights, handle, zero_copy=False, out=out, **plain
        )
        settle(torch_way.device)
        near(out, weighted(mine))

    on_ranks(torch_way, body)


@pytest.mark.parametrize("async_finish", [False, True])
def test_sglang_normal_and_low_latency(torch_way, async_finish):
    """One buffer for both modes ("auto"), as big as either needs."""

    def body(world, mine):
        config = Buffer.get_dispatch_config(WORLD)
        assert config.get_rdma_buffer_size_hint(2 * HIDDEN, WORLD) == 0
        buffer = Buffer(
            world, GIB // 64,
            Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, WORLD, EXPERTS),
            low_latency_mode=True, num_qps_per_rank=max(Buffer.num_sms, LOCAL), allow_mnnvl=True,
        )  # fmt: skip
        assert buffer.group_size == WORLD and buffer.low_latency_mode

        def queued():
            event = Buffer.capture() if async_finish else None
            beside = {"async_finish": async_finish, "allocate_on_comm_stream": event is not None}
            return {"previous_event": event, **beside}

        *layout, event = buffer.get_dispatch_layout(mine.ids, EXPERTS, **queued())
        names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
        given = dict(zip((*names, "is_token_in_rank"), layout))
        again = {**queued(), **({"previous_event": event} if async_finish else {})}
        x, ids, weights, counts, handle, event = buffer.dispatch(
            mine.x, topk_idx=mine.ids, topk_weights=mine.weights, expert_alignment=128,
            config=None, **given, **again,
        )  # fmt: skip
        if async_finish:
            event.current_stream_wait()
        settle(torch_way.device)
        assert all(count % 128 == 0 for count in counts)
        sums, _, event = buffer.combine(
            local_sums(x, ids, weights, world.rank), handle, config=None, **queued()
        )
        if async_finish:
            event.current_stream_wait()
        settle(torch_way.device)
        near(sums, weighted(mine))

        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        packed, masked, handle, _, hook = buffer.low_latency_dispatch(
            mine.x, mine.ids, MOST, EXPERTS, use_fp8=True, round_scale=False, use_ue8m0=False,
            async_finish=False, return_recv_hook=True,
        )  # fmt: skip
        hook()
        settle(torch_way.device)
        assert packed[0].dtype == torch.float8_e4m3fn and masked.dtype == torch.int32
        rows = packed[0].float() * packed[1].repeat_interleave(128, dim=2)
        live = torch.arange(rows.shape[1], device=rows.device) < masked[:, None]
        rows = rows.masked_fill(~live[..., None], 0).bfloat16()
        sums, _, hook = buffer.low_latency_combine(
            x=rows, topk_idx=mine.ids, topk_weights=mine.weights, handle=handle,
            async_finish=False, return_recv_hook=True,
        )  # fmt: skip
        hook()
        settle(torch_way.device)
        want = mine.x.float() * mine.weights.masked_fill(mine.ids < 0, 0).sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), want, rtol=0.1, atol=0.1)

    on_ranks(torch_way, body)


def test_an_event_of_another_device():
    event = EventOverlap(EventHandle())
    event.event.device = torch.device("cuda:7")
    queue = Queue(torch.device("cuda:0"), "Buffer")
    with pytest.raises(ValueError, match=r"previous_event is of cuda:7, expected one of cuda:0"):
        queue._checked(event, True, False)
    event.event.device = None
    with pytest.raises(ValueError, match="previous_event is of host memory"):
        queue._checked(event, True, False)
    with pytest.raises(ValueError, match="previous_event holds a str"):
        queue._checked(EventOverlap("now"), True, False)
