"""First derivatives backward are all that calls have: others are refused, never lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import Unsupported


def refuse_tangent(value: torch.Tensor, name: str) -> None:
    """A tensor of forward-mode AD, whose tangent would be lost where rows are read as bytes."""
    if torch.compiler.is_compiling():  # there are none in compiled programs
        return
    unpacked = torch.autograd.forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    if unpacked.tangent is not None:
        raise Unsupported(
            f"{name} has a tangent, expected none: calls of Waybill have no derivatives in forward"
            " mode"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Who differentiates the gradients again gets an error. (torch's once_differentiable does so
    only where the gradient that comes in is differentiated, too: of a loss that is linear in the
    output, second derivatives would be left out silently.)
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        for gradient in gradients:
            if isinstance(gradient, torch.Tensor):
                refuse_tangent(gradient, "a gradient")
        again = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not again:
            return found
        given = [t for t in found if t is not None]
        with torch.enable_grad():
            marked = iter(_NoSecond.apply(torch.zeros(0, requires_grad=True), *given))
        return tuple(None if t is None else next(marked) for t in found)

    return call


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(t.view_as(t) for t in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Unsupported(
            "got a gradient of a gradient (create_graph=True) of a Waybill call, expected first"
            " derivatives alone"
        )
