"""One rank's tables of a BatchPlan, and attention with them, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np
import torch

from .._dispatcher import ReadyPlan, TensorFormat
from ..sparse import SparseMetadata
from .batch_plan import BatchPlan
from .kernels import AttentionKernel, AttentionShape, Sequences
from .sequence_dispatcher import SequenceDispatcher

_MOST_SLICES = 4  # with more ranges of rows, one operation with their numbers


class Rows:
    """Ranges of a rank's rows, which stand one behind the other in another tensor."""

    def __init__(self, table: Any, device: torch.device) -> None:
        self.ranges = [(int(begin), int(rows)) for begin, rows in table.reshape(-1, 2).tolist()]
        self.count = sum(rows for _, rows in self.ranges)
        self._numbers: Optional[torch.Tensor] = None
        if len(self.ranges) > _MOST_SLICES:
            numbers = np.concatenate([np.arange(b, b + n) for b, n in self.ranges])
            self._numbers = on_device(torch.from_numpy(numbers), device)

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts the rows of ``source`` to their places."""
        if self._numbers is not None:
            target.index_copy_(0, self._numbers, source)
            return
        at = 0
        for begin, rows in self.ranges:
            target[begin : begin + rows].copy_(source[at : at + rows])
            at += rows

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds them to what is there, in the wider of the two dtypes, rounded once."""
        if self._numbers is not None:
            sums = target.index_select(0, self._numbers) + source
            target.index_copy_(0, self._numbers, sums.to(target.dtype))
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


class Saved(NamedTuple):
    """What backward needs beside q, k, v and out. Without rows where nothing came."""

    home_lse: torch.Tensor
    q: torch.Tensor  #: dispatched to this rank, as the next four
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Beside:
    """A second stream of a GPU: what is done under ``run`` may overlap with what is queued between
    it and ``join``. On the CPU all is done in order.

    Memory needs no record: what one stream leaves is taken again by the same stream, whose work
    under ``run`` begins behind all that was queued before, and ends before ``join``.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._stream: Any = None
        self._device = device
        if device.type == "cuda" and overlap:
            stream: Any = torch.cuda.Stream
            self._stream = stream(device, priority=-1)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class RankStep:
    """The tables of one plan on one rank. Collective where the windows must grow."""

    def __init__(
        self, plan: BatchPlan, dispatcher: SequenceDispatcher, kernel: AttentionKernel,
        beside: Beside,
    ) -> None:  # fmt: skip
        self.plan, self.dispatcher, self.kernel, self.beside = plan, dispatcher, kernel, beside
        self.shape = shape = plan.planner.shape
        rank = dispatcher.world.rank
        self.device = torch.device(dispatcher.world.device)
        routing = plan.routing()
        in_place, dispatched, q_rows, kv_rows = routing.rank(rank)
        self.rows = plan.home_tokens[rank]
        self.home = home_calls(in_place.reshape(-1, 4), self.rows, kernel.takes_gaps, self.device)
        arrived = dispatched.reshape(-1, 4)
        self.arrived: Optional[Sequences] = None
        if len(arrived):
            self.arrived = Sequences.of(arrived[:, 1], arrived[:, 3], self.device)
        self.q_rows, self.kv_rows = Rows(q_rows, self.device), Rows(kv_rows, self.device)
        #: Whether any rank dispatches anything: else there is nothing collective.
        self.moves = bool(len(routing.fwd_q.dst_rank))
        if self.moves:
            self._compile(routing, shape)

    def _compile(self, routing: Any, shape: AttentionShape) -> None:
        q, k, v, out = formats_of(shape)
        fwd_q, rev_q, fwd_kv, sum_kv = (
            SparseMetadata._wrap(table)
            for table in (routing.fwd_q, routing.rev_q, routing.fwd_kv, routing.sum_kv)
        )
        plan = self.dispatcher.plan_dispatch
        self._there = plan((fwd_q, q), (fwd_kv, k, v))
        self._out_home = plan((rev_q, out))
        self._grad_there = plan((fwd_q, out))
        self._dq_home = self._out_home if out == q else plan((rev_q, q))
        self._sums = self.dispatcher.plan_kv_gradient((sum_kv, k, v))
        self._lse_home: Optional[ReadyPlan] = None
        self._lse_parts = (rev_q, out, TensorFormat(torch.float32, (shape.heads,)))
        self.dispatcher.reserve(
            self._there, self._out_home, self._grad_there, self._dq_home, self._sums
        )

    def _move(
        self, plan: ReadyPlan, tensors: Sequence[torch.Tensor], of_dispatch: int = 0
    ) -> Tuple[torch.Tensor, ...]:
        return self.dispatcher._dispatch(
            "ContextParallelAttention", lambda t: f"tensors[{t}]", plan, tensors, of_dispatch
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool, want_lse: bool
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Saved, int]:
        """(output, log-sum-exp [rows, heads] where it is wanted, what backward needs, the number of
        the dispatch). With ``keep`` what came is copied from the window.
        """
        number, back, there = 0, [], self._nothing(q)
        lse: Optional[torch.Tensor]
        if self.moves:
            with self.beside.run():
                views = self._move(self._there, (q, k, v))
                number = self.dispatcher.last_dispatch
                there, lse = self._attend_there(views, keep, want_lse)
                back = self._send_back(there.out, lse, want_lse)
        out, home_lse = self._attend_home(q, k, v, want_lse)
        if self.moves:
            self.beside.join()
            self.q_rows.write(out, back[0])
        lse = None
        if want_lse:
            lse = home_lse.t().contiguous()
            if self.moves:
                self.q_rows.write(lse, back[1])
        kept = home_lse if self.kernel.needs_lse else home_lse.new_empty(0)
        return out, lse, there._replace(home_lse=kept), number

    def _nothing(self, like: torch.Tensor) -> Saved:
        none, lse = like.new_empty(0), like.new_empty(0, dtype=torch.float32)
        return Saved(lse, none, none, none, none, lse)

    def _attend_there(
        self, views: Sequence[torch.Tensor], keep: bool, want_lse: bool
    ) -> Tuple[Saved, torch.Tensor]:
        shape = self.shape
        q, k, v = (view.clone() for view in views) if keep else views
        if self.arrived is None:
            out = q.new_empty(0, shape.heads, shape.v_head_dim)
            lse = q.new_empty(shape.heads, 0, dtype=torch.float32)
        else:
            out, found = self.kernel.forward(q, k, v, self.arrived, shape, want_lse)
            out = out.contiguous()
            lse = q.new_empty(0, dtype=torch.float32) if found is None else found
        return Saved(lse.new_empty(0), q, k, v, out, lse), lse

    def _send_back(self, out: torch.Tensor, lse: torch.Tensor, want_lse: bool) -> list[Any]:
        if not want_lse:
            return list(self._move(self._out_home, (out,)))
        if self._lse_home is None:
            self._lse_home = self.dispatcher.plan_dispatch(self._lse_parts)
            self.dispatcher.reserve(self._lse_home)
        return list(self._move(self._lse_home, (out, lse.t().contiguous())))

    def _attend_home(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, want_lse: bool
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp [heads, rows]; rows that were dispatched have none yet."""
        shape = self.shape
        parts = []
        for call in self.home:
            q_, k_, v_ = q[call.q], k[call.kv], v[call.kv]
            parts.append(self.kernel.forward(q_, k_, v_, call.sequences, shape, want_lse))
        if len(parts) == 1 and parts[0][0].shape[0] == self.rows:
            out, lse = parts[0]
            out = out.contiguous()
            return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse
        out = q.new_empty(self.rows, shape.heads, shape.v_head_dim)
        lses = q.new_empty(shape.heads, self.rows, dtype=torch.float32)
        for call, (part, lse) in zip(self.home, parts):
            out[call.q] = part
            if lse is not None:
                lses[:, call.q] = lse
        return out, lses

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, saved: Saved, number: int, needs: Tuple[bool, bool],
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:  # fmt: skip
        """Gradients of q, k and v. ``needs``: of q, and of k or v; the same on all ranks."""
        grad = grad.contiguous()
        back: Tuple[torch.Tensor, ...] = ()
        sums: Tuple[torch.Tensor, ...] = ()
        if self.moves:
            with self.beside.run():
                (there,) = self._move(self._grad_there, (grad,), number)
                found = self._gradients_there(there, saved)
                if needs[1]:
                    sums = self.dispatcher.kv_gradient(
                        self._sums, *found[1:], dtype=_sum_dtype(k.dtype), of_dispatch=number
                    )
                if needs[0]:
                    back = self._move(self._dq_home, (found[0],), number)
        dq, dk, dv = self._gradients_home(grad, q, k, v, out, saved.home_lse)
        if self.moves:
            self.beside.join()
            if needs[0]:
                self.q_rows.write(dq, back[0])
            if needs[1]:
                self.kv_rows.add(dk, sums[0])
                self.kv_rows.add(dv, sums[1])
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[1] else None

    def _gradients_there(self, grad: torch.Tensor, saved: Saved) -> Tuple[torch.Tensor, ...]:
        if self.arrived is None:
            return saved.q, saved.k, saved.v
        found = self.kernel.backward(
            grad, saved.q, saved.k, saved.v, saved.out, saved.lse, self.arrived, self.shape
        )
        return tuple(tensor.contiguous() for tensor in found)

    def _gradients_home(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        parts = []
        for call in self.home:
            lse_ = lse[:, call.q].contiguous() if self.kernel.needs_lse else None
            parts.append(
                self.kernel.backward(
                    grad[call.q], q[call.q], k[call.kv], v[call.kv], out[call.q], lse_,
                    call.sequences, self.shape,
                )
            )  # fmt: skip
        if len(parts) == 1 and self.home[0].q == slice(0, self.rows) == self.home[0].kv:
            return parts[0]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for call, (dq_, dk_, dv_) in zip(self.home, parts):
            dq[call.q], dk[call.kv], dv[call.kv] = dq_, dk_, dv_
        return dq, dk, dv


def home_calls(table: Any, rows: int, takes_gaps: bool, device: torch.device) -> list[HomeCall]:
    """Calls for sequences in a rank's own rows: one, with sequences that lack queries or keys where
    rows lie between, or one for each run of sequences without a gap.
    """
    runs: list[Any] = []
    for q, q_len, kv, kv_len in table.tolist():
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == q and sum(runs[-1][-1][2:]) == kv:
            runs[-1].append((q, q_len, kv, kv_len))
        else:
            runs.append([(q, q_len, kv, kv_len)])
    if takes_gaps and runs:
        return [_with_gaps(table.tolist(), rows, device)]
    calls = []
    for run in runs:
        q, kv = run[0][0], run[0][2]
        q_end, kv_end = run[-1][0] + run[-1][1], run[-1][2] + run[-1][3]
        lengths = Sequences.of([s[1] for s in run], [s[3] for s in run], device)
        calls.append(HomeCall(slice(q, q_end), slice(kv, kv_end), lengths))
    return calls


def _with_gaps(table: list[Any], rows: int, device: torch.device) -> HomeCall:
    q_lens: list[int] = []
    k_lens: list[int] = []
    q_at = kv_at = 0
    most = max(max(q_len, kv_len) for _, q_len, _, kv_len in table)

    def gap(q_len: int, kv_len: int) -> None:
        # No longer than what is attended to: kernels launch blocks for the longest sequence.
        for lens, others, length in ((q_lens, k_lens, q_len), (k_lens, q_lens, kv_len)):
            for begin in range(0, length, most):
                lens.append(min(most, length - begin))
                others.append(0)

    for q, q_len, kv, kv_len in table:
        gap(q - q_at, kv - kv_at)
        q_lens.append(q_len)
        k_lens.append(kv_len)
        q_at, kv_at = q + q_len, kv + kv_len
    gap(rows - q_at, rows - kv_at)
    return HomeCall(slice(0, rows), slice(0, rows), Sequences.of(q_lens, k_lens, device))


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


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of several copies are rounded once, with what stayed at home."""
    return torch.float32 if dtype.itemsize == 2 else dtype
