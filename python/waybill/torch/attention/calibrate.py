"""Measures the attention kernel of this device by lengths of queries and keys: data for plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Optional, Tuple, Union

import numpy as np
import torch

from ..._arrays import within
from ..._graphs import outside_graphs
from ...costs import AttentionCosts
from ...errors import InvalidArgument
from ...simulate import progress
from .._tensors import dtype_name, require_device
from ..kernels import AttentionKernel, AttentionShape, Sequences, choose_kernel
from ..kernels import Kernel as _Kernel
from ..kernels.seam import attention, gradients
from .plan import BatchPlanner

_WHO = "calibrate_attention"


#: One call: so many shards, the queries of each, the keys of its last query.
_Case = Tuple[int, int, int]


def pairs(case: _Case, shape: AttentionShape) -> int:
    """(query, key) pairs of a call."""
    shards, q_len, kv_len = case
    if shape.mask == "full":
        return shards * q_len * kv_len
    keys = np.arange(kv_len - q_len + 1, kv_len + 1)
    if shape.window is not None:
        keys = np.minimum(keys, shape.window)
    return shards * int(keys.sum())


@outside_graphs
def calibrate_attention(
    heads: int,
    kv_heads: Optional[int] = None,
    head_dim: int = 128,
    v_head_dim: Optional[int] = None,
    *,
    dtype: Union[str, torch.dtype] = "bfloat16",
    mask: str = "causal",
    window: Optional[int] = None,
    kernel: _Kernel = "auto",
    device: Any = "cuda",
    rows: int = 16384,
    repeats: int = 5,
) -> AttentionCosts:
    """Times the kernel forward and backward on this device over lengths of queries and keys: whole
    documents from 128 tokens to ``rows``, ends of longer ones, short shards with much context.
    Takes a second on a GPU. On one rank: the others get its result, such as by a file.

    Args:
        heads, kv_heads, head_dim, v_head_dim, dtype, mask, window, kernel: as of
            ContextParallelAttention.
        rows: of queries in a call: enough that the device is full.
        repeats: the median of so many is taken.
    """
    device = require_device(device, f"{_WHO}: device")
    if device is None:
        raise InvalidArgument(f"{_WHO}: device = None, expected a device")
    rows = within(rows, 256, 2**24, f"{_WHO}: rows", "2^24")
    repeats = within(repeats, 1, 2**24, f"{_WHO}: repeats", "2^24")
    planner = BatchPlanner(
        1, heads, kv_heads, head_dim, v_head_dim, dtype=dtype, mask=mask, window=window, who=_WHO
    )
    shape = planner.shape
    found = choose_kernel(kernel, device, _WHO)
    found.check(shape, device, _WHO)
    found.check_training(device, _WHO)
    cases = _cases(rows, mask)
    with progress(_WHO):
        times = [_timed(case, found, shape, device, repeats) for case in cases]
    about: dict[str, Any] = {
        "measured": [[*case, *spans] for case, spans in zip(cases, times)],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernel": found.name, "torch": torch.__version__, "heads": shape.heads,
        "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "v_head_dim": shape.v_head_dim,
        "dtype": dtype_name(shape.dtype), "mask": shape.mask, "window": shape.window,
    }  # fmt: skip
    return fit(cases, times, shape, about)


def _cases(rows: int, mask: str) -> list[_Case]:
    """Calls of as many rows; lengths are not all multiples of a block."""
    cases = []
    length = 128
    while length <= rows:
        for q_len in (length, length * 3 // 4 + 5):
            cases.append((max(1, rows // q_len), q_len, q_len))
        length *= 2
    if mask == "full":
        return cases
    for q_len in (128, 512, 2048):
        for factor in (4, 16):
            if q_len * factor <= 2 * rows:
                cases.append((max(1, rows // (q_len * factor)), q_len, q_len * factor))
    return cases


def _timed(
    case: _Case, kernel: AttentionKernel, shape: AttentionShape, device: torch.device, repeats: int
) -> Tuple[float, float]:
    """Seconds (forward, backward), medians."""
    shards, q_len, kv_len = case
    sequences = Sequences.of([q_len] * shards, [kv_len] * shards, device)

    def random(count: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(count, heads, size, device=device, dtype=shape.dtype)

    q, grad = (random(shards * q_len, shape.heads, n) for n in (shape.head_dim, shape.v_head_dim))
    k, v = (random(shards * kv_len, shape.kv_heads, n) for n in (shape.head_dim, shape.v_head_dim))
    at = f"on {device}"
    out, lse = attention(kernel, q, k, v, sequences, shape, False, at)
    gradients(kernel, grad, q, k, v, out, lse, sequences, shape, at)

    def median(call: Callable[[], Any]) -> float:
        return statistics.median(_seconds(call, device) for _ in range(repeats))

    forward = median(lambda: kernel.forward(q, k, v, sequences, shape, False))
    return forward, median(lambda: kernel.backward(grad, q, k, v, out, lse, sequences, shape))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    event: Any = torch.cuda.Event
    first, last = (event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    first.record(stream)
    call()
    last.record(stream)
    last.synchronize()
    return 1e-3 * first.elapsed_time(last)


def fit(
    cases: list[_Case], times: list[Tuple[float, float]], shape: AttentionShape,
    about: dict[str, Any],
) -> AttentionCosts:  # fmt: skip
    """Least squares of relative errors, of forward and backward together: seconds of a pair, of a
    row, of a shard and of a call, none below 0. That of a call, mostly the host's, is the same for
    all ranks and no part of the costs; without it rows and shards would be charged with it.
    """
    facts = np.array([[pairs(c, shape), c[0] * c[1], c[0], 1] for c in cases], np.float64)
    seconds = np.array([forward + backward for forward, backward in times])
    weighted = facts / seconds[:, None]
    kept = [0, 1, 2, 3]
    while True:
        values, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(cases)), rcond=None)
        wrong = [i for i, value in zip(kept, values) if value < 0 and i > 0]
        if not wrong:
            break
        kept.remove(min(wrong, key=lambda i: values[kept.index(i)] * facts[:, i].mean()))
    if values[0] <= 0:
        raise InvalidArgument(f"{_WHO}: more pairs take no more time: what was timed is too small")
    found = np.zeros(4)
    found[kept] = values
    ratio = sum(b for _, b in times) / sum(f for f, _ in times)
    error = float(np.abs(facts @ found / seconds - 1).max())
    return AttentionCosts(
        pairs_per_second=float((1 + ratio) / found[0]),
        row_pairs=min(2**20, round(found[1] / found[0])),
        shard_pairs=min(2**40, round(found[2] / found[0])),
        backward_ratio=float(ratio), error=error, about={**about, "call_seconds": float(found[3])},
    )  # fmt: skip
