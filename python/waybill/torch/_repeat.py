"""``python -m waybill selftest --repeat N``: the same calls again and again, with the same bits.

The first call of each input is compared with the simulation; what it returned is the reference of
all later ones, which are compared where they are, and the host reads the verdicts of many calls at
once. On GPUs most of them are replayed from CUDA graphs that hold many calls with the comparison.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from .._selftest import TIMEOUT_S, expected_gradients, expected_rows
from ..errors import InvalidArgument, Unsupported
from ..moe import simulate_dispatch
from ..planner import plan
from ..world import World, num_gpus
from .moe import EPAll2AllLayer, EPConfig
from .sequence_dispatcher import SequenceDispatcher
from .world import run_threads

#: Calls take these inputs in turn. Windows alternate, so memory that a call did not write has the
#: bits of another input, and not those that are right.
INPUTS = 3
_TOPK = 8
_EXPERTS_PER_RANK = 8
_FEW_TOKENS = 128  #: layers of at most so many tokens exchange ids instead of counts
_DROPPED = 0.06  #: share of the topk slots that go nowhere


class Sizes(NamedTuple):
    """Sizes of every call."""

    ranks: int
    tokens: int  #: tokens of each rank
    hidden: int  #: elements of a row, a multiple of 128


class Calls(NamedTuple):
    """One kind of call on one rank."""

    call: Callable[[int], Sequence[torch.Tensor]]  #: with input number 0..INPUTS-1
    names: Tuple[str, ...]  #: names of the tensors that it returns
    wanted: List[List[torch.Tensor]]  #: the same tensors for each input, in host memory
    inputs: List[torch.Tensor]  #: no call may change them
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
        """Draws an output of the experts for each row, and computes their sums."""
        self.answers = [_numbers(self._random, n, self._hidden) for n in self.num_rows]
        self.sums = self.arrived.combine(self.answers, layer.local_combine, weighted=layer.weighted)


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


def _calls_of(layer: _Layer, combines: bool = False) -> Callable[[Sizes], Make]:
    """Dispatches of a layer, or combines of what one dispatch of each input brought."""

    def prepare(sizes: Sizes) -> Make:
        batches = [_Batch(layer, sizes, seed) for seed in range(INPUTS)]
        for batch in batches if combines else []:
            batch.answer(layer)
        return lambda world: _calls_on(world, layer, combines, sizes, batches)

    return prepare


def _calls_on(
    world: World, layer: _Layer, combines: bool, sizes: Sizes, batches: List[_Batch]
) -> Calls:
    """A layer on one rank, with its inputs there."""
    config, rank = layer.config(sizes), world.rank
    most = max(rows for batch in batches for rows in batch.num_rows)
    inputs = [
        (
            _on(world, batch.tokens[rank], torch.bfloat16),
            _on(world, batch.ids[rank], torch.int32),
            _on(world, batch.weights[rank]),
        )
        for batch in batches
    ]
    module = EPAll2AllLayer(
        world, config.max_tokens, config.hidden, _TOPK, rank, config.num_experts,
        sizes.ranks, sizes.ranks, rows=layer.rows, payload=layer.payload,
        enable_local_combine=layer.local_combine, copy_out=False,
        fixed_rows=max(most, 1) if layer.fixed else None,
    )  # fmt: skip
    answers = [_on(world, batch.answers[rank], torch.bfloat16) for batch in batches if combines]
    quantized = layer.payload == "quantized"

    def dispatch(number: int, layout: Any = None) -> Tuple[Any, List[torch.Tensor]]:
        """The descriptor, and the rows that came with what belongs to them."""
        rows, weights, made = module.dispatch(*inputs[number], layout_desc=layout)
        parts: List[Any] = [rows, weights, *([made.recv_scales] if quantized else [])]
        return made, [part[: batches[number].num_rows[rank]] for part in parts]

    settle(world)
    known = combines or layer.known
    layouts: List[Any] = [dispatch(n)[0] if known else None for n in range(INPUTS)]

    def combine(number: int) -> List[torch.Tensor]:
        return [module.combine(answers[number], layouts[number], weighted=layer.weighted)]

    held = [*answers, *(one for given in inputs for one in given)]
    ends = (module.synchronize, module.finalize)
    if combines:
        sums = [[torch.from_numpy(batch.sums[rank]).bfloat16()] for batch in batches]
        return Calls(combine, ("sums",), sums, held, *ends)
    names = ("rows", "weights", "scales") if quantized else ("rows", "weights")
    wanted = [batch.wanted_rows(rank) for batch in batches]
    return Calls(lambda n: dispatch(n, layouts[n])[1], names, wanted, held, *ends)


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
    Kind("dispatch, counting", _calls_of(_Layer())),
    Kind("dispatch, counts on the host", _calls_of(_Layer(fixed=False)), graphs=False),
    Kind("dispatch, known routing", _calls_of(_Layer(known=True))),
    Kind("dispatch, compact rows", _calls_of(_Layer(rows="compact"))),
    Kind("dispatch, few tokens", _calls_of(_Layer(few=True))),
    Kind("dispatch, float8", _calls_of(_Layer(payload="quantized"))),
    Kind("combine, grouped rows", _calls_of(_Layer(), combines=True)),
    Kind("combine, compact rows", _calls_of(_Layer(rows="compact"), combines=True)),
    Kind("combine, weighted", _calls_of(_Layer(weighted=True), combines=True)),
    Kind("combine, local sums", _calls_of(_Layer(local_combine=True), combines=True)),
    Kind("combine, few tokens", _calls_of(_Layer(few=True), combines=True)),
    Kind("sequence dispatch", _sequences(False)),
    Kind("kv_gradient", _sequences(True)),
]


_BATCH = 96  #: calls of a graph, and between two looks of the host: a multiple of INPUTS, even
_EAGER_SHARE = 10  #: on GPUs one call of so many is not in a graph
_SAY_EVERY_S = 5.0
_NOT_COMPARED = 2
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """Where a call first differed from the first call of the same input."""

    call: int  #: from 0 on
    rank: int
    tensor: str
    row: int
    element: int  #: its place in the row
    got: str  #: its bits
    expected: str
    in_graph: bool

    def __str__(self) -> str:
        where = "in a graph" if self.in_graph else "eager"
        return (
            f"call {self.call} ({where}), rank {self.rank}, {self.tensor}: row {self.row}, element"
            f" {self.element} is {self.got}, in the first call {self.expected}"
        )


class Found(NamedTuple):
    """The result of one kind on one rank."""

    calls: int
    in_graphs: int
    bad_calls: int  #: that differed
    first: Optional[Difference]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, flat: as integers of 8 bytes where rows are made of them."""
    flat = tensor.contiguous().view(-1)
    size = flat.element_size()
    row = tensor.shape[-1] * size if tensor.ndim > 1 else size
    wide = row % 8 == 0 and flat.data_ptr() % 8 == 0
    return flat.view(_WORDS[8 if wide else size])


class _Compared:
    """Compares results of calls with the references, on the device; slot by slot of a batch."""

    def __init__(self, wanted: List[List[torch.Tensor]], device: str) -> None:
        self.references = [[tensor.to(device) for tensor in tensors] for tensors in wanted]
        self._words = [[_words(tensor) for tensor in tensors] for tensors in self.references]
        outputs = range(len(wanted[0]))
        most = [max(len(words[o]) for words in self._words) for o in outputs]
        self._unequal = [torch.zeros(n, dtype=torch.bool, device=device) for n in most]
        shape = (len(most), _BATCH, 1)
        #: 0: the same, 1: it differs, _NOT_COMPARED
        self._differs = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._index = torch.zeros(shape, dtype=torch.int64, device=device)
        self._got = [
            torch.zeros(_BATCH, 1, dtype=self._words[0][o].dtype, device=device) for o in outputs
        ]

    def begin(self) -> None:
        """Before a batch: a verdict that stays as it is now was not given."""
        self._differs.fill_(_NOT_COMPARED)

    def add(self, slot: int, number: int, results: Sequence[torch.Tensor]) -> None:
        """Queues the comparison of one call. Nothing waits for it."""
        for o, (want, result) in enumerate(zip(self._words[number], results)):
            if len(want) == 0:
                self._differs[o, slot].zero_()
                continue
            words = _words(result)
            unequal = self._unequal[o][: len(want)]
            torch.ne(words, want, out=unequal)
            bits = unequal.view(torch.uint8)
            index = self._index[o, slot]
            torch.argmax(bits, 0, True, out=index)
            torch.index_select(bits, 0, index, out=self._differs[o, slot])
            torch.index_select(words, 0, index, out=self._got[o][slot])

    def differing(self, slots: int) -> List[Tuple[int, int]]:
        """(slot, output) of what differed in a batch whose calls are done."""
        verdicts = self._differs[:, :slots, 0].cpu()
        if (verdicts == _NOT_COMPARED).any():
            raise AssertionError("a call was not made: its result was not compared")
        return sorted((int(slot), int(o)) for o, slot in verdicts.nonzero().tolist())

    def describe(self, slot: int, output: int, number: int) -> Tuple[int, int, str, str]:
        """(row, element, its bits, the reference's bits)."""
        reference = self.references[number][output]
        size = reference.element_size()
        word = int(self._index[output, slot].cpu())
        got = self._got[output][slot].cpu().numpy().view(f"u{size}")
        want = self._words[number][output][word : word + 1].cpu().numpy().view(f"u{size}")
        inside = int(np.flatnonzero(got != want)[0])
        flat = word * len(got) + inside
        columns = reference.shape[-1] if reference.ndim > 1 else 1
        digits = 2 * size + 2
        shown = (f"{int(bits[inside]):#0{digits}x}" for bits in (got, want))
        return (flat // columns, flat % columns, *shown)  # type: ignore[return-value]


class _Rank:
    """Repeats one kind on one rank."""

    def __init__(
        self, world: World, calls: Calls, total: int, progress: Any, in_graphs: bool
    ) -> None:
        self._world, self._calls, self._total = world, calls, total
        self._progress = progress
        self._may_capture = in_graphs and world.device != "cpu"
        self._done = self._in_graphs = self._bad_calls = 0
        self._first: Optional[Difference] = None
        calls.synchronize()
        settle(world)
        self._inputs = [tensor.clone() for tensor in calls.inputs]
        self._compared = _Compared(calls.wanted, world.device)
        # The kernels that compare are loaded now, and torch's cache gets what calls return: on a
        # GPU that happens while nobody waits there.
        for number in range(INPUTS):
            self._compared.add(0, number, self._compared.references[number])
        kept = [torch.empty_like(t) for _ in range(4) for t in self._compared.references[0]]
        del kept
        settle(self._world)

    def run(self) -> Found:
        """All calls: the first ones against the simulation, some eager, the rest in graphs."""
        self._take_references()
        if self._may_capture:
            self._eager(min(max(self._total // _EAGER_SHARE, 2 * INPUTS), self._total))
            graphs = (self._total - self._done) // _BATCH
            if graphs > 0:
                self._graphs(graphs)
        self._eager(self._total)
        for before, now in zip(self._inputs, self._calls.inputs):
            if not torch.equal(before, now):
                raise AssertionError(f"rank {self._world.rank}: a call changed its input")
        return Found(self._done, self._in_graphs, self._bad_calls, self._first)

    def _take_references(self) -> None:
        """Calls each input once; what comes must be what the simulation says."""
        for number in range(min(INPUTS, self._total)):
            results = [result.clone() for result in self._calls.call(number)]
            self._calls.synchronize()
            wanted = self._calls.wanted[number]
            for name, result, want in zip(self._calls.names, results, wanted):
                if not torch.equal(_words(result).cpu(), _words(want)):
                    raise AssertionError(
                        f"rank {self._world.rank}, {name}: the first call with input {number}"
                        " differs from the simulation"
                    )
            self._done += 1
        settle(self._world)

    def _eager(self, until: int) -> None:
        while self._done < until:
            slots = min(_BATCH, until - self._done)
            self._compared.begin()
            for slot in range(slots):
                number = (self._done + slot) % INPUTS
                self._compared.add(slot, number, self._calls.call(number))
            self._look(slots, self._done % INPUTS, False)

    def _graphs(self, graphs: int) -> None:
        first = self._done % INPUTS
        settle(self._world)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if (
            stream == torch.cuda.default_stream()
        ):  # a rank alone on its GPU has it: it cannot be captured
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for slot in range(_BATCH):
                number = (first + slot) % INPUTS
                self._compared.add(slot, number, self._calls.call(number))
            graph.capture_end()
        self._world.barrier()
        for _ in range(graphs):
            self._compared.begin()
            graph.replay()
            self._look(_BATCH, first, True)
        settle(self._world)
        del graph
        self._world.barrier()

    def _look(self, slots: int, first: int, in_graph: bool) -> None:
        """Reads the verdicts of a batch."""
        self._calls.synchronize()
        differing = self._compared.differing(slots)
        self._bad_calls += len({slot for slot, _ in differing})
        if differing and self._first is None:
            slot, output = differing[0]
            place = self._compared.describe(slot, output, (first + slot) % INPUTS)
            self._first = Difference(
                self._done + slot, self._world.rank, self._calls.names[output], *place, in_graph
            )
        self._done += slots
        self._in_graphs += slots if in_graph else 0
        if self._world.rank == 0:
            self._progress(self._done)


def repeat_kind(kind: Kind, total: int, sizes: Sizes, device: str, progress: Any) -> List[Found]:
    """Repeats one kind on ranks that are threads; what each rank saw."""
    if device == "cuda" and not kind.graphs:
        total = max(total // _EAGER_SHARE, INPUTS)  # as many as the others have outside of graphs
    make = kind.prepare(sizes)

    def body(world: World) -> Found:
        with torch.no_grad():
            calls = make(world)
            found = _Rank(world, calls, total, progress, kind.graphs).run()
            calls.close()
            return found

    # Memory of a GPU that is given back waits for kernels there, which may wait for this rank.
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        found = run_threads(sizes.ranks, body, device=device, timeout_s=TIMEOUT_S)
    finally:
        if enabled:
            gc.enable()
    if device == "cuda":  # the memory of the ranks' streams; the next ranks have other streams
        torch.cuda.empty_cache()
    return found


def _progress(total: int) -> Callable[[int], None]:
    """Says now and then how far a kind has come."""
    last = time.monotonic()

    def say(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAY_EVERY_S and done < total:
            last = now
            print(f"{done} of {total} ... ", end="", flush=True)

    return say


def _verdict(found: List[Found]) -> Tuple[bool, str]:
    firsts = [one.first for one in found if one.first is not None]
    calls, graphs = found[0].calls, found[0].in_graphs
    if not firsts:
        return True, f"{calls} calls, {graphs} of them in graphs: the same bits"
    first = min(firsts, key=lambda difference: (difference.call, difference.rank))
    bad = max(one.bad_calls for one in found)
    return False, f"{first}; {bad} of {calls} calls differ"


def _chosen_kinds(only: Optional[str]) -> List[Kind]:
    """The kinds whose name holds the words."""
    found = [kind for kind in KINDS if only is None or only in kind.name]
    if not found:
        names = "; ".join(kind.name for kind in KINDS)
        raise InvalidArgument(f'--only "{only}": no kind of call has that in its name: {names}')
    return found


def run(
    total: int, ranks: Optional[int], tokens: int, hidden: int, device: str, only: Optional[str]
) -> int:  # fmt: skip
    """Repeats all kinds, a line each. 0 when all bits were the same, else 1.

    :param ranks: None: as many as there are GPUs, and at least two
    """
    if device == "cuda" and not (num_gpus() and torch.cuda.is_available()):
        raise Unsupported("--device cuda: there is no GPU, or an installation without CUDA")
    if ranks is None:
        ranks = max(2, num_gpus()) if device == "cuda" else 2
    if hidden % 128 != 0:
        raise InvalidArgument(f"--hidden {hidden}, expected a multiple of 128")
    sizes, kinds = Sizes(ranks, tokens, hidden), _chosen_kinds(only)
    name = torch.cuda.get_device_name() if device == "cuda" else "host memory"
    print(
        f"{total} calls of each kind: {sizes.ranks} ranks in {name}, {sizes.tokens} tokens each,"
        f" rows of {sizes.hidden}",
        flush=True,
    )
    begin, failed = time.monotonic(), []
    width = max(len(kind.name) for kind in kinds)
    for i, kind in enumerate(kinds, start=1):
        print(f"{i:2}/{len(kinds)}  {kind.name:{width}}  ", end="", flush=True)
        start = time.monotonic()
        try:
            found = repeat_kind(kind, total, sizes, device, _progress(total))
            same, text = _verdict(found)
        except Exception as error:  # the other kinds are still worth a look
            same, text = False, f"{type(error).__name__}: {error}".splitlines()[0]
        if not same:
            failed.append(kind.name)
        elapsed = time.monotonic() - start
        print(f"{'ok' if same else 'FAILED':8}{elapsed:6.2f} s  {text}", flush=True)
    seconds = time.monotonic() - begin
    if failed:
        print(f"selftest: FAILED: {'; '.join(failed)} ({len(kinds)} kinds, {seconds:.1f} s)")
        return 1
    print(f"selftest: passed: {len(kinds)} kinds in {seconds:.1f} s")
    return 0
