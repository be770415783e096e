"""One rank's tables of a BatchPlan, and attention with them, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Tuple, TypeVar, cast

import torch

from .._errors import said_by, shown
from ..errors import Disagreement, InvalidArgument, TransportError
from ._autocast import Autocast
from ._context_parallel_latent import Latent, Project, Projector
from ._context_parallel_moves import WHO, Moves
from ._context_parallel_streams import Beside, Uploads
from ._context_parallel_tables import Rows, calls_of
from ._piece_exchange import first_difference
from ._ranges import named
from ._tensors import require_moved
from .batch_plan import BatchPlan
from .kernels import AttentionKernel
from .kernels._checks import attention, gradients
from .sequence_dispatcher import SequenceDispatcher

_F = TypeVar("_F", bound=Callable[..., Any])

# What ranks must have in common, as errors say it.
ORDER = "calls are for the same plans in the same order"
GRADIENTS = f"{ORDER}, and q, as well as k or v, require gradients on all ranks or on none"


class Saved(NamedTuple):
    """What backward needs beside q, k, v and out. Without rows where nothing came."""

    home_lse: torch.Tensor
    q: torch.Tensor  #: dispatched to this rank, as the next four
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class StepMemory(NamedTuple):
    """Bytes of one call on one rank, beside q, k, v, the output and their gradients."""

    kept: int  #: from forward to backward: what came from elsewhere, and log-sum-exps
    backward: int  #: while it runs: gradients of what came, sums of copies; not the kernel's own
    windows: int  #: of the module, for all layers and plans


def names_difference(call: _F) -> _F:
    """A call of RankStep. Where ranks see that they disagree in it, in memory of the host, all of
    them do, and go on to compare what they planned; a GPU has lost its calls then.
    """

    @functools.wraps(call)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return call(self, *args, **options)
        except Disagreement as error:
            if self.device.type == "cpu" and "ranks disagree in call " in str(error):
                found = first_difference(self.dispatcher.world, self.pieces, self.planner.facts())
                if found:
                    told_by = f"{WHO}.gather tells all ranks what each holds"
                    error.args = (f"{error}: {found} ({told_by})", *error.args[1:])
            raise

    return cast(_F, told)


class RankStep:
    """The tables of one plan on one rank. Collective where the windows must grow. Does not hold the
    plan, with which it goes.
    """

    #: How many plans were there before: only tables of one size get others.
    generation = 0
    owner = 0  #: the number of the module to which it belongs

    def __init__(
        self, plan: BatchPlan, dispatcher: SequenceDispatcher, kernel: AttentionKernel,
        beside: Beside,
    ) -> None:  # fmt: skip
        self.dispatcher, self.kernel, self.beside = dispatcher, kernel, beside
        self.shape = shape = plan.planner.shape
        self.latent_dim = plan.planner.latent_dim
        self.planner, self.pieces = plan.planner, plan._pieces
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
        self.at = f"on rank {rank}"  #: as errors say it
        self.uploads.keep((table, *self.q_rows.tables, *self.kv_rows.tables))
        #: Whether any rank dispatches anything: else there is nothing collective.
        self.moves = bool(len(routing.fwd_q.dst_rank))
        self._moves = Moves(routing, dispatcher, shape, plan.planner.latent_dim)

    def check_generation(self, generation: int) -> None:
        """A backward pass needs the plan that its forward had."""
        if generation != self.generation:
            raise InvalidArgument(
                f"{WHO}: backward of a FixedPlan whose plan was replaced since forward, expected"
                " one FixedPlan for each microbatch in flight"
            )

    def check_open(self) -> None:
        """Backward of a call that was made before the module was closed comes too late. Where no
        rows travel, no other call looks whether the user or another rank has ended the program.
        """
        self.dispatcher.world._world.check_ended(WHO)
        if self.dispatcher._closed:
            raise TransportError(f"{WHO}: the module was closed {self.at}")

    @said_by(f"{WHO}.prepare", ORDER)
    def prepare(self) -> None:
        """Makes what calls would make."""
        self.check_open()
        if self.moves:
            with self.beside.only():
                self._moves.prepare(self.uploads.run())

    def checked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, casts: Callable[[], bool],
        latent: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        """The tensors of a call, which fit the plan; cast where ``casts`` says so. Without the
        rows that stay, K and V of latent rows have none.
        """
        if self.latent_dim and not latent:
            raise InvalidArgument(
                f"{WHO}: got k and v, expected latent(...): latent_dim = {self.latent_dim}"
            )
        self.check_open()
        shape, kv_rows = self.shape, self.rows if self.home or not latent else 0
        kv = (kv_rows, shape.kv_heads)
        return [
            self._checked("q", q, (self.rows, shape.heads, shape.head_dim), casts),
            self._checked("k", k, (*kv, shape.head_dim), casts),
            self._checked("v", v, (*kv, shape.v_head_dim), casts),
        ]

    def checked_latent(
        self, rows: torch.Tensor, project: Project, weights: Sequence[torch.Tensor],
        casts: Callable[[], bool],
    ) -> Tuple[torch.Tensor, Projector, torch.Tensor, torch.Tensor]:  # fmt: skip
        """(latent rows, how they are projected, K and V of those that stay)."""
        if not self.latent_dim:
            raise InvalidArgument(f"{WHO}: got latent rows, expected k and v: latent_dim is None")
        rows = self._checked("rows", rows, (self.rows, self.latent_dim), casts)
        for i, weight in enumerate(weights):
            require_moved(weight, f"{WHO}: weights[{i}]")
        if not callable(project):
            raise InvalidArgument(f"{WHO}: project = {shown(project)}, expected a function")
        autocast = Autocast.now(self.device.type)
        projector = Projector(project, self.shape, casts(), autocast, self.at)
        mine = rows if self.home else rows[:0]
        k, v = projector.fitting(project(mine, *weights), mine.shape[0])
        return rows, projector, k, v

    def _checked(
        self, name: str, tensor: torch.Tensor, expected: Tuple[int, ...], casts: Callable[[], bool]
    ) -> torch.Tensor:
        at = self.at
        require_moved(tensor, f"{WHO}: {name}")
        if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
            raise InvalidArgument(
                f"{WHO}: {name} is a {type(tensor).__name__} {at}, expected this rank's part:"
                f" {name}.to_local()"
            )
        if tensor.device != self.device:
            raise InvalidArgument(
                f"{WHO}: {name} lies on {tensor.device}, expected {self.device} {at}"
            )
        if tuple(tensor.shape) != expected:
            raise InvalidArgument(
                f"{WHO}: {name} has shape {list(tensor.shape)}, expected {list(expected)}, as the"
                f" plan has it {at}"
            )
        if tensor.dtype != self.shape.dtype and casts():
            tensor = tensor.to(self.shape.dtype)
        if tensor.dtype != self.shape.dtype:
            raise InvalidArgument(
                f"{WHO}: {name} has dtype {tensor.dtype}, expected {self.shape.dtype} {at}"
            )
        return adjacent_rows(tensor)

    @property
    def arrived_rows(self) -> Tuple[int, int]:
        """Rows of Q, and of K and V, that come from elsewhere."""
        if self.arrived is None:
            return 0, 0
        return sum(self.arrived.q_lens), sum(self.arrived.k_lens)

    def memory(self) -> StepMemory:
        """As ContextParallelAttention.memory, but for the windows."""
        shape, size = self.shape, self.shape.dtype.itemsize
        q_rows, kv_rows = self.arrived_rows
        lse = 4 * shape.heads if self.kernel.needs_lse else 0
        q_row, kv_row = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        out_row, v_row = shape.heads * shape.v_head_dim, shape.kv_heads * shape.v_head_dim
        if self.latent_dim:
            kv_row, v_row = self.latent_dim, 0
        came = q_rows * (size * (q_row + out_row) + lse) + kv_rows * size * (kv_row + v_row)
        gradients = size * (q_rows * q_row + kv_rows * (kv_row + v_row))
        sums = self.kv_rows.count * max(4, size) * (kv_row + v_row)
        return StepMemory(came + self.rows * lse, gradients + (sums if self.moves else 0), 0)

    @said_by(f"{WHO}: forward", ORDER)
    @names_difference
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool, want_lse: bool,
        latent: Optional[Latent] = None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Saved, int]:  # fmt: skip
        """(output, log-sum-exp [rows, heads] where it is wanted, what backward needs, the number of
        the dispatch). With ``keep`` what came is copied from the window. Of latent rows, k and v
        are those that stay, and the latent ones travel.
        """
        sent = (q, k, v) if latent is None else (q, latent.rows)
        number, there = 0, None
        back: Tuple[torch.Tensor, ...] = ()
        lse: Optional[torch.Tensor]
        views: Callable[[], Tuple[torch.Tensor, ...]] = tuple
        self.beside.fork(self.uploads)
        # Others wait for what is sent; but the first time its tables are made while the device is
        # busy with what stays.
        at_once = self.moves and (self._moves.is_ready or not self.beside.overlaps)
        if at_once:
            with self.beside.run(), named("dispatch", self.device):
                views, number = self._moves.there(*sent)
        with named("forward in place", self.device):
            out, home_lse = self._attend_home(q, k, v, want_lse)
        if self.moves:
            with self.beside.run(), named("forward of rows that travel", self.device):
                if not at_once:
                    views, number = self._moves.there(*sent)
                there, lse = self._attend_there(views(), keep, want_lse, latent)
                back = self._send_back(there.out, lse, want_lse)
                if keep:
                    self._moves.prepare_backward()
            self.beside.join()
            self.q_rows.write(out, back[0])
        lse = None
        if want_lse:
            lse = home_lse.t().clone(memory_format=torch.contiguous_format)
            if self.moves:
                self.q_rows.write(lse, back[1])
        kept = home_lse if self.kernel.needs_lse else home_lse.new_empty(0)
        if there is None:
            none = q.new_empty(0)
            return out, lse, Saved(kept, none, none, none, none, kept.new_empty(0)), number
        return out, lse, there._replace(home_lse=kept), number

    def _attend_there(
        self, views: Sequence[torch.Tensor], keep: bool, want_lse: bool, latent: Optional[Latent]
    ) -> Tuple[Saved, torch.Tensor]:
        shape = self.shape
        q, *kv = (view.clone() for view in views) if keep else views
        k, v = kv if latent is None else (kv[0], q.new_empty(0))
        if latent is not None and self.arrived is not None:
            kv = [adjacent_rows(t) for t in latent.project(kv[0], *latent.weights)]
        if self.arrived is None:
            out = q.new_empty(0, shape.heads, shape.v_head_dim)
            lse = q.new_empty(shape.heads, 0, dtype=torch.float32)
        else:
            out, found = attention(
                self.kernel, q, kv[0], kv[1], self.arrived, shape, want_lse, self.at
            )
            out = out.contiguous()
            lse = q.new_empty(0, dtype=torch.float32) if found is None else found
        kept = lse if self.kernel.needs_lse else lse.new_empty(0)
        return Saved(kept, q, k, v, out, kept), lse  # that of rows at home comes later

    def _send_back(
        self, out: torch.Tensor, lse: torch.Tensor, want_lse: bool
    ) -> Tuple[torch.Tensor, ...]:
        if not want_lse:
            return self._moves.out_home(out)
        return self._moves.out_and_lse_home(out, lse.t().contiguous())

    @property
    def _is_whole(self) -> bool:
        """Whether one call at home has all rows, so that nothing is cut out."""
        rows = slice(0, self.rows)
        return len(self.home) == 1 and self.home[0].q == rows == self.home[0].kv

    @property
    def _all_travel(self) -> bool:
        """Whether gradients of K and V are sums of copies alone, of all rows in their order."""
        return not self.home and self.moves and self.kv_rows.ranges == [(0, self.rows)]

    def _begun(self, like: torch.Tensor) -> torch.Tensor:
        """A gradient to which sums are added."""
        return torch.empty_like(like) if self._all_travel else torch.zeros_like(like)

    def _attend_home(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, want_lse: bool
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp [heads, rows]; rows that were dispatched have none yet."""
        shape = self.shape
        if self._is_whole:
            out, lse = attention(
                self.kernel, q, k, v, self.home[0].sequences, shape, want_lse, self.at
            )
            out = out.contiguous()
            return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse
        out = q.new_empty(self.rows, shape.heads, shape.v_head_dim)
        lses = q.new_empty(shape.heads, self.rows, dtype=torch.float32)
        for call in self.home:
            q_, k_, v_ = q[call.q], k[call.kv], v[call.kv]
            out[call.q], lse = attention(
                self.kernel, q_, k_, v_, call.sequences, shape, want_lse, self.at
            )
            if lse is not None:
                lses[:, call.q] = lse
        return out, lses

    @said_by(f"{WHO}: backward", GRADIENTS)
    @names_difference
    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, saved: Saved, number: int, needs: Tuple[bool, bool],
        latent: Optional[Latent] = None,
    ) -> Tuple[Optional[torch.Tensor], ...]:  # fmt: skip
        """Gradients of q, k and v; then of latent rows and weights. ``needs``: of q, and of k or v;
        the same on all ranks.
        """
        self.check_open()
        grad = grad.contiguous()
        sums: Tuple[torch.Tensor, ...] = ()
        of_weights: Tuple[Optional[torch.Tensor], ...] = ()
        self.beside.fork(self.uploads)
        if self.moves:
            with self.beside.run(), named("dispatch of gradients", self.device):
                there = self._moves.grad_there(grad, number)
        with named("backward in place", self.device):
            dq, dk, dv = self._gradients_home(grad, q, k, v, out, saved.home_lse)
        if self.moves:
            with self.beside.run(), named("backward of rows that travel", self.device):
                found, of_weights = self._gradients_there(there()[0], saved, latent)
                if needs[1]:
                    sums = self._moves.sums(number, *found[1:])
                # Last: its view holds until the dispatcher's next call.
                back = self._moves.dq_home(found[0], number) if needs[0] else grad
            self.beside.join()
            if needs[0]:
                self.q_rows.write(dq, back)
        targets = [dk, dv] if latent is None else [self._begun(latent.rows)]
        for target, sum_ in zip(targets, sums):
            if self._all_travel:
                target.copy_(sum_)
            else:
                self.kv_rows.add(target, sum_)
        of_kv = (dk, dv) if latent is None else (dk, dv, *targets, *of_weights)
        return dq if needs[0] else None, *(t if needs[1] else None for t in of_kv)

    def _gradients_there(
        self, grad: torch.Tensor, saved: Saved, latent: Optional[Latent]
    ) -> Tuple[Tuple[torch.Tensor, ...], Tuple[Optional[torch.Tensor], ...]]:
        """(of q, k and v, or of q and the latent rows; of weights)."""
        weights = () if latent is None else latent.weights
        if self.arrived is None:
            kv = (saved.k, saved.v) if latent is None else (saved.k,)
            zeros = (torch.zeros_like(w) if w.is_floating_point() else None for w in weights)
            return (saved.q, *kv), tuple(zeros)
        again = None if latent is None else latent.again(saved.k)
        k, v = (saved.k, saved.v) if again is None else again.kv
        found: Tuple[torch.Tensor, ...] = gradients(
            self.kernel,
            grad,
            saved.q,
            k,
            v,
            saved.out,
            saved.lse,
            self.arrived,
            self.shape,
            self.at,
        )
        of_weights: Tuple[Optional[torch.Tensor], ...] = ()
        if again is not None:
            of_rows, *rest = again.gradients(found[1], found[2])
            found, of_weights = (found[0], of_rows), tuple(rest)
        return tuple(tensor.contiguous() for tensor in found), of_weights

    def _gradients_home(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        kept = lse if self.kernel.needs_lse else None
        if self._is_whole:
            sequences = self.home[0].sequences
            return gradients(self.kernel, grad, q, k, v, out, kept, sequences, self.shape, self.at)
        dq, dk, dv = torch.empty_like(q), self._begun(k), self._begun(v)
        for call in self.home:
            lse_ = None if kept is None else kept[:, call.q].contiguous()
            dq[call.q], dk[call.kv], dv[call.kv] = gradients(
                self.kernel, grad[call.q], q[call.q], k[call.kv], v[call.kv], out[call.q], lse_,
                call.sequences, self.shape, self.at,
            )  # fmt: skip
        return dq, dk, dv


def adjacent_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Slices of a common projection go as they are; rows must have adjacent elements, in memory."""
    if tensor.is_neg():
        return tensor.resolve_neg().contiguous()
    size = 1
    for extent, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:])):
        if stride != size and extent != 1:
            return tensor.contiguous()
        size *= extent
    return tensor
