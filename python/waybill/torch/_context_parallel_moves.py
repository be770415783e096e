"""What travels of one BatchPlan on one rank, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Tuple

import torch

from .._dispatcher import PlanHandle, TensorFormat
from ..sparse import SparseMetadata
from ._context_parallel_tables import formats_of
from .kernels import AttentionShape
from .sequence_dispatcher import SequenceDispatcher

WHO = "ContextParallelAttention"
_BACKWARD = ("grad", "dq", "sums")


def _name(t: int) -> str:
    return f"tensors[{t}]"


class Moves:
    """Calls of the dispatcher. Their tables are made ahead, or when they are first used, on the
    stream that is current then. Collective where the windows must grow.
    """

    def __init__(
        self, routing: Any, dispatcher: SequenceDispatcher, shape: AttentionShape, latent_dim: int
    ) -> None:
        self._routing, self._dispatcher = routing, dispatcher
        self._q, *self._kv, self._out = formats_of(shape)
        if latent_dim:
            self._kv = [TensorFormat(shape.dtype, (latent_dim,))]
        self._lse = TensorFormat(torch.float32, (shape.heads,))
        self._plans: dict[str, PlanHandle] = {}

    def there(
        self, q: torch.Tensor, *kv: torch.Tensor
    ) -> Tuple[Callable[[], Tuple[torch.Tensor, ...]], int]:
        """(what makes views of what came of q, k and v, or of q and the latent rows, the number of
        the dispatch).
        """
        shown = self._send(self._plan("qkv"), (q, *kv))
        return shown, self._dispatcher.last_dispatch

    def out_home(self, out: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        return self._call(self._plan("out"), (out,))

    def out_and_lse_home(self, out: torch.Tensor, lse: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        return self._call(self._plan("out and lse"), (out, lse))

    def grad_there(self, grad: torch.Tensor, number: int) -> Callable[[], Tuple[torch.Tensor, ...]]:
        return self._send(self._plan("grad"), (grad,), number)

    def dq_home(self, dq: torch.Tensor, number: int) -> torch.Tensor:
        return self._call(self._plan("dq"), (dq,), number)[0]

    def sums(self, number: int, *gradients: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Of the copies of own rows of K and V. Those of 16-bit rows are in float32, to be rounded
        once with what stayed.
        """
        dtype = gradients[0].dtype
        dtype = torch.float32 if dtype.itemsize == 2 else dtype
        return self._dispatcher.kv_gradient(
            self._plan("sums"), *gradients, dtype=dtype, of_dispatch=number
        )

    @property
    def is_ready(self) -> bool:
        """Whether the tables of the first dispatch are there."""
        return "qkv" in self._plans

    def prepare(self, upload: AbstractContextManager[None]) -> None:
        """Tables of all calls but those with a log-sum-exp, uploaded as ``upload`` says. Windows
        grow behind the calls of the stream that is current.
        """
        with upload:
            for name in ("qkv", "out", *_BACKWARD):
                self._find(name)
        self._dispatcher.reserve(*self._plans.values())

    def prepare_backward(self) -> None:
        """A backward pass makes no tables, for which windows might have to grow."""
        if all(name in self._plans for name in _BACKWARD):
            return
        self._dispatcher.reserve(*(self._find(name) for name in _BACKWARD))

    def _call(
        self, plan: PlanHandle, tensors: Sequence[torch.Tensor], of_dispatch: int = 0
    ) -> Tuple[torch.Tensor, ...]:
        return self._dispatcher._dispatch(WHO, _name, plan, tensors, of_dispatch)

    def _send(
        self, plan: PlanHandle, tensors: Sequence[torch.Tensor], of_dispatch: int = 0
    ) -> Callable[[], Tuple[torch.Tensor, ...]]:
        """Views are made when they are asked for, behind what else is to be queued."""
        views = self._dispatcher._send(WHO, _name, plan, tensors, of_dispatch)
        return lambda: self._dispatcher._shown(plan, views)

    def _plan(self, name: str) -> PlanHandle:
        ready = self._plans.get(name)
        if ready is None:
            ready = self._find(name)
            self._dispatcher.reserve(ready)
        return ready

    def _find(self, name: str) -> PlanHandle:
        """Made once. (functools.cached_property of Python 3.11 has one lock for all objects, which
        ranks that are threads would wait for each other with.)
        """
        ready = self._plans.get(name)
        if ready is None:
            ready = self._plans[name] = self._make(name)
        return ready

    def _make(self, name: str) -> PlanHandle:
        if name == "dq" and self._q == self._out:
            return self._find("out")
        return self._plan_of(name, self._parts(name))

    def _plan_of(self, name: str, parts: Sequence[Tuple[Any, ...]]) -> PlanHandle:
        if name == "sums":
            return self._dispatcher.plan_kv_gradient(*parts)
        return self._dispatcher.plan_dispatch(*parts)

    def _parts(self, name: str) -> list[Tuple[Any, ...]]:
        return [(self._table(table), *formats) for table, formats in self._formats(name)]

    def _table(self, name: str) -> SparseMetadata:
        return SparseMetadata._wrap(getattr(self._routing, name))

    def _formats(self, name: str) -> list[Tuple[str, list[TensorFormat]]]:
        """Of each part: which table of the routing, and what goes that way."""
        return {
            "qkv": [("fwd_q", [self._q]), ("fwd_kv", self._kv)],
            "out": [("rev_q", [self._out])],
            "out and lse": [("rev_q", [self._out, self._lse])],
            "grad": [("fwd_q", [self._out])],
            "dq": [("rev_q", [self._q])],
            "sums": [("sum_kv", self._kv)],
        }[name]
