"""Arguments of calls, looked at before any communication."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from ..._arrays import flag, int64
from ...errors import InvalidArgument, Unsupported
from ...world import World

__all__ = [
    "biases_of",
    "check_network",
    "check_stats",
    "check_table",
    "check_timeout",
    "payload_of",
    "weights_shape",
]

_COUNTS = (torch.int32, torch.int64)


def payload_of(
    x: Any, who: str, rank: int, device: torch.device
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Rows, and their scales where they are float8."""
    x, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    place = f"{who}: x of rank {rank}"
    if not isinstance(x, torch.Tensor) or x.ndim != 2:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument(f"{place} is {shape}, expected a tensor [num_tokens, hidden]")
    expected = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    if x.dtype != expected:
        scaled = "without" if scales is None else "with"
        raise InvalidArgument(f"{place} has dtype {x.dtype}, expected {expected} {scaled} scales")
    if x.shape[1] < 1:
        raise InvalidArgument(f"{place} has no columns, expected [num_tokens, hidden]")
    check_memory(x, f"{who}: x", rank, device)
    if scales is not None:
        shape = (x.shape[0], x.shape[1] // 128)
        if x.shape[1] % 128 != 0:
            raise InvalidArgument(f"{place} has {x.shape[1]} columns, expected a multiple of 128")
        if not isinstance(scales, torch.Tensor) or scales.dtype != torch.float32:
            got = getattr(scales, "dtype", type(scales).__name__)
            raise InvalidArgument(f"{place}: scales are {got}, expected torch.float32")
        if tuple(scales.shape) != shape:
            raise InvalidArgument(f"{place}: scales {tuple(scales.shape)}, expected {shape}")
        check_memory(scales, f"{who}: scales", rank, device)
    return x, scales


def check_table(
    value: Any, name: str, shape: Tuple[Any, ...], dtypes: Tuple[torch.dtype, ...], rank: int,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """A tensor of that shape and one of the dtypes, where the buffer is."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(
            f"{name} of rank {rank} is a {type(value).__name__}, expected a tensor {shape}"
        )
    if tuple(value.shape) != shape or value.dtype not in dtypes:
        raise InvalidArgument(
            f"{name} of rank {rank} is {tuple(value.shape)} of {value.dtype}, expected {shape} of"
            f" {' or '.join(map(str, dtypes))}"
        )
    check_memory(value, name, rank, device)
    return value


def check_memory(value: torch.Tensor, name: str, rank: int, device: torch.device) -> None:
    """That it lies where the buffer is, with strides."""
    if value.device != device or value.layout is not torch.strided:
        raise InvalidArgument(
            f"{name} of rank {rank} lies on {value.device} ({value.layout}), expected {device},"
            " with strides"
        )


def weights_shape(weights: Any, rows: int) -> Tuple[Any, ...]:
    """What weights must be, of any number of topk slots."""
    known = isinstance(weights, torch.Tensor) and weights.ndim == 2 and weights.shape[1] > 0
    return rows, weights.shape[1] if known else "num_topk"


def check_network(who: str, num_qps: Any, nvlink: Any, mnnvl: Any, fabric: Any) -> None:
    """Options of DeepEP's way between GPUs: on one host there are no queue pairs, and NVLink is
    what there is.
    """
    if int64(num_qps, f"{who}: num_qps_per_rank") < 1:
        raise InvalidArgument(f"{who}: num_qps_per_rank = {num_qps}, expected >= 1")
    flag(mnnvl, f"{who}: allow_mnnvl")
    if not flag(nvlink, f"{who}: allow_nvlink_for_low_latency_mode"):
        raise Unsupported(
            f"{who}: allow_nvlink_for_low_latency_mode = False, expected True: ranks of one host"
            " have no other way"
        )
    if flag(fabric, f"{who}: use_fabric"):
        raise Unsupported(f"{who}: use_fabric = True, expected False: memory is of one host")


def check_timeout(value: Any, name: str, world: World) -> None:
    """Waits end at the World's deadline: what allows more time holds, less does not."""
    if value is None:
        return
    seconds = int64(value, name)
    if seconds < 1:
        raise InvalidArgument(f"{name} = {seconds}, expected >= 1")
    if seconds < world.timeout_s:
        raise Unsupported(
            f"{name} = {seconds}, expected at least {world.timeout_s:g}, the deadline of the World:"
            " give a World that was made with this timeout_s"
        )


def biases_of(bias: Any, who: str, rank: int) -> List[Any]:
    """None, one or two."""
    if bias is None:
        return []
    biases = list(bias) if isinstance(bias, (list, tuple)) else [bias]
    if len(biases) > 2:
        raise InvalidArgument(
            f"{who}: bias of rank {rank} has {len(biases)} tensors, expected at most two"
        )
    return biases


def check_stats(stats: Any, num_local: int, who: str, rank: int, device: torch.device) -> None:
    """Counts of this rank's experts, to which others are added."""
    if stats is not None:
        name = f"{who}: cumulative_local_expert_recv_stats"
        check_table(stats, name, (num_local,), _COUNTS, rank, device)
