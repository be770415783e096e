"""Q, K and V to the ranks that attend to them, and attention's output back, for autograd.

Names that go in 0.3: ContextParallelAttention takes plans of one's own, relays and kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Dict, Optional, Tuple

import torch

from .._arrays import instance
from .._graphs import outside_graphs
from .._lifetime import OfThisProcess
from ..errors import InvalidArgument
from ..plans import QkvRouting, RankAttention
from ..sequence_dispatcher import Names, PlanHandle, of_qkv
from ._tensors import (
    adjacent_rows,
    callers_level,
    first_order,
    read_mark,
    require_moved,
    require_moved_rows,
    save_mark,
)
from .kernels import Sequences
from .sequence_dispatcher import SequenceDispatcher

__all__ = ["AttentionStep", "recomputed_attention"]

Attend = Callable[..., torch.Tensor]

#: The plans of a call, and of the gradient of its first tensor.
_PLANS = {
    "dispatch_qkv": ("forward", "q_gradient"),
    "return_outputs": ("output", "output_gradient"),
}


class AttentionStep(OfThisProcess):
    """One rank's plans of one routing: Q, K and V out, attention's output home, and the ways back
    of their gradients.

    .. deprecated:: 0.2
        Use ContextParallelAttention with the plan and a function as its kernel; goes in 0.3.

    ``dispatch_qkv``, attention on what came, ``return_outputs``, in pairs: two batches in flight
    take a step each. All ranks make the same calls, forward and backward, also those that receive
    no rows. Results are tensors of their own.

    Args:
        dispatcher: of this rank; kept alive.
        routing: the same on all ranks.
        q, kv: their formats: tensors, or TensorFormat. K and V, or one tensor that holds both.
        out: the format of attention's output; that of q without.
    """

    _why_not_copied = (
        "plans of one rank's dispatcher: make one on each rank from the routing, which can be"
    )

    @outside_graphs
    def __init__(
        self, dispatcher: SequenceDispatcher, routing: QkvRouting, q: Any, *kv: Any, out: Any = None
    ) -> None:
        who = "AttentionStep"
        _say_deprecated(
            f"{who}: use ContextParallelAttention, whose plan() takes a QkvPlan or an AttentionPlan"
            " and whose kernel may be a function"
        )
        expected = "a waybill.torch.SequenceDispatcher"
        instance(dispatcher, SequenceDispatcher, f"{who}: dispatcher", expected)
        if len(kv) == 0:
            raise InvalidArgument(f"{who}: got no format of K and V, expected one or two")
        self.dispatcher = dispatcher
        self._q, _ = dispatcher._format(q, f"{who}: q")
        self._kv = [dispatcher._format(v, f"{who}: kv[{i}]")[0] for i, v in enumerate(kv)]
        self._out = self._q if out is None else dispatcher._format(out, f"{who}: out")[0]
        self._token: Optional[torch.Tensor] = None
        self._needs_gradients = False
        parts = self._parts(routing)
        self.routing = routing
        self._plans: Dict[str, PlanHandle] = {
            name: dispatcher.plan_kv_gradient(*given)
            if name == "kv_gradient"
            else dispatcher.plan_dispatch(*given)
            for name, given in parts.items()
        }
        dispatcher.reserve(*self._plans.values())

    @property
    @outside_graphs
    def attention(self) -> RankAttention:
        """Where the rows and contexts of the query shards lie that this rank attends to."""
        return self.routing.attention(self.dispatcher.world.rank)

    @outside_graphs
    def varlen(self) -> Sequences:
        """The attention layout for kernels of variable lengths; kv_layout="per_query" has one."""
        _, q_begin, q_len, kv_begin, kv_len = (t.tolist() for t in self.attention)
        for name, begins, lens in (("queries", q_begin, q_len), ("keys", kv_begin, kv_len)):
            for i in range(1, len(begins)):
                if begins[i] != begins[i - 1] + lens[i - 1]:
                    raise InvalidArgument(
                        f"AttentionStep.varlen: {name} of shard {i} begin at row {begins[i]},"
                        f" expected {begins[i - 1] + lens[i - 1]}, where those before end:"
                        ' cu_seqlens cannot say that; plan with kv_layout="per_query"'
                    )
        return Sequences.of(q_len, kv_len, self.dispatcher.world.device)

    @property
    def window_bytes(self) -> int:
        """Bytes that the windows must have for all of its calls."""
        return max(plan.window_bytes for plan in self._plans.values())

    @outside_graphs
    def dispatch_qkv(self, q: torch.Tensor, *kv: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Collective: Q and KV in the attention layout, in one launch: ``(q, *kv)``.

        Backward sends the gradient of Q home, and sums those of the copies of K and V in float32,
        in the order of the copies. Whether q, and whether kv, need gradients is the same on all
        ranks.
        """
        for i, tensor in enumerate((q, *kv)):
            require_moved_rows(tensor, f"dispatch_qkv: {of_qkv(i)}")
        *there, token = _Moved.apply(self, "dispatch_qkv", of_qkv, None, q, *kv)
        self._token, self._needs_gradients = token, token.requires_grad
        return tuple(there)

    @outside_graphs
    def return_outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Collective: attention's output, in the rows of this rank's q, which the loss must depend
        on. Backward sends its gradient to where the output came from.
        """
        require_moved_rows(out, "return_outputs: out")
        token, self._token = self._token, None
        if token is None and self._needs_gradients:  # again, as of a checkpoint: on all ranks alike
            token = torch.empty(0, device=out.device, requires_grad=True)
        home, _ = _Moved.apply(self, "return_outputs", _of_out, token, adjacent_rows(out))
        return home

    @outside_graphs
    def replace_routing(self, routing: QkvRouting) -> None:
        """Puts another routing into the memory of this one, as SequenceDispatcher.replace_plan."""
        for name, parts in self._parts(routing).items():
            self.dispatcher.replace_plan(self._plans[name], *parts)
        self.routing = routing

    def __repr__(self) -> str:
        return f"AttentionStep({self.routing!r}, rank={self.dispatcher.world.rank})"

    def _parts(self, routing: QkvRouting) -> Dict[str, Any]:
        """The parts of each plan."""
        name, expected = "AttentionStep: routing", "a QkvRouting, as of QkvPlan.to_routing()"
        instance(routing, QkvRouting, name, expected)
        kv = (routing.fwd_kv, *self._kv)
        return {
            "forward": [(routing.fwd_q, self._q), kv],
            "q_gradient": [(routing.rev_q, self._q)],
            "kv_gradient": [kv],
            "output": [(routing.rev_q, self._out)],
            "output_gradient": [(routing.fwd_q, self._out)],
        }


def _of_out(_: int) -> str:
    return "out"


class _Moved(torch.autograd.Function):
    """Moves tensors by the plan of a call. Backward moves the gradient of the first by another, and
    sums those of further ones, the copies of K and V.
    """

    @staticmethod
    def forward(
        ctx: Any, step: AttentionStep, who: str, names: Names, token: Optional[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> Tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.step, ctx.who = step, who
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        views = step.dispatcher._dispatch(who, names, step._plans[_PLANS[who][0]], tensors, 0)
        ctx.number = step.dispatcher.last_dispatch
        # Without elements, it ties return_outputs to this call: where attention computes nothing
        # from no rows, backward would else leave this call out, for which other ranks wait.
        tie = tensors[0].new_empty(0, dtype=torch.float32)
        save_mark(ctx, tie)
        return (*(view.clone() for view in views), tie)

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        _read_mark(ctx, ctx.who)
        step, (rows, *kv_rows) = ctx.step, ctx.rows
        gradient, *kv = gradients[:-1]
        needs_token, needs_first, *needs_kv = ctx.needs_input_grad[3:]
        first = token = None
        dkv: list[Optional[torch.Tensor]] = [None] * len(kv)
        if needs_token or needs_first:
            plan, given = step._plans[_PLANS[ctx.who][1]], (adjacent_rows(gradient),)
            (view,) = step.dispatcher._dispatch("return_outputs", _of_out, plan, given, ctx.number)
            first = _padded(view, rows) if rows > view.shape[0] else view.clone()
            token = first.new_zeros(0, dtype=torch.float32) if needs_token else None
        if any(needs_kv):
            sums = step.dispatcher.kv_gradient(
                step._plans["kv_gradient"], *map(adjacent_rows, kv), of_dispatch=ctx.number
            )
            dkv = [_padded(s, rows) for s, rows in zip(sums, kv_rows)]
        return (None, None, None, token, first if needs_first else None, *dkv)


@outside_graphs
def recomputed_attention(
    attend: Attend,
    forward: AttentionStep,
    backward: AttentionStep,
    q: torch.Tensor,
    *kv: torch.Tensor,
) -> torch.Tensor:
    """Collective: attention's output in the rows of q, with nothing kept in the attention layout.

    .. deprecated:: 0.2
        Use ContextParallelAttention under torch.utils.checkpoint; goes in 0.3.

    Backward dispatches Q, K and V again under ``backward``, whose routing may be another one, and
    computes attention again.

    Args:
        attend: ``attend(step, q, *kv)`` computes the output of this rank's queries, where
            ``step.attention`` says; gradients flow to q and kv alone.
    """
    who = "recomputed_attention"
    _say_deprecated(f"{who}: use ContextParallelAttention under torch.utils.checkpoint")
    if not callable(attend):
        raise InvalidArgument(f"{who}: attend is a {type(attend).__name__}, expected a function")
    for name, step in (("forward", forward), ("backward", backward)):
        instance(step, AttentionStep, f"{who}: {name}", "an AttentionStep")
    for i, tensor in enumerate((q, *kv)):
        require_moved(tensor, f"{who}: {of_qkv(i)}")
    return _Recomputed.apply(attend, forward, backward, q, *kv)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attend: Attend, forward: AttentionStep, backward: AttentionStep,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.attend, ctx.step = attend, backward
        ctx.save_for_backward(*tensors)
        return forward.return_outputs(attend(forward, *forward.dispatch_qkv(*tensors)))

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        needed = ctx.needs_input_grad[3:]
        leaves = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed)]
        with torch.enable_grad():
            step: AttentionStep = ctx.step
            out = step.return_outputs(ctx.attend(step, *step.dispatch_qkv(*leaves)))
        wanted = [leaf for leaf, n in zip(leaves, needed) if n]
        found = iter(torch.autograd.grad(out, wanted, gradient))
        return (None, None, None, *(next(found) if n else None for n in needed))


def _say_deprecated(text: str) -> None:
    warnings.warn(f"{text}; goes in 0.3", DeprecationWarning, stacklevel=callers_level())


def _read_mark(ctx: Any, who: str) -> None:
    try:
        read_mark(ctx)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise InvalidArgument(
                f"{who}: its backward was called before: either the loss was, without"
                " retain_graph=True, or two dispatch_qkv came before their return_outputs, which"
                " belongs to the last one: call them in pairs, or make an AttentionStep for each"
                " batch in flight"
            ) from error
        raise


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with zeros below, where the caller's has more rows than the plan."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    return torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing))
