"""Collectives of NCCL and calls of Waybill beside each other, each on a stream of its own.

docs/concurrency.md says what is needed: all ranks queue them in the same order, and what no event
keeps apart fits on the device together.
"""

import pytest
from test_process_worlds import expect_all_well, run_ranks

import waybill

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    waybill.num_gpus() < 2 or not torch.cuda.is_available(),
    reason="fewer than two GPUs, or an installation without CUDA",
)

PROGRAM = """
    import random, time
    import torch
    from torch import distributed
    import waybill.torch as wt
    from waybill.torch.moe import EPAll2AllLayer

    NUM_SMS, JOINED, FOLDER = {num_sms}, {joined}, {folder!r}
    W, MAX, HIDDEN, TOPK, EXPERTS = 2, 128, 1024, 4, 8

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=f"file://{FOLDER}/torch", rank=rank, world_size=W, device_id=device
    )
    world = wt.World.from_environment(device="cuda", timeout_s=30)
    sms = NUM_SMS or torch.cuda.get_device_properties(device).multi_processor_count

    plan = waybill.plan([3000, 410, 70, 900, 2000], W, 0, block_tokens=8)
    routing = plan.to_routing()
    rows = [np.arange(n * 256, dtype=np.float32).reshape(n, 256) % 8191 + 10000 * r
            for r, n in enumerate(plan.home_tokens.tolist())]
    received = waybill.simulate_communication(rows, plan.to_metadata().fwd_kv)[rank]
    received = torch.from_numpy(received).to(device)
    mine = torch.from_numpy(rows[rank]).to(device)
    first, second = (wt.SequenceDispatcher(world, num_sms=sms) for _ in range(2))
    plans = [d.plan_dispatch((routing.fwd_kv, mine)) for d in (first, second)]

    layer = EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, rank, EXPERTS, W, W, num_sm=sms, fixed_rows=W * MAX * TOPK
    )
    draws = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 9, (MAX, HIDDEN), generator=draws).to(device, torch.bfloat16)
    ids = torch.randint(0, EXPERTS + 1, (MAX, TOPK), generator=draws).to(device)
    sums = tokens * 2 * (ids < EXPERTS).sum(1, keepdim=True)
    y = torch.zeros(1 << 22, device=device)
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]

    def sequences(number):
        (got,) = first.dispatch(plans[0], mine)
        wrong[0].add_((got != received).sum())
        there, _, layout = layer.dispatch(tokens, ids)
        wrong[0].add_((layer.combine(there * 2, layout) != sums).sum())

    def more_sequences(number):
        (got,) = second.dispatch(plans[1], mine)
        wrong[1].add_((got != received).sum())

    def nccl(number):
        y.fill_((rank + 1) * number)
        distributed.all_reduce(y)
        wrong[2].add_((y != 3 * number).sum())

    # What is loaded, connected and allocated at first use is, before anything is beside.
    for call in (nccl, sequences, more_sequences):
        for number in range(2):
            call(number)
        torch.cuda.synchronize()
        world.barrier()

    calls = [(torch.cuda.Stream(), call) for call in (nccl, sequences, more_sequences)]
    pauses = random.Random(rank)
    last = torch.cuda.current_stream()
    for number in range(90):
        turn = number % 3  # the same on all ranks
        for stream, call in calls[turn:] + calls[:turn]:
            if JOINED:
                stream.wait_stream(last)
            with torch.cuda.stream(stream):
                call(number)
            last = stream
            time.sleep(pauses.random() * 1e-3)
    torch.cuda.synchronize()
    assert [w.item() for w in wrong] == [0, 0, 0], wrong

    world.barrier()
    first.close()
    second.close()
    layer.finalize()
    distributed.destroy_process_group()
    print("rank", rank, "of", W, "is well")
"""


@pytest.mark.parametrize(
    "num_sms, joined, connections",
    [(16, False, 32), (16, False, 1), (0, True, 8)],
    ids=["they fit together", "in one hardware queue", "whole device, joined by events"],
)
def test_collectives_of_nccl(tmp_path, num_sms, joined, connections):
    program = PROGRAM.replace("{num_sms}", str(num_sms)).replace("{joined}", str(joined))
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": connections, "NCCL_NVLS_ENABLE": 0, "NCCL_MAX_CTAS": 32,
    }  # fmt: skip
    results = run_ranks(
        tmp_path, program.replace("{folder!r}", repr(str(tmp_path))), 2, environment
    )
    expect_all_well(results)
