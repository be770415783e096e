"""Latent rows, of which K and V are projected where they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Tuple

import torch

Project = Callable[..., Tuple[torch.Tensor, torch.Tensor]]


class Latent(NamedTuple):
    """One rank's latent rows, and how K and V come of them."""

    rows: torch.Tensor
    project: Project
    weights: Tuple[torch.Tensor, ...]

    def again(self, came: torch.Tensor) -> Projection:
        """K and V of rows that came, computed again for backward."""
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (came, *self.weights)]
            k, v = self.project(*inputs)
        return Projection(inputs, k, v)


class Projection(NamedTuple):
    """K and V of some rows, known to autograd."""

    inputs: list[torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor

    @property
    def kv(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Not known to autograd."""
        return self.k.detach().contiguous(), self.v.detach().contiguous()

    def gradients(self, dk: torch.Tensor, dv: torch.Tensor) -> Tuple[Any, ...]:
        """Of the rows and of each weight."""
        return torch.autograd.grad((self.k, self.v), self.inputs, (dk, dv), materialize_grads=True)
