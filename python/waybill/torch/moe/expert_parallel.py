"""A layer of experts for a model: scores and ids in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict, Optional, Tuple

import torch

from ..._agreement import agree_on
from ..._arrays import flag, int64
from ..._copies import OfThisProcess
from ..._errors import said_by
from ..._graphs import outside_graphs
from ...errors import InvalidArgument, TransportError
from .._operations import has_operations
from . import operations as ops
from .autograd import tied_to_parameters
from .checks import (
    check_call,
    check_choices,
    check_experts,
    check_layer,
    check_operations,
    check_options,
    check_outputs,
    check_shared,
    require_layer,
)
from .grouped import ends_within
from .lanes import Lane, scaled_gradient
from .layer import EPAll2AllLayer
from .presets import PRESETS, preset_options
from .shared_layers import LayerBox, shared_box
from .tensors import as_autocast, flat_rows, world_of

__all__ = ["ExpertParallel"]


class ExpertParallel(OfThisProcess, torch.nn.Module):
    """Dispatch, a rank's experts, and the weighted combine, as one module.

    ``forward(tokens, scores, ids)``: tokens [..., hidden], scores and ids [..., topk]; returns
    [..., hidden]. A topk slot of id -1 is dropped. Forward and backward are collective.

    :param experts: of this rank, num_experts / ranks of them: a module or function of (rows
        [R, hidden] grouped by expert, ends [experts] int32) that returns [R, hidden]
    :param num_experts: experts of all ranks, a multiple of their number
    :param topk: experts of a token, 1 to 32
    :param hidden: elements of a token
    :param max_tokens: most tokens of a rank in a call
    :param dtype: of tokens, None: bfloat16; under autocast floats of any dtype are converted to it
    :param weight_dtype: of scores, None: float32; scores of fewer digits are converted, of more
        refused, but under autocast
    :param group: a process group, None for the default one, a DeviceMesh of one dimension, or a
        ``waybill.World``
    :param device: of ranks from a process group, as of ``EPAll2AllLayer``
    :param shared: experts that each token has: a module or function of [T, hidden]; on a GPU it
        runs beside the dispatch, on a stream of its own
    :param gradients: of the experts, to be given: "sum": of the sum of the ranks' losses, where the
        gradients of the other parameters are added over the ranks, as those of
        ``ContextParallelAttention`` are; "mean": of the mean of the ranks' losses, where they are
        averaged, as DDP and FSDP do
    :param weights: who multiplies by the scores: "combine", or "experts", which then get them as a
        third argument [R], so that no rows are kept for the scores' gradients
    :param windows: "shared": modules of the same sizes share a layer and its memory, and rows are
        copied out of it; "own": rows stay in this module's own window until its backward is over,
        before which it must not be called again. (Programs of torch.compile copy them.)
    :param chunks: parts into which the tokens are cut, so that the experts work on one part while
        the next is on its way, on GPUs on a stream of its own. Windows are smaller by this factor;
        ``fixed_rows`` are those of a chunk
    :param preset: "training" or "decoding", None: "training": defaults of ``layer_options``, which
        are arguments of ``EPAll2AllLayer``, such as ``combine="push"`` (provisional)
    :param operations: whether calls are operations of torch.library, which needs ``fixed_rows`` and
        no chunks; None: if torch compiles and they can be. Selective checkpoints need True
    :param layer: an ``EPAll2AllLayer`` to use instead, with its world, dtypes and options
    """

    _why_not_copied = (
        "one rank's buffers: make one on each rank, and load its state_dict, which can be"
    )

    def __init__(
        self,
        experts: Callable[..., torch.Tensor],
        *,
        num_experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        group: Any = None,
        dtype: Any = None,
        weight_dtype: Any = None,
        shared: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
        gradients: Optional[str] = None,
        weights: str = "combine",
        windows: str = "shared",
        chunks: int = 1,
        preset: Optional[str] = None,
        operations: Optional[bool] = None,
        layer: Optional[EPAll2AllLayer] = None,
        device: Any = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        who = "ExpertParallel"
        if layer is not None:
            require_layer(layer)
        world = world_of(group, None, device, who) if layer is None else layer.world
        options: Dict[str, Any] = {}
        most = 0

        def check() -> Dict[str, Any]:
            nonlocal num_experts, topk, hidden, max_tokens, most, chunks, operations, dtype
            check_choices(experts, shared, gradients=gradients, weights=weights, windows=windows)
            num_experts = int64(num_experts, f"{who}: num_experts")
            topk, hidden = int64(topk, f"{who}: topk"), int64(hidden, f"{who}: hidden")
            operations = None if operations is None else flag(operations, f"{who}: operations")
            chunks = int64(chunks, f"{who}: chunks")
            if chunks < 1:
                raise InvalidArgument(f"{who}: chunks = {chunks}, expected >= 1")
            most = max_tokens = int64(max_tokens, f"{who}: max_tokens")
            if max_tokens > 0:
                max_tokens = -(-max_tokens // chunks)
            sizes = {"max_tokens": max_tokens, "num_experts": num_experts, "topk": topk}
            if layer is None:
                dtype, of_weights = check_options(
                    world, num_experts, topk, hidden, max_tokens, dtype, weight_dtype, layer_options
                )
                options.update(dropped_id=-1, **preset_options(preset, world, **sizes))
                options.update(layer_options, weight_dtype=of_weights)
                fixed_rows = options.get("fixed_rows")
            else:
                given_more = {
                    "group": group, "device": device, "dtype": dtype, "weight_dtype": weight_dtype,
                    "preset": preset, **layer_options,
                }  # fmt: skip
                check_layer(layer, num_experts, topk, hidden, max_tokens, given_more)
                fixed_rows = layer.fixed_rows
            check_experts(experts, num_experts, world)
            if operations:
                check_operations(fixed_rows, chunks, windows, layer_options)
            return {
                "layer": "made" if layer is None else "given", "chunks": chunks, **sizes,
                "max_tokens": most, "hidden": hidden, "gradients": gradients, "weights": weights,
                "windows": windows, "preset": (preset or PRESETS[0]) if layer is None else "",
                "dtype": str(dtype).removeprefix("torch.") if layer is None else "",
                "weight_dtype": str(options.get("weight_dtype", "")).removeprefix("torch."),
            }  # fmt: skip

        agree_on(world, who, check)
        self.max_tokens, self.chunks = most, chunks
        if layer is None:
            sizes = (max_tokens, hidden, topk, num_experts)
            box = _box_of(world, sizes, dtype, options, windows == "shared")
        else:
            box = LayerBox(None, layer)
        box.users += 1
        self._boxes, self._released = (box,), False  # no submodule: others may have it, too
        self.experts, self.shared = experts, shared
        self.gradients, self.weights, self.windows = gradients, weights, windows
        self.operations = operations
        self._beside = Lane()
        self._moving = Lane()

    @property
    def layer(self) -> EPAll2AllLayer:
        """The layer that moves the tokens."""
        layer = self._boxes[0].layer
        assert layer is not None
        return layer

    def forward(
        self, tokens: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """[..., hidden]: the sum of each token's experts, times their scores, and of the shared."""
        if self._released:
            raise TransportError("ExpertParallel: the module was finalized")
        check_call(self.layer, self.max_tokens, self.chunks, tokens, scores, ids)
        # A view also where there is nothing to flatten: shared experts have a stream of their own,
        # and autograd gathers a leaf's gradients on the stream that used the leaf first.
        x = tokens.reshape(-1, tokens.shape[-1])
        weights, chosen = flat_rows(scores), flat_rows(ids)
        beside = None if self.shared is None else self._beside.run(self.shared, x)
        if self.shared is not None:
            check_shared(beside, x, self.layer.rank)
        # What is between here and home has the gradients of the mean.
        ranks = self.layer.world_size if self.gradients == "mean" else 1
        x = scaled_gradient(x, ranks)
        weights = scaled_gradient(weights.to(self.layer.weight_dtype), ranks)
        sums = scaled_gradient(self._all_chunks(x, weights, chosen), 1 / ranks)
        if beside is not None:
            self._beside.join(beside)
            sums = sums + beside
        return sums if tokens.ndim == 2 else sums.reshape(tokens.shape)

    def uses_operations(self) -> bool:
        """Whether a call now would be made of operations of torch.library."""
        if self.operations is not None:
            return self.operations
        one = self.layer.fixed_rows is not None and self.chunks == 1
        return one and has_operations() and torch.compiler.is_compiling()

    def take_overflow(self) -> int:
        """The number of rows that ``fixed_rows`` should have been since the last call of this, the
        same on all ranks; 0: all did fit. Waits for the current stream. Gradients of a step with
        an overflow are NaN: ``resize``, and repeat the step.
        """
        self.layer.await_calls()
        return self.layer.take_overflow()

    def resize(self, fixed_rows: int) -> None:
        """Collective: the layer, of all modules that share it, gets so many rows. No forward may
        wait for its backward.
        """
        if self._released:
            raise InvalidArgument("ExpertParallel.resize: the module was finalized")
        who, number = "ExpertParallel.resize", 0

        def check() -> Dict[str, Any]:
            nonlocal number
            number = int64(fixed_rows, f"{who}: fixed_rows")
            self._boxes[0].check_resize(number)
            return {"fixed_rows": number}

        agree_on(self.layer.world, who, check)
        self._boxes[0].resize(number)

    def finalize(self) -> None:
        """Collective: gives the layer's symmetric memory back, if no other module shares it; that
        of a given ``layer`` in any case. Twice does nothing. When an error of this rank is in
        flight, nobody is waited for, and the memory goes with the world.
        """
        if not self._released:
            self._released = True
            self._boxes[0].release()

    def extra_repr(self) -> str:
        """For print(model)."""
        parts = [f"{name}={getattr(self, name)!r}" for name in ("gradients", "weights", "windows")]
        parts += [f"chunks={self.chunks}"] if self.chunks > 1 else []
        return ", ".join([*parts, self.layer.extra_repr()])

    def _all_chunks(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if self.uses_operations():
            return self._by_operations(x, weights, chosen)
        if self.chunks == 1:
            return self._combine(*self._computed(*self._dispatch(x, chosen, weights)))
        parts = list(zip(*(self._parts(one) for one in (x, chosen, weights))))
        lane, sums = self._moving, []
        arrived = lane.run(self._dispatch, *parts[0])
        for number in range(self.chunks):
            outputs, layout = self._computed(*lane.join(arrived))
            if number + 1 < self.chunks:  # it is on its way while these experts work
                arrived = lane.run(self._dispatch, *parts[number + 1])
            sums.append(lane.run(self._combine, outputs, layout))
        return torch.cat([lane.join(one) for one in sums])

    def _by_operations(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        number, inside = self._boxes[0].number, self.weights == "experts"
        recorded = torch.is_grad_enabled()
        x = as_autocast(x, self.layer.dtype, self.layer.device)
        needs = [recorded and one.requires_grad for one in (x, weights)]
        rows, row_weights, ends, ticket, token = ops.dispatch(number, x, chosen, weights, *needs)
        outputs = self.experts(rows, ends, *([row_weights] if inside else []))
        check_outputs(outputs, rows, self.layer.rank)
        outputs = tied_to_parameters(outputs.to(rows.dtype), self.experts, rows, row_weights)
        will = any(needs) or (recorded and outputs.requires_grad)
        sums: torch.Tensor = ops.combine(
            number, ticket, token, outputs, None if inside else row_weights, x.shape[0], will
        )
        return sums

    def _parts(self, value: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """One for each chunk, the last ones perhaps without tokens."""
        size = -(-self.max_tokens // self.chunks)
        return tuple(value[n * size : (n + 1) * size] for n in range(self.chunks))

    @outside_graphs
    def _dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """Rows are copied if they must live longer than the window is theirs."""
        kept = torch.is_grad_enabled() and (self.windows == "shared" or self.chunks > 1)
        with said_by("ExpertParallel: forward"):
            return self.layer.dispatch(x, ids, weights, copy_out=self.layer.copy_out and kept)

    def _computed(self, rows: torch.Tensor, row_weights: torch.Tensor, layout: Any) -> Any:
        """What the experts make of rows, and the descriptor."""
        given = (rows, ends_within(layout.recv_expert_offsets, self.layer.fixed_rows))
        outputs = self.experts(*given, *([row_weights] if self.weights == "experts" else []))
        outputs = check_outputs(outputs, rows, self.layer.rank).to(self.layer.dtype)
        return self._tied(outputs, rows, row_weights), layout

    @outside_graphs
    def _tied(
        self, outputs: torch.Tensor, rows: torch.Tensor, row_weights: torch.Tensor
    ) -> torch.Tensor:
        return tied_to_parameters(outputs, self.experts, rows, row_weights)

    @outside_graphs
    def _combine(self, outputs: torch.Tensor, layout: Any) -> torch.Tensor:
        with said_by("ExpertParallel: forward"):
            return self.layer.combine(outputs, layout, weighted=self.weights == "combine")


def _box_of(
    world: Any, sizes: Tuple[int, int, int, int], dtype: Any, options: Dict[str, Any], shares: bool
) -> LayerBox:
    """A layer of its own, or the one that modules of these sizes share.

    :param sizes: (max_tokens, hidden, topk, num_experts)
    """
    max_tokens, hidden, topk, num_experts = sizes

    def make(**changed: Any) -> EPAll2AllLayer:
        if changed:  # capacity was that of buffers that grow
            options.pop("capacity", None)
        with said_by("ExpertParallel"):
            return EPAll2AllLayer(
                world, max_tokens, hidden, topk, world.rank, num_experts,
                world.topology.ranks_per_node, world.world_size, dtype, **{**options, **changed},
            )  # fmt: skip

    key = (*sizes, dtype, sorted(options.items()))
    return shared_box(world, key, make) if shares else LayerBox(make)
