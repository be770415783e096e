"""NCCL's all_to_all_single through PyTorch on the GPUs of this machine, to compare with.

One process per GPU, bfloat16; the slowest rank's median of 60 calls, with and without packing
rows into send order and out of receive order, which it needs and a dispatch does not.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from waybill._bench.ranks import Place, Rank, slowest_us, start

ROW = 4096  # elements
MIB = 1 << 20


def measure(rank: Rank, mib: int) -> tuple[float, float]:
    """The slowest rank's us of an all to all of `mib` MiB per rank, alone and with packing."""
    rows = mib * MIB // (2 * ROW)
    source = torch.randn(rows, ROW, device=rank.device).bfloat16()
    send, recv = torch.empty_like(source), torch.empty_like(source)
    result = torch.empty_like(source)
    order = torch.randperm(rows, device=rank.device)

    def plain() -> None:
        dist.all_to_all_single(recv, send)

    def packed() -> None:
        torch.index_select(source, 0, order, out=send)
        dist.all_to_all_single(recv, send)
        torch.index_select(recv, 0, order, out=result)

    return slowest_us(rank, plain, 5.0), slowest_us(rank, packed, 5.0)


def rank_main(rank: Rank) -> None:
    world = rank.size
    if rank.rank == 0:
        print(f"NCCL {torch.cuda.nccl.version()}, PyTorch {torch.__version__}, {world} GPUs")
        print(f"{'MiB per rank':>10} {'us':>9} {'GB/s':>8} {'with pack and unpack us':>24}")
    for mib in (1, 8, 64, 256):
        us, packed_us = measure(rank, mib)
        if rank.rank == 0:
            rate = mib * MIB * (world - 1) / world / us / 1e3
            print(f"{mib:>10} {us:>9.1f} {rate:>8.1f} {packed_us:>24.1f}", flush=True)


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit("all_to_all: needs two GPUs, nothing measured")
    start(Place("cuda", gpus, processes=True), rank_main)
