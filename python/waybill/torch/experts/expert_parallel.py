"""ExpertParallel, a layer of experts for a model: scores and ids in, tokens out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from ..._arrays import at_least, choice, flag, instance, int64
from ..._errors import known_keywords, said_by, shown, unknown_keyword
from ..._graphs import outside_graphs
from ..._lifetime import OfThisProcess
from ..._process_group import group_of
from ...errors import InvalidArgument, TransportError, WrongType
from ...moe.config import EPConfig
from ...world import World, agree_on
from .._tensors import (
    as_autocast,
    flat_rows,
    has_operations,
    holds,
    is_autocast,
    refuse_tangent,
    require_known_ids,
    require_moved_rows,
    require_rows,
    require_tensor,
    torch_dtype,
)
from ..world import world_of
from . import operations as ops
from .autograd import tied_to_parameters
from .copies import adapted, checked_copies
from .copy_operations import check_recorded, compute_recorded
from .device_copies import copies_for
from .grouped import SwiGLUExperts, ends_within
from .layer import PRESETS, EPAll2AllLayer, preset_options


class Lane:
    """A second stream on a GPU; in host memory calls run as they come."""

    _stream: Any = None

    def run(self, call: Callable[..., Any], *given: Any) -> Tuple[Any, Any]:
        """Runs the call after the work that the current stream has: (result, event after it)."""
        if not given[0].is_cuda:
            return call(*given), None
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
        return result, event

    def join(self, ran: Tuple[Any, Any]) -> Any:
        """The result; the current stream goes on after the call that gave it."""
        result, event = ran
        if event is not None:
            tensors = result if isinstance(result, tuple) else (result,)
            current = torch.cuda.current_stream(tensors[0].device)
            current.wait_event(event)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(current)
        return result


def scaled_gradient(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The value, with its gradient times factor."""
    if factor == 1 or not value.requires_grad or not torch.is_grad_enabled():
        return value
    return _ScaledGradient.apply(value, factor)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class LayerBox:
    """A layer that modules share: when it is made anew, larger, all of them have the new one.

    :param layer: one that was given, and is not made
    :param forget: called when nobody uses it any more
    """

    def __init__(
        self, make: Optional[Callable[..., EPAll2AllLayer]], layer: Any = None,
        forget: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        self.make, self._forget = make, forget
        self.layer = layer if make is None else make()
        self.users = 0
        self.number = ops.register(self)

    def resize(self, fixed_rows: int) -> None:
        """Collective: another layer in its place. Nothing of the old one is in flight."""
        assert self.make is not None
        self.layer.finalize()
        self.layer._replaced = True
        self.layer = self.make(fixed_rows=fixed_rows)

    def release(self) -> None:
        """Collective when the last of its users says so."""
        self.users -= 1
        if self.users == 0:
            self._forget()
            self.layer.finalize()


_WHO = "ExpertParallel"
_LAYER = list(inspect.signature(EPAll2AllLayer).parameters)
_LAYER_OPTIONS = _LAYER[_LAYER.index("num_sm") :]  # those before it are the module's


def check_options(
    world: World, num_experts: int, topk: int, hidden: int, max_tokens: int, dtype: Any,
    weight_dtype: Any, options: Dict[str, Any],
) -> Tuple[torch.dtype, torch.dtype]:  # fmt: skip
    """Checks the options that a layer would be made with; returns its dtypes.

    The layer would check sizes, too, but after the ranks have compared them: then a rank's own
    mistake would be told as one that they disagree on.
    """
    dtype = torch_dtype(torch.bfloat16 if dtype is None else dtype, f"{_WHO}: dtype")
    weight_dtype = torch_dtype(
        torch.float32 if weight_dtype is None else weight_dtype, f"{_WHO}: weight_dtype"
    )
    EPConfig._of_words(
        _WHO, {"token_dtype": "dtype", "world_size": "ranks"}, max_tokens, hidden, topk,
        num_experts, world.rank, world.world_size, world.topology.ranks_per_node,
        dtype, weight_dtype, torch.int32,
    )  # fmt: skip
    for name, value, reason in (
        ("rows", "grouped", "experts get rows of their own"),
        ("payload", "plain", "rows in other formats have no gradients"),
    ):
        if options.get(name, value) != value:
            raise InvalidArgument(
                f'{_WHO}: {name} = {shown(options[name])}, expected "{value}": {reason}'
            )
    for name in options:
        if name not in _LAYER_OPTIONS:
            own = inspect.signature(ExpertParallel).parameters
            raise unknown_keyword(_WHO, name, [*list(own)[:-1], *_LAYER_OPTIONS])
    return dtype, weight_dtype


def check_operations(fixed_rows: Any, chunks: int, windows: str, options: Dict[str, Any]) -> None:
    """Checks for operations of torch.library, which give copies of sizes known before."""
    if fixed_rows is None or chunks > 1:
        raise InvalidArgument(
            f"{_WHO}: operations = True with fixed_rows = {fixed_rows} and chunks = {chunks},"
            " expected fixed_rows and one chunk"
        )
    if windows == "own" or options.get("copy_out") is False:
        given = 'windows = "own"' if windows == "own" else "copy_out = False"
        raise InvalidArgument(
            f"{_WHO}: {given} with operations = True, whose rows are always copies, expected"
            ' windows = "shared" and copy_out = True'
        )


def check_experts(
    experts: Any, num_experts: int, world: World, has_copies: bool, operations: Optional[bool]
) -> None:
    """Checks the number of a rank's experts, where they say it."""
    wanted = num_experts // world.world_size
    if isinstance(experts, SwiGLUExperts) and len(experts.gate) != wanted:
        raise InvalidArgument(
            f"{_WHO}: experts has {len(experts.gate)} experts, expected {wanted} on rank"
            f" {world.rank}: num_experts = {num_experts} over {world.world_size} ranks"
        )
    if has_copies:
        adapted(experts, wanted)
    if has_copies and operations:
        check_recorded(experts)


def check_choices(
    experts: Any, shared: Any, *, gradients: Optional[str], weights: str, windows: str
) -> None:
    """Functions, and arguments that are one of few words."""
    if gradients is None:
        raise InvalidArgument(
            f'{_WHO}: gradients = None, expected "sum" or "mean", as the gradients of the other'
            ' parameters: "sum" gives the experts those of the sum of the ranks\' losses, for'
            " programs that add gradients over the ranks (as beside ContextParallelAttention);"
            ' "mean" divides that by the number of ranks, for programs that average them (DDP,'
            " FSDP)"
        )
    for name, value, choices in (
        ("gradients", gradients, ("sum", "mean")),
        ("weights", weights, ("combine", "experts")),
        ("windows", windows, ("shared", "own")),
    ):
        choice(value, f"{_WHO}: {name}", *choices)
    for name, value in (("experts", experts), ("shared", shared)):
        if not callable(value) and not (name == "shared" and value is None):
            raise WrongType(f"{_WHO}: {name} = {shown(value)}, expected a module or function")


def check_layer(
    layer: Any, num_experts: int, topk: int, hidden: int, max_tokens: int, more: Dict[str, Any]
) -> None:
    """One that was given.

    :param more: arguments that are the layer's; None: not given
    """
    who = f"{_WHO}: layer"
    got = (layer.num_tot_experts, layer.topk, layer.hidden, layer.rows, layer.payload)
    wanted = (num_experts, topk, hidden, "grouped", "plain")
    if got != wanted or layer.max_tokens < max_tokens:
        raise InvalidArgument(
            f"{who} has (experts, topk, hidden, rows, payload) = {got} and max_tokens ="
            f" {layer.max_tokens}, expected {wanted} and at least {max_tokens}"
        )
    for name, own in (
        ("group", layer.ep_group),
        ("device", layer.world.device),
        ("dtype", layer.dtype),
        ("weight_dtype", layer.weight_dtype),
    ):
        value = more.pop(name)
        if value is not None and not _is_of(layer, name, value):
            raise InvalidArgument(
                f"{_WHO}: {name} = {shown(value)}, expected {shown(own)}, that of the layer"
            )
    rest = sorted(name for name, value in more.items() if name != "preset" or value is not None)
    if rest:
        raise InvalidArgument(f"{who} is given: {', '.join(rest)} are those of the layer")


def _is_of(layer: EPAll2AllLayer, name: str, value: Any) -> bool:
    """Whether the value of an argument is what a layer has."""
    if name == "group":
        if isinstance(value, World):
            return value._world is layer.world._world
        return group_of(value, _WHO, name) is layer.ep_group
    if name == "device":
        device = layer.world.device
        is_name = isinstance(value, (str, torch.device))
        return is_name and str(value) in (device, device.split(":")[0])
    return torch_dtype(value, f"{_WHO}: {name}") == getattr(layer, name)


def check_call(
    layer: EPAll2AllLayer, most: int, chunks: int, tokens: Any, scores: Any, ids: Any
) -> None:
    """Rows of scores and ids that lie otherwise than those of tokens are other tokens'."""
    hidden, topk, rank, device = layer.hidden, layer.topk, layer.rank, layer.device
    wanted = require_rows(tokens, f"{_WHO}: tokens").shape[:-1]
    count = wanted.numel()
    for name, value, columns in (
        ("tokens", tokens, hidden),
        ("scores", scores, topk),
        ("ids", ids, topk),
    ):
        require_moved_rows(value, f"{_WHO}: {name}")
        *rows, last = value.shape
        if last != columns or not (rows == [count] or rows == list(wanted)):
            raise _wrong(f"{name} has shape {list(value.shape)}", f"{[*wanted, columns]}", rank)
        if value.device != device:
            raise _wrong(f"{name} lies on {value.device}", f"{device}", rank)
    casts = is_autocast(device.type)
    if tokens.dtype != layer.dtype and not (tokens.is_floating_point() and casts):
        raise _wrong(f"tokens is {tokens.dtype}", f"{layer.dtype}, or autocast", rank)
    if not scores.is_floating_point():
        raise _wrong(f"scores is {scores.dtype}", "floats", rank)
    of_weights = layer.weight_dtype
    if not holds(of_weights, scores.dtype) and not casts:
        wanted_dtype = f"{of_weights}, which is weight_dtype, or fewer digits; or autocast"
        raise _wrong(f"scores is {scores.dtype}", wanted_dtype, rank)
    if ids.dtype not in (torch.int32, torch.int64):
        raise _wrong(f"ids is {ids.dtype}", "int32 or int64", rank)
    if count > most:
        parts = "" if chunks == 1 else f", in {chunks} chunks"
        raise _wrong(f"tokens are {count}", f"at most max_tokens = {most}{parts}", rank)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        require_known_ids(ids, layer.num_tot_experts, layer.dropped_id, f"{_WHO}: ids", rank)


def _wrong(got: str, expected: str, rank: int) -> InvalidArgument:
    return InvalidArgument(f"{_WHO}: {got}, expected {expected}, on rank {rank}")


def check_outputs(outputs: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    """The outputs that experts made of rows: another shape would be spread over them."""
    require_tensor(outputs, name)
    if outputs.shape != rows.shape or not outputs.is_floating_point():
        raise InvalidArgument(
            f"{name} is {tuple(outputs.shape)} of {outputs.dtype}, expected {tuple(rows.shape)} of"
            " floats, a row for each"
        )
    if outputs.dtype != rows.dtype and not is_autocast(rows.device.type):
        raise InvalidArgument(f"{name} is {outputs.dtype}, expected {rows.dtype}, or autocast")
    return outputs


_tied = outside_graphs(tied_to_parameters)


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
        runs during the dispatch, on a stream of its own
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
        sums of the one before go back, on GPUs on a stream of their own. Windows are smaller by
        this factor; ``fixed_rows`` are those of a chunk
    :param preset: "training" or "decoding", None: "training": defaults of ``layer_options``, which
        are arguments of ``EPAll2AllLayer``
    :param operations: whether calls are operations of torch.library, which needs ``fixed_rows`` and
        no chunks; None: if torch compiles and they can be. Selective checkpoints need True
    :param layer: an ``EPAll2AllLayer`` to use instead, with its world, dtypes and options
    :param spare_experts: slots per rank for copies of other ranks' hot experts, planned in each
        forward. Weights come from the experts' homes; gradients are added there in float32, home's
        first, then those of copies by rank. Parameters of experts are [experts of this rank, ...],
        or experts has the methods ``expert_tensors(expert)``, the tensors of a home expert, and
        ``use_tensors(slot, tensors)``, by which it computes a slot
    :param limit, min_rows: as in ``even_experts``: a copy takes at least so many rows; "pays": of
        ``break_even_rows``, for these experts and nodes
    :param keep_copies: False: all modules of a world have one pool for copies, and backward fetches
        weights again; True: each module keeps its own, and fetches those that are not there. They
        are void when weights change: see ``forget_copies``
    """

    _why_not_copied = (
        "one rank's buffers: make one on each rank, and load its state_dict, which can be"
    )

    @known_keywords(*_LAYER_OPTIONS)
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
        spare_experts: int = 0,
        limit: float = 1.02,
        min_rows: Union[int, str] = 128,
        keep_copies: bool = False,
        device: Any = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        who = "ExpertParallel"
        if layer is not None:
            instance(layer, EPAll2AllLayer, f"{who}: layer", "an EPAll2AllLayer")
        world = world_of(group, None, device, who) if layer is None else layer.world
        options: Dict[str, Any] = {}
        most = 0
        of_copies = (spare_experts, limit, min_rows, keep_copies, layer, experts, world)

        def check() -> Dict[str, Any]:
            nonlocal num_experts, topk, hidden, max_tokens, most, chunks, operations, dtype
            options.update(checked_copies(*of_copies))
            check_choices(experts, shared, gradients=gradients, weights=weights, windows=windows)
            num_experts = int64(num_experts, f"{who}: num_experts")
            topk, hidden = int64(topk, f"{who}: topk"), int64(hidden, f"{who}: hidden")
            operations = None if operations is None else flag(operations, f"{who}: operations")
            chunks = at_least(chunks, 1, f"{who}: chunks")
            most = max_tokens = int64(max_tokens, f"{who}: max_tokens")
            max_tokens = -(-most // chunks) if most > 0 else most
            sizes = {"max_tokens": max_tokens, "num_experts": num_experts, "topk": topk}
            if layer is None:
                dtype, of_weights = check_options(
                    world, num_experts, topk, hidden, max_tokens, dtype, weight_dtype, layer_options
                )
                options.update(dropped_id=-1, **preset_options(preset, world, **sizes))
                options.update(layer_options, weight_dtype=of_weights)
                fixed_rows = options.get("fixed_rows")
            else:
                its = {"group": group, "device": device, "dtype": dtype, **layer_options}
                its.update(weight_dtype=weight_dtype, preset=preset)
                check_layer(layer, num_experts, topk, hidden, max_tokens, its)
                fixed_rows = layer.fixed_rows
            check_experts(experts, num_experts, world, spare_experts != 0, operations)
            if operations:
                check_operations(fixed_rows, chunks, windows, layer_options)
            return {
                "layer": "made" if layer is None else "given", "chunks": chunks, **sizes,
                "max_tokens": most, "hidden": hidden, "gradients": gradients, "weights": weights,
                "keep_copies": keep_copies, "windows": windows,
                "preset": (preset or PRESETS[0]) if layer is None else "",
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
        self._copies = copies_for(experts, box.layer, keep_copies)
        self._box, self._released = box, False
        self._number = torch.tensor([ops.register(self)]) if self._copies else None
        self.experts, self.shared = experts, shared
        self.gradients, self.weights, self.windows = gradients, weights, windows
        self.operations = operations
        self._side, self._moving = Lane(), Lane()

    @property
    def layer(self) -> EPAll2AllLayer:
        """The layer that moves the tokens."""
        return self._box.layer

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
        added = None if self.shared is None else self._side.run(self.shared, x)
        if added is not None:
            check_outputs(added[0], x, f"{_WHO}: what shared gave on rank {self.layer.rank}")
        # Everything between here and home has the gradients of the mean.
        ranks = self.layer.world_size if self.gradients == "mean" else 1
        x = scaled_gradient(x, ranks)
        weights = scaled_gradient(weights.to(self.layer.weight_dtype), ranks)
        sums = scaled_gradient(self._all_chunks(x, weights, chosen), 1 / ranks)
        if added is not None:
            sums = sums + self._side.join(added)
        return sums if tokens.ndim == 2 else sums.reshape(tokens.shape)

    def uses_operations(self) -> bool:
        """Whether a call now would be made of operations of torch.library."""
        if self.operations is not None:
            return self.operations
        one = self.layer.fixed_rows is not None and self.chunks == 1
        if len(self._copies) > 0 and not isinstance(self.experts, torch.nn.Module):
            one = False
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
            if self._box.make is None:
                raise InvalidArgument(
                    f"{who}: the layer was given, expected one that the module made"
                )
            number = at_least(fixed_rows, 1, f"{who}: fixed_rows")
            return {"fixed_rows": number}

        agree_on(self.layer.world, who, check)
        self._box.resize(number)

    def finalize(self) -> None:
        """Collective: gives the layer's symmetric memory back, if no other module shares it; that
        of a given ``layer`` in any case. Twice does nothing. When an error of this rank is in
        flight, nobody is waited for, and the memory goes with the world.
        """
        if not self._released:
            self._released = True
            for copies in self._copies:
                copies.release()
            self._box.release()

    def forget_copies(self) -> None:
        """With ``keep_copies``: weights of this rank's experts have changed in a way that torch's
        version counters do not show, such as through ``data`` or by a step in a CUDA graph. Other
        steps of optimizers, load_state_dict and edits in place are noticed. Not collective.
        """
        for copies in self._copies:
            copies.forget()

    def memory(self) -> Dict[str, int]:
        """Bytes on this rank: ``windows``, the symmetric memory of the layer; ``copies``, the store
        of copies, which modules share unless they keep theirs; ``copy_gradients``, which a backward
        takes for a time, on GPUs a part of the store; ``copies_if_kept``, the store with
        ``keep_copies``, of each module.
        """
        made = {"copies": 0, "copy_gradients": 0, "copies_if_kept": 0}
        for copies in self._copies:
            made = copies.memory()
        return {"windows": self.layer.memory_bytes, **made}

    def extra_repr(self) -> str:
        """For print(model)."""
        parts = [f"{name}={getattr(self, name)!r}" for name in ("gradients", "weights", "windows")]
        parts += [f"chunks={self.chunks}"] if self.chunks > 1 else []
        parts += ["keep_copies=True"] if self._copies and self._copies[0].keep else []
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
            if number + 1 < self.chunks:  # after these experts: the stream waits for them
                arrived = lane.run(self._dispatch, *parts[number + 1])
            sums.append(lane.run(self._combine, outputs, layout))
        return torch.cat([lane.join(one) for one in sums])

    def _by_operations(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        number, inside = self._box.number, self.weights == "experts"
        recorded = torch.is_grad_enabled()
        x = as_autocast(x, self.layer.dtype, self.layer.device)
        needs = [recorded and one.requires_grad for one in (x, weights)]
        rows, row_weights, ends, ticket, token = ops.dispatch(
            number, x, chosen, weights, *needs, self._number
        )
        if self._copies:
            of_rows = row_weights if inside else None
            outputs = compute_recorded(self, ticket, rows, ends, of_rows, [recorded, *needs])
        else:
            outputs = self._outputs(rows, ends, row_weights, tied_to_parameters)
        will = any(needs) or (recorded and outputs.requires_grad)
        return ops.combine(
            number, ticket, token, outputs, None if inside else row_weights, x.shape[0], will
        )

    def _parts(self, value: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """One for each chunk, the last ones perhaps without tokens."""
        size = -(-self.max_tokens // self.chunks)
        return tuple(value[n * size : (n + 1) * size] for n in range(self.chunks))

    @outside_graphs
    def _dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """Rows are copied if they must live longer than the window is theirs."""
        kept = torch.is_grad_enabled() and (self.windows == "shared" or self.chunks > 1)
        with said_by("ExpertParallel: forward"):
            layer, present = self.layer, None
            for copies in self._copies:
                present = copies.before_dispatch(self.experts, layer, self.training)
            copy_out = layer.copy_out and kept
            return layer.dispatch(x, ids, weights, present=present, copy_out=copy_out)

    def _computed(self, rows: torch.Tensor, row_weights: torch.Tensor, layout: Any) -> Any:
        ends = ends_within(layout.recv_expert_offsets, self.layer.fixed_rows)
        return self._outputs(rows, ends, row_weights, _tied, layout), layout

    def _outputs(
        self, rows: torch.Tensor, ends: torch.Tensor, row_weights: torch.Tensor, tied: Any,
        layout: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """The outputs that the experts make of rows."""
        weights = [row_weights] if self.weights == "experts" else []
        name = f"{_WHO}: what the experts of rank {self.layer.rank} gave"
        if self._copies:
            outputs = self._with_copies(layout, rows, ends, weights)
        else:
            outputs = self.experts(rows, ends, *weights)
        check_outputs(outputs, rows, name)
        refuse_tangent(outputs, name)
        return tied(outputs.to(rows.dtype), self.experts, rows, row_weights)

    @outside_graphs
    def _with_copies(
        self, layout: Any, rows: torch.Tensor, ends: torch.Tensor, weights: List[torch.Tensor]
    ) -> torch.Tensor:
        """Home experts work on their rows, copies on theirs."""
        copies = self._copies[0]
        with said_by("ExpertParallel: forward"):
            return copies.run(copies.begin(self.layer, layout), rows, ends, weights)

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

    if not shares:
        return LayerBox(make)
    # A box stays until its users have released it, not until they are collected, which may be at
    # other times on other ranks.
    boxes = world._expert_layers
    key = repr((*sizes, dtype, sorted(options.items())))
    if key not in boxes:
        world = world._for_its_layers()
        boxes[key] = LayerBox(make, forget=lambda: world._expert_layers.pop(key, None))
    box: LayerBox = boxes[key]
    return box
