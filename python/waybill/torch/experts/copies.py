"""Copies of experts that a rank computes with: weights from home, gradients home again."""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Set, Tuple

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import _core
from ..._arrays import flag
from ..._errors import shown
from ..._graphs import outside_graphs
from ...costs import LinkSpeeds
from ...errors import InvalidArgument, Unsupported
from ...moe.config import EPConfig
from ...moe.even_experts import refuse_without_copies, spare_options
from ...moe.predict import break_even_rows
from ...world import World
from .._tensors import first_order, read_mark, save_mark, shown_memory

_WHO = "ExpertParallel: spare_experts"
_LIMIT, _MIN_ROWS = 1.02, 128  #: unless they are given
_ALIGNMENT = 64  #: bytes between the beginnings of tensors in a store
_SUMMED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Tensors = Sequence[torch.Tensor]


class StackedExperts:
    """Experts of a module whose parameters each hold all experts, [experts, ...]. It runs twice:
    for home experts, and with the weights of copies in place of its parameters.
    """

    def __init__(self, experts: torch.nn.Module, num_experts: int) -> None:
        self.module, self.num_experts = experts, num_experts
        self._names = [name for name, _ in experts.named_parameters()]
        self.host_waits = True  #: for the number of rows of home experts, where it is on a device
        for name, value in zip(self._names, self.home()):
            if value.ndim == 0 or value.shape[0] != num_experts:
                raise InvalidArgument(
                    f"{_WHO}: parameter {name} of experts has shape {list(value.shape)}, expected"
                    f" [{num_experts}, ...], all experts of this rank; or experts with the methods"
                    " expert_tensors and use_tensors"
                )
        for name, value in experts.named_buffers():
            if value.ndim > 0 and value.shape[0] == num_experts:
                raise InvalidArgument(
                    f"{_WHO}: buffer {name} of experts has shape {list(value.shape)}, expected no"
                    f" buffer of [{num_experts}, ...]: copies come without it, and would compute"
                    " with that of home experts; or experts with the methods expert_tensors and"
                    " use_tensors"
                )

    def home(self) -> List[torch.Tensor]:
        """Differentiable tensors, whose gradients are those of home experts."""
        return [local_part(value) for _, value in self.module.named_parameters()]

    def of_expert(self, tensors: Tensors, expert: int) -> List[torch.Tensor]:
        """Those of one expert, from ``home()`` or ``split()``, which are detached."""
        return [one[expert] for one in tensors]

    def split(self, parts: List[torch.Tensor]) -> List[torch.Tensor]:
        """The tensors of copies as ``run`` takes them, from [spare slots, ...] of each part."""
        return parts

    def run(
        self, home: Tensors, copies: Tensors, rows: torch.Tensor, ends: torch.Tensor,
        weights: Tensors,
    ) -> torch.Tensor:  # fmt: skip
        """Computes the experts' outputs. Rows of home experts come first.

        :param copies: none where no rank has any
        """
        of_home, of_copies = ends[: self.num_experts], ends[self.num_experts :]
        if copies and not self.host_waits:
            return self._apart(home, copies, rows, of_home, of_copies, weights)
        split, end = _on_host(of_home[-1], ends[-1]) if copies else (0, 0)
        if split == end:
            return self._made(home, of_home, rows, *weights)
        before, after = ([one[part] for one in (rows, *weights)] for part in _halves(split))
        first = self._made(home, of_home, *before)
        return torch.cat([first, self._made(copies, of_copies - split, *after)])

    def _made(
        self, tensors: Tensors, ends: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes the module's outputs with these parameters."""
        replaced, given = dict(zip(self._names, tensors)), (rows, ends, *weights)
        return torch.func.functional_call(self.module, replaced, given)

    def _apart(
        self, home: Tensors, copies: Tensors, rows: torch.Tensor, of_home: torch.Tensor,
        of_copies: torch.Tensor, weights: Tensors,
    ) -> torch.Tensor:  # fmt: skip
        """The same where only the device knows how many rows home experts have: copies get all rows
        turned round, so that theirs are the first. Rows of others are zeros, as their gradients,
        which may be anything, would be added.
        """
        split, count = of_home[-1], rows.shape[0]
        place = torch.arange(count, device=rows.device)
        of_home_rows = place < split
        there, back = (place + split) % count, (place - split) % count
        of_copy_rows = place < of_copies[-1] - split
        given = (rows, *weights)
        first = [_only(of_home_rows, one) for one in given]
        second = [_only(of_copy_rows, one.index_select(0, there)) for one in given]
        made = self._made(home, of_home, *first)
        turned = self._made(copies, of_copies - split, *second).index_select(0, back)
        return torch.where(of_home_rows[:, None], made, turned)


def local_part(value: Any) -> torch.Tensor:
    """Returns this rank's part of a DTensor, and any other tensor as it is."""
    # The compiler knows no attributes of the value, but those of its type.
    return value.to_local() if hasattr(type(value), "to_local") else value


def _on_host(*numbers: torch.Tensor) -> List[int]:
    """Waits for numbers of a device. A copy to pageable memory would hold up the driver for a rank
    on the same GPU.
    """
    found = torch.stack(numbers).to("cpu", non_blocking=True)  # into pinned memory
    if numbers[0].is_cuda:
        torch.cuda.current_stream(numbers[0].device).synchronize()
    values: List[int] = found.tolist()
    return values


def _halves(split: int) -> Tuple[slice, slice]:
    return slice(0, split), slice(split, None)


def _only(wanted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Zeros in place of the other rows."""
    return torch.where(wanted if rows.ndim == 1 else wanted[:, None], rows, rows.new_zeros(()))


class GivenExperts:
    """Experts with an interface of two functions: ``expert_tensors(expert)`` returns the tensors of
    a home expert, and ``use_tensors(slot, tensors)`` says which ones a slot computes with until the
    next call; None: none. The module is then called with the ends of all slots.
    """

    def __init__(self, experts: Any, num_experts: int) -> None:
        self.module, self.num_experts = experts, num_experts

    def home(self) -> List[torch.Tensor]:
        """As ``StackedExperts.home``: expert after expert."""
        return [
            one for e in range(self.num_experts) for one in self.module.expert_tensors(e)
        ]  # fmt: skip

    def of_expert(self, tensors: Tensors, expert: int) -> List[torch.Tensor]:
        """As ``StackedExperts.of_expert``."""
        count = len(self.module.expert_tensors(0))
        return list(tensors[expert * count : (expert + 1) * count])

    def split(self, parts: List[torch.Tensor]) -> List[torch.Tensor]:
        """As ``StackedExperts.split``: slot after slot."""
        return [one[slot] for slot in range(len(parts[0])) for one in parts]

    def run(
        self, home: Tensors, copies: Tensors, rows: torch.Tensor, ends: torch.Tensor,
        weights: Tensors,
    ) -> torch.Tensor:  # fmt: skip
        """As ``StackedExperts.run``."""
        tensors, num_slots = [*home, *copies], ends.shape[0]
        for slot in range(num_slots):
            self.module.use_tensors(slot, self.of_expert(tensors, slot) or None)
        outputs: torch.Tensor = self.module(rows, ends, *weights)
        for slot in range(num_slots):  # they hold the graph
            self.module.use_tensors(slot, None)
        return outputs


def adapted(experts: Any, num_experts: int) -> Any:
    """The experts as tensors that are sent, and a function of tensors."""
    modules = experts.modules() if isinstance(experts, torch.nn.Module) else [experts]
    kinds = {one.__name__ for module in modules for one in type(module).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise Unsupported(f"{_WHO}: experts is sharded by FSDP, expected whole parameters")
    if "DistributedDataParallel" in kinds:
        raise Unsupported(
            f"{_WHO}: experts is wrapped by DDP, whose averages miss the gradients of copies,"
            " expected the module itself"
        )
    if all(callable(getattr(experts, n, None)) for n in ("expert_tensors", "use_tensors")):
        return GivenExperts(experts, num_experts)
    if not isinstance(experts, torch.nn.Module):
        raise InvalidArgument(
            f"{_WHO}: experts = {shown(experts)}, expected a module whose parameters are"
            " [experts of this rank, ...], or one with the methods expert_tensors and use_tensors"
        )
    return StackedExperts(experts, num_experts)


def checked_copies(
    spare_experts: Any, limit: Any, min_rows: Any, keep_copies: Any, layer: Any, experts: Any,
    world: World,
) -> Dict[str, Any]:  # fmt: skip
    """Checks the arguments of ExpertParallel for copies; returns the layer's options for them.

    :param layer: one that was given, or None
    """
    keeps = flag(keep_copies, "ExpertParallel: keep_copies")
    pays = isinstance(min_rows, str) and min_rows == "pays"
    rows = _rows_that_pay(experts, keeps, world) if pays else min_rows
    options = spare_options(spare_experts, limit, rows, "ExpertParallel")
    if layer is not None and layer.spare_experts != spare_experts:
        raise InvalidArgument(
            f"{_WHO} = {spare_experts}, expected {layer.spare_experts}, as the layer has"
        )
    refuse_without_copies(
        spare_experts, "ExpertParallel", keep_copies=(keeps, False), limit=(limit, _LIMIT),
        min_rows=(min_rows, _MIN_ROWS),
    )  # fmt: skip
    for name, default in (("limit", _LIMIT), ("min_rows", _MIN_ROWS)):
        if layer is not None and options[name] not in (default, getattr(layer, name)):
            raise InvalidArgument(
                f"ExpertParallel: {name} = {options[name]}, expected {getattr(layer, name)}, that"
                " of the layer"
            )
    return {} if spare_experts == 0 else options


def _rows_that_pay(experts: Any, keep_copies: bool, world: World) -> int:
    """From how many rows on a copy of these experts pays; between nodes over the network."""
    given = getattr(experts, "expert_tensors", None)
    own = getattr(experts, "parameters", list)() if given is None else given(0)
    tensors = [one for one in own if isinstance(one, torch.Tensor)]
    elements = sum(one.numel() for one in tensors)
    weight_bytes = sum(one.numel() * one.itemsize for one in tensors) / max(1, elements)
    nodes = world.topology.ranks_per_node < world.world_size
    links = LinkSpeeds()
    return break_even_rows(
        EPConfig(1, 1, 1, 1, 0, 1, 1, "bfloat16"),  # whose elements have 2 bytes
        weights=(1 if keep_copies else 2) * weight_bytes / 2,
        link_bytes_per_second=(
            links.network_bytes_per_second if nodes else links.nvlink_bytes_per_second
        ),
    )


class Store:
    """Memory for copies. On GPUs it is symmetric, moves rows itself, has room for gradients, too,
    and is collective.

    :param sizes: bytes of weights and of gradients
    """

    def __init__(self, world: Any, sizes: Sequence[int], spare: int, on_host: bool) -> None:
        self.sizes, self.spare = sizes, spare
        self.compiled: Any = None
        if on_host:
            self.weights = torch.empty(sizes[0], dtype=torch.uint8)
            #: [ranks, spare slots, 3]: number of the module, expert, stamp of its weights
            self.held = np.full((world.world_size, spare, 3), -1, np.int64)
            return
        self.compiled = _core.CopyStore(world._world, sum(sizes), spare)
        # Tensors of their own: autograd counts the changes of weights, not of gradients.
        self.weights, self.gradients = (
            shown_memory(self.compiled.bytes(first, count), torch.uint8)
            for first, count in ((0, sizes[0]), (sizes[0], sizes[1]))
        )


class Exchange:
    """All that modules of a world share: a pool for copies, and in host memory what moves rows."""

    def __init__(self, world: Any, on_host: bool) -> None:
        self._world, self._on_host = world._for_its_layers(), on_host
        self.compiled: Any = _core.CopyExchange(world._world) if on_host else None
        self.pool: Optional[Store] = None
        self.users, self.num_modules, self.num_calls = 0, 0, 0

    @classmethod
    def of(cls, world: Any, on_host: bool) -> Exchange:
        """That of a world, collective where it is the first."""
        shared = world._expert_layers
        if "copies" not in shared:
            shared["copies"] = cls(world, on_host)
        made: Exchange = shared["copies"]
        made.users += 1
        made.num_modules += 1
        return made

    def pool_of(self, sizes: Tuple[int, int], spare: int) -> Store:
        """The pool, with room for so many bytes. Calls in flight keep the one that they had."""
        has = (0, 0, 0) if self.pool is None else (*self.pool.sizes, self.pool.spare)
        wanted = tuple(map(max, has, (*sizes, spare)))
        if self.pool is None or wanted != has:
            self.pool = Store(self._world, wanted[:2], wanted[2], self._on_host)
        return self.pool

    def release(self) -> None:
        """Collective when the last module says so."""
        self.users -= 1
        if self.users == 0:
            self._world._expert_layers.pop("copies", None)
            for one in (self, self.pool):
                if one is not None and one.compiled is not None:
                    one.compiled.finalize()


@dataclass(eq=False)
class Call:
    """The copies of one forward."""

    slots: Any  #: [ranks, slots], in host memory without copies that have no rows
    stamps: Any  #: the weights at each home, [ranks]; on a GPU those of this rank
    store: Store
    has_copies: bool = True  #: as far as the host knows
    quotas: Any = None  #: on a GPU: [ranks, slots]
    fresh: bool = False  #: on a GPU: the next fetch brings all copies


_lock, _hooks = threading.Lock(), []  # type: ignore[var-annotated]
_watching: weakref.WeakSet[Copies] = weakref.WeakSet()


def _watch_steps(copies: Copies) -> None:
    """Tells kept copies of steps of optimizers, as long as they live. No version counter shows
    fused ones, nor those that write weights through ``data`` from tensors of their own.
    """
    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_tell))
        _watching.add(copies)


@outside_graphs
def _tell(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _lock:
        watching = list(_watching)
    changed = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for copies in watching:
        copies.after_step(changed, threading.get_ident())


class Copies:
    """Copies of hot experts for one module.

    :param keep: a store of the module's own, whose copies stay while weights do
    """

    on_host = True

    def __init__(self, experts: Any, layer: Any, keep: bool) -> None:
        self._experts = adapted(experts, layer.experts_per_rank)
        self.world, self.keep, self._spare = layer.world, keep, layer.spare_experts
        self._first_spare, self.num_experts = layer.experts_per_rank, layer.num_tot_experts
        self._rank = layer.rank
        self._parts, self._forms = self._checked_parts(), self._forms_now()
        self._made_with = [weakref.ref(one) for one in self._parameters()]
        sizes = (self._spare * math.prod(s) * d.itemsize for s, d in self._parts)
        self.size = sum(_padded(size) for size in sizes)
        self._exchange = Exchange.of(self.world, self.on_host)
        self.number = self._exchange.num_modules
        self._own: Optional[Store] = None
        self._forgotten = 0
        self._made_by = threading.get_ident()
        if keep:
            self._own = Store(self.world, self._sizes(), self._spare, self.on_host)
            _watch_steps(self)
        else:
            self._pool()
        self._seen: Tuple[Any, ...] = ()  #: the tensors and their versions in the last look
        self._version = 0
        self._versions: Optional[List[int]] = None  #: by rank, for ``_present``
        self._present: Any = None
        self._last: Any = None
        self._stamps: Any = None

    def _checked_parts(self) -> List[Tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each tensor of an expert."""
        home = self._experts.home()
        parts: List[Tuple[torch.Size, torch.dtype]] = []
        for expert in range(self._first_spare):
            tensors = self._experts.of_expert(home, expert)
            mine = [(one.shape, one.dtype) for one in tensors]
            parts = parts or mine
            if mine != parts:
                raise InvalidArgument(
                    f"{_WHO}: tensors of expert {expert} are {_said(mine)}, expected"
                    f" {_said(parts)}, as those of expert 0"
                )
        for _, dtype in parts:
            if dtype not in _SUMMED:
                raise InvalidArgument(f"{_WHO}: a tensor of an expert is {dtype}, expected floats")
        return parts

    def _forms_now(self) -> List[Tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of the tensors of all experts, which a conversion changes."""
        return [(one.shape, one.dtype) for one in self._experts.home()]

    def _sizes(self) -> Tuple[int, int]:
        """Bytes that a store has for weights and for gradients."""
        return self.size, 0

    def _pool(self) -> Store:
        return self._own or self._exchange.pool_of(self._sizes(), self._spare)

    def memory(self) -> Dict[str, int]:
        """As ``ExpertParallel.memory`` says."""
        wide = (_wide(dtype).itemsize for _, dtype in self._parts)
        gradients = sum(math.prod(s) * n for (s, _), n in zip(self._parts, wide))
        return {
            "copies": len(self._pool().weights), "copy_gradients": self._spare * gradients,
            "copies_if_kept": self.size,
        }  # fmt: skip

    def forget(self) -> None:
        """Copies of this rank's experts are void, on all ranks."""
        self._forgotten += 1

    def after_step(self, changed: Set[int], thread: int) -> None:
        """An optimizer has taken a step: on the thread of this rank, or of these experts.

        :param changed: the ids of the tensors that the optimizer has
        :param thread: on which the step was
        """
        given = self._parameters() or self._experts.home()  # the latter may be slices
        held = (one if one._base is None else one._base for one in given)
        if thread == self._made_by or any(id(one) in changed for one in held):
            self.forget()

    def release(self) -> None:
        """Collective."""
        if self._own is not None and self._own.compiled is not None:
            self._own.compiled.finalize()
        self._exchange.release()

    def _parameters(self) -> List[torch.Tensor]:
        module = self._experts.module
        return list(module.parameters()) if isinstance(module, torch.nn.Module) else []

    def _take(self, experts: Any) -> None:
        """The experts as they are now: they may be others, of another dtype or sharded by FSDP."""
        before, now = self._experts, adapted(experts, self._first_spare)
        if experts is before.module and self._forms_now() == self._forms:
            return
        self._experts = now
        parts = self._checked_parts()
        if parts != self._parts:
            self._experts = before
            raise InvalidArgument(
                f"{_WHO}: tensors of an expert are {_said(parts)}, expected"
                f" {_said(self._parts)}, as when the module was made: convert experts"
                " before, or make another module"
            )
        self._forms = self._forms_now()
        if isinstance(before, StackedExperts) and isinstance(now, StackedExperts):
            now.host_waits = before.host_waits
        self._made_with = [weakref.ref(one) for one in self._parameters()]
        self.forget()

    def before_dispatch(self, experts: Any, layer: Any, training: bool) -> Any:
        """Collective where copies are kept: the layout whose copies are there, None: none.

        In training it changes with the weights alone, so that a checkpoint that computes a forward
        again makes the same plan.
        """
        self._take(experts)
        if not self.keep:
            return None
        versions = self._exchange.compiled.exchange_versions(self._own_version(), self.number)
        if versions != self._versions or not training:
            self._versions, self._present = versions, self._last
        self._stamps = np.array(versions)
        if self._present is not None and self._present[0] is not layer:  # it was made anew
            self._present = None
        return None if self._present is None else self._present[1]

    def _own_version(self) -> int:
        """A number that grows when weights of this rank change."""
        home, whole = self._experts.home(), self._parameters()
        # Those of FSDP, which wraps a module around this one, are filled anew for each forward, and
        # no counter says so.
        if any(one is not of() for one, of in zip(whole, self._made_with)):
            self.forget()
        # A DTensor is changed in place by way of its own counter, not of that of its part.
        seen = (
            self._forgotten,
            *((one.data_ptr(), one._version) for one in home if not one.is_inference()),
            *(one._version for one in whole if not one.is_inference()),
        )
        if seen != self._seen:
            self._seen = seen
            self._version += 1
        return self._version

    def _remember(self, layer: Any, layout: Any) -> None:
        kept = copy.copy(layout)  # without what holds the graph
        kept._token = kept._weights = None
        self._last = (layer, kept)

    def begin(self, layer: Any, layout: Any) -> Any:
        """The copies that a dispatch has planned."""
        slots = layout.all_slot_experts.numpy().astype(np.int64)
        spare = slots[:, self._first_spare :]
        spare[layout.all_slot_quotas.numpy()[:, self._first_spare :] == 0] = -1
        if self.keep:
            self._remember(layer, layout)
            stamps = self._stamps
        else:
            self._exchange.num_calls += 1
            stamps = np.full(len(slots), self._exchange.num_calls)
        return Call(slots, stamps, self._pool(), bool((spare >= 0).any()))

    def run(
        self, call: Any, rows: torch.Tensor, ends: torch.Tensor, weights: Tensors
    ) -> torch.Tensor:
        """Computes outputs of home experts and copies. Collective where there are copies."""
        home = self._experts.home()
        outputs: torch.Tensor
        if not call.has_copies:
            outputs = self._experts.run(home, [], rows, ends, weights)
            return outputs
        token, *given = _Fetch.apply(self, call, rows[:0], *home)
        outputs = self._experts.run(given[: len(home)], given[len(home) :], rows, ends, weights)
        return _Again.apply(self, call, outputs, token, rows, *weights)

    def parts_of(self, store: Any) -> List[torch.Tensor]:
        """[spare slots, ...] of each part of an expert, in a store."""
        return self._views(store.weights, [dtype for _, dtype in self._parts])

    def _views(self, memory: torch.Tensor, dtypes: Sequence[torch.dtype]) -> List[torch.Tensor]:
        begin, parts = 0, []
        for (shape, _), dtype in zip(self._parts, dtypes):
            size = self._spare * math.prod(shape) * dtype.itemsize
            parts.append(memory[begin : begin + size].view(dtype).view(self._spare, *shape))
            begin += _padded(size)
        return parts

    def _sizes_of(self, which: Sequence[int]) -> List[Tuple[int, str]]:
        """Elements and dtype of these parts."""
        parts = (self._parts[part] for part in which)
        return [(math.prod(shape), str(dtype).removeprefix("torch.")) for shape, dtype in parts]

    def split(self, store: Any) -> List[torch.Tensor]:
        """Those as the experts take them."""
        return self._experts.split(self.parts_of(store))

    @outside_graphs
    def fetch(self, call: Call) -> None:
        """Brings the weights of those copies of a call that do not lie in its store."""
        spare = call.slots[:, self._first_spare :]
        stamps = call.stamps[np.maximum(spare, 0) // self._first_spare]
        wanted = np.stack([np.full_like(spare, self.number), spare, stamps], axis=2)
        held = call.store.held[:, : spare.shape[1]]
        missing = (spare >= 0) & (held != wanted).any(axis=2)
        if not missing.any():
            return
        slots = call.slots.copy()
        slots[:, self._first_spare :][~missing] = -1
        others = call.store.held
        others[others[:, :, 0] != self.number] = -1  # theirs may lie where these go
        held[missing] = wanted[missing]
        home = [one.detach() for one in self._experts.home()]
        every = range(len(self._parts))
        self._move("fetch_weights", slots, home, self.split(call.store), every)

    def add(
        self, call: Call, home: List[Any], copies: List[Any], needs: Sequence[bool]
    ) -> List[Any]:
        """The gradients of home's tensors, with those of copies, which come home.

        :param home, copies: as ``run`` gave the tensors; None for one that has no gradient
        :param needs: of home's tensors, whether they need a gradient: alike for all experts
        """
        tensors = self._experts.home()
        # Where no part needs a gradient, ranks agree on that.
        which = [part for part in range(len(self._parts)) if needs[part]]
        first = self._rank * self._first_spare
        spare = call.slots[:, self._first_spare :]
        mine = home
        if ((first <= spare) & (spare < first + self._first_spare)).any():
            mine = [
                torch.zeros_like(one) if given is None else given.clone(memory_format=_ROWS)
                for one, given in zip(tensors, home)
            ]
        wide = [
            (torch.zeros_like(one) if given is None else given).to(_wide(one.dtype)).contiguous()
            for one, given in zip(self.split(call.store), copies)
        ]
        self._move("add_gradients", call.slots, mine if mine is not home else [], wide, which)
        return mine

    def _move(
        self, call: str, slots: Any, home: Tensors, copies: Tensors, which: Sequence[int]
    ) -> None:
        """:param home: none where no rank has copies of this one's experts
        :param which: parts of an expert that move
        """
        kept = []

        def addresses(tensors: Tensors, count: int) -> List[int]:
            if not tensors:
                return [0] * (count * len(which))
            of_all = [self._experts.of_expert(tensors, at) for at in range(count)]
            moved = [of_one[part].contiguous() for of_one in of_all for part in which]
            kept.extend(moved)
            return [one.data_ptr() for one in moved]

        own = addresses(home, self._first_spare)
        theirs = addresses(copies, self._spare)
        move = getattr(self._exchange.compiled, call)
        move(slots, self.num_experts, self._sizes_of(which), own, theirs, self.number)


_ROWS = torch.contiguous_format


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _said(parts: List[Tuple[torch.Size, torch.dtype]]) -> str:
    """Parts as an error says them: [16, 32] torch.float32, [32, 16] torch.float32."""
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in parts)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Fetch(torch.autograd.Function):
    """Home's tensors and those of copies, with their weights. Backward adds the gradients of copies
    to home's, once all of them are there.
    """

    @staticmethod
    def forward(ctx: Any, copies: Copies, call: Call, mark: torch.Tensor, *home: Any) -> Any:
        copies.fetch(call)
        ctx.copies, ctx.call, ctx.count = copies, call, len(home)
        ctx.set_materialize_grads(False)
        save_mark(ctx, mark)
        token = mark.new_empty(0, dtype=torch.float32)
        mine = [one.view_as(one) for one in home]
        views = copies.split(call.store)
        given = [one.detach() for one in views]
        needs = ctx.needs_input_grad[3:]
        parts = len(copies._parts)  # a copy's parts need gradients where those of home do
        fixed = [one for one, needed in zip(mine, needs) if not needed]
        fixed += [one for i, one in enumerate(given) if not needs[i % parts]]
        ctx.mark_non_differentiable(*fixed)
        return (token, *mine, *given)

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, _token: Any, *gradients: Any) -> Any:
        read_mark(ctx)
        needs = ctx.needs_input_grad[3:]
        home, theirs = list(gradients[: ctx.count]), list(gradients[ctx.count :])
        home = ctx.copies.add(ctx.call, home, theirs, needs)
        tensors = ctx.copies._experts.home()
        found = [
            (torch.zeros_like(of) if one is None else one) if needed else None
            for one, of, needed in zip(home, tensors, needs)
        ]
        return (None, None, None, *found)


class _Again(torch.autograd.Function):
    """Outputs as they are. Backward fetches copies again that others have taken the place of. That
    they depend on the token and on rows makes all ranks do so.
    """

    @staticmethod
    def forward(ctx: Any, copies: Copies, call: Call, outputs: Any, *ties: Any) -> Any:
        ctx.copies, ctx.call, ctx.num_ties = copies, call, len(ties)
        save_mark(ctx, outputs)
        return outputs.view_as(outputs)

    @staticmethod
    @outside_graphs
    @first_order
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        read_mark(ctx)
        ctx.copies.fetch(ctx.call)
        token = None
        if ctx.needs_input_grad[3]:
            token = torch.zeros(0, device=gradient.device)
        return (None, None, gradient, token, *[None] * (ctx.num_ties - 1))
