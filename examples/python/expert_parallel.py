"""Expert parallelism in one page: tokens to their experts on all ranks, and back.

    torchrun --nproc-per-node N examples/python/expert_parallel.py
    python examples/python/expert_parallel.py [--ranks N] [--device cpu|cuda]

The program of Triton-distributed's page on EPAll2AllLayer; but for the two imports it is the same.
Ranks are processes under torchrun, else threads: on the GPUs where Waybill was built with CUDA and
there are some, else in host memory. Each checks the sums that came home.

Needs torch; without it, it says so and ends with status 77, which test runners show as skipped.
"""

import argparse
import os
import sys

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

from waybill import num_gpus
from waybill.torch import initialize_distributed, run_threads
from waybill.torch.moe import EPAll2AllLayer

MAX_TOKENS, NUM_TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 64, 32, 256, 4, 4


def expert_ffn(rows, layout, first_expert):
    """Stands for the experts: expert e multiplies its rows, which lie together, by e + 1."""
    counts = layout.recv_expert_counts.long()
    factors = first_expert + 1 + torch.arange(len(counts), device=rows.device)
    return rows * torch.repeat_interleave(factors, counts)[:, None]


def one_rank(ep_group, rank, world_size, local_world_size, device):
    num_experts = EXPERTS_PER_RANK * world_size
    ep_layer = EPAll2AllLayer(
        ep_group=ep_group,
        max_tokens=MAX_TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        rank=rank,
        num_tot_experts=num_experts,
        local_world_size=local_world_size,
        world_size=world_size,
        dtype=torch.bfloat16,
        weight_dtype=torch.float32,
        num_sm=20,
    )

    # Input: tokens, and what a gate chose for them
    draws = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 4, (NUM_TOKENS, HIDDEN), generator=draws).bfloat16().to(device)
    scores = torch.rand(NUM_TOKENS, num_experts, generator=draws)
    weights, expert_ids = (t.to(device) for t in scores.softmax(-1).topk(TOPK))

    # Dispatch
    recv_tokens, recv_weights, layout_desc = ep_layer.dispatch(
        input=tokens, exp_indices=expert_ids.int(), weight=weights
    )

    # Experts: rows come with their weights, which combine leaves to them
    expert_output = expert_ffn(recv_tokens, layout_desc, rank * EXPERTS_PER_RANK)
    expert_output = (expert_output * recv_weights[:, None]).bfloat16()

    # Combine: [NUM_TOKENS, HIDDEN], back where the tokens came from
    combined = ep_layer.combine(expert_output, layout_desc)
    ep_layer.ep_barrier_all()

    expected = tokens.float() * (weights * (expert_ids + 1)).sum(-1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=2e-2, atol=2e-2)
    received = len(recv_tokens)
    ep_layer.finalize()
    return received


def main():
    parser = argparse.ArgumentParser(description="Tokens to their experts on all ranks, and back.")
    gpus = num_gpus() if torch.cuda.is_available() else 0
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, default=gpus or 4, help="of threads")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # no launcher
        rows = run_threads(
            options.ranks,
            lambda world: one_rank(
                world, world.rank, world.world_size, world.topology.ranks_per_node, world.device
            ),
            device=options.device,
        )
        print(f"{options.ranks} ranks as threads on {options.device} received {rows} rows")
        return

    rank, world_size = initialize_distributed(device=options.device)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    received = one_rank(dist.group.WORLD, rank, world_size, local_world_size, options.device)
    rows = [0] * world_size
    dist.all_gather_object(rows, received)
    if rank == 0:
        print(f"{world_size} ranks as processes on {options.device} received {rows} rows")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
