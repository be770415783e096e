"""Dispatch and combine of experts' tokens by Waybill, all_to_all_single and DeepEP, side by side.

One process per rank, bfloat16, the same tokens for all ways; what they combine is compared with the
exact sums. A figure is the slowest rank's median, whole call. DeepEP is left out where it is not
installed.

    python bench/baselines/experts.py                          # on all GPUs
    python bench/baselines/experts.py --device cpu --ranks 2 --tokens 64 --hidden 256
"""

import argparse
import sys

import ranks
import torch
import torch.distributed as dist
from expert_ways import WAYS, Case

CALLS = {
    "dispatch, with counting": "dispatch",
    "dispatch, routing known": "dispatch_again",
    "combine": "combine",
}


def read_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--ranks", type=int, help="GPUs unless given; 2 on the CPU")
    add("--tokens", type=int, default=4096, help="of each rank (default %(default)s)")
    add("--hidden", type=int, default=7168, help="elements of a token (default %(default)s)")
    add("--topk", type=int, default=8, help="experts of a token (default %(default)s)")
    add("--experts", type=int, default=256, help="of all ranks (default %(default)s)")
    add("--num-sm", type=int, default=20, help="multiprocessors of a call (default %(default)s)")
    add("--calls", type=int, default=60, help="of which the median is taken (default %(default)s)")
    add("--only", metavar="WAYS", default=",".join(WAYS), help="default %(default)s")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if arguments.ranks is None:
        arguments.ranks = gpus if arguments.device == "cuda" else 2
    if arguments.device == "cuda" and not 2 <= arguments.ranks <= gpus:
        parser.error(
            f"--ranks: got {arguments.ranks}, expected at least 2, and at most the {gpus} GPUs that"
            " are here; --device cpu needs none"
        )
    if arguments.ranks < 1:
        parser.error(f"--ranks: got {arguments.ranks}, expected at least 1")
    if arguments.experts < 1 or arguments.experts % arguments.ranks != 0:
        parser.error(
            f"--experts: got {arguments.experts}, expected a multiple of --ranks ="
            f" {arguments.ranks}"
        )
    if not 1 <= arguments.topk <= arguments.experts:
        parser.error(f"--topk: got {arguments.topk}, expected 1..{arguments.experts}, the experts")
    for name in ("tokens", "hidden", "calls", "num_sm"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    arguments.only = arguments.only.split(",")
    for name in arguments.only:
        if name not in WAYS:
            parser.error(f"--only: got {name!r}, expected some of {', '.join(WAYS)}")
    return arguments


def measure(name, case, arguments):
    """us of each call; None where the way cannot be imported."""
    try:
        way = WAYS[name](case, dist.group.WORLD)
    except ImportError as error:  # not installed, or not for this machine
        return None, f"left out: {error}"
    us = {}
    for call in CALLS.values():
        us[call] = ranks.slowest_us(getattr(way, call), case.device, arguments.calls)
    right = torch.tensor([int(case.is_sum(way.combined()))], device=case.device)
    dist.all_reduce(right, op=dist.ReduceOp.MIN)
    way.close()
    return us, "" if right.item() else "WRONG SUMS"


def worker(rank, arguments):
    a = arguments
    case = Case(rank, a.ranks, a.device, a.tokens, a.hidden, a.topk, a.experts, a.num_sm)
    most = torch.tensor([case.wire_bytes()], device=a.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        where = torch.cuda.get_device_name() if a.device == "cuda" else "host memory"
        print(
            f"{a.ranks} ranks, {where}; {a.tokens} tokens x {a.hidden} bfloat16, top-{a.topk} of"
            f" {a.experts}; {most.item() / 1e6:.1f} MB leave a rank; num_sm {a.num_sm}"
        )
        print(f"{'way':<12}{'call':<26}{'us':>10}{'GB/s':>8}{'of waybill':>12}")
    ours, failed = {}, False
    for name in a.only:
        us, remark = measure(name, case, a)
        failed |= remark == "WRONG SUMS"
        if name == "waybill":
            ours = us
        if rank == 0:
            show(name, us, remark, most.item(), ours)
    if failed:
        sys.exit("experts: a way combined wrong sums")


def show(name, us, remark, wire_bytes, ours):
    for text, call in CALLS.items():
        if us is None:
            continue
        ratio = f"{us[call] / ours[call]:.2f}" if ours else "-"
        rate = wire_bytes / us[call] / 1e3
        print(f"{name:<12}{text:<26}{us[call]:>10.1f}{rate:>8.1f}{ratio:>12}", flush=True)
    if remark:
        print(f"{name:<12}{remark}", flush=True)


if __name__ == "__main__":
    options = read_arguments()
    ranks.start(worker, options.ranks, options.device, options)
