"""Copies of experts on GPUs: plans, and what lies in a store, only the device knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Dict, List, Optional, Tuple

import torch

from ... import _core
from ..._graphs import outside_graphs
from .._tensors import shown_memory, stream_of
from .copies import _ROWS, Copies, Exchange, Tensors, _padded, _wide


def copies_for(experts: Any, layer: Any, keep_copies: bool) -> Tuple[Copies, ...]:
    """One for a layer that has spare experts. Collective."""
    if not layer.spare_experts:
        return ()
    kind = Copies if layer.world.device == "cpu" else DeviceCopies
    return (kind(experts, layer, keep_copies),)


class DeviceStore:
    """Symmetric memory for copies and their gradients. Collective.

    :param sizes: bytes of weights and of gradients
    """

    def __init__(self, world: Any, sizes: Tuple[int, int], spare: int) -> None:
        self.sizes, self.spare = sizes, spare
        self.compiled = _core.CopyStore(world._world, sum(sizes), spare)
        # Tensors of their own: autograd counts the changes of weights, not of gradients.
        self.weights, self.gradients = (
            shown_memory(self.compiled.bytes(first, count), torch.uint8)
            for first, count in ((0, sizes[0]), (sizes[0], sizes[1]))
        )


class DeviceExchange(Exchange):
    """As ``Exchange``: the pool brings its own way of weights and gradients."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.device_pool: Optional[DeviceStore] = None
        self.users, self.num_modules, self.num_calls = 0, 0, 0

    def device_pool_of(self, sizes: Tuple[int, int], spare: int) -> DeviceStore:
        """The pool, with room for so many bytes. Collective where it has to grow. Calls in flight
        keep the one that they had.
        """
        pool = self.device_pool
        if pool is None or spare > pool.spare or any(a > b for a, b in zip(sizes, pool.sizes)):
            before = (0, 0) if pool is None else pool.sizes
            more = spare if pool is None else max(spare, pool.spare)
            larger = (max(sizes[0], before[0]), max(sizes[1], before[1]))
            pool = self.device_pool = DeviceStore(self.world, larger, more)
        return pool

    def release(self, world: Any) -> None:
        self.users -= 1
        if self.users == 0:
            world._expert_layers.pop("copies", None)
            if self.device_pool is not None:
                self.device_pool.compiled.finalize()


class DeviceCall:
    """The copies of one forward, as tables on the device."""

    has_copies = True  #: as far as the host knows

    def __init__(self, layout: Any, stamp: int, store: DeviceStore, fresh: bool) -> None:
        self.slots, self.quotas = layout.all_slot_experts, layout.all_slot_quotas
        self.stamp, self.store = stamp, store
        self.fresh = fresh  #: the next fetch brings all copies


class DeviceCopies(Copies):
    """As ``Copies``, with nothing that waits for the device."""

    def __init__(self, experts: Any, layer: Any, keep: bool) -> None:
        super().__init__(experts, layer, keep)
        if hasattr(self._experts, "host_waits"):
            self._experts.host_waits = layer.fixed_rows is None

    def _share(self) -> DeviceExchange:
        return DeviceExchange.of(self.world)  # type: ignore[return-value]

    def _sizes(self) -> Tuple[int, int]:
        wide = (self._spare * math.prod(s) * _wide(d).itemsize for s, d in self._parts)
        return self.size, sum(_padded(size) for size in wide)

    def _make_store(self) -> DeviceStore:
        return DeviceStore(self.world, self._sizes(), self._spare)

    def _pool(self) -> Any:
        if self._own is not None:
            return self._own
        return self._exchange.device_pool_of(self._sizes(), self._spare)

    def memory(self) -> Dict[str, int]:
        copies, gradients = self._pool().sizes
        return {"copies": copies, "copy_gradients": gradients, "copies_if_kept": self.size}

    def release(self) -> None:
        if self._own is not None:
            self._own.compiled.finalize()
        super().release()

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
        return DeviceCall(layout, stamp, self._pool(), not own)

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
        which = [part for part in range(self.num_parts) if needs[part]]
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
            [parts[part].data_ptr() for part in which], (self.number, call.stamp, fresh),
            stream_of(call.slots.device),
        )  # fmt: skip


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
