"""deep_ep.Buffer in a process group, as installed; in a CUDA graph on two GPUs."""

import pytest
from test_process_worlds import expect_all_well, run_ranks

import waybill

pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("processes")

PROGRAM = """
    import torch
    from torch import distributed
    from waybill.integrations import deep_ep

    deep_ep.install()
    import deep_ep
    from deep_ep.utils import EventHandle, EventOverlap

    W, T, H, K, E, DEVICE = 2, 6, 128, 2, 8, "{device}"
    rank = int(os.environ["RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "{backend}", init_method="file://{folder}/group", rank=rank, world_size=W
    )
    group = distributed.group.WORLD
    config = deep_ep.Buffer.get_dispatch_config(W)
    size = config.get_nvl_buffer_size_hint(2 * H, W)
    few = deep_ep.Buffer.get_low_latency_rdma_size_hint(T, H, W, E)
    buffer = deep_ep.Buffer(group, size, few, low_latency_mode=True, explicitly_destroy=True)
    assert buffer.group is group and buffer.num_nvl_bytes == size
    draws = torch.Generator().manual_seed(rank)
    x = torch.zeros(T, H, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.zeros(T, K, dtype=deep_ep.topk_idx_t, device=DEVICE)
    weights = torch.zeros(T, K, device=DEVICE)

    def refill():
        x.copy_(torch.randint(-9, 9, x.shape, generator=draws))
        ids.copy_(torch.randint(-1, E, ids.shape, generator=draws))
        weights.copy_(torch.rand(weights.shape, generator=draws))

    def step(worst):
        tokens, _, experts, inside, _ = buffer.get_dispatch_layout(ids, E)
        got, found, there, counts, handle, event = buffer.dispatch(
            x, num_tokens_per_rank=tokens, is_token_in_rank=inside, num_tokens_per_expert=experts,
            topk_idx=ids, topk_weights=weights, num_worst_tokens=worst,
            previous_event=EventOverlap(EventHandle()), async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        sums, home, _ = buffer.combine(got, handle, there)
        return sums, home, inside

    def check(sums, home, inside):
        assert torch.equal(sums, x * inside.sum(1, keepdim=True))
        assert torch.equal(home, weights.masked_fill(ids < 0, 0))

    def low_latency_step():
        got, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, T, E, use_fp8=False, return_recv_hook=True
        )
        hook()
        return buffer.low_latency_combine(got, ids, weights, handle)[0]

    def check_low_latency(sums):
        scale = weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), x.float() * scale, rtol=1e-2, atol=1e-2)

    for _ in range(3):
        refill()
        check(*step(0))
        check(*step(W * T))
        check_low_latency(low_latency_step())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(W * T)
            sums = low_latency_step()
        for _ in range(6):
            refill()
            graph.replay()
            check(*results)
            check_low_latency(sums)
        torch.cuda.synchronize()
        distributed.barrier()
        del graph
    buffer.destroy()
    distributed.destroy_process_group()
    print("rank", rank, "of", W, "is well")
"""


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_a_process_group(tmp_path, device, backend):
    if device == "cuda" and waybill.num_gpus() < 2:
        pytest.skip("needs two GPUs, and an installation with CUDA")
    program = PROGRAM
    for name, value in (("device", device), ("backend", backend), ("folder", tmp_path)):
        program = program.replace("{" + name + "}", str(value))
    environment = {"WAYBILL_DEEP_EP_MAX_TOKENS": 6}
    expect_all_well(run_ranks(tmp_path, program, world_size=2, environment=environment))
