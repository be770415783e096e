"""NCCL's all_to_all_single through PyTorch on the GPUs of this machine, to compare with.

One process per GPU, bfloat16; the slowest rank's median of 60 calls, with and without packing
rows into send order and out of receive order, which it needs and a dispatch does not.
"""

import sys

import ranks
import torch
import torch.distributed as dist

ROW = 4096  # elements
MIB = 1 << 20


def measure(mib):
    """The slowest rank's us of an all to all of `mib` MiB per rank, alone and with packing."""
    rows = mib * MIB // (2 * ROW)
    source = torch.randn(rows, ROW, device="cuda").bfloat16()
    send, recv = torch.empty_like(source), torch.empty_like(source)
    result = torch.empty_like(source)
    order = torch.randperm(rows, device="cuda")

    def plain():
        dist.all_to_all_single(recv, send)

    def packed():
        torch.index_select(source, 0, order, out=send)
        dist.all_to_all_single(recv, send)
        torch.index_select(recv, 0, order, out=result)

    return ranks.slowest_us(plain, "cuda", 60), ranks.slowest_us(packed, "cuda", 60)


def worker(rank, world):
    if rank == 0:
        print(f"NCCL {torch.cuda.nccl.version()}, PyTorch {torch.__version__}, {world} GPUs")
        print(f"{'MiB per rank':>10} {'us':>9} {'GB/s':>8} {'with pack and unpack us':>24}")
    for mib in (1, 8, 64, 256):
        us, packed_us = measure(mib)
        if rank == 0:
            rate = mib * MIB * (world - 1) / world / us / 1e3
            print(f"{mib:>10} {us:>9.1f} {rate:>8.1f} {packed_us:>24.1f}", flush=True)


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit("all_to_all: needs two GPUs, nothing measured")
    ranks.start(worker, gpus, "cuda", gpus)
