"""Collectives of torch.distributed that autograd knows, as a user writes them by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: Any, sent: Any) -> torch.Tensor:
        ctx.sizes = received, sent
        return exchanged(rows, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        received, sent = ctx.sizes
        return exchanged(gradient, sent, received), None, None


def exchanged(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class Gathered(torch.autograd.Function):
    """All ranks' rows; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return gathered(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return scattered(gradient)


class Scattered(torch.autograd.Function):
    """The sums of this rank's rows over all ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return scattered(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gathered(gradient)


def gathered(rows: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(distributed.get_world_size() * rows.shape[0], *rows.shape[1:])
    distributed.all_gather_into_tensor(out, rows.contiguous())
    return out


def scattered(rows: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(rows.shape[0] // distributed.get_world_size(), *rows.shape[1:])
    distributed.reduce_scatter_tensor(out, rows.contiguous())
    return out
