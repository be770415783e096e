"""Dispatch and weighted combine as operations of torch.library, for torch.compile and for selective
checkpoints.

Sizes are those of ``fixed_rows``. A graph's inputs are tensors, so the descriptor of a dispatch
goes along as a ticket: a number on the host, whose memory keeps the descriptor until nobody, also
no graph of autograd, has the ticket any more.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Dict, Optional, Tuple

import numpy as np
import torch

from ..._errors import said_by
from ...errors import InvalidArgument
from ...moe.layer import RankLayout
from .._tensors import first_order, operation
from .autograd import weights_home
from .grouped import ends_within

_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_held: Dict[int, Any] = {}  #: objects that tickets keep alive, such as a layer and a layout
_numbers = itertools.count(1)


def register(found: Any) -> int:
    """A number by which operations find a LayerBox, or an ExpertParallel."""
    number = next(_numbers)
    _known[number] = found
    return number


def found_by(number: int) -> Any:
    """Returns the object that was registered under that number."""
    found = _known.get(number)
    if found is None:
        raise InvalidArgument(f"experts: layer {number} is not there any more")
    return found


def _layer_of(number: int) -> Any:
    return found_by(number).layer


def _present(number: Optional[torch.Tensor]) -> Any:
    """Returns ``present`` of a dispatch with copies. Collective if the module keeps them."""
    if number is None:
        return None
    module = found_by(int(number))
    return module._copies[0].before_dispatch(module.experts, module.layer, module.training)


def ticket_of(held: Any) -> torch.Tensor:
    """Makes a ticket, which keeps the object as long as somebody has the ticket."""
    number = next(_numbers)
    memory = np.array([number])
    _held[number] = held
    weakref.finalize(memory, _held.pop, number, None)
    return torch.from_numpy(memory)  # its storage keeps the array


def held_by(ticket: torch.Tensor) -> Any:
    """Returns the object that a ticket keeps."""
    number = int(ticket)
    if number not in _held:
        raise InvalidArgument(f"experts: ticket {number} is of no call, or was copied")
    return _held[number]


def dispatch_of(ticket: torch.Tensor) -> Tuple[Any, RankLayout]:
    """The layer that made it, and its descriptor."""
    moving, layout = held_by(ticket)
    moving._check_not_replaced()
    return moving, layout


@operation(
    "experts_dispatch",
    "(int layer, Tensor x, Tensor ids, Tensor weights, bool x_needs, bool weights_need,"
    " Tensor? copies) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@said_by("ExpertParallel: forward")
def dispatch(
    layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    x_needs: bool, weights_need: bool, copies: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(rows, their weights, ends of the experts, ticket, token). The token has no elements. It ties
    combine to this call, whose backward is to come also where experts make nothing of the rows.

    :param copies: the number of a module that has copies. A tensor: alike modules are one graph
    """
    moving = _layer_of(layer)
    rows, row_weights, layout = moving._dispatch(
        x, ids, weights, None, None, None, x_needs, weights_need, present=_present(copies),
        copy_out=True,
    )  # fmt: skip
    if weights_need:
        moving._need_slot_layer()
    ends = ends_within(layout.recv_expert_offsets, moving.fixed_rows)
    return rows, row_weights, ends, ticket_of((moving, layout)), row_weights.new_empty(0)


@dispatch.register_fake
def _(
    layer: int, x: Any, ids: Any, weights: Any, x_needs: bool, weights_need: bool, copies: Any
) -> Tuple[torch.Tensor, ...]:
    moving = _layer_of(layer)
    return (
        x.new_empty(moving.fixed_rows, moving.hidden),
        weights.new_empty(moving.fixed_rows),
        x.new_empty(moving.experts_per_rank + moving.spare_experts, dtype=torch.int32),
        torch.empty(1, dtype=torch.int64),
        weights.new_empty(0),
    )


@operation(
    "experts_dispatch_backward",
    "(int layer, Tensor ticket, Tensor ids, Tensor? rows, Tensor? weights) -> (Tensor, Tensor)",
)
@said_by("ExpertParallel: backward")
def dispatch_backward(
    layer: int, ticket: torch.Tensor, ids: torch.Tensor, rows: Optional[torch.Tensor],
    weights: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of tokens and of their weights; of what needs none, a tensor without elements."""
    moving, layout = dispatch_of(ticket)
    nothing = torch.empty(0, device=ids.device)
    x = nothing
    if rows is not None:
        x = moving._combine(rows, layout, False, (), of_backward=True)
    home = nothing
    if weights is not None:
        home = weights_home(moving, layout, weights).to(weights.dtype)
    return x, home


@dispatch_backward.register_fake
def _(
    layer: int, ticket: Any, ids: Any, rows: Any, weights: Any
) -> Tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.empty(0, device=ids.device)
    return (
        nothing if rows is None else rows.new_empty(ids.shape[0], rows.shape[1]),
        nothing.clone() if weights is None else weights.new_empty(ids.shape),
    )


def _keep_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.layer, _, ids, _, ctx.x_needs, ctx.weights_need, _ = inputs
    rows, row_weights, ends, ticket, token = output
    ctx.save_for_backward(ids, ticket)
    nothing = [ends, ticket]
    nothing += [] if ctx.x_needs or ctx.weights_need else [token]
    nothing += [] if ctx.x_needs else [rows]
    nothing += [] if ctx.weights_need else [row_weights]
    ctx.mark_non_differentiable(*nothing)


@first_order
def _dispatch_gradients(ctx: Any, rows: Any, weights: Any, *_: Any) -> Any:
    ids, ticket = ctx.saved_tensors
    x, home = dispatch_backward(
        ctx.layer, ticket, ids, rows if ctx.x_needs else None, weights if ctx.weights_need else None
    )
    x, home = x if ctx.x_needs else None, home if ctx.weights_need else None
    return None, x, None, home, None, None, None


dispatch.register_autograd(_dispatch_gradients, setup_context=_keep_dispatch)


@operation(
    "experts_combine",
    "(int layer, Tensor ticket, Tensor token, Tensor rows, Tensor? weights, SymInt num_tokens,"
    " bool needs) -> Tensor",
)
@said_by("ExpertParallel: forward")
def combine(
    layer: int, ticket: torch.Tensor, token: torch.Tensor, rows: torch.Tensor,
    weights: Optional[torch.Tensor], num_tokens: int, needs: bool,
) -> torch.Tensor:  # fmt: skip
    """Sums [num_tokens, hidden], with the dispatch's weights if some are given."""
    moving, layout = dispatch_of(ticket)
    return moving._combine(rows, layout, weights is not None, (), needs_gradients=needs)


@combine.register_fake
def _(
    layer: int, ticket: Any, token: Any, rows: Any, weights: Any, num_tokens: Any, needs: bool
) -> torch.Tensor:
    return rows.new_empty(num_tokens, rows.shape[1])


@operation(
    "experts_combine_backward",
    "(int layer, Tensor ticket, Tensor gradient, Tensor? rows, Tensor? weights, bool needs_rows)"
    " -> (Tensor, Tensor)",
)
@said_by("ExpertParallel: backward")
def combine_backward(
    layer: int, ticket: torch.Tensor, gradient: torch.Tensor, rows: Optional[torch.Tensor],
    weights: Optional[torch.Tensor], needs_rows: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of rows, and of weights if rows are given; else a tensor without elements."""
    moving, layout = dispatch_of(ticket)
    of_rows, of_weights = moving._rows_gradients(gradient, layout, weights, rows, needs_rows)
    nothing = torch.empty(0, device=gradient.device)
    of_rows = nothing if of_rows is None else of_rows
    if of_weights is None:
        return of_rows, nothing.clone()
    assert weights is not None
    return of_rows, of_weights.to(weights.dtype)


@combine_backward.register_fake
def _(
    layer: int, ticket: Any, gradient: Any, rows: Any, weights: Any, needs_rows: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    moving = _layer_of(layer)
    nothing = torch.empty(0, device=gradient.device)
    needs_rows = needs_rows or weights is None
    return (
        gradient.new_empty(moving.fixed_rows, moving.hidden) if needs_rows else nothing,
        nothing.clone() if rows is None else weights.new_empty(moving.fixed_rows),
    )


def _keep_combine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.layer, ticket, token, rows, weights, _, _ = inputs
    ctx.weights_need = weights is not None and weights.requires_grad
    # Rows are kept for the weights' gradients alone.
    ctx.save_for_backward(ticket, token, rows if ctx.weights_need else None, weights)


@first_order
def _combine_gradients(ctx: Any, gradient: torch.Tensor) -> Any:
    ticket, token, rows, weights = ctx.saved_tensors
    needs_rows = ctx.needs_input_grad[3]
    of_rows, of_weights = combine_backward(
        ctx.layer, ticket, gradient.contiguous(), rows, weights, needs_rows
    )
    return (
        None, None, torch.zeros_like(token), of_rows if needs_rows else None,
        of_weights if ctx.weights_need else None, None, None,
    )  # fmt: skip


combine.register_autograd(_combine_gradients, setup_context=_keep_combine)
