"""Operations of torch.library, where torch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _NoOperation:
    """Before torch 2.4, which cannot make one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def register_fake(self, function: Any) -> Any:
        return function

    def register_autograd(self, backward: Any, setup_context: Any) -> None:
        pass


def has_operations() -> bool:
    return hasattr(torch.library, "custom_op")


def operation(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: waybill::name, which changes none of its arguments."""
    if not has_operations():
        return _NoOperation
    return torch.library.custom_op(f"waybill::{name}", mutates_args=(), schema=schema)
