"""What all ranks must have the same, told to each other when something is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional, Protocol, TypeVar

from .errors import InvalidArgument

__all__ = ["agree", "agree_on", "agreed_world"]


class Ranks(Protocol):
    """A World, which uses this file itself."""

    _world: Any


World = TypeVar("World", bound=Ranks)


def agree(
    world: Ranks, who: str, facts: Mapping[str, Any], wrong: Optional[Exception] = None
) -> None:
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


def agree_on(world: Ranks, who: str, check: Callable[[], Mapping[str, Any]]) -> None:
    """The same of what ``check`` returns, or of what it raises."""
    agreed_world(lambda: world, who, check)


def agreed_world(
    make: Callable[[], World], who: str, check: Callable[[], Mapping[str, Any]]
) -> World:
    """A world whose ranks agree. Wrong arguments come before why there is no world."""
    facts: Mapping[str, Any] = {}
    wrong: Optional[Exception] = None
    try:
        facts = check()
    except Exception as error:
        wrong = error
    try:
        world = make()
    except Exception:
        if wrong is not None:
            raise wrong from None
        raise
    agree(world, who, facts, wrong)
    return world
