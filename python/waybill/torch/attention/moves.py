"""A rank's tables of a BatchPlan: which rows, and which sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np
import torch

from .._dispatcher import TensorFormat
from .kernels import AttentionShape, Sequences

_MOST_SLICES = 4  # with more ranges of rows, one operation with their numbers


def put_rows(target: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
    """index_copy_ of rows whose numbers are right and differ. Under deterministic algorithms torch
    would look at them on the host: that waits for the device, and a graph forbids it.
    """
    if torch.are_deterministic_algorithms_enabled():
        torch.ops.aten._index_put_impl_(target, [numbers], source, False, True)
    else:
        target.index_copy_(0, numbers, source)


class Rows:
    """Ranges of a rank's rows, which stand one after another in another tensor."""

    def __init__(self, table: Any, device: torch.device) -> None:
        self.ranges = [(int(begin), int(rows)) for begin, rows in table.reshape(-1, 2).tolist()]
        self.count = sum(rows for _, rows in self.ranges)
        self._numbers: Optional[torch.Tensor] = None
        if len(self.ranges) > _MOST_SLICES:
            numbers = np.concatenate([np.arange(b, b + n) for b, n in self.ranges])
            self._numbers = on_device(torch.from_numpy(numbers), device)

    @property
    def tables(self) -> list[torch.Tensor]:
        """What lies on the device."""
        return [] if self._numbers is None else [self._numbers]

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts the rows of ``source`` to their places."""
        if self._numbers is not None:
            put_rows(target, self._numbers, source)
            return
        at = 0
        for begin, rows in self.ranges:
            target[begin : begin + rows].copy_(source[at : at + rows])
            at += rows

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds them to what is there, in the wider of the two dtypes, rounded once."""
        if self._numbers is not None:
            sums = target.index_select(0, self._numbers) + source
            put_rows(target, self._numbers, sums.to(target.dtype))
            return
        at = 0
        for begin, rows in self.ranges:
            target[begin : begin + rows].add_(source[at : at + rows])
            at += rows


class HomeCall(NamedTuple):
    """One call of the kernel on a rank's own rows."""

    q: slice
    kv: slice
    sequences: Sequences


class HomeLens(NamedTuple):
    """What a HomeCall is made of."""

    q: slice
    kv: slice
    q_lens: list[int]
    k_lens: list[int]


def home_lens(table: Any, rows: int, takes_gaps: bool) -> list[HomeLens]:
    """Calls for sequences in a rank's own rows: one, with sequences that lack queries or keys where
    rows lie between, or one for each run of sequences without a gap.
    """
    sequences = table.tolist()
    if takes_gaps and sequences:
        most = max(max(q_len, kv_len) for _, q_len, _, kv_len in sequences)
        lens = with_gaps(sequences, rows, rows, most)
        return [HomeLens(slice(0, rows), slice(0, rows), *lens)]
    runs: list[Any] = []
    for q, q_len, kv, kv_len in sequences:
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == q and sum(runs[-1][-1][2:]) == kv:
            runs[-1].append((q, q_len, kv, kv_len))
        else:
            runs.append([(q, q_len, kv, kv_len)])
    calls = []
    for run in runs:
        q, kv = run[0][0], run[0][2]
        q_end, kv_end = run[-1][0] + run[-1][1], run[-1][2] + run[-1][3]
        lens = ([s[1] for s in run], [s[3] for s in run])
        calls.append(HomeLens(slice(q, q_end), slice(kv, kv_end), *lens))
    return calls


def with_gaps(
    sequences: Sequence[Any], q_end: int, kv_end: int, most: int
) -> Tuple[list[int], list[int]]:
    """Lengths of queries and keys of sequences (first query, queries, first key, keys), and of
    what lies between them and behind the last, in parts of at most ``most`` rows: no longer than
    what is attended to, as kernels launch blocks for the longest sequence.
    """
    q_lens: list[int] = []
    k_lens: list[int] = []
    q_at = kv_at = 0

    def gap(q_len: int, kv_len: int) -> None:
        for lens, others, length in ((q_lens, k_lens, q_len), (k_lens, q_lens, kv_len)):
            for begin in range(0, length, most):
                lens.append(min(most, length - begin))
                others.append(0)

    for q, q_len, kv, kv_len in sequences:
        gap(q - q_at, kv - kv_at)
        q_lens.append(q_len)
        k_lens.append(kv_len)
        q_at, kv_at = q + q_len, kv + kv_len
    gap(q_end - q_at, kv_end - kv_at)
    return q_lens, k_lens


def calls_of(
    in_place: Any, dispatched: Any, rows: int, takes_gaps: bool, device: torch.device
) -> Tuple[list[HomeCall], Optional[Sequences], torch.Tensor]:
    """(calls on own rows, sequences of the rows that come, the table on the device that all of them
    show), of a rank's tables.
    """
    home = home_lens(in_place.reshape(-1, 4), rows, takes_gaps)
    arrived = dispatched.reshape(-1, 4)
    lens = [(call.q_lens, call.k_lens) for call in home]
    if len(arrived):
        lens.append((arrived[:, 1].tolist(), arrived[:, 3].tolist()))
    sequences = Sequences.several(lens, device) if lens else []
    calls = [HomeCall(call.q, call.kv, s) for call, s in zip(home, sequences)]
    table = sequences[0].cu_seqlens_q if sequences else torch.empty(0, device=device)
    return calls, sequences[-1] if len(arrived) else None, table


def formats_of(shape: AttentionShape) -> Tuple[TensorFormat, ...]:
    """Of q, k, v and the output."""
    return (
        TensorFormat(shape.dtype, (shape.heads, shape.head_dim)),
        TensorFormat(shape.dtype, (shape.kv_heads, shape.head_dim)),
        TensorFormat(shape.dtype, (shape.kv_heads, shape.v_head_dim)),
        TensorFormat(shape.dtype, (shape.heads, shape.v_head_dim)),
    )


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small table of the host, which does not wait for the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
