"""A layer of experts for a model: scores and ids in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict, Optional, Tuple

import torch

from ..._arrays import int64
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
    topk]; a topk slot of id -1 goes nowhere. Collective, as its backward is.

    :param experts: this rank's: a module or function of (rows [R, hidden], ends [experts] int32),
        rows grouped by expert, that gives [R, hidden]; num_experts / ranks of them
    :param group: a process group, None for the default one, a DeviceMesh of one dimension, or a
        ``waybill.World``
    :param shared: experts that each token has, a module or function of [T, hidden]; on a GPU it
        runs beside the dispatch, on a stream of its own
    :param gradients: "mean": those of the experts are of the mean of the ranks' losses, as those of
        what all ranks have are behind DDP or FSDP; "sum": of their sum
    :param chunks: parts of the tokens that go one after another, so that the experts of one work
        while the next is on its way: on GPUs the calls of the layer have a stream of their own.
        Windows are smaller by this factor, and ``fixed_rows`` are those of a chunk
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
        chunks: int = 1,
        layer: Optional[EPAll2AllLayer] = None,
        device: Any = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        who = "ExpertParallel"
        if gradients not in ("mean", "sum"):
            raise InvalidArgument(f'{who}: gradients = {gradients!r}, expected "mean" or "sum"')
        self.chunks = int64(chunks, f"{who}: chunks")
        if self.chunks < 1:
            raise InvalidArgument(f"{who}: chunks = {self.chunks}, expected >= 1")
        max_tokens = -(-int64(max_tokens, f"{who}: max_tokens") // self.chunks)
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
        self._beside = _Lane()
        self._moving = _Lane()

    @property
    def layer(self) -> EPAll2AllLayer:
        """The layer that moves the tokens."""
        return self._layers[0]

    def forward(
        self, tokens: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """[..., hidden]: the sum of each token's experts, times their scores, and of the shared."""
        x = tokens.reshape(-1, tokens.shape[-1])
        weights, chosen = (one.reshape(-1, one.shape[-1]) for one in (scores, ids))
        beside = None if self.shared is None else self._beside.run(self.shared, x)
        # What is between here and home has the gradients of the mean.
        ranks = self.layer.world_size if self.gradients == "mean" else 1
        x = _scaled(x, ranks)
        weights = _scaled(weights.to(self.layer.weight_dtype), ranks)
        sums = _scaled(self._all_chunks(x, weights, chosen), 1 / ranks)
        if beside is not None:
            self._beside.join(beside)
            sums = sums + beside
        return sums.reshape(tokens.shape)

    def finalize(self) -> None:
        """Collective: gives the layer's symmetric memory back."""
        self.layer.finalize()

    def _all_chunks(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if self.chunks == 1:
            rows, row_weights, layout = self.layer.dispatch(x, chosen, weights)
            return self.layer.combine(self._computed(rows, row_weights, layout), layout)
        if x.shape[0] > self.chunks * self.layer.max_tokens:
            raise InvalidArgument(
                f"ExpertParallel: {x.shape[0]} tokens on rank {self.layer.rank}, expected at most"
                f" {self.chunks} chunks of {self.layer.max_tokens}"
            )
        parts = list(zip(*(self._parts(one) for one in (x, chosen, weights))))
        lane, sums = self._moving, []
        arrived = lane.run(self.layer.dispatch, *parts[0])
        for number in range(self.chunks):
            rows, row_weights, layout = lane.join(arrived)
            outputs = self._computed(rows, row_weights, layout)
            if number + 1 < self.chunks:  # it is on its way while these experts work
                arrived = lane.run(self.layer.dispatch, *parts[number + 1])
            sums.append(lane.run(self.layer.combine, outputs, layout))
        return torch.cat([lane.join(one) for one in sums])

    def _parts(self, value: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """One for each chunk, the last ones perhaps without tokens."""
        size = self.layer.max_tokens
        return tuple(value[n * size : (n + 1) * size] for n in range(self.chunks))

    def _computed(
        self, rows: torch.Tensor, row_weights: Optional[torch.Tensor], layout: Any
    ) -> torch.Tensor:
        """What the experts make of rows, times their weights."""
        outputs = self.experts(rows, layout.recv_expert_offsets[1:])
        if outputs.shape != rows.shape:
            raise InvalidArgument(
                f"ExpertParallel: the experts of rank {self.layer.rank} gave"
                f" {tuple(outputs.shape)}, expected {tuple(rows.shape)}, a row for each"
            )
        assert row_weights is not None
        weighted = outputs.to(self.layer.weight_dtype) * row_weights[:, None]
        return weighted.to(self.layer.dtype)


class _Lane:
    """A stream beside the current one on a GPU; in host memory calls run as they come."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._events: Dict[int, Any] = {}  #: behind each call that is not joined, by its result

    def run(self, call: Callable[..., Any], *given: Any) -> Any:
        """Begins behind what the current stream has."""
        if not given[0].is_cuda:
            return call(*given)
        cuda: Any = torch.cuda
        device = given[0].device
        if self._stream is None:
            self._stream = cuda.Stream(device)
        self._stream.wait_stream(cuda.current_stream(device))
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(self._stream)
        with cuda.stream(self._stream):
            result = call(*given)
            event = cuda.Event()
            event.record(self._stream)
        self._events[id(_first(result))] = event
        return result

    def join(self, result: Any) -> Any:
        """The current stream goes on behind the call that gave it."""
        first = _first(result)
        if first.is_cuda:
            current = torch.cuda.current_stream(first.device)
            current.wait_event(self._events.pop(id(first)))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(current)
        return result


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


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
