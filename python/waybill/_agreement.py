"""What all ranks must have the same, told to each other when something is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from .errors import Error, InvalidArgument
from .world import World

__all__ = ["agree"]


def agree(world: World, who: str, facts: Mapping[str, Any], wrong: Optional[Error] = None) -> None:
    """Collective, on the host. Raises on all ranks where ranks have other facts, naming a rank and
    the fact, or where one has found something ``wrong``, which it passes: nobody waits for it.
    """
    told = "right" if wrong is None else f"wrong ({str(wrong).removeprefix(f'{who}: ')})"
    says = [("arguments", told), *((name, str(fact)) for name, fact in facts.items())]
    try:
        world._world.require_same(who, says)
    except InvalidArgument:
        if wrong is None:
            raise
    if wrong is not None:
        raise wrong
