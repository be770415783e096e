"""deep_ep.Buffer in a process group, through the installed module; in a CUDA graph on two GPUs."""

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
    buffer = deep_ep.Buffer(group, size, 0, explicitly_destroy=True)
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

    for _ in range(3):
        refill()
        check(*step(0))
        check(*step(W * T))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(W * T)
        for _ in range(6):
            refill()
            graph.replay()
            check(*results)
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
