"""Causal attention of documents that are spread over ranks, trained through.

    python examples/python/distributed_attention.py [--ranks N] [--device cpu|cuda]
    torchrun --nproc-per-node N examples/python/distributed_attention.py

Every rank has rows of Q, K and V; a plan says which rank attends to which queries, so that all have
equal work. The plan is the program's own, and so is the attention function. Autograd goes through
ContextParallelAttention, with what it keeps and with recomputation. The loss and all gradients are
compared with those of one process.

Needs torch; without it, it says so and ends with status 77, which test runners show as skipped.
Ranks are threads, or processes under torchrun: on the GPUs where Waybill was built with CUDA and
there are some, else in host memory.
"""

import argparse
import contextlib
import io
import itertools
import os
import sys

try:
    import torch
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

from torch.utils.checkpoint import checkpoint

import waybill.torch as waybill

LENGTHS = [530, 41, 7, 260, 90, 33, 3, 60]  # documents, tokens
HEADS, KV_HEADS, HEAD = 8, 2, 16
NUM_LAYERS = 2


def dot_product(q, k, v):
    """Causal attention of queries that stand at the end of their keys: (queries, heads, size)."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    visible = visible.tril(k.shape[1] - q.shape[1])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return out.transpose(0, 1)


def attend(q, k, v, sequences, shape):
    """Of the queries that this rank attends to, a sequence each with the keys that it sees. This is
    where a kernel of variable lengths (FlashAttention) would take sequences.cu_seqlens_q.
    """
    keys = zip(k.split(sequences.k_lens), v.split(sequences.k_lens))
    queries = q.split(sequences.q_lens)
    return torch.cat([q[:0], *(dot_product(mine, *seen) for mine, seen in zip(queries, keys))])


def model(attention, hidden, weights):
    """Layers of projection, attention and sum; `attention` is all that differs between ranks."""
    for weight in weights:
        qkv = (hidden @ weight).view(-1, HEADS + 2 * KV_HEADS, HEAD)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)  # rows with gaps: not copied
        hidden = hidden + attention(q, k, v).flatten(1)
    return hidden.square().sum()


def one_process(hidden, weights):
    """Loss and gradients without any ranks."""
    hidden, weights = with_gradients(hidden, weights)

    def attention(q, k, v):
        documents = (t.split(LENGTHS) for t in (q, k, v))
        return torch.cat([dot_product(*document) for document in zip(*documents)])

    loss = model(attention, hidden, weights)
    loss.backward()
    return [loss.detach(), hidden.grad, *(weight.grad for weight in weights)]


def one_rank(world, own_plan, hidden, weights, in_place, recompute):
    """The same for the rows of one rank; gradients of weights are still to be added up."""
    hidden, weights = with_gradients(hidden, weights, world.device)
    module = waybill.ContextParallelAttention(
        world, HEADS, KV_HEADS, HEAD, dtype=hidden.dtype, kernel=attend, in_place=in_place
    )
    plan = module.plan(own_plan)

    def attention(q, k, v):
        if recompute:  # nothing is kept of the rows that came from other ranks
            return checkpoint(module, plan, q, k, v, use_reentrant=False)
        return module(plan, q, k, v)

    loss = model(attention, hidden, weights)
    loss.backward()
    found = [t.cpu() for t in (loss.detach(), hidden.grad, *(weight.grad for weight in weights))]
    module.close()
    return found


def with_gradients(hidden, weights, device="cpu"):
    def leaf(tensor):
        return tensor.to(device, copy=True).requires_grad_()

    return leaf(hidden), [leaf(weight) for weight in weights]


def check(what, got, want):
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    print(f"  ok  {what}")


def compare(ranks, expected):
    loss, hidden, *weights = expected
    check("the loss", sum(rank[0] for rank in ranks), loss)
    check("gradients of the input", torch.cat([rank[1] for rank in ranks]), hidden)
    for i, weight in enumerate(weights):
        check(f"gradients of layer {i}", sum(rank[2 + i] for rank in ranks), weight)


def run_ranks(options, body):
    """What body(world) returns on each rank, by rank: of threads, or of torchrun's processes."""
    if not options.launched:
        return waybill.run_threads(options.ranks, body, device=options.device)
    world = waybill.World.from_process_group(device=options.device, nvshmem=options.nvshmem)
    results = [None] * options.ranks
    torch.distributed.all_gather_object(results, body(world))
    return results


def train(options):
    torch.manual_seed(0)
    size = HEADS * HEAD
    hidden = torch.randn(sum(LENGTHS), size, dtype=torch.float64)
    shape = (NUM_LAYERS, size, (HEADS + 2 * KV_HEADS) * HEAD)
    weights = list(torch.randn(shape, dtype=torch.float64) / size**0.5)
    expected = one_process(hidden, weights)

    plan = waybill.plan(
        LENGTHS, options.ranks, 0, q_hidden=size, kv_hidden=KV_HEADS * HEAD, dtype="float64",
        block_tokens=16,
    )  # fmt: skip
    rows = hidden.split(plan.home_tokens.tolist())
    print(f"{options.ranks} ranks on {options.device}: {plan!r}")
    for in_place, recompute in itertools.product((True, False), repeat=2):
        ranks = run_ranks(
            options,
            lambda world: one_rank(world, plan, rows[world.rank], weights, in_place, recompute),  # noqa: B023
        )
        rows_that_stay = "in place" if in_place else "through the window"
        print(f"  rows that stay {rows_that_stay}, {'with' if recompute else 'no'} recomputation")
        compare(ranks, expected)
    print("All is well.")


def main():
    parser = argparse.ArgumentParser(description="Distributed causal attention, checked.")
    gpus = waybill.num_gpus() if torch.cuda.is_available() else 0
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, default=gpus or 4, help="of threads")
    parser.add_argument("--nvshmem", action="store_true", help="between processes with GPUs")
    options = parser.parse_args()
    options.launched = "RANK" in os.environ
    if not options.launched:
        train(options)
        return
    rank, options.ranks = waybill.initialize_distributed("gloo", device=options.device)
    with contextlib.redirect_stdout(sys.stdout if rank == 0 else io.StringIO()):
        train(options)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
