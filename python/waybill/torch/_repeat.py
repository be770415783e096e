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

from .._selftest import TIMEOUT_S, expected_gradients, expected_rows, rows_of
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


class Kind(NamedTuple):
    """A kind of call: of a layer of experts, or of sequences."""

    name: str
    #: Computes the simulation of all ranks once; returns what makes a rank's calls, collectively.
    prepare: Callable[[Any, Sizes], Callable[[World], Calls]]
    sums: bool = False  #: combine, of what one dispatch of each input brought; kv_gradient
    #: A CUDA graph can hold its calls; without fixed_rows the host waits for counts.
    graphs: bool = True
    rows: str = "grouped"
    payload: str = "plain"
    few: bool = False
    known: bool = False  #: dispatches by the routing of an earlier one
    local_combine: bool = False
    weighted: bool = False


def _numbers(random: np.random.Generator, *shape: int) -> Any:
    """float32 that bfloat16 can hold."""
    values = torch.from_numpy(random.standard_normal(shape, np.float32))
    return values.bfloat16().float().numpy()


def settle(world: World) -> None:
    """Returns when all ranks have nothing queued. On a GPU that ranks share nothing is uploaded,
    and no kernel loaded, while one of them waits there for another.
    """
    if world.device != "cpu":
        torch.cuda.current_stream().synchronize()
    world.barrier()


#: One input on one rank: tensors in host memory, and the results by the simulation.
_Case = Tuple[List[torch.Tensor], List[torch.Tensor]]


def _expert_cases(kind: Kind, config: EPConfig, tokens: int, seed: int) -> List[_Case]:
    """One input of a layer on each rank: tokens, ids and weights; for a combine also an output of
    the experts for each row that came. A dispatch brings rows, weights, and scales where rows have
    them.
    """
    random = np.random.default_rng(seed)
    ranks, hidden, experts = config.world_size, config.hidden, config.num_experts
    given = [_numbers(random, tokens, hidden) for _ in range(ranks)]
    ids, weights = [], []
    for _ in range(ranks):
        chosen = random.random((tokens, experts)).argsort(1)[:, :_TOPK]
        chosen[random.random(chosen.shape) < _DROPPED] = experts
        ids.append(chosen)
        weights.append(random.random((tokens, _TOPK), np.float32))
    arrived = simulate_dispatch(config, given, ids, weights, rows=kind.rows, payload=kind.payload)
    inputs = [
        [torch.from_numpy(x).bfloat16(), torch.from_numpy(i).int(), torch.from_numpy(w)]
        for x, i, w in zip(given, ids, weights)
    ]
    if kind.sums:
        answers = [_numbers(random, int(n), hidden) for n in arrived.num_recv_tokens_per_rank]
        sums = arrived.combine(answers, kind.local_combine, weighted=kind.weighted)
        wanted = [[torch.from_numpy(rows).bfloat16()] for rows in sums]
        inputs = [[*g, torch.from_numpy(a).bfloat16()] for g, a in zip(inputs, answers)]
        return [*zip(inputs, wanted)]
    assert arrived.recv_weights is not None
    wanted = []
    for rank, came in enumerate(arrived.recv_tokens):
        rows = torch.from_numpy(np.asarray(came).view(np.uint8)).clone()
        parts = [torch.from_numpy(arrived.recv_weights[rank].copy())]
        if arrived.recv_scales is None:
            rows = rows.view(torch.float32).bfloat16()
        else:
            rows = rows.view(torch.float8_e4m3fn)
            parts.append(torch.from_numpy(arrived.recv_scales[rank].copy()))
        wanted.append([rows, *parts])
    return [*zip(inputs, wanted)]


def _experts(kind: Kind, sizes: Sizes) -> Callable[[World], Calls]:
    """Dispatches of a layer, or combines."""
    tokens = min(sizes.tokens, _FEW_TOKENS) if kind.few else sizes.tokens
    # A layer for few tokens has no room for more.
    most = tokens if kind.few else max(tokens, _FEW_TOKENS + 1)
    experts = _EXPERTS_PER_RANK * sizes.ranks
    config = EPConfig(most, sizes.hidden, _TOPK, experts, 0, sizes.ranks, sizes.ranks)
    batches = [_expert_cases(kind, config, tokens, seed) for seed in range(INPUTS)]
    return lambda world: _expert_calls(kind, world, config, batches)


def _expert_calls(kind: Kind, world: World, config: EPConfig, batches: List[List[_Case]]) -> Calls:
    """A layer on one rank, with its inputs there."""
    counts_of_all = [
        [len(given[3]) if kind.sums else len(wanted[0]) for given, wanted in batch]
        for batch in batches
    ]
    counts = [of_ranks[world.rank] for of_ranks in counts_of_all]
    cases = [batch[world.rank] for batch in batches]
    inputs = [[tensor.to(world.device) for tensor in given] for given, _ in cases]
    wanted = [results for _, results in cases]
    module = EPAll2AllLayer(
        world, config.max_tokens, config.hidden, _TOPK, world.rank, config.num_experts,
        config.world_size, config.world_size, rows=kind.rows, payload=kind.payload,
        enable_local_combine=kind.local_combine, copy_out=False,
        fixed_rows=max(1, *map(max, counts_of_all)) if kind.graphs else None,
    )  # fmt: skip
    quantized = kind.payload == "quantized"

    def dispatch(number: int, layout: Any = None) -> Tuple[Any, List[torch.Tensor]]:
        """The descriptor, and the rows that came with what belongs to them."""
        rows, weights, made = module.dispatch(*inputs[number][:3], layout_desc=layout)
        parts: List[Any] = [rows, weights, *([made.recv_scales] if quantized else [])]
        return made, [part[: counts[number]] for part in parts]

    settle(world)
    known = kind.sums or kind.known
    layouts: List[Any] = [dispatch(n)[0] if known else None for n in range(INPUTS)]

    def combine(number: int) -> List[torch.Tensor]:
        return [module.combine(inputs[number][3], layouts[number], weighted=kind.weighted)]

    names = ("rows", "weights", "scales") if quantized else ("rows", "weights")
    held = [tensor for given in inputs for tensor in given]
    return Calls(
        combine if kind.sums else lambda n: dispatch(n, layouts[n])[1],
        ("sums",) if kind.sums else names, wanted, held, module.synchronize, module.finalize,
    )  # fmt: skip


def _sequences(kind: Kind, sizes: Sizes) -> Callable[[World], Calls]:
    """Rows of Q to the attention layout; or the sums of the gradients of K, in float32. Half of the
    tokens are in one document, so that ranks need copies of it.
    """
    left, documents = sizes.ranks * sizes.tokens, []
    while left > 0:
        documents.append(max(left // 2, 1))
        left -= documents[-1]
    planned = plan(documents, sizes.ranks, 0)
    metadata, routing = planned.to_metadata(), planned.to_routing()
    own = [rows_of(planned, rank) for rank in range(sizes.ranks)]
    given, wanted = [], []
    for seed in range(INPUTS):
        random = np.random.default_rng(seed)
        rows = [_numbers(random, n, sizes.hidden) for n in own]
        there = expected_rows(rows, metadata.fwd_kv if kind.sums else metadata.fwd_q)
        if kind.sums:
            rows = [_numbers(random, *array.shape) for array in there]
            there = expected_gradients(rows, metadata, own)
        given.append(rows)
        wanted.append(there)

    def make(world: World) -> Calls:
        dtype = torch.float32 if kind.sums else torch.bfloat16
        rows, results = (
            [torch.from_numpy(one[world.rank].copy()).to(dtype) for one in arrays]
            for arrays in (given, wanted)
        )
        rows = [one.to(world.device) for one in rows]
        dispatcher = SequenceDispatcher(world, local_by_copy_engine=False)
        if kind.sums:
            ready = dispatcher.plan_kv_gradient((routing.fwd_kv, rows[0]))
        else:
            ready = dispatcher.plan_dispatch((routing.fwd_q, rows[0]))
        dispatcher.reserve(ready)
        operation: Any = dispatcher.kv_gradient if kind.sums else dispatcher.dispatch
        return Calls(
            lambda number: [operation(ready, rows[number])[0][: len(results[number])]],
            ("sums" if kind.sums else "rows",), [[one] for one in results], rows,
            dispatcher.synchronize, dispatcher.close,
        )  # fmt: skip

    return make


KINDS = [
    Kind("dispatch, counting", _experts),
    Kind("dispatch, counts on the host", _experts, graphs=False),
    Kind("dispatch, known routing", _experts, known=True),
    Kind("dispatch, compact rows", _experts, rows="compact"),
    Kind("dispatch, few tokens", _experts, few=True),
    Kind("dispatch, float8", _experts, payload="quantized"),
    Kind("combine, grouped rows", _experts, sums=True),
    Kind("combine, compact rows", _experts, sums=True, rows="compact"),
    Kind("combine, weighted", _experts, sums=True, weighted=True),
    Kind("combine, local sums", _experts, sums=True, local_combine=True),
    Kind("combine, few tokens", _experts, sums=True, few=True),
    Kind("sequence dispatch", _sequences),
    Kind("kv_gradient", _sequences, sums=True),
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


class _Rank:
    """Repeats one kind on one rank. Results of calls are compared with the references on the
    device, slot by slot of a batch.
    """

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
        device = world.device
        self._references = [[tensor.to(device) for tensor in tensors] for tensors in calls.wanted]
        self._words = [[_words(tensor) for tensor in tensors] for tensors in self._references]
        most = [max(map(len, words)) for words in zip(*self._words)]
        self._unequal = [torch.zeros(n, dtype=torch.bool, device=device) for n in most]
        shape = (len(most), _BATCH, 1)
        #: 0: the same, 1: it differs, _NOT_COMPARED
        self._differs = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._index = torch.zeros(shape, dtype=torch.int64, device=device)
        self._got = [
            torch.zeros(_BATCH, 1, dtype=words.dtype, device=device) for words in self._words[0]
        ]
        # The kernels that compare are loaded now, and torch's cache gets what calls return: on a
        # GPU that happens while nobody waits there.
        for number in range(INPUTS):
            self._compare(0, number, self._references[number])
        kept = [torch.empty_like(t) for _ in range(4) for t in self._references[0]]
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

    def _compare(self, slot: int, number: int, results: Sequence[torch.Tensor]) -> None:
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

    def _eager(self, until: int) -> None:
        while self._done < until:
            slots = min(_BATCH, until - self._done)
            self._differs.fill_(_NOT_COMPARED)
            for slot in range(slots):
                number = (self._done + slot) % INPUTS
                self._compare(slot, number, self._calls.call(number))
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
                self._compare(slot, number, self._calls.call(number))
            graph.capture_end()
        self._world.barrier()
        for _ in range(graphs):
            self._differs.fill_(_NOT_COMPARED)
            graph.replay()
            self._look(_BATCH, first, True)
        settle(self._world)
        del graph
        self._world.barrier()

    def _look(self, slots: int, first: int, in_graph: bool) -> None:
        """Reads the verdicts of a batch."""
        self._calls.synchronize()
        verdicts = self._differs[:, :slots, 0].cpu()
        if (verdicts == _NOT_COMPARED).any():
            raise AssertionError("a call was not made: its result was not compared")
        differing = sorted((int(slot), int(o)) for o, slot in verdicts.nonzero().tolist())
        self._bad_calls += len({slot for slot, _ in differing})
        if differing and self._first is None:
            slot, output = differing[0]
            place = self._describe(slot, output, (first + slot) % INPUTS)
            self._first = Difference(
                self._done + slot, self._world.rank, self._calls.names[output], *place, in_graph
            )
        self._done += slots
        self._in_graphs += slots if in_graph else 0
        if self._world.rank == 0:
            self._progress(self._done)

    def _describe(self, slot: int, output: int, number: int) -> Tuple[int, int, str, str]:
        """(row, element, its bits, the reference's bits)."""
        reference = self._references[number][output]
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


def repeat_kind(kind: Kind, total: int, sizes: Sizes, device: str, progress: Any) -> List[Found]:
    """Repeats one kind on ranks that are threads; what each rank saw."""
    if device == "cuda" and not kind.graphs:
        total = max(total // _EAGER_SHARE, INPUTS)  # as many as the others have outside of graphs
    make = kind.prepare(kind, sizes)

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
