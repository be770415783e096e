"""A layer of experts for a model: scores and ids in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Tuple

import torch

from ...errors import InvalidArgument, Unsupported
from .layer import EPAll2AllLayer
from .tensors import world_of

__all__ = ["ExpertParallel", "SwiGLUExperts", "grouped_mm"]


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[R, out]: each row times the matrix of its group, by ``torch._grouped_mm``; also of no rows.

    :param rows: [R, in], group after group; what lies behind the last group gives anything
    :param weights: [groups, in, out]
    :param offsets: [groups] int32, the end of each group
    """
    product = getattr(torch, "_grouped_mm", None)
    if product is None:
        raise Unsupported(
            f"grouped_mm: torch {torch.__version__} has no _grouped_mm, expected 2.8 or newer"
        )
    if rows.shape[0] > 0:
        return product(rows, weights, offs=offsets)
    one = torch.nn.functional.pad(rows, (0, 0, 0, 1))  # its gradients need a row
    return product(one, weights, offs=offsets)[:0]


class SwiGLUExperts(torch.nn.Module):
    """Some experts, each down(silu(gate(x)) * up(x)), as three grouped products.

    :param num_experts: of this rank
    :param inner: columns between the two products
    """

    def __init__(
        self, num_experts: int, hidden: int, inner: int, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": device}
        self.gate = torch.nn.Parameter(torch.empty(num_experts, hidden, inner, **made))
        self.up = torch.nn.Parameter(torch.empty(num_experts, hidden, inner, **made))
        self.down = torch.nn.Parameter(torch.empty(num_experts, inner, hidden, **made))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of rows [R, hidden], expert after expert; offsets are their ends. In the
        dtype of the rows.
        """
        gate, up, down = (weight.to(rows.dtype) for weight in (self.gate, self.up, self.down))
        gated = torch.nn.functional.silu(grouped_mm(rows, gate, offsets))
        return grouped_mm(gated * grouped_mm(rows, up, offsets), down, offsets)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class ExpertParallel(torch.nn.Module):
    """Tokens to their experts on all ranks of a group, the experts, and their weighted sums home.

    ``forward(tokens, scores, ids)``: [..., hidden] of tokens [..., hidden], scores and ids [...,
    topk]; a choice of id -1 goes nowhere. Collective, as its backward is.

    :param experts: this rank's: a module or function of (rows [R, hidden], ends [experts] int32),
        rows grouped by expert, that gives [R, hidden]; num_experts / ranks of them
    :param group: a process group, None for the default one, a DeviceMesh of one dimension, or a
        ``waybill.World``
    :param shared: experts that each token has, a module or function of [T, hidden]; on a GPU it
        runs beside the dispatch, on a stream of its own
    :param gradients: "mean": those of the experts are of the mean of the ranks' losses, as those of
        what all ranks have are behind DDP or FSDP; "sum": of their sum
    :param layer: an ``EPAll2AllLayer`` to use, such as another module's ``layer``: then all of them
        have its memory. None makes one of dtype, with max_tokens and ``layer_options``
    """

    def __init__(
        self,
        experts: Callable[..., torch.Tensor],
        *,
        num_experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        group: Any = None,
        dtype: Any = torch.bfloat16,
        shared: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
        gradients: str = "mean",
        layer: Optional[EPAll2AllLayer] = None,
        device: Any = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        who = "ExpertParallel"
        if gradients not in ("mean", "sum"):
            raise InvalidArgument(f'{who}: gradients = {gradients!r}, expected "mean" or "sum"')
        if layer is None:
            world = world_of(group, None, device, who)
            layer = EPAll2AllLayer(
                world, max_tokens, hidden, topk, world.rank, num_experts,
                world.topology.ranks_per_node, world.world_size, dtype,
                **{"dropped_id": -1, **layer_options},
            )  # fmt: skip
        else:
            _check_layer(layer, num_experts, topk, hidden, max_tokens, layer_options)
        self.experts, self.shared = experts, shared
        self.gradients = gradients
        self._layers = (layer,)  # not a submodule: others may have it, too
        self._side: Any = None

    @property
    def layer(self) -> EPAll2AllLayer:
        """The layer that moves the tokens."""
        return self._layers[0]

    def forward(
        self, tokens: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """[..., hidden]: the sum of each token's experts, times their scores, and of the shared."""
        layer = self.layer
        x = tokens.reshape(-1, tokens.shape[-1])
        weights, chosen = (one.reshape(-1, one.shape[-1]) for one in (scores, ids))
        beside = self._begin_shared(x)
        ranks = layer.world_size if self.gradients == "mean" else 1
        # What is between here and home has the gradients of the mean.
        rows, row_weights, layout = layer.dispatch(
            _scaled(x, ranks), chosen, _scaled(weights.to(layer.weight_dtype), ranks)
        )
        assert row_weights is not None and layout.recv_expert_offsets is not None
        outputs = self.experts(rows, layout.recv_expert_offsets[1:])
        if outputs.shape != rows.shape:
            raise InvalidArgument(
                f"ExpertParallel: the experts of rank {layer.rank} gave {tuple(outputs.shape)},"
                f" expected {tuple(rows.shape)}, a row for each"
            )
        weighted = (outputs.to(layer.weight_dtype) * row_weights[:, None]).to(layer.dtype)
        sums = _scaled(layer.combine(weighted, layout), 1 / ranks)
        return self._add_shared(sums, beside).reshape(tokens.shape)

    def finalize(self) -> None:
        """Collective: gives the layer's symmetric memory back."""
        self.layer.finalize()

    def _begin_shared(self, x: torch.Tensor) -> Any:
        if self.shared is None:
            return None
        if not x.is_cuda:
            return self.shared(x)
        cuda: Any = torch.cuda
        if self._side is None:
            self._side = cuda.Stream(x.device)
        self._side.wait_stream(cuda.current_stream(x.device))
        with cuda.stream(self._side):
            made = self.shared(x)
        x.record_stream(self._side)
        return made

    def _add_shared(self, sums: torch.Tensor, made: Any) -> torch.Tensor:
        if made is None:
            return sums
        if made.is_cuda:
            current = torch.cuda.current_stream(made.device)
            current.wait_stream(self._side)
            made.record_stream(current)
        return sums + made


def _scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The same, with its gradient times factor."""
    if factor == 1 or not value.requires_grad or not torch.is_grad_enabled():
        return value
    return _ScaledGradient.apply(value, factor)


def _check_layer(
    layer: Any, num_experts: int, topk: int, hidden: int, max_tokens: int, more: Any
) -> None:
    who = "ExpertParallel: layer"
    if not isinstance(layer, EPAll2AllLayer):
        raise InvalidArgument(f"{who} is a {type(layer).__name__}, expected an EPAll2AllLayer")
    got = (layer.num_tot_experts, layer.topk, layer.hidden, layer.rows)
    wanted = (num_experts, topk, hidden, "grouped")
    if got != wanted or layer.max_tokens < max_tokens:
        raise InvalidArgument(
            f"{who} has (experts, topk, hidden, rows) = {got} and max_tokens = {layer.max_tokens},"
            f" expected {wanted} and at least {max_tokens}"
        )
    if more:
        raise InvalidArgument(f"{who} is given: {', '.join(sorted(more))} are those of the layer")
