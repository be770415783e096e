"""Attention with one rank's tables of a BatchPlan, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Tuple, TypeVar, cast

import torch

from ..._errors import reworded, said_by, shown
from ..._graphs import outside_graphs
from ...errors import Disagreement, Error, InvalidArgument, TransportError
from .._tensors import (
    adjacent_rows,
    autocast_now,
    casts_to,
    first_order,
    is_plain,
    profiled,
    require_moved,
    wants_gradients,
    without_autocast,
)
from ..kernels import AttentionKernel
from ..kernels.seam import attention, gradients, mismatch
from ..sequence_dispatcher import SequenceDispatcher
from .moves import WHO, Call, Moves, Rows, SideStream, Uploads, calls_of, first_difference
from .plan import BatchPlan

#: A function of latent rows and weights that makes K and V of them.
Project = Callable[..., Tuple[torch.Tensor, torch.Tensor]]


_F = TypeVar("_F", bound=Callable[..., Any])

# Ranks must have this in common, as errors say it.
ORDER = "all ranks call the same plans in the same order"
GRADIENTS = f"{ORDER}, and q, as well as k or v, require gradients on all ranks or on none"


#: Tensors that backward needs besides q, k, v and out: the log-sum-exp of rows in place; q, k, v,
#: output and log-sum-exp of rows that were dispatched to this rank. Without rows where none came.
Saved = Tuple[torch.Tensor, ...]


class StepMemory(NamedTuple):
    """Bytes of one call on one rank, besides q, k, v, the output and their gradients."""

    kept: int  #: from forward to backward: what came from elsewhere, and log-sum-exps
    backward: int  #: while it runs: gradients of what came, sums of copies; not the kernel's own
    windows: int  #: windows of the module, for all layers and plans


def _call_of_all(what: str, common: str) -> Callable[[_F], _F]:
    """A collective call of RankStep, without autocast: tensors are of the right dtype by then.

    Where ranks see that they disagree in it, in memory of the host, all of them do, and go on to
    compare what they planned; a GPU has lost its calls then.

    :param common: what ranks must have in common, as errors say it
    """

    def decorate(call: _F) -> _F:
        @functools.wraps(call)
        def call_and_name(self: Any, *args: Any) -> Any:
            try:
                with without_autocast(self.device.type):
                    return call(self, *args)
            except Error as error:
                on_host = isinstance(error, Disagreement) and self.device.type == "cpu"
                if on_host and "ranks disagree in call " in str(error):
                    found = first_difference(
                        self.dispatcher.world, self.pieces, self.planner.facts()
                    )
                    if found:
                        found = found.removesuffix(", expected the same on all ranks")
                        if " document" in found:  # otherwise it is an option of the planner
                            found += f" ({WHO}.gather tells all ranks what each holds)"
                        error.args = (f"{error}: {found}", *error.args[1:])
                reworded(error, f"{WHO}: {what}", None, common)
                raise

        return cast(_F, call_and_name)

    return decorate


class Attention(torch.autograd.Function):
    """Attention with the tables of a RankStep, for autograd.

    Tensors alone are saved, the same number on all ranks: a checkpoint that computes the forward
    again, and its calls, does so on all of them at the same place. Where latent rows travel, k and
    v are of the rows that stay, and ``latent`` are the rows and the weights, so that each weight
    has one gradient, of all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, step: RankStep, keep: bool, want_lse: bool, project: Optional[Project],
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *latent: torch.Tensor,
    ) -> Any:  # fmt: skip
        out, lse, saved, ctx.number = step.forward(q, k, v, keep, want_lse, project, latent)
        ctx.step, ctx.generation, ctx.project = step, step.generation, project
        if keep:
            ctx.save_for_backward(q, k, v, out, *saved, *latent)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        q, k, v, out, *rest = ctx.saved_tensors  # first: a checkpoint makes its calls here
        needs = ctx.needs_input_grad[4:]
        if ctx.generation != ctx.step.generation:
            raise InvalidArgument(
                f"{WHO}: backward of a FixedPlan whose plan was replaced since forward, expected"
                " one FixedPlan for each microbatch in flight"
            )
        found = ctx.step.backward(
            grad, q, k, v, out, rest[:6], ctx.number, (needs[0], any(needs[1:])), ctx.project,
            rest[6:],
        )  # fmt: skip
        found += (None,) * (len(needs) - len(found))
        return (None, None, None, None, *(t if n else None for t, n in zip(found, needs)))


def keeps(kernel: AttentionKernel, device: torch.device, *inputs: torch.Tensor) -> bool:
    """Whether a backward pass may come, which the kernel must have."""
    keep = wants_gradients(*inputs)
    if keep:
        kernel.check_training(device, WHO)
    return keep


class RankStep:
    """The tables of one plan on one rank. Collective where the windows must grow. Does not hold the
    plan, with which it goes.
    """

    #: How many plans were there before: only tables of one size get others.
    generation = 0
    owner = 0  #: the number of the module to which it belongs
    #: Whether all rows of Q, K and V travel, in their order: nothing is made where they lie.
    _all_travel = False

    uploads_ahead = True  #: on a stream of their own

    def __init__(
        self, plan: BatchPlan, dispatcher: SequenceDispatcher, kernel: AttentionKernel,
        side: SideStream,
    ) -> None:  # fmt: skip
        self.dispatcher, self.kernel, self.side = dispatcher, kernel, side
        self.planner, self.pieces = plan.planner, plan._pieces
        self.shape, self.latent_dim = plan.planner.shape, plan.planner.latent_dim
        self.device = torch.device(dispatcher.world.device)
        self.at = f"on rank {dispatcher.world.rank}"  #: as errors say it
        self.uploads = Uploads(self.device, side.uploads if self.uploads_ahead else None)
        self._make_tables(plan)
        self._nothing = _nothing(self.shape.dtype, self.device)
        shape, kv_rows = self.shape, 0 if self.latent_dim and not self.home else self.rows
        self._shapes = (
            (self.rows, shape.heads, shape.head_dim),
            (kv_rows, shape.kv_heads, shape.head_dim),
            (kv_rows, shape.kv_heads, shape.v_head_dim),
        )

    def _make_tables(self, plan: BatchPlan) -> None:
        rank, routing = self.dispatcher.world.rank, plan.routing()
        in_place, dispatched, q_rows, kv_rows = routing.rank(rank)
        self.rows = int(plan._pieces[rank][:, 2].sum())
        with self.uploads.run():
            self.home, self.arrived, uploaded = calls_of(
                in_place, dispatched, self.rows, self.kernel.takes_gaps, self.shape, self.device
            )
            self.q_rows, self.kv_rows = Rows(q_rows, self.device), Rows(kv_rows, self.device)
        self.uploads.keep((*uploaded, *self.q_rows.tables, *self.kv_rows.tables))
        #: Whether any rank dispatches anything: else there is nothing collective.
        self.moves = bool(len(routing.fwd_q.dst_rank))
        whole = [(0, self.rows)]
        self._all_travel = (
            not self.home and self.moves and (self.q_rows.ranges == whole == self.kv_rows.ranges)
        )
        tables = plan.tables() if self.moves else None
        self._moves = Moves(routing, self.dispatcher, self.shape, self.latent_dim, tables)

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
            with self.side.only():
                self._moves.prepare(self.uploads.run())

    def attend(
        self, q: torch.Tensor, kv: Sequence[torch.Tensor], want_lse: bool,
        project: Optional[Project] = None,
    ) -> Any:  # fmt: skip
        """Collective, known to autograd: the output, and the log-sum-exp where it is wanted.

        :param kv: K and V; with ``project`` latent rows and weights
        """
        latent: Tuple[torch.Tensor, ...] = ()
        if project is not None:
            project, latent, kv = self._projected(project, kv[0], kv[1:])
        q, k, v = self.checked(q, kv[0], kv[1], project is not None)
        keep = keeps(self.kernel, self.device, q, *(latent or (k, v)))
        out, lse = Attention.apply(self, keep, want_lse, project, q, k, v, *latent)
        return (out, lse) if want_lse else out

    def checked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, latent: bool = False
    ) -> list[torch.Tensor]:
        """The tensors of a call, which fit the plan; cast where autocast says so. Without the rows
        that stay, K and V of latent rows have none.
        """
        if self.latent_dim and not latent:
            raise InvalidArgument(
                f"{WHO}: got k and v, expected latent(...): latent_dim = {self.latent_dim}"
            )
        self.check_open()
        shapes = self._shapes
        q, k = self._checked("q", q, shapes[0]), self._checked("k", k, shapes[1])
        return [q, k, self._checked("v", v, shapes[2])]

    def _projected(
        self, project: Project, rows: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> Tuple[Project, Tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        """(the function for rows that come, latent rows and weights, K and V of those that stay).
        Wherever rows are, the function computes under autocast as it is around the call.
        """
        if not self.latent_dim:
            raise InvalidArgument(f"{WHO}: got latent rows, expected k and v: latent_dim is None")
        rows = self._checked("rows", rows, (self.rows, self.latent_dim))
        for i, weight in enumerate(weights):
            require_moved(weight, f"{WHO}: weights[{i}]")
        if not callable(project):
            raise InvalidArgument(f"{WHO}: project = {shown(project)}, expected a function")
        autocast, cast = autocast_now(self.device.type), self._casts()

        def there(came: torch.Tensor, *weights: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
            with autocast():
                given = project(came, *weights)
            return self._fitting(given, came.shape[0], cast)

        mine = rows if self.home else rows[:0]
        kv = self._fitting(project(mine, *weights), mine.shape[0], cast)
        return there, (rows, *weights), kv

    def _fitting(self, given: Any, rows: int, cast: bool) -> Tuple[torch.Tensor, torch.Tensor]:
        """K and V, of what the caller's function returned."""
        who = f"{WHO}: project"
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            got = f"{len(given)} results" if isinstance(given, (tuple, list)) else shown(given)
            raise InvalidArgument(f"{who} returned {got} {self.at}, expected k and v")
        shape, fits = self.shape, []
        for name, tensor, size in zip("kv", given, (shape.head_dim, shape.v_head_dim)):
            if cast and isinstance(tensor, torch.Tensor):
                tensor = tensor.to(shape.dtype)
            wrong = mismatch(tensor, (rows, shape.kv_heads, size), self.device, shape.dtype)
            if wrong is not None:
                raise InvalidArgument(f"{who} {self.at}: its {name} {wrong}")
            fits.append(tensor)
        return fits[0], fits[1]

    def _casts(self) -> bool:
        """Whether autocast is on, to the plan's dtype."""
        return casts_to(self.device.type, self.shape.dtype)

    def _checked(self, name: str, tensor: torch.Tensor, expected: Tuple[int, ...]) -> torch.Tensor:
        fits = is_plain(tensor) and tensor.dtype == self.shape.dtype
        if fits and tensor.shape == expected and tensor.device == self.device:
            return tensor
        at = self.at
        require_moved(tensor, f"{WHO}: {name}")
        if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
            raise InvalidArgument(
                f"{WHO}: {name} is a {type(tensor).__name__} {at}, expected this rank's part:"
                f" {name}.to_local()"
            )
        if tensor.dtype != self.shape.dtype and self._casts():
            tensor = tensor.to(self.shape.dtype)
        wrong = mismatch(tensor, expected, self.device, self.shape.dtype)
        if wrong is not None:
            raise InvalidArgument(f"{WHO}: {name} {wrong} {at}")
        return adjacent_rows(tensor)

    @property
    def arrived_rows(self) -> Tuple[int, int]:
        """Rows of Q, and of K and V, that come from elsewhere."""
        if not self.arrived:
            return 0, 0
        last = self.arrived[-1]
        return int(last.q.stop), int(last.kv.stop)

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
        here = 0 if self._all_travel else self.rows * lse
        return StepMemory(came + here, gradients + (sums if self.moves else 0), 0)

    @_call_of_all("forward", ORDER)
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool, want_lse: bool,
        project: Optional[Project] = None, latent: Sequence[torch.Tensor] = (),
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Saved, int]:  # fmt: skip
        """(output, log-sum-exp [rows, heads] where it is wanted, what backward needs, the number of
        the dispatch). With ``keep`` what came is copied from the window. Of latent rows, k and v
        are those that stay, and the latent ones travel.
        """
        sent = (q, k, v) if project is None else (q, latent[0])
        number = 0
        there: Tuple[torch.Tensor, ...] = ()
        back: Tuple[torch.Tensor, ...] = ()
        views: Callable[[], Tuple[torch.Tensor, ...]] = tuple
        side, moves, device = self.side, self._moves, self.device
        side.fork(self.uploads)
        # Others wait for what is sent; but the first time its tables are made while the device is
        # busy with what stays.
        at_once = self.moves and (moves.is_ready or not side.overlaps)
        if at_once:
            with side.run(), profiled("dispatch", device):
                views = moves.there("qkv", *sent)
        home: Tuple[torch.Tensor, ...] = ()
        if not self._all_travel:
            with profiled("forward in place", device):
                home = self._attend(self.home, q, k, v, want_lse)
        if self.moves:
            with side.run(), profiled("forward of rows that travel", device):
                if not at_once:
                    views = moves.there("qkv", *sent)
                number = self.dispatcher.last_dispatch
                there, lse = self._attend_there(views(), keep, want_lse, project, latent)
                if want_lse:
                    back = moves.home("out and lse", there[3], lse.t().contiguous())
                else:
                    back = moves.home("out", there[3])
                if keep:
                    moves.prepare_backward()
            side.join()
        results = self._at_home(home, back, want_lse)
        none, no_lse = self._nothing
        kept = home[1] if home and self.kernel.needs_lse else no_lse
        saved = (kept, *(there or (none, none, none, none, no_lse)))
        return results[0], results[1] if want_lse else None, saved, number

    def _at_home(
        self, home: Sequence[torch.Tensor], back: Sequence[torch.Tensor], want_lse: bool
    ) -> Sequence[torch.Tensor]:
        """The output, and the log-sum-exp [rows, heads] where it is wanted."""
        if not home:
            return [view.clone() for view in back]
        results = [home[0]]
        if want_lse:
            results.append(home[1].t().clone(memory_format=torch.contiguous_format))
        for result, view in zip(results, back):
            self.q_rows.write(result, view)
        return results

    def _attend_there(
        self, views: Sequence[torch.Tensor], keep: bool, want_lse: bool,
        project: Optional[Project], latent: Sequence[torch.Tensor],
    ) -> Tuple[Tuple[torch.Tensor, ...], torch.Tensor]:  # fmt: skip
        """(q, k, v, output and log-sum-exp of rows that came, as Saved has them; the last)."""
        shape = self.shape
        q, *kv = [view.clone() for view in views] if keep else views
        k, v = kv if project is None else (kv[0], self._nothing[0])
        if project is not None and self.arrived:
            kv = [adjacent_rows(t) for t in project(kv[0], *latent[1:])]
        if not self.arrived:
            out = q.new_empty(0, shape.heads, shape.v_head_dim)
            lse = q.new_empty(shape.heads, 0, dtype=torch.float32)
        else:
            out, lse = self._attend(self.arrived, q, kv[0], kv[1], want_lse)
        return (q, k, v, out, lse if self.kernel.needs_lse else self._nothing[1]), lse

    def _attend(
        self, calls: Sequence[Call], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        want_lse: bool,
    ) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Output and log-sum-exp [heads, rows] of calls; of other rows there are none yet."""
        if _is_whole(calls, q, k):
            call = calls[0]
            out, lse = attention(
                self.kernel, q, k, v, call.sequences, call.shape, want_lse, self.at
            )
            return out.contiguous(), self._nothing[1] if lse is None else lse
        shape, rows = self.shape, q.shape[0]
        out = q.new_empty(rows, shape.heads, shape.v_head_dim)
        lses = q.new_empty(shape.heads, rows, dtype=torch.float32)
        for call in calls:
            found, lse = attention(
                self.kernel, q[call.q], k[call.kv], v[call.kv], call.sequences, call.shape,
                want_lse, self.at,
            )  # fmt: skip
            _put(call, out, found)
            if lse is not None:
                _put(call, lses.t(), lse.t())
        return out, lses

    @_call_of_all("backward", GRADIENTS)
    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, saved: Sequence[torch.Tensor], number: int, needs: Tuple[bool, bool],
        project: Optional[Project] = None, latent: Sequence[torch.Tensor] = (),
    ) -> Tuple[Optional[torch.Tensor], ...]:  # fmt: skip
        """Gradients of q, k and v; then of latent rows and weights. ``needs``: of q, and of k or v;
        the same on all ranks.
        """
        self.check_open()
        grad = grad.contiguous().resolve_neg()
        made: Sequence[torch.Tensor] = ()
        sums: Sequence[torch.Tensor] = ()
        of_weights: Tuple[Optional[torch.Tensor], ...] = ()
        travels = (k, v) if project is None else latent[:1]
        if self._all_travel and needs[1]:  # before the fork: the second stream writes there
            made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in travels]
        side, moves, device = self.side, self._moves, self.device
        side.fork(self.uploads)
        if self.moves:
            with side.run(), profiled("dispatch of gradients", device):
                there = moves.there("grad", grad, number=number)
        dq, dk, dv = None, k, v  # latent rows leave none
        if not self._all_travel:
            with profiled("backward in place", device):
                dq, dk, dv = self._gradients(self.home, grad, q, k, v, out, saved[0])
        if self.moves:
            with side.run(), profiled("backward of rows that travel", device):
                found, of_weights = self._gradients_there(
                    there()[0], saved[1:], project, latent[1:]
                )
                if needs[1]:
                    sums = moves.sums(number, found[1:], made)
                # Last: its view holds until the dispatcher's next call.
                if needs[0]:
                    (back,) = moves.home("dq", found[0], number=number)
            side.join()
            if needs[0]:
                if dq is None:
                    dq = back.clone()
                else:
                    self.q_rows.write(dq, back)
        if not made:
            made = (dk, dv) if project is None else (torch.zeros_like(latent[0]),)
            for target, sum_ in zip(made, sums):
                self.kv_rows.add(target, sum_)
        of_kv = made if project is None else (dk, dv, *made, *of_weights)
        return dq if needs[0] else None, *(t if needs[1] else None for t in of_kv)

    def _gradients_there(
        self, grad: torch.Tensor, came: Sequence[torch.Tensor], project: Optional[Project],
        weights: Sequence[torch.Tensor],
    ) -> Tuple[Tuple[torch.Tensor, ...], Tuple[Optional[torch.Tensor], ...]]:  # fmt: skip
        """(of q, k and v, or of q and the latent rows; of weights)."""
        q, k, v, out, lse = came
        if not self.arrived:
            kv = (k, v) if project is None else (k,)
            zeros = (torch.zeros_like(w) if w.is_floating_point() else None for w in weights)
            return (q, *kv), tuple(zeros)
        again = None
        if project is not None:
            k, v, again = _projected_again(project, k, *weights)
        found: Tuple[torch.Tensor, ...] = self._gradients(self.arrived, grad, q, k, v, out, lse)
        of_weights: Tuple[Optional[torch.Tensor], ...] = ()
        if again is not None:
            of_rows, *rest = again(found[1], found[2])
            found, of_weights = (found[0], of_rows), tuple(rest)
        return tuple(tensor.contiguous() for tensor in found), of_weights

    def _gradients(
        self, calls: Sequence[Call], grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        kept = lse if self.kernel.needs_lse else None
        if _is_whole(calls, q, k):
            sequences, shape = calls[0].sequences, calls[0].shape
            return gradients(self.kernel, grad, q, k, v, out, kept, sequences, shape, self.at)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for call in calls:
            lse_ = None if kept is None else kept[:, call.q].contiguous()
            found = gradients(
                self.kernel, grad[call.q], q[call.q], k[call.kv], v[call.kv], out[call.q], lse_,
                call.sequences, call.shape, self.at,
            )  # fmt: skip
            _put(call, dq, found[0])
            if self.shape.mask == "prefix":  # its keys are also those of the queries after it
                dk[call.kv].add_(found[1])
                dv[call.kv].add_(found[2])
            else:
                dk[call.kv], dv[call.kv] = found[1:]
        return dq, dk, dv


def _projected_again(
    project: Project, *given: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, Callable[..., Tuple[Any, ...]]]:
    """(K and V of rows that came, computed again for backward; a function that makes the gradients
    of the rows and of each weight from theirs, zeros where nothing depends on it).
    """
    with torch.enable_grad():
        inputs = [t.detach() for t in given]
        inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
        k, v = project(*inputs)

    def gradients(dk: torch.Tensor, dv: torch.Tensor) -> Tuple[Any, ...]:
        pairs = [(t, g) for t, g in ((k, dk), (v, dv)) if t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        found: Any = [torch.zeros_like(t) for t in wanted]
        if pairs:
            outputs, grads = zip(*pairs)
            found = torch.autograd.grad(outputs, wanted, grads, materialize_grads=True)
        rest = iter(found)
        return tuple(next(rest) if t.requires_grad else None for t in inputs)

    return k.detach().contiguous(), v.detach().contiguous(), gradients


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    """Tensors without elements: of rows, of log-sum-exps."""
    with torch.inference_mode(False):
        none = torch.empty(0, dtype=dtype, device=device)
        return none, none.new_empty(0, dtype=torch.float32)


def _is_whole(calls: Sequence[Call], q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether one call has all rows, so that nothing is cut out."""
    if len(calls) != 1:
        return False
    return calls[0].q == slice(0, q.shape[0]) and calls[0].kv == slice(0, k.shape[0])


def _put(call: Call, target: torch.Tensor, found: torch.Tensor) -> None:
    """The rows of a call's queries to their places."""
    if call.own is None:
        target[call.q] = found
    else:
        call.own.move(target, found)
