"""Experts with copies as one operation of torch.library.

Weights come, experts compute, and backward takes gradients home inside of it. A compiler would keep
the weights that it saw until backward, for each module, where a pool has others by then. So experts
run as they are written, and autograd records them, as it does without a compiler. A ticket keeps
the record.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, List, Optional, Set, Tuple

import torch

from ..._errors import shown
from ...errors import Unsupported
from .._tensors import autocast_dtype, first_order, is_autocast, operation
from .copies import local_part
from .operations import dispatch_of, found_by, held_by, ticket_of


@functools.cache
def _keys() -> Tuple[Any, Any]:
    """The dispatch keys of a new thread, that is outside of all operations."""
    found: List[Any] = []
    core = torch._C

    def look() -> None:
        found.append(core._dispatch_tls_local_include_set())
        found.append(core._dispatch_tls_local_exclude_set())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0], found[1]


@contextmanager
def _recording(kind: str, casts: Optional[torch.dtype]) -> Iterator[None]:
    """Autograd records, as outside of operations. Hooks, such as those of a checkpoint around the
    operation, do not see what it saves.
    """
    saved = torch.autograd.graph.saved_tensors_hooks
    with ExitStack() as states:
        states.enter_context(torch._C._ForceDispatchKeyGuard(*_keys()))
        states.enter_context(_autocast(kind, casts))
        states.enter_context(saved(torch.Tensor.detach, lambda one: one))
        states.enter_context(torch.enable_grad())
        yield


def _autocast(kind: str, casts: Optional[torch.dtype]) -> Any:
    return torch.autocast(kind, dtype=casts, enabled=casts is not None, cache_enabled=False)


class _End(torch.autograd.Function):
    """A tensor without elements in place of outputs, whose memory it does not keep. Backward takes
    their gradient from a list.
    """

    @staticmethod
    def forward(ctx: Any, gradients: List[torch.Tensor], outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return outputs.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:  # type: ignore[override]
        return None, ctx.gradients.pop()


def _recorded(leaves: List[Any], outputs: torch.Tensor) -> Callable[[torch.Tensor], List[Any]]:
    """A backward by the graph that autograd recorded: from the gradient of outputs to those of the
    leaves. Collective.

    :param leaves: rows and weights, None where they need no gradient, and parameters that do
    """
    given: List[torch.Tensor] = []
    end: Any = _End.apply(given, outputs)
    asked = [one for one in leaves if one is not None]

    def backward(gradient: torch.Tensor) -> List[Any]:
        given.append(gradient)
        with _recording(gradient.device.type, None):  # the graph is kept, as the caller may keep it
            found = iter(torch.autograd.grad(end, asked, end, True, allow_unused=True))
        return [None if one is None else next(found) for one in leaves]

    return backward


def _check_leaves(outputs: torch.Tensor, known: Sequence[Any]) -> None:
    """The operation gives gradients to its inputs alone: refuses outputs that depend on others."""
    names, ahead = {id(one) for one in known}, [outputs.grad_fn]
    seen: Set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in names:
            raise Unsupported(
                "ExpertParallel: spare_experts with operations: experts use a tensor of"
                f" {list(leaf.shape)} that requires gradients, expected their parameters alone"
            )
        ahead += [one for one, _ in node.next_functions]


def _apart(value: torch.Tensor, *others: Optional[torch.Tensor]) -> torch.Tensor:
    """Contiguous, in memory of its own."""
    value = value.detach().contiguous()
    places = {one.untyped_storage().data_ptr() for one in others if one is not None}
    return value.clone() if value.untyped_storage().data_ptr() in places else value


@operation(
    "experts_with_copies",
    "(Tensor module, Tensor ticket, Tensor rows, Tensor ends, Tensor? weights,"
    " Tensor[] parameters, bool[] needs, ScalarType? casts) -> (Tensor, Tensor)",
)
def compute(
    module: torch.Tensor, ticket: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor,
    weights: Optional[torch.Tensor], parameters: List[torch.Tensor], needs: List[bool],
    casts: Optional[torch.dtype],
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(outputs, ticket of the record). Collective.

    :param module: its number
    :param ticket: of the dispatch
    :param parameters: all of the experts, by which gradients find their way
    :param needs: whether autograd records; whether rows and weights need gradients
    :param casts: the dtype of autocast, None: it is off
    """
    owner, (_, layout) = found_by(int(module)), dispatch_of(ticket)
    records, *need = needs
    if not records:
        with _autocast(rows.device.type, casts):
            outputs = owner._outputs(rows, ends, weights, _untied, layout)
        return _apart(outputs, rows), ticket_of(None)
    with _recording(rows.device.type, casts):
        given = [
            one if one is None else one.detach().requires_grad_(needed)
            for one, needed in zip((rows, weights), need)
        ]
        outputs = owner._outputs(given[0], ends, given[1], _untied, layout)
        leaves: List[Any] = [one if needed else None for one, needed in zip(given, need)]
        leaves += [one for one in owner.experts.parameters() if one.requires_grad]
        record = None
        if outputs.requires_grad:
            _check_leaves(outputs, leaves)
            record = _recorded(leaves, outputs)
    return _apart(outputs, rows), ticket_of(record)


def _untied(outputs: torch.Tensor, *_: Any) -> torch.Tensor:
    return outputs


@compute.register_fake
def _(
    module: Any, ticket: Any, rows: Any, ends: Any, weights: Any, parameters: Any, needs: Any,
    casts: Any,
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return rows.new_empty(rows.shape), torch.empty(1, dtype=torch.int64)


@operation(
    "experts_with_copies_backward",
    "(Tensor ticket, Tensor gradient, Tensor? weights, Tensor[] parameters, bool rows_need)"
    " -> Tensor[]",
)
def compute_backward(
    ticket: torch.Tensor, gradient: torch.Tensor, weights: Optional[torch.Tensor],
    parameters: List[torch.Tensor], rows_need: bool,
) -> List[torch.Tensor]:  # fmt: skip
    """Gradients of rows, of weights and of parameters. Collective.

    :param weights, parameters: those that need gradients; of what needs none, rows or weights, a
        tensor without elements comes
    """
    record = held_by(ticket)
    likes = _likes(gradient, weights, parameters, rows_need)
    found = [None] * len(likes) if record is None else record(gradient)
    made: List[torch.Tensor] = []
    for one, like in zip(found, likes):
        made.append(like.zero_() if one is None else _apart(local_part(one), gradient, *made))
    return made


def _likes(
    gradient: torch.Tensor, weights: Optional[torch.Tensor], parameters: Sequence[torch.Tensor],
    rows_need: bool,
) -> List[torch.Tensor]:  # fmt: skip
    """Tensors as the gradients are."""
    nothing = gradient.new_empty(0)
    first = [gradient if rows_need else nothing, nothing if weights is None else weights]
    return [one.new_empty(one.shape) for one in (*first, *parameters)]


@compute_backward.register_fake
def _(ticket: Any, gradient: Any, weights: Any, parameters: Any, rows_need: bool) -> Any:
    return _likes(gradient, weights, parameters, rows_need)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, _, _, weights, parameters, needs, _ = inputs
    _, ctx.rows_need, weights_need = needs
    ctx.weights_need = weights_need and weights is not None
    ctx.which = [one.requires_grad for one in parameters]
    _, ticket = output
    ctx.mark_non_differentiable(ticket)
    asked = [one for one in parameters if one.requires_grad]
    ctx.save_for_backward(ticket, weights if ctx.weights_need else None, *asked)


@first_order
def _gradients(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    ticket, weights, *parameters = ctx.saved_tensors
    found = compute_backward(ticket, gradient.contiguous(), weights, parameters, ctx.rows_need)
    of_rows, of_weights, *rest = found
    each = iter(rest)
    of_parameters = [next(each) if needed else None for needed in ctx.which]
    return (
        None, None, of_rows if ctx.rows_need else None, None,
        of_weights if ctx.weights_need else None, of_parameters, None, None,
    )  # fmt: skip


compute.register_autograd(_gradients, setup_context=_keep)


def check_recorded(experts: Any) -> None:
    """Experts with copies are one operation, whose gradients go to its inputs."""
    if not isinstance(experts, torch.nn.Module):
        raise Unsupported(
            "ExpertParallel: operations = True with spare_experts and experts ="
            f" {shown(experts)}, expected a torch.nn.Module, whose parameters get gradients"
        )


def compute_recorded(
    owner: Any, ticket: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor,
    weights: Optional[torch.Tensor], needs: List[bool],
) -> torch.Tensor:  # fmt: skip
    """Computes the outputs of an ExpertParallel's experts. Traced."""
    check_recorded(owner.experts)
    casts = autocast_dtype(rows.device.type) if is_autocast(rows.device.type) else None
    parameters = [local_part(one) for one in owner.experts.parameters()]
    outputs, _ = compute(owner._number, ticket, rows, ends, weights, parameters, needs, casts)
    return outputs
