"""Streams beside the current one, and scaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict, Tuple

import torch


class Lane:
    """A stream beside the current one on a GPU; in host memory calls run as they come."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._events: Dict[int, Any] = {}  #: behind each call that is not joined, by its result

    def run(self, call: Callable[..., Any], *given: Any) -> Any:
        """Begins behind what the current stream has."""
        if not given[0].is_cuda:
            return call(*given)
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
        self._events[id(first_of(result))] = event
        return result

    def join(self, result: Any) -> Any:
        """The current stream goes on behind the call that gave it."""
        first = first_of(result)
        if first.is_cuda:
            current = torch.cuda.current_stream(first.device)
            current.wait_event(self._events.pop(id(first)))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(current)
        return result


def first_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def scaled_gradient(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The same, with its gradient times factor."""
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
