"""ContextParallelAttention as operations of torch.library, which torch.compile puts into one graph.

A graph's inputs are tensors, so a plan comes as a ticket: a number of the host, by which the
operation finds the plan when it runs, and tensors without elements whose sizes say how many rows
come from elsewhere. Another batch is another number and other sizes of the same graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Tuple

import torch

from ...errors import InvalidArgument, Unsupported
from .._tensors import adjacent_rows, first_order, has_operations, operation
from .step import RankStep, Saved

_KEPT = 256  # tickets; with more in flight than that, backward would not find its plan
# The sizes of a ticket have this added to the number of rows. Sizes of 0 and 1, and those that
# happen to be equal in the first batch, would be facts of the graph: these are like no other.
_Q_SPARE, _KV_SPARE = 2**24, 2**23
_LEAST = 2  # rows of what is kept for backward, for the same reason

_pad = torch.nn.functional.pad
_steps: weakref.WeakValueDictionary[int, RankStep] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class PlanTicket(NamedTuple):
    """A plan as tensors, on one rank, for compiled programs."""

    number: torch.Tensor  #: (1,) int64, on the host
    q_rows: torch.Tensor  #: (rows of Q that come from elsewhere + 2^24, 0)
    kv_rows: torch.Tensor  #: the same of K and V, + 2^23


def ticket_of(step: RankStep, kept: OrderedDict[int, RankStep]) -> PlanTicket:
    """A ticket. ``kept`` are the module's, of which the last 256 are good."""
    if not has_operations():
        raise Unsupported(
            f"ContextParallelAttention.ticket: torch {torch.__version__} has no operations of its"
            " own, expected 2.4 or newer"
        )
    number = next(_numbers)
    _steps[number] = kept[number] = step
    while len(kept) > _KEPT:
        kept.popitem(last=False)
    q_rows, kv_rows = step.arrived_rows
    sizes = [
        torch.empty(rows, 0, dtype=torch.int8) for rows in (q_rows + _Q_SPARE, kv_rows + _KV_SPARE)
    ]
    for size in sizes:
        torch._dynamo.maybe_mark_dynamic(size, 0)
    return PlanTicket(torch.tensor([number]), sizes[0], sizes[1])


def _step_of(number: torch.Tensor, owner: int = 0) -> RankStep:
    """:param owner: the number of the module that is called; 0: it was looked at before"""
    if number.numel() != 1:
        raise InvalidArgument(
            f"ContextParallelAttention: the ticket's number has shape {list(number.shape)},"
            " expected that of ticket(plan)"
        )
    step = _steps.get(int(number))
    if step is not None and owner not in (0, step.owner):
        raise InvalidArgument(
            f"ContextParallelAttention: ticket {int(number)} is of another module {step.at},"
            " expected that of this module's ticket(plan)"
        )
    if step is None:
        raise InvalidArgument(
            f"ContextParallelAttention: ticket {int(number)} is of no plan, or {_KEPT} others were"
            " made since"
        )
    return step


@operation(
    "context_parallel_attention",
    "(Tensor number, Tensor q_rows, Tensor kv_rows, Tensor token, Tensor q, Tensor k,"
    " Tensor v, int owner, bool needs_lse, bool want_lse) -> (" + ", ".join(["Tensor"] * 10) + ")",
)
def attend(
    number: torch.Tensor, q_rows: torch.Tensor, kv_rows: torch.Tensor, token: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: int, needs_lse: bool, want_lse: bool,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    """(output, token, log-sum-exp or nothing, number of the dispatch, what backward needs)."""
    step = _step_of(number, owner)
    q, k, v = step.checked(q, k, v)
    out, lse, saved, dispatch = step.forward(q, k, v, True, want_lse)
    lse = q.new_empty(0, dtype=torch.float32) if lse is None else lse
    return (out, token.new_empty(0), lse, torch.tensor([dispatch]), *_kept(step, saved))


@attend.register_fake
def _(
    number: Any, q_rows: Any, kv_rows: Any, token: Any, q: Any, k: Any, v: Any,
    owner: int, needs_lse: bool, want_lse: bool,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    rows, heads, v_dim = q.shape[0], q.shape[1], v.shape[2]
    came_q = torch.sym_max(q_rows.shape[0] - _Q_SPARE, _LEAST)
    came_kv = torch.sym_max(kv_rows.shape[0] - _KV_SPARE, _LEAST)

    def float32(*shape: Any) -> torch.Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    return (
        q.new_empty(rows, heads, v_dim),
        token.new_empty(0),
        float32(rows, heads) if want_lse else float32(0),
        torch.empty(1, dtype=torch.int64),
        float32(heads, rows) if needs_lse else float32(0),
        q.new_empty(came_q, heads, q.shape[2]),
        k.new_empty(came_kv, *k.shape[1:]),
        v.new_empty(came_kv, *v.shape[1:]),
        q.new_empty(came_q, heads, v_dim),
        float32(heads, came_q) if needs_lse else float32(0),
    )


def _kept(step: RankStep, saved: Saved) -> Saved:
    """Tensors that backward needs, each in its own memory and of the shape in the graph."""
    shape, needs_lse = step.shape, step.kernel.needs_lse
    q_rows, kv_rows = step.arrived_rows
    home_lse, *came, lse = saved
    if not needs_lse:
        home_lse, lse = lse.new_empty(0), lse.new_empty(0)
    elif not home_lse.numel():  # all rows travel
        home_lse = lse.new_empty(shape.heads, step.rows)
    for i, (rows, heads, size) in enumerate((
        (q_rows, shape.heads, shape.head_dim),
        (kv_rows, shape.kv_heads, shape.head_dim),
        (kv_rows, shape.kv_heads, shape.v_head_dim),
        (q_rows, shape.heads, shape.v_head_dim),
    )):  # fmt: skip
        if rows < _LEAST:
            came[i] = _pad(came[i].reshape(rows, heads, size), (0, 0, 0, 0, 0, _LEAST - rows))
    if needs_lse and q_rows < _LEAST:
        lse = _pad(lse.reshape(shape.heads, q_rows), (0, _LEAST - q_rows))
    return (home_lse, *came, lse)


def _as_saved(step: RankStep, kept: Sequence[torch.Tensor]) -> Saved:
    home_lse, q, k, v, out, lse = kept
    q_rows, kv_rows = step.arrived_rows
    if q_rows < _LEAST and step.kernel.needs_lse:
        lse = lse[:, :q_rows].contiguous()
    return home_lse, q[:q_rows], k[:kv_rows], v[:kv_rows], out[:q_rows], lse


@operation(
    "context_parallel_attention_backward",
    "(Tensor number, Tensor dispatch, Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out,"
    " Tensor[] saved, bool needs_q, bool needs_kv) -> (Tensor, Tensor, Tensor)",
)
def attend_backward(
    number: torch.Tensor, dispatch: torch.Tensor, grad: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, saved: Sequence[torch.Tensor],
    needs_q: bool, needs_kv: bool,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    step = _step_of(number)
    q, k, v = (adjacent_rows(t) for t in (q, k, v))  # as forward had them
    found = step.backward(
        grad, q, k, v, out, _as_saved(step, saved), int(dispatch), (needs_q, needs_kv)
    )
    given = (torch.empty_like(t) if g is None else g for g, t in zip(found, (q, k, v)))
    return tuple(t.contiguous() for t in given)


@attend_backward.register_fake
def _(
    number: Any, dispatch: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, saved: Any,
    needs_q: bool, needs_kv: bool,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    number, _, _, _, q, k, v, *_ = inputs
    out, _, lse, dispatch, *saved = output
    ctx.save_for_backward(number, dispatch, q, k, v, out, *saved)
    ctx.mark_non_differentiable(lse, dispatch, *saved)


@first_order
def _backward(ctx: Any, *grads: Any) -> Any:
    number, dispatch, q, k, v, out, *saved = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad, token = grads[0], grads[1]
    found = attend_backward(
        number, dispatch, grad, q, k, v, out, saved, needs[4], needs[5] or needs[6]
    )
    given = (g if n else None for g, n in zip(found, needs[4:7]))
    return (None, None, None, token if needs[3] else None, *given, None, None, None)


attend.register_autograd(_backward, setup_context=_setup_context)
