"""One world for all layers of a process group."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any, Optional

import torch

from ..._group_places import device_of, nodes_of_group
from ..._process_group import group_of
from ...errors import InvalidArgument
from ...world import World

__all__ = ["shared_world"]

_TIMEOUT_S = 60.0


class _SharedWorlds:
    """The worlds of one group, by kind of device and ranks of a node."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.node_size: Optional[int] = None  #: of hosts
        self.worlds: dict[tuple[bool, int], World] = {}


# A group that is destroyed takes its worlds along; they do not keep it.
_shared: weakref.WeakKeyDictionary[Any, _SharedWorlds] = weakref.WeakKeyDictionary()
atexit.register(_shared.clear)


def shared_world(
    group: Any, device: Any, ranks_per_node: Optional[int], who: str, name: str = "group"
) -> World:
    """The world that all layers of the group share; the first one makes it, which is collective."""
    group = group_of(group, who, name)
    named = device_of(group, device)
    shared = _shared.setdefault(group, _SharedWorlds())
    with shared.lock:
        if ranks_per_node is None:
            if shared.node_size is None:
                shared.node_size = nodes_of_group(group, _TIMEOUT_S, who)
            ranks_per_node = shared.node_size
        key = (named != "cpu", ranks_per_node)
        world = shared.worlds.get(key)
        if world is None:
            world = World.from_process_group(
                group, device=device, ranks_per_node=ranks_per_node, timeout_s=_TIMEOUT_S
            )
            shared.worlds[key] = world
    if named == "cuda":
        named = f"cuda:{torch.cuda.current_device()}"
    if named != world.device:
        raise InvalidArgument(
            f"{who}: device is {named}, expected {world.device}, where the first layer of the group"
            " is: make a World.from_process_group for another one"
        )
    return world
