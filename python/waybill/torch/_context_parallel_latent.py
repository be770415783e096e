"""Latent rows, of which K and V are projected where they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Tuple

import torch

from .._errors import shown
from ..errors import InvalidArgument
from ._autocast import Autocast
from .kernels import AttentionShape

Project = Callable[..., Tuple[torch.Tensor, torch.Tensor]]


class Projector(NamedTuple):
    """The caller's function, computed wherever rows are as it is around the call."""

    function: Project
    shape: AttentionShape
    casts: bool  #: to the module's dtype
    autocast: Autocast
    at: str

    def __call__(self, rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        """K and V of rows that came."""
        with self.autocast.again():
            given = self.function(rows, *weights)
        return self.fitting(given, rows.shape[0])

    def fitting(self, given: Any, rows: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """K and V, of what the function returned."""
        who = "ContextParallelAttention: project"
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            got = f"{len(given)} results" if isinstance(given, (tuple, list)) else shown(given)
            raise InvalidArgument(f"{who} returned {got} {self.at}, expected k and v")
        fits = []
        for name, tensor, size in zip(
            ("k", "v"), given, (self.shape.head_dim, self.shape.v_head_dim)
        ):
            expected = (rows, self.shape.kv_heads, size)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != expected:
                is_tensor = isinstance(tensor, torch.Tensor)
                got = f"of shape {list(tensor.shape)}" if is_tensor else f"that is {shown(tensor)}"
                raise InvalidArgument(
                    f"{who} returned a {name} {got} {self.at}, expected {list(expected)}"
                )
            if self.casts:
                tensor = tensor.to(self.shape.dtype)
            if tensor.dtype != self.shape.dtype:
                raise InvalidArgument(
                    f"{who} returned a {name} of {tensor.dtype} {self.at}, expected"
                    f" {self.shape.dtype}"
                )
            fits.append(tensor)
        return fits[0], fits[1]


class Latent(NamedTuple):
    """One rank's latent rows, and how K and V come of them."""

    rows: torch.Tensor
    project: Projector
    weights: Tuple[torch.Tensor, ...]

    def again(self, came: torch.Tensor) -> Projection:
        """K and V of rows that came, computed again for backward."""
        with torch.enable_grad():
            inputs = [t.detach() for t in (came, *self.weights)]
            inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
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
        """Of the rows and of each weight; zeros where nothing depends on it."""
        pairs = [(t, g) for t, g in ((self.k, dk), (self.v, dv)) if t.requires_grad]
        wanted = [t for t in self.inputs if t.requires_grad]
        found: Any = [torch.zeros_like(t) for t in wanted]
        if pairs:
            outputs, grads = zip(*pairs)
            found = torch.autograd.grad(outputs, wanted, grads, materialize_grads=True)
        rest = iter(found)
        return tuple(next(rest) if t.requires_grad else None for t in self.inputs)
