"""The calls that ``selftest --repeat`` repeats, and what the simulation says that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from .._selftest.parts import expected_gradients, expected_rows
from ..moe import simulate_dispatch
from ..planner import plan
from ..world import World
from .moe import EPAll2AllLayer, EPConfig
from .sequence_dispatcher import SequenceDispatcher

#: Calls take these inputs in turn. Windows alternate, so memory that a call did not write has the
#: bits of another input, and not those that are right.
INPUTS = 3
_TOPK = 8
_EXPERTS_PER_RANK = 8
_FEW_TOKENS = 128  #: layers of at most so many tokens exchange ids instead of counts
_DROPPED = 0.06  #: share of the topk slots that go nowhere


class Sizes(NamedTuple):
    """Those of every call."""

    ranks: int
    tokens: int  #: of each rank
    hidden: int  #: elements of a row, a multiple of 128
    combine: str = "pull"


class Calls(NamedTuple):
    """One kind of call on one rank."""

    call: Callable[[int], Sequence[torch.Tensor]]  #: with input number 0..INPUTS-1
    names: Tuple[str, ...]  #: of the tensors that it returns
    wanted: List[List[torch.Tensor]]  #: of each input: those tensors, in host memory
    inputs: List[torch.Tensor]  #: what no call may change
    synchronize: Callable[[], None]
    close: Callable[[], None]


#: Makes a rank's calls, collectively.
Make = Callable[[World], Calls]


class Kind(NamedTuple):
    """A name, and what computes the simulation of all ranks once."""

    name: str
    prepare: Callable[[Sizes], Make]
    graphs: bool = True  #: whether a CUDA graph can hold its calls


class _Layer(NamedTuple):
    """Which layer of experts, and which of its calls."""

    rows: str = "grouped"
    payload: str = "plain"
    few: bool = False
    known: bool = False  #: dispatches by the routing of an earlier one
    fixed: bool = True  #: has fixed_rows; else the host waits for the counts of each dispatch
    local_combine: bool = False
    weighted: bool = False

    def config(self, sizes: Sizes) -> EPConfig:
        """The layer's sizes; one for few tokens has no room for more."""
        most = self.tokens(sizes) if self.few else max(sizes.tokens, _FEW_TOKENS + 1)
        experts = _EXPERTS_PER_RANK * sizes.ranks
        return EPConfig(most, sizes.hidden, _TOPK, experts, 0, sizes.ranks, sizes.ranks)

    def tokens(self, sizes: Sizes) -> int:
        return min(sizes.tokens, _FEW_TOKENS) if self.few else sizes.tokens


def _numbers(random: np.random.Generator, *shape: int) -> Any:
    """float32 that bfloat16 can hold."""
    values = torch.from_numpy(random.standard_normal(shape, np.float32))
    return values.bfloat16().float().numpy()


class _Batch:
    """One input of a layer on all ranks, and its simulation."""

    def __init__(self, layer: _Layer, sizes: Sizes, seed: int) -> None:
        random = np.random.default_rng(seed)
        config = layer.config(sizes)
        tokens, experts = layer.tokens(sizes), config.num_experts
        self.tokens = [_numbers(random, tokens, sizes.hidden) for _ in range(sizes.ranks)]
        self.ids, self.weights = [], []
        for _ in range(sizes.ranks):
            ids = random.random((tokens, experts)).argsort(1)[:, :_TOPK]
            ids[random.random(ids.shape) < _DROPPED] = experts
            self.ids.append(ids)
            self.weights.append(random.random((tokens, _TOPK), np.float32))
        self.arrived = simulate_dispatch(
            config, self.tokens, self.ids, self.weights, rows=layer.rows, payload=layer.payload
        )
        self.num_rows = [int(n) for n in self.arrived.num_recv_tokens_per_rank]
        self._random, self._hidden = random, sizes.hidden

    def wanted_rows(self, rank: int) -> List[torch.Tensor]:
        """Rows, weights, and scales where rows have them."""
        rows = torch.from_numpy(np.asarray(self.arrived.recv_tokens[rank]).view(np.uint8)).clone()
        assert self.arrived.recv_weights is not None
        weights = torch.from_numpy(self.arrived.recv_weights[rank].copy())
        if self.arrived.recv_scales is None:
            return [rows.view(torch.float32).bfloat16(), weights]
        scales = torch.from_numpy(self.arrived.recv_scales[rank].copy())
        return [rows.view(torch.float8_e4m3fn), weights, scales]

    def answer(self, layer: _Layer) -> None:
        """What experts say to all rows, each something else, and the sums of that."""
        self.answers = [_numbers(self._random, n, self._hidden) for n in self.num_rows]
        self.sums = self.arrived.combine(self.answers, layer.local_combine, weighted=layer.weighted)


def _batches(layer: _Layer, sizes: Sizes) -> List[_Batch]:
    return [_Batch(layer, sizes, seed) for seed in range(INPUTS)]


def _on(world: World, array: Any, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return (tensor if dtype is None else tensor.to(dtype)).to(world.device)


def settle(world: World) -> None:
    """Returns when all ranks have nothing queued. On a GPU that ranks share nothing is uploaded,
    and no kernel loaded, while one of them waits there for another.
    """
    if world.device != "cpu":
        torch.cuda.current_stream().synchronize()
    world.barrier()


class _Experts:
    """A layer on one rank, with its inputs there."""

    def __init__(self, world: World, layer: _Layer, sizes: Sizes, batches: List[_Batch]) -> None:
        config, rank = layer.config(sizes), world.rank
        most = max(rows for batch in batches for rows in batch.num_rows)
        self.num_rows = [batch.num_rows[rank] for batch in batches]
        self.tokens = [_on(world, batch.tokens[rank], torch.bfloat16) for batch in batches]
        self.ids = [_on(world, batch.ids[rank], torch.int32) for batch in batches]
        self.weights = [_on(world, batch.weights[rank]) for batch in batches]
        self.layer = EPAll2AllLayer(
            world, config.max_tokens, config.hidden, _TOPK, rank, config.num_experts,
            sizes.ranks, sizes.ranks, rows=layer.rows, payload=layer.payload,
            enable_local_combine=layer.local_combine, copy_out=False, combine=sizes.combine,
            fixed_rows=max(most, 1) if layer.fixed else None,
        )  # fmt: skip
        self._quantized = layer.payload == "quantized"

    def dispatch(self, number: int, layout: Any = None) -> Tuple[Any, List[torch.Tensor]]:
        """The descriptor, and the rows that came with what belongs to them."""
        rows, weights, made = self.layer.dispatch(
            self.tokens[number], self.ids[number], self.weights[number], layout_desc=layout
        )
        parts: List[Any] = [rows, weights]
        if self._quantized:
            parts.append(made.recv_scales)
        return made, [part[: self.num_rows[number]] for part in parts]

    def inputs(self) -> List[torch.Tensor]:
        return [*self.tokens, *self.ids, *self.weights]


def _dispatches(layer: _Layer) -> Callable[[Sizes], Make]:
    names = ("rows", "weights", "scales") if layer.payload == "quantized" else ("rows", "weights")

    def prepare(sizes: Sizes) -> Make:
        batches = _batches(layer, sizes)

        def make(world: World) -> Calls:
            experts = _Experts(world, layer, sizes, batches)
            settle(world)
            known = [experts.dispatch(n)[0] if layer.known else None for n in range(INPUTS)]
            return Calls(
                lambda number: experts.dispatch(number, known[number])[1], names,
                [batch.wanted_rows(world.rank) for batch in batches], experts.inputs(),
                experts.layer.synchronize, experts.layer.finalize,
            )  # fmt: skip

        return make

    return prepare


def _combines(layer: _Layer) -> Callable[[Sizes], Make]:
    def prepare(sizes: Sizes) -> Make:
        batches = _batches(layer, sizes)
        for batch in batches:
            batch.answer(layer)

        def make(world: World) -> Calls:
            experts = _Experts(world, layer, sizes, batches)
            rank = world.rank
            answers = [_on(world, batch.answers[rank], torch.bfloat16) for batch in batches]
            settle(world)
            layouts = [experts.dispatch(number)[0] for number in range(INPUTS)]

            def call(number: int) -> List[torch.Tensor]:
                rows, layout = answers[number], layouts[number]
                return [experts.layer.combine(rows, layout, weighted=layer.weighted)]

            wanted = [[torch.from_numpy(batch.sums[rank]).bfloat16()] for batch in batches]
            return Calls(
                call, ("sums",), wanted, [*answers, *experts.inputs()],
                experts.layer.synchronize, experts.layer.finalize,
            )  # fmt: skip

        return make

    return prepare


def _documents(sizes: Sizes) -> List[int]:
    """Documents of all ranks: half of the tokens are in one, so that ranks need copies of it."""
    left = sizes.ranks * sizes.tokens
    found = []
    while left > 0:
        found.append(max(left // 2, 1))
        left -= found[-1]
    return found


def _sequences(gradient: bool) -> Callable[[Sizes], Make]:
    """Rows of Q to the attention layout; or the sums of the gradients of K, in float32."""

    def prepare(sizes: Sizes) -> Make:
        planned = plan(_documents(sizes), sizes.ranks, 0)
        metadata, routing = planned.to_metadata(), planned.to_routing()
        qkv = planned.to_qkv_plan()
        ends = qkv.rank_shard_offsets
        own = [int(qkv.shard_len[ends[r] : ends[r + 1]].sum()) for r in range(sizes.ranks)]
        table = metadata.fwd_kv if gradient else metadata.fwd_q
        given, wanted = [], []
        for seed in range(INPUTS):
            random = np.random.default_rng(seed)
            rows = [_numbers(random, n, sizes.hidden) for n in own]
            there = expected_rows(rows, table)
            if gradient:
                rows = [_numbers(random, *array.shape) for array in there]
                there = expected_gradients(rows, metadata, own)
            given.append(rows)
            wanted.append(there)

        def make(world: World) -> Calls:
            rank = world.rank
            dtype = torch.float32 if gradient else torch.bfloat16
            rows = [_on(world, one[rank], dtype) for one in given]
            dispatcher = SequenceDispatcher(world, local_by_copy_engine=False)
            if gradient:
                ready = dispatcher.plan_kv_gradient((routing.fwd_kv, rows[0]))
            else:
                ready = dispatcher.plan_dispatch((routing.fwd_q, rows[0]))
            dispatcher.reserve(ready)
            operation: Any = dispatcher.kv_gradient if gradient else dispatcher.dispatch
            results = [[torch.from_numpy(one[rank].copy()).to(dtype)] for one in wanted]
            sizes_of = [len(result[0]) for result in results]
            return Calls(
                lambda number: [operation(ready, rows[number])[0][: sizes_of[number]]],
                ("sums" if gradient else "rows",), results, rows,
                dispatcher.synchronize, dispatcher.close,
            )  # fmt: skip

        return make

    return prepare


KINDS = [
    Kind("dispatch, counting", _dispatches(_Layer())),
    Kind("dispatch, counts on the host", _dispatches(_Layer(fixed=False)), graphs=False),
    Kind("dispatch, known routing", _dispatches(_Layer(known=True))),
    Kind("dispatch, compact rows", _dispatches(_Layer(rows="compact"))),
    Kind("dispatch, few tokens", _dispatches(_Layer(few=True))),
    Kind("dispatch, float8", _dispatches(_Layer(payload="quantized"))),
    Kind("combine, grouped rows", _combines(_Layer())),
    Kind("combine, compact rows", _combines(_Layer(rows="compact"))),
    Kind("combine, weighted", _combines(_Layer(weighted=True))),
    Kind("combine, local sums", _combines(_Layer(local_combine=True))),
    Kind("combine, few tokens", _combines(_Layer(few=True))),
    Kind("sequence dispatch", _sequences(False)),
    Kind("kv_gradient", _sequences(True)),
]
