"""Copies of experts on GPUs: plans, and what lies in a store, only the device knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Dict, List, Tuple

import torch

from ..._graphs import outside_graphs
from .._tensors import stream_of
from .copies import _ROWS, Call, Copies, Tensors, _padded, _wide


def copies_for(experts: Any, layer: Any, keep_copies: bool) -> Tuple[Copies, ...]:
    """One for a layer that has spare experts. Collective."""
    if not layer.spare_experts:
        return ()
    kind = Copies if layer.world.device == "cpu" else DeviceCopies
    return (kind(experts, layer, keep_copies),)


class DeviceCopies(Copies):
    """As ``Copies``, with nothing that waits for the device."""

    on_host = False

    def __init__(self, experts: Any, layer: Any, keep: bool) -> None:
        super().__init__(experts, layer, keep)
        if hasattr(self._experts, "host_waits"):
            self._experts.host_waits = layer.fixed_rows is None

    def _sizes(self) -> Tuple[int, int]:
        wide = (self._spare * math.prod(s) * _wide(d).itemsize for s, d in self._parts)
        return self.size, sum(_padded(size) for size in wide)

    def memory(self) -> Dict[str, int]:
        copies, gradients = self._pool().sizes
        return {
            "copies": copies, "copy_gradients": gradients, "copies_if_kept": sum(self._sizes())
        }  # fmt: skip

    def before_dispatch(self, experts: Any, layer: Any, training: bool) -> Any:
        """The last layout, where copies are kept and not trained: ranks do not ask each other
        whether weights have changed, and a checkpoint makes the same plan again.
        """
        self._take(experts)
        last = None if training or not self.keep else self._last
        return last[1] if last is not None and last[0] is layer else None

    def begin(self, layer: Any, layout: Any) -> Any:
        self._exchange.num_calls += 1
        if self.keep:
            self._remember(layer, layout)
        # Replays have other weights than the capture: their copies come in each.
        own = self.keep and not _captures(layer.device)
        stamp = self._own_version() if own else -self._exchange.num_calls
        slots, quotas = layout.all_slot_experts, layout.all_slot_quotas
        return Call(slots, stamp, self._pool(), quotas=quotas, fresh=not own)

    @outside_graphs
    def fetch(self, call: Any) -> None:
        """Brings the weights of a call's copies; again, those that do not lie there any more."""
        fresh, call.fresh = call.fresh, False
        home = [one.detach() for one in self._experts.home()]
        every = range(len(self._parts))
        self._queue("fetch_weights", call, home, self.parts_of(call.store), every, fresh)

    def add(
        self, call: Any, home: List[Any], copies: List[Any], needs: Sequence[bool]
    ) -> List[Any]:
        tensors = self._experts.home()
        which = [part for part in range(len(self._parts)) if needs[part]]
        if not which:
            return home
        mine = [
            torch.zeros_like(one) if given is None else given.clone(memory_format=_ROWS)
            for one, given in zip(tensors, home)
        ]
        parts = self._views(call.store.gradients, [_wide(dtype) for _, dtype in self._parts])
        for place, given in zip(self._experts.split(parts), copies):
            place.zero_() if given is None else place.copy_(given)
        self._queue("add_gradients", call, mine, parts, which, True)
        return mine

    def _queue(
        self, name: str, call: Any, home: Tensors, parts: Tensors, which: Sequence[int], fresh: bool
    ) -> None:
        """:param which: parts of an expert that move"""
        of_all = [self._experts.of_expert(home, at) for at in range(self._first_spare)]
        moved = [of_one[part].contiguous() for of_one in of_all for part in which]
        getattr(call.store.compiled, name)(
            (call.slots.data_ptr(), call.quotas.data_ptr()), (self.num_experts, self._spare),
            self._sizes_of(which), [one.data_ptr() for one in moved],
            [parts[part].data_ptr() for part in which], (self.number, call.stamps, fresh),
            stream_of(call.slots.device),
        )  # fmt: skip


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
