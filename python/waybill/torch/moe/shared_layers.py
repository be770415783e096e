"""One EPAll2AllLayer for all modules of a model that have the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict, Optional, Tuple

from ...errors import InvalidArgument
from .layer import EPAll2AllLayer
from .operations import register_layer

__all__ = ["LayerBox", "shared_box"]

Make = Callable[..., EPAll2AllLayer]


class LayerBox:
    """A layer that modules share: when it is made anew, larger, all of them have the new one."""

    def __init__(self, make: Optional[Make], layer: Optional[EPAll2AllLayer] = None) -> None:
        self._make = make
        self.layer = layer if make is None else make()
        self.users = 0
        self.number = register_layer(self)
        self._boxes: Optional[Dict[Any, LayerBox]] = None
        self._key: Any = None

    def check_resize(self, fixed_rows: int) -> None:
        """Whether it can be made anew with so many rows."""
        if self._make is None:
            raise InvalidArgument(
                "ExpertParallel.resize: the layer was given, expected one that the module made"
            )
        if fixed_rows < 1:
            raise InvalidArgument(
                f"ExpertParallel.resize: fixed_rows = {fixed_rows}, expected >= 1"
            )

    def resize(self, fixed_rows: int) -> None:
        """Collective: another layer in its place. Nothing of the old one is in flight."""
        assert self.layer is not None and self._make is not None
        self.layer.finalize()
        self.layer._replaced = True
        self.layer = self._make(fixed_rows=fixed_rows)

    def release(self) -> None:
        """Collective when the last of its users says so."""
        self.users -= 1
        if self.users > 0:
            return
        if self._boxes is not None:
            self._boxes.pop(self._key, None)
        assert self.layer is not None
        self.layer.finalize()


def shared_box(world: Any, key: Tuple[Any, ...], make: Make) -> LayerBox:
    """The box of this world for these sizes. It stays until its users have released it, not until
    they are collected, which may be at other times on other ranks.
    """
    boxes: Dict[Any, LayerBox] = world._expert_layers  # they go with it
    name = repr(key)
    box = boxes.get(name)
    if box is None:
        box = boxes[name] = LayerBox(make)
        box._boxes, box._key = boxes, name
    return box
