"""Autocast as it is around a call, without it, and again where the call is computed later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

_NOTHING = nullcontext()


class Autocast(NamedTuple):
    """What it does to operations on a kind of device."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> Autocast:
        if hasattr(torch, "get_autocast_dtype"):
            return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        old: Any = torch  # before torch 2.4
        if kind == "cuda":
            return cls(kind, old.is_autocast_enabled(), old.get_autocast_gpu_dtype())
        return cls(kind, old.is_autocast_cpu_enabled(), old.get_autocast_cpu_dtype())

    def again(self) -> AbstractContextManager[Any]:
        """Under it. It keeps no weights that it has cast: made where autograd does not look, the
        caller would get them too.
        """
        return torch.autocast(
            self.kind, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


def casts_to(kind: str, dtype: torch.dtype) -> bool:
    """Whether autocast is on, to this dtype."""
    found = Autocast.now(kind)
    return found.enabled and found.dtype == dtype


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """For tensors that are of the right dtype by then."""
    known = hasattr(torch, "get_autocast_dtype")  # since torch 2.4
    if known and not torch.is_autocast_enabled(kind):
        return _NOTHING
    return torch.autocast(kind, enabled=False)
