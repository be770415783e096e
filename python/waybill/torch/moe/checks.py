"""What is given to ExpertParallel, looked at before any communication, in its caller's words."""

from __future__ import annotations

import inspect
from typing import Any, Dict, Optional, Tuple

import torch

from ..._arrays import choice
from ..._errors import shown
from ...errors import InvalidArgument, WrongType
from ...moe.config import EPConfig
from ...world import World
from .._tensors import require_moved, require_rows, require_tensor
from .grouped import SwiGLUExperts
from .layer import EPAll2AllLayer
from .tensors import holds, is_autocast, require_known_ids, torch_dtype

__all__ = [
    "check_call",
    "check_choices",
    "check_experts",
    "check_layer",
    "check_operations",
    "check_options",
    "check_outputs",
    "check_shared",
    "require_layer",
]

_WHO = "ExpertParallel"
_FIRST_OPTION = "num_sm"  # of the layer's arguments: those before it are the module's


def check_options(
    world: World, num_experts: int, topk: int, hidden: int, max_tokens: int, dtype: Any,
    weight_dtype: Any, options: Dict[str, Any],
) -> Tuple[torch.dtype, torch.dtype]:  # fmt: skip
    """Those that a layer would be made with; returns its dtypes."""
    dtype = torch_dtype(torch.bfloat16 if dtype is None else dtype, f"{_WHO}: dtype")
    weight_dtype = torch_dtype(
        torch.float32 if weight_dtype is None else weight_dtype, f"{_WHO}: weight_dtype"
    )
    EPConfig._of_words(
        _WHO, {"token_dtype": "dtype", "world_size": "ranks"}, max_tokens, hidden, topk,
        num_experts, world.rank, world.world_size, world.topology.ranks_per_node,
        dtype, weight_dtype, torch.int32,
    )  # fmt: skip
    for name, value in (("rows", "grouped"), ("payload", "plain")):
        if options.get(name, value) != value:
            raise InvalidArgument(
                f'{_WHO}: {name} = {shown(options[name])}, expected "{value}": experts get rows of'
                " their own, which are those of the tokens"
            )
    parameters = list(inspect.signature(EPAll2AllLayer).parameters)
    known = parameters[parameters.index(_FIRST_OPTION) :]
    for name in options:
        if name not in known:
            raise WrongType(
                f"{_WHO}: there is no argument {name}, expected one of {', '.join(sorted(known))}"
            )
    return dtype, weight_dtype


def check_operations(fixed_rows: Any, chunks: int, windows: str, options: Dict[str, Any]) -> None:
    """What operations of torch.library need, which give copies of sizes that are known before."""
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


def check_experts(experts: Any, num_experts: int, world: World) -> None:
    """Those of a rank, where they say how many they are."""
    wanted = num_experts // world.world_size
    if isinstance(experts, SwiGLUExperts) and len(experts.gate) != wanted:
        raise InvalidArgument(
            f"{_WHO}: experts has {len(experts.gate)} experts, expected {wanted} on rank"
            f" {world.rank}: num_experts = {num_experts} over {world.world_size} ranks"
        )


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


def require_layer(layer: Any) -> None:
    """One that has a world, on which the others can be told."""
    if not isinstance(layer, EPAll2AllLayer):
        kind = type(layer).__name__
        raise InvalidArgument(f"{_WHO}: layer is a {kind}, expected an EPAll2AllLayer")


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
            return value is layer.world
        from ..._process_group import group_of  # not every torch has torch.distributed

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
        require_moved(require_rows(value, f"{_WHO}: {name}"), f"{_WHO}: {name}")
        *rows, last = value.shape
        if last != columns or not (rows == [count] or rows == list(wanted)):
            raise _wrong(f"{name} has shape {list(value.shape)}", f"{[*wanted, columns]}", rank)
        if value.device != device:
            raise _wrong(f"{name} lies on {value.device}", f"{device}", rank)
    if tokens.dtype != layer.dtype and not (tokens.is_floating_point() and is_autocast(device)):
        raise _wrong(f"tokens is {tokens.dtype}", f"{layer.dtype}, or autocast", rank)
    if not scores.is_floating_point():
        raise _wrong(f"scores is {scores.dtype}", "floats", rank)
    of_weights = layer.weight_dtype
    if not holds(of_weights, scores.dtype) and not is_autocast(device):
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


def check_outputs(outputs: Any, rows: torch.Tensor, rank: int) -> torch.Tensor:
    """What the experts made of rows."""
    name = f"{_WHO}: what the experts of rank {rank} gave"
    require_moved(outputs, name)
    if outputs.shape != rows.shape or not outputs.is_floating_point():
        raise InvalidArgument(
            f"{name} is {tuple(outputs.shape)} of {outputs.dtype}, expected {tuple(rows.shape)} of"
            " floats, a row for each"
        )
    if outputs.dtype != rows.dtype and not is_autocast(rows.device):
        raise InvalidArgument(f"{name} is {outputs.dtype}, expected {rows.dtype}, or autocast")
    return outputs  # type: ignore[no-any-return]


def check_shared(outputs: Any, tokens: torch.Tensor, rank: int) -> None:
    """What the shared experts made of tokens: another shape would be spread over them."""
    name = f"{_WHO}: what shared gave on rank {rank}"
    require_tensor(outputs, name)
    if outputs.shape != tokens.shape:
        raise InvalidArgument(
            f"{name} is {tuple(outputs.shape)}, expected {tuple(tokens.shape)}, a row for each"
        )
    if outputs.dtype != tokens.dtype and not is_autocast(tokens.device):
        raise InvalidArgument(f"{name} is {outputs.dtype}, expected {tokens.dtype}, or autocast")
