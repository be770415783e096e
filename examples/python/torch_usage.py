"""A program written for DistCA, with only its import changed; then what tensors allow beyond.

    python examples/python/torch_usage.py

Needs torch; without it, it says so and ends with status 77, which test runners show as skipped.
Uses a GPU where there is one. Every claim is checked.
"""

import sys

try:
    import torch
except ImportError:
    print("torch is not installed: nothing was run")
    sys.exit(77)

# For DistCA the next lines were
#   from d2.runtime.inplace_metadata import compute_metadata, exclusive_cumsum, prepend_zero_fn
#   from test_util import create_qkv_dispatch, gen_seq_lens, orchestrate_simulate
import waybill.torch
from waybill.torch import (
    compute_metadata,
    create_qkv_dispatch,
    exclusive_cumsum,
    gen_seq_lens,
    orchestrate_simulate,
    prepend_zero_fn,
)

WORLD_SIZE, TOTAL, NUM_SEQS, MAX_CP, HIDDEN = 4, 512, 3, 4, 32


def check(what, ok):
    print(f"  ok  {what}" if ok else f"  FAILED  {what}")
    if not ok:
        raise AssertionError(what)


def queries(device):
    """As it was written for DistCA: random destinations, forward, reverse, compare."""
    torch.manual_seed(0)
    seq_len = gen_seq_lens(WORLD_SIZE, NUM_SEQS, TOTAL).to(device)
    dispatch = torch.randint(0, WORLD_SIZE, (WORLD_SIZE, NUM_SEQS), device=device)
    fwd_metadata, rev_metadata = compute_metadata(seq_len, dispatch)

    tensor = torch.rand((WORLD_SIZE, TOTAL, HIDDEN), device=device) + 1
    max_recv_tokens = fwd_metadata.num_recv_tokens.max()
    output_tensor = torch.zeros((WORLD_SIZE, max_recv_tokens, HIDDEN), device=device)
    output_tensor = orchestrate_simulate(tensor, output_tensor, fwd_metadata)
    rev_tensor = torch.zeros_like(tensor)
    rev_tensor = orchestrate_simulate(output_tensor, rev_tensor, rev_metadata)
    torch.testing.assert_close(rev_tensor, tensor)
    check("Q comes back", torch.equal(rev_tensor, tensor))
    check("results lie where the inputs lie", fwd_metadata.dst_offset.device == seq_len.device)

    begins = exclusive_cumsum(seq_len, dim=1)
    ends = prepend_zero_fn(seq_len.cumsum(dim=1), dim=1)
    check("helpers take and return tensors", torch.equal(begins, ends[:, :-1]))


def keys_and_values(device):
    """KV has a copy per query: the planes that come back are summed, as DistCA's test does."""
    torch.manual_seed(1)
    _, _, fwd_k, rev_k, attention = create_qkv_dispatch(WORLD_SIZE, TOTAL, NUM_SEQS, MAX_CP)
    kv = torch.rand(WORLD_SIZE, TOTAL, HIDDEN) + 1
    received = torch.zeros(WORLD_SIZE, int(fwd_k.num_recv_tokens.max()), HIDDEN)
    received = orchestrate_simulate(kv, received, fwd_k)
    planes = torch.zeros(WORLD_SIZE, TOTAL * MAX_CP, HIDDEN)
    planes = orchestrate_simulate(received, planes, rev_k)
    planes = planes.reshape(WORLD_SIZE, MAX_CP, TOTAL, HIDDEN)
    copies = (planes != 0).sum(dim=1)
    check("every row of KV comes back at least once", bool((copies > 0).all()))
    torch.testing.assert_close(planes.sum(dim=1) / copies, kv)
    check("each rank knows its cu_seqlens", len(attention.cu_seqlens_q) == WORLD_SIZE)

    summed = waybill.torch.sum_kv_copies(planes[0].reshape(-1, HIDDEN), rev_k, rank=0)
    torch.testing.assert_close(summed, planes[0].sum(dim=0))
    check("sum_kv_copies sums the planes of a rank", summed.shape == (TOTAL, HIDDEN))
    check("the validator finds nothing", waybill.torch.validate(fwd_k, rev_k) == [])


def beyond(device):
    """What tensors of any dtype and place allow."""
    fwd, rev = compute_metadata(torch.tensor([[3, 2], [4, 1]]), torch.tensor([[1, 0], [1, 0]]))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64):
        bits = torch.randint(-128, 128, (2, 5, 8 * dtype.itemsize), dtype=torch.int8, device=device)
        tensor = bits.view(dtype)
        there = torch.zeros(2, 7, 8 * dtype.itemsize, dtype=torch.int8, device=device).view(dtype)
        orchestrate_simulate(tensor, there, fwd)
        back = orchestrate_simulate(there, torch.empty_like(tensor), rev)
        check(f"{dtype} keeps its bits", torch.equal(back.view(torch.int8), bits))

    part = fwd.get_slice(0).normalize_dtype().to(device)
    check("tables for a kernel", part.normalized and part.dst_rank.dtype == torch.int32)

    plan = waybill.torch.QkvPlan(2, [0, 2, 4], [4, 2, 5, 3], [0, 1, 0, 1], [0, 3, 4], [0, 1, 2, 3])
    step = waybill.torch.plan_metadata(plan, device)
    check("a plan of our own, as tensors", step.fwd_kv.dst_rank.device.type == device.type)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__} on {device.type}")
    queries(device)
    keys_and_values(device)
    beyond(device)
    print("All is well.")


if __name__ == "__main__":
    main()
