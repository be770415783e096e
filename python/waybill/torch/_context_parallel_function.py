"""ContextParallelAttention as functions of autograd."""

from __future__ import annotations

from typing import Any

import torch

from .._graphs import outside_graphs
from ._autocast import without_autocast
from ._context_parallel_latent import Latent, Projector
from ._context_parallel_step import RankStep, Saved
from ._first_order import first_order


class Attention(torch.autograd.Function):
    """What is saved are tensors alone, the same number on all ranks: a checkpoint that computes
    the forward again, and its calls, does so on all of them at the same place.
    """

    @staticmethod
    def forward(
        ctx: Any, step: RankStep, keep: bool, want_lse: bool,
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    ) -> Any:  # fmt: skip
        out, lse, saved, ctx.number = step.forward(q, k, v, keep, want_lse)
        ctx.step, ctx.generation = step, step.generation
        if keep:
            ctx.save_for_backward(q, k, v, out, *saved)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        q, k, v, out, *saved = ctx.saved_tensors  # first: a checkpoint makes its calls here
        needs = ctx.needs_input_grad
        ctx.step.check_generation(ctx.generation)
        with without_autocast(grad.device.type):  # as forward was
            found = ctx.step.backward(
                grad, q, k, v, out, Saved(*saved), ctx.number, (needs[3], needs[4] or needs[5])
            )
        return (None, None, None, *(t if n else None for t, n in zip(found, needs[3:])))


class LatentAttention(torch.autograd.Function):
    """The same where latent rows travel: k and v are of those that stay. Weights are inputs, so
    that each has one gradient, of all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, step: RankStep, keep: bool, want_lse: bool, project: Projector, q: torch.Tensor,
        k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor,
    ) -> Any:  # fmt: skip
        latent = Latent(rows, project, weights)
        out, lse, saved, ctx.number = step.forward(q, k, v, keep, want_lse, latent)
        ctx.step, ctx.project = step, project  # there are no fixed plans of latent rows
        if keep:
            ctx.save_for_backward(q, k, v, out, *saved, rows, *weights)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        q, k, v, out, *rest = ctx.saved_tensors
        saved, (rows, *weights) = Saved(*rest[:6]), rest[6:]
        needs = ctx.needs_input_grad[4:]
        latent = Latent(rows, ctx.project, tuple(weights))
        with without_autocast(grad.device.type):
            found = ctx.step.backward(
                grad, q, k, v, out, saved, ctx.number, (needs[0], any(needs[1:])), latent
            )
        found += (None,) * (len(needs) - len(found))
        return (None, None, None, None, *(t if n else None for t, n in zip(found, needs)))
