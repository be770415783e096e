"""The gradients of dispatch and combine: each is the other, with the same layout."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, List, Optional, Set, Tuple

import torch

from ..._errors import said_by
from ..._graphs import outside_graphs
from ...errors import InvalidArgument
from .._tensors import first_order, read_mark, save_mark

_COMBINE = "backward of EPAll2AllLayer.combine"
_Gradients = Tuple[Optional[torch.Tensor], ...]
# Autograd does not run what leads to nothing that gradients are asked of, such as parameters.
_ALIKE = "the outputs of all ranks must depend on what torch.autograd.grad asks of: docs/moe.md"


class Dispatch(torch.autograd.Function):
    """Rows and weights of a dispatch. Backward sums the gradients of a token's rows, as combine
    does, and takes each weight's gradient home.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: Any, tokens: Any, weight: Any, ids: Any, positions: Any, layout: Any,
        present: Any, copy_out: Any, holder: Any,
    ) -> Any:  # fmt: skip
        _, tokens_need, weight_needs, *_ = ctx.needs_input_grad
        rows, weights, made = layer._dispatch(
            tokens, ids, weight, positions, None, layout, tokens_need, weight_needs,
            present=present, copy_out=copy_out,
        )  # fmt: skip
        holder.append(made)
        # A copy: the descriptor will hold the token, which holds this node of the graph. A circle
        # would last until Python looks for circles, which it does not do when a GPU is full.
        ctx.layer, ctx.layout = layer, copy.copy(made)
        ctx.weight_dtype = None if weight is None else weight.dtype
        # Without elements, it ties combine to this call: where no rows arrive, backward would else
        # leave this call out, for which other ranks wait.
        token = tokens.new_empty(0, dtype=torch.float32)
        save_mark(ctx, tokens)
        if weights is None:
            weights = tokens.new_empty(0, dtype=torch.float32)
        if not ctx.needs_input_grad[2]:
            ctx.mark_non_differentiable(weights)
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(rows)
        return rows, weights, token

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, rows: Any, weights: Any, _token: Any) -> _Gradients:
        read_mark(ctx)
        layer, tokens_gradient, weight_gradient = ctx.layer, None, None
        with said_by("backward of EPAll2AllLayer.dispatch"):
            layer._check_not_replaced()
            if ctx.needs_input_grad[1]:
                tokens_gradient = layer._combine(rows, ctx.layout, False, (), of_backward=True)
            if ctx.needs_input_grad[2]:
                weight_gradient = weights_home(layer, ctx.layout, weights).to(ctx.weight_dtype)
        return None, tokens_gradient, weight_gradient, None, None, None, None, None, None


def weights_home(of: Any, brought: Any, gradient: torch.Tensor) -> torch.Tensor:
    """[T, topk] of what the receivers have, [R] or of compact rows [R, topk]: as rows of which each
    holds its own topk slot alone, so that the sum of a token's rows is all of them. They go by the
    layout that has brought the weights.
    """
    layer = of._slot_layers[0]
    topk, dtype = layer.ep_config.topk, layer.ep_config.token_dtype
    compact = layer.rows == "compact"
    table = brought.recv_topk_indices if compact else brought.recv_tags[:, 2:3]
    # Both may have room for more rows than have come, which are not looked at: not both the same.
    count = min(gradient.shape[0], table.shape[0])
    gradient, table = gradient[:count].to(dtype), table[:count]
    zero = torch.zeros((), dtype=dtype, device=layer.device)
    if compact:
        rows = torch.where(table >= 0, gradient, zero)
    else:
        slots = torch.arange(topk, dtype=torch.int32, device=layer.device)
        rows = torch.where(table == slots, gradient[:, None], zero)
    return layer._combine(rows, brought, False, (), of_backward=True, of_companion=True)


@contextlib.contextmanager
def _overwritten(layout: Any) -> Iterator[None]:
    """Says what to write where autograd finds that what it kept is not there any more."""
    try:
        yield
    except RuntimeError as error:
        if not layout._lost or "modified by an inplace operation" not in str(error):
            raise
        raise InvalidArgument(
            f"dispatch {layout._lost[0]} (a backward dispatches, too) has overwritten rows of"
            f" dispatch {layout._handle.number}, which autograd kept as views, expected this"
            " backward before a second forward; or copies of rows: copy_out = True, in"
            ' ExpertParallel windows = "shared" without preset = "decoding"'
        ) from None


def _look_for_lost(ctx: Any) -> None:
    """Autograd's own error would come later, from where what lies between dispatch and combine
    reads what it kept: the same is read here before.
    """
    ahead = [node for node, _ in ctx.next_functions if node is not None]
    seen: Set[Any] = set()
    with _overwritten(ctx.layout):
        while ahead:
            node = ahead.pop()
            if node not in seen and node.name() != "DispatchBackward":
                if _will_run(node):
                    _read_saved(node)
                ahead += [one for one, _ in node.next_functions if one is not None]
            seen.add(node)


def _will_run(node: Any) -> bool:
    """Whether this backward passes the node; False where torch does not say."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except (AttributeError, RuntimeError):
        return False


def _read_saved(node: Any) -> None:
    """Reads what it kept, but for packed tensors: a checkpoint unpacks once, and has its own."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            packed = raw if isinstance(raw, (tuple, list)) else [raw]
            if all(getattr(one, "unpack_hook", node) is None for one in packed):
                getattr(node, "saved_tensors" if name == "_raw_saved_tensors" else name[4:])


class Combine(torch.autograd.Function):
    """Sums of rows, each times its weight if `weighted`. Backward dispatches the gradient of each
    sum to all of its rows, if ranks agree that it does: `needs`; the gradient of a bias is there
    without.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: Any, layout: Any, needs: bool, weighted: bool, rows: Any, weights: Any,
        token: Any, *biases: Any,
    ) -> Any:  # fmt: skip
        ctx.layer, ctx.layout, ctx.needs = layer, layout, needs
        ctx.has_token = token is not None
        mark = rows.new_empty(0)
        # Rows are kept for the weights' gradients alone.
        kept = rows if needs and ctx.needs_input_grad[5] else None
        ctx.save_for_backward(mark, kept, weights)
        return layer._combine(rows, layout, weighted, biases, needs_gradients=needs)

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, sums: torch.Tensor) -> _Gradients:
        with said_by(_COMBINE), _overwritten(ctx.layout):
            _, kept, weights = (
                ctx.saved_tensors
            )  # a checkpoint computes its part again before the calls
        rows, of_weights = None, None
        # Also where this rank's rows need none, perhaps as it has none: others wait for the call.
        if ctx.needs:
            with said_by(_COMBINE, _ALIKE):
                ctx.layer._check_not_replaced()
                rows, of_weights = ctx.layer._rows_gradients(
                    sums, ctx.layout, weights, kept, ctx.needs_input_grad[4]
                )
                if ctx.layout._lost:
                    _look_for_lost(ctx)
        if of_weights is not None:
            of_weights = of_weights.to(weights.dtype)
        token = sums.new_zeros(0, dtype=torch.float32) if ctx.has_token else None
        biases = [sums if needed else None for needed in ctx.needs_input_grad[7:]]
        return None, None, None, None, rows, of_weights, token, *biases


def tied_to_parameters(
    outputs: torch.Tensor, experts: Any, rows: torch.Tensor, weights: Optional[torch.Tensor]
) -> torch.Tensor:
    """The outputs of a rank's experts, which depend on the experts' parameters on every rank: also
    where the experts had no rows and made no product. Backward then passes the same calls on all
    ranks, whatever it is asked for, and gives parameters that were not used zeros.
    """
    if not torch.is_grad_enabled() or not isinstance(experts, torch.nn.Module):
        return outputs
    if torch.compiler.is_compiling():  # a compiled program is one node, which has all inputs
        used = outputs.requires_grad
    else:
        used = _uses_a_leaf(outputs, rows, weights)
    parameters = [] if used else [one for one in experts.parameters() if one.requires_grad]
    if not parameters:
        return outputs
    return _Tied.apply(outputs, rows, weights, *parameters)


def _uses_a_leaf(outputs: torch.Tensor, *given: Optional[torch.Tensor]) -> bool:
    """Whether outputs depend on a leaf of the graph by a way that does not pass what is given."""
    if outputs.grad_fn is None:
        return outputs.requires_grad
    seen = {None, *(None if one is None else one.grad_fn for one in given)}
    ahead: List[Any] = [outputs.grad_fn]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        # A reentrant checkpoint hides the leaves that it uses.
        if node.name().endswith(("AccumulateGrad", "CheckpointFunctionBackward")):
            return True
        seen.add(node)
        ahead += [one for one, _ in node.next_functions]
    return False


class _Tied(torch.autograd.Function):
    """Outputs as they are. That they depend on rows and weights, too, lets schedules that compute
    gradients of inputs first keep what is left here, where no rank is waited for.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, rows: Any, weights: Any, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.parameters = parameters
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None, *(torch.zeros_like(one) for one in ctx.parameters)
