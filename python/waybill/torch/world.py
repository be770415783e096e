"""Ranks as threads, for torch: the rank's GPU is the current device of its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, TypeVar

import torch

from .. import world
from .._errors import shown
from .._graphs import outside_graphs
from ..errors import InvalidArgument
from ..world import World

__all__ = ["run_threads"]

_T = TypeVar("_T")


@outside_graphs
def run_threads(
    world_size: int,
    body: Callable[[World], _T],
    *,
    device: str = "cpu",
    ranks_per_node: Optional[int] = None,
    timeout_s: float = 60.0,
) -> list[_T]:
    """Runs ``body(world)`` on one thread a rank and returns what each returned, by rank.

    As ``waybill.run_threads``; with device="cuda" each thread's current device is its rank's GPU,
    and where ranks share GPUs each thread's current stream is one of its own: in one queue a rank's
    work would wait for that of another, which waits for it.

    Thread ranks share torch's global generator: what they draw depends on who comes first, unless
    each has a ``torch.Generator``. Each has its own grad mode, and begins with gradients enabled.
    """
    if not callable(body):
        raise InvalidArgument(f"run_threads: body = {shown(body)}, expected a function")

    def on_device(rank: World) -> _T:
        if rank.device == "cpu":
            return body(rank)
        torch.cuda.set_device(rank.device)
        if rank.world_size <= world.num_gpus():  # each has one of its own
            return body(rank)
        own: Any = torch.cuda.Stream
        with torch.cuda.stream(own(rank.device)):
            return body(rank)

    return world.run_threads(
        world_size, on_device, device=device, ranks_per_node=ranks_per_node, timeout_s=timeout_s
    )
