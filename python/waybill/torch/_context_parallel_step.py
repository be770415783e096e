"""One rank's tables of a BatchPlan, and attention with them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, Tuple

import torch

from ..errors import InvalidArgument
from ._context_parallel_moves import WHO, Moves
from ._context_parallel_streams import Beside, Uploads
from ._context_parallel_tables import Rows, calls_of
from ._ranges import named
from ._tensors import require_tensor
from .batch_plan import BatchPlan
from .kernels import AttentionKernel
from .sequence_dispatcher import SequenceDispatcher


class Saved(NamedTuple):
    """What backward needs beside q, k, v and out. Without rows where nothing came."""

    home_lse: torch.Tensor
    q: torch.Tensor  #: dispatched to this rank, as the next four
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class RankStep:
    """The tables of one plan on one rank. Collective where the windows must grow. Does not hold the
    plan, with which it goes.
    """

    def __init__(
        self, plan: BatchPlan, dispatcher: SequenceDispatcher, kernel: AttentionKernel,
        beside: Beside,
    ) -> None:  # fmt: skip
        self.dispatcher, self.kernel, self.beside = dispatcher, kernel, beside
        self.shape = shape = plan.planner.shape
        rank = dispatcher.world.rank
        self.device = torch.device(dispatcher.world.device)
        routing = plan.routing()
        in_place, dispatched, q_rows, kv_rows = routing.rank(rank)
        self.rows = plan.home_tokens[rank]
        self.uploads = Uploads(self.device, beside.uploads)
        with self.uploads.run():
            self.home, self.arrived, table = calls_of(
                in_place, dispatched, self.rows, kernel.takes_gaps, self.device
            )
            self.q_rows, self.kv_rows = Rows(q_rows, self.device), Rows(kv_rows, self.device)
        self.uploads.keep((table, *self.q_rows.tables, *self.kv_rows.tables))
        #: Whether any rank dispatches anything: else there is nothing collective.
        self.moves = bool(len(routing.fwd_q.dst_rank))
        self._moves = Moves(routing, dispatcher, shape)

    def prepare(self) -> None:
        """Makes what calls would make."""
        if self.moves:
            with self.beside.only():
                self._moves.prepare(self.uploads.run())

    def checked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, casts: Callable[[], bool]
    ) -> list[torch.Tensor]:
        """The tensors of a call, which fit the plan; cast where ``casts`` says so."""
        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        sizes = (shape.head_dim, shape.head_dim, shape.v_head_dim)
        at = f"on rank {self.dispatcher.world.rank}"
        checked = []
        for name, tensor, n, size in zip("qkv", (q, k, v), heads, sizes):
            require_tensor(tensor, f"{WHO}: {name}")
            if tensor.device != self.device:
                raise InvalidArgument(
                    f"{WHO}: {name} lies on {tensor.device}, expected {self.device} {at}"
                )
            if tuple(tensor.shape) != (self.rows, n, size):
                raise InvalidArgument(
                    f"{WHO}: {name} has shape {list(tensor.shape)}, expected"
                    f" [{self.rows}, {n}, {size}], as the plan has it {at}"
                )
            if tensor.dtype != shape.dtype and casts():
                tensor = tensor.to(shape.dtype)
            if tensor.dtype != shape.dtype:
                raise InvalidArgument(
                    f"{WHO}: {name} has dtype {tensor.dtype}, expected {shape.dtype} {at}"
                )
            checked.append(adjacent_rows(tensor))
        return checked

    @property
    def arrived_rows(self) -> Tuple[int, int]:
        """Rows of Q, and of K and V, that come from elsewhere."""
        if self.arrived is None:
            return 0, 0
        return sum(self.arrived.q_lens), sum(self.arrived.k_lens)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool, want_lse: bool
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Saved, int]:
        """(output, log-sum-exp [rows, heads] where it is wanted, what backward needs, the number of
        the dispatch). With ``keep`` what came is copied from the window.
        """
        number, there = 0, self._nothing(q)
        back: Tuple[torch.Tensor, ...] = ()
        lse: Optional[torch.Tensor]
        views: Tuple[torch.Tensor, ...] = ()
        self.beside.fork(self.uploads)
        # Others wait for what is sent; but the first time its tables are made while the device is
        # busy with what stays.
        at_once = self.moves and (self._moves.is_ready or not self.beside.overlaps)
        if at_once:
            with self.beside.run(), named("dispatch", self.device):
                views, number = self._moves.there(q, k, v)
        with named("forward in place", self.device):
            out, home_lse = self._attend_home(q, k, v, want_lse)
        if self.moves:
            with self.beside.run(), named("forward of rows that travel", self.device):
                if not at_once:
                    views, number = self._moves.there(q, k, v)
                there, lse = self._attend_there(views, keep, want_lse)
                back = self._send_back(there.out, lse, want_lse)
                if keep:
                    self._moves.prepare_backward()
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

    def _send_back(
        self, out: torch.Tensor, lse: torch.Tensor, want_lse: bool
    ) -> Tuple[torch.Tensor, ...]:
        if not want_lse:
            return self._moves.out_home(out)
        return self._moves.out_and_lse_home(out, lse.t().contiguous())

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
        sums: Tuple[torch.Tensor, ...] = ()
        self.beside.fork(self.uploads)
        if self.moves:
            with self.beside.run(), named("dispatch of gradients", self.device):
                there = self._moves.grad_there(grad, number)
        with named("backward in place", self.device):
            dq, dk, dv = self._gradients_home(grad, q, k, v, out, saved.home_lse)
        if self.moves:
            with self.beside.run(), named("backward of rows that travel", self.device):
                found = self._gradients_there(there, saved)
                if needs[1]:
                    sums = self._moves.sums(found[1], found[2], number)
                # Last: its view holds until the dispatcher's next call.
                back = self._moves.dq_home(found[0], number) if needs[0] else grad
            self.beside.join()
            if needs[0]:
                self.q_rows.write(dq, back)
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


def adjacent_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Slices of a common projection go as they are; rows must have adjacent elements."""
    if tensor.shape[0] > 0 and not tensor[0].is_contiguous():
        return tensor.contiguous()
    return tensor
