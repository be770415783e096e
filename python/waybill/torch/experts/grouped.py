"""Experts of a rank as grouped products."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..._arrays import at_least
from ...errors import InvalidArgument, Unsupported
from .._tensors import holds, is_autocast, require_device, torch_dtype


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[R, out]: each row times the matrix of its group, by ``torch._grouped_mm``; also of no rows.
    float64 in host memory, which torch has not, is a product for each group.

    :param rows: [R, in], group after group; what lies after the last group gives anything
    :param weights: [groups, in, out]; rows of both of a multiple of 16 bytes, as torch wants
    :param offsets: [groups] int32, the end of each group
    """
    if rows.dtype == torch.float64 and rows.device.type == "cpu":
        return _one_by_one(rows, weights, offsets)
    product = getattr(torch, "_grouped_mm", None)
    if product is None:
        raise Unsupported(
            f"grouped_mm: torch {torch.__version__} has no _grouped_mm, expected 2.8 or newer"
        )
    if rows.shape[0] > 0:
        return product(rows, weights, offs=offsets)
    one = torch.nn.functional.pad(rows, (0, 0, 0, 1))  # its gradients need a row
    return product(one, weights, offs=offsets)[:0]


def _one_by_one(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    begins = [0, *offsets.tolist()]
    parts = [
        rows[begin:end] @ matrix for begin, end, matrix in zip(begins, begins[1:], weights.unbind())
    ]
    rest = rows.new_zeros(rows.shape[0] - begins[-1], weights.shape[2])
    return torch.cat([*parts, rest])


def ends_within(offsets: torch.Tensor, fixed_rows: Optional[int]) -> torch.Tensor:
    """[experts]: the ends of groups that lie in so many rows. Those of an overflow, counted, lie
    after them, where a grouped product would read, and write, what is somebody else's.
    """
    return offsets[1:] if fixed_rows is None else offsets[1:].clamp(max=fixed_rows)


class SwiGLUExperts(torch.nn.Module):
    """A rank's experts, each down(silu(gate(x)) * up(x)), as three grouped GEMMs.

    Parameters ``gate`` and ``up`` [num_experts, hidden, inner] and ``down`` [num_experts, inner,
    hidden], drawn from a normal distribution of deviation 1 / sqrt(rows of the matrix).

    :param num_experts: experts of this rank: ExpertParallel's num_experts / ranks
    :param hidden: elements of a token; a multiple of 16 bytes
    :param inner: elements between the products; a multiple of 16 bytes
    :param dtype: of the parameters, torch's default if None; products are in that of the tokens,
        whose values it must hold, but under autocast
    """

    def __init__(
        self, num_experts: int, hidden: int, inner: int, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        who = "SwiGLUExperts"
        num_experts = at_least(num_experts, 1, f"{who}: num_experts")
        hidden, inner = at_least(hidden, 1, f"{who}: hidden"), at_least(inner, 1, f"{who}: inner")
        if dtype is not None:
            dtype = torch_dtype(dtype, f"{who}: dtype")
            if not dtype.is_floating_point:
                raise InvalidArgument(f"{who}: dtype = {dtype}, expected floats")
        made = {"dtype": dtype, "device": require_device(device, f"{who}: device")}
        self.gate = torch.nn.Parameter(torch.empty(num_experts, hidden, inner, **made))
        self.up = torch.nn.Parameter(torch.empty(num_experts, hidden, inner, **made))
        self.down = torch.nn.Parameter(torch.empty(num_experts, inner, hidden, **made))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def extra_repr(self) -> str:
        experts, hidden, inner = self.gate.shape
        return f"num_experts={experts}, hidden={hidden}, inner={inner}, dtype={self.gate.dtype}"

    def forward(
        self, rows: torch.Tensor, offsets: torch.Tensor, weights: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """[R, hidden] of rows [R, hidden], expert after expert; offsets are their ends. In the
        dtype of the rows. Weights [R] multiply between the products, where columns are few.
        """
        if offsets.shape[0] != self.gate.shape[0]:
            raise InvalidArgument(
                f"SwiGLUExperts: rows of {offsets.shape[0]} experts, expected"
                f" {self.gate.shape[0]}: num_experts are those of this rank"
            )
        self._check_dtype(rows)
        gate, up, down = (weight.to(rows.dtype) for weight in (self.gate, self.up, self.down))
        gated = torch.nn.functional.silu(grouped_mm(rows, gate, offsets))
        inner = gated * grouped_mm(rows, up, offsets)
        if weights is not None:
            inner = (inner.to(weights.dtype) * weights[:, None]).to(rows.dtype)
        return grouped_mm(inner, down, offsets)

    def _check_dtype(self, rows: torch.Tensor) -> None:
        own = self.gate.dtype
        if not holds(own, rows.dtype) and not is_autocast(rows.device.type):
            raise InvalidArgument(
                f"SwiGLUExperts: parameters are {own}, expected {rows.dtype} as the rows, or more"
                " digits; or autocast"
            )
