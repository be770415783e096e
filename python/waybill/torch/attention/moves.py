"""A rank's tables of a BatchPlan, the streams they are used on, and the calls that move rows."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np
import torch

from ..._arrays import IntArray
from ..._errors import said_by
from ..._graphs import outside_graphs
from ...errors import Disagreement, Error, InvalidArgument, Timeout, TransportError
from ...plans import SparseMetadata
from ...routing import compute_metadata
from ...sequence_dispatcher import PlanHandle, TensorFormat
from ...world import World, agree
from .._tensors import on_device
from ..kernels import AttentionShape, Sequences
from ..sequence_dispatcher import SequenceDispatcher
from .plan import RankPieces, check_table, piece_table

_MOST_SLICES = 4  # with more ranges of rows, one operation with their numbers


def put_rows(target: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
    """index_copy_ of rows whose numbers are right and differ. Under deterministic algorithms torch
    would look at them on the host: that waits for the device, and a graph forbids it.
    """
    if torch.are_deterministic_algorithms_enabled():
        torch.ops.aten._index_put_impl_(target, [numbers], source, False, True)
    else:
        target.index_copy_(0, numbers, source)


class Rows:
    """Ranges of a rank's rows, which stand one after another in another tensor."""

    def __init__(self, table: Any, device: torch.device) -> None:
        self.ranges = [(int(begin), int(rows)) for begin, rows in table.reshape(-1, 2).tolist()]
        self.count = sum(rows for _, rows in self.ranges)
        self._numbers: Optional[torch.Tensor] = None
        if len(self.ranges) > _MOST_SLICES:
            numbers = np.concatenate([np.arange(b, b + n) for b, n in self.ranges])
            self._numbers = on_device(torch.from_numpy(numbers), device)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies the rows from their places in ``source`` to the same in ``target``."""
        if self._numbers is not None:
            put_rows(target, self._numbers, source.index_select(0, self._numbers))
            return
        for begin, rows in self.ranges:
            target[begin : begin + rows].copy_(source[begin : begin + rows])

    @property
    def tables(self) -> list[torch.Tensor]:
        """The tensors on the device."""
        return [] if self._numbers is None else [self._numbers]

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts the rows of ``source`` to their places."""
        if self._numbers is not None:
            put_rows(target, self._numbers, source)
            return
        at = 0
        for begin, rows in self.ranges:
            target[begin : begin + rows].copy_(source[at : at + rows])
            at += rows

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds them to what is there, in the wider of the two dtypes, rounded once."""
        if self._numbers is not None:
            sums = target.index_select(0, self._numbers) + source
            put_rows(target, self._numbers, sums.to(target.dtype))
            return
        at = 0
        for begin, rows in self.ranges:
            target[begin : begin + rows].add_(source[at : at + rows])
            at += rows


class Call(NamedTuple):
    """One call of the kernel: on a rank's own rows, or on those that came."""

    q: slice
    kv: slice
    sequences: Sequences
    shape: AttentionShape  #: whose mask is that of these sequences: "causal" or "full"
    #: The rows of its queries, where an earlier call has others of the same rows.
    own: Optional[Rows] = None


#: Rows of queries, rows of keys, and the lengths of a call's sequences of both.
HomeLens = Tuple[slice, slice, list[int], list[int]]


def home_lens(table: Any, rows: int, takes_gaps: bool) -> list[HomeLens]:
    """Calls for sequences in a rank's own rows: one, with sequences that lack queries or keys where
    rows lie between, or one for each run of sequences without a gap.
    """
    sequences = table.tolist()
    if takes_gaps and sequences:
        most = max(max(q_len, kv_len) for _, q_len, _, kv_len in sequences)
        lens = with_gaps(sequences, rows, rows, most)
        return [(slice(0, rows), slice(0, rows), *lens)]
    runs: list[Any] = []
    for q, q_len, kv, kv_len in sequences:
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == q and sum(runs[-1][-1][2:]) == kv:
            runs[-1].append((q, q_len, kv, kv_len))
        else:
            runs.append([(q, q_len, kv, kv_len)])
    calls = []
    for run in runs:
        q, kv = run[0][0], run[0][2]
        q_end, kv_end = run[-1][0] + run[-1][1], run[-1][2] + run[-1][3]
        lens = ([s[1] for s in run], [s[3] for s in run])
        calls.append((slice(q, q_end), slice(kv, kv_end), *lens))
    return calls


def with_gaps(
    sequences: Sequence[Any], q_end: int, kv_end: int, most: int
) -> Tuple[list[int], list[int]]:
    """Lengths of queries and keys of sequences (first query, queries, first key, keys), and of
    what lies between them and after the last, in parts of at most ``most`` rows: no longer than
    what is attended to, as kernels launch blocks for the longest sequence.
    """
    q_lens: list[int] = []
    k_lens: list[int] = []
    q_at = kv_at = 0

    def gap(q_len: int, kv_len: int) -> None:
        for lens, others, length in ((q_lens, k_lens, q_len), (k_lens, q_lens, kv_len)):
            for begin in range(0, length, most):
                lens.append(min(most, length - begin))
                others.append(0)

    for q, q_len, kv, kv_len in sequences:
        gap(q - q_at, kv - kv_at)
        q_lens.append(q_len)
        k_lens.append(kv_len)
        q_at, kv_at = q + q_len, kv + kv_len
    gap(q_end - q_at, kv_end - kv_at)
    return q_lens, k_lens


def calls_of(
    in_place: Any, dispatched: Any, rows: int, takes_gaps: bool, shape: AttentionShape,
    device: torch.device,
) -> Tuple[list[Call], list[Call], list[torch.Tensor]]:  # fmt: skip
    """(calls on own rows, calls on the rows that come, the tables on the device that they show), of
    a rank's tables. A call is of sequences with causal queries alone, or of those whose queries
    meet all of their keys: with a prefix mask there are both.
    """
    found: list[Tuple[HomeLens, bool, Optional[Rows]]] = []
    home, arrived = in_place.reshape(-1, 5), dispatched.reshape(-1, 5)
    mixed = shape.mask == "prefix"  # else all sequences are of one kind
    for whole in (False, True) if mixed else (False,):
        part = home[home[:, 4] == whole, :4] if mixed else home[:, :4]
        shared = takes_gaps and whole and len(part) < len(home)
        own = Rows(part[:, :2], device) if shared else None
        found += [(lens, whole, own) for lens in home_lens(part, rows, takes_gaps)]
    num_home = len(found)
    for whole in (True, False) if mixed else (False,):
        part = arrived[arrived[:, 4] == whole, :4] if mixed else arrived[:, :4]
        if len(part):
            (q, kv), (q_last, kv_last) = part[0, ::2].tolist(), part[-1, ::2].tolist()
            q_rows = slice(q, q_last + int(part[-1, 1]))
            kv_rows = slice(kv, kv_last + int(part[-1, 3]))
            found.append(((q_rows, kv_rows, part[:, 1].tolist(), part[:, 3].tolist()), whole, None))
    all_lens = [(lens[2], lens[3]) for lens, _, _ in found]
    sequences = Sequences.several(all_lens, device) if found else []
    calls = [
        Call(lens[0], lens[1], one, shape_of(shape, whole), own)
        for (lens, whole, own), one in zip(found, sequences)
    ]
    tables = [] if not sequences else [sequences[0].cu_seqlens_q]
    tables += [t for _, _, own in found if own is not None for t in own.tables]
    return calls[:num_home], calls[num_home:], tables


def shape_of(shape: AttentionShape, whole: bool) -> AttentionShape:
    """The shape as kernels know it, which have no prefixes."""
    if shape.mask != "prefix":
        return shape
    return shape._replace(mask="full" if whole else "causal")


_NOTHING = contextlib.nullcontext()


class Uploads:
    """Tables of one plan on their way to the device, on a stream of their own: they wait for
    nothing of a step that runs, so that they are there when the next begins.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._tensors: list[torch.Tensor] = []
        self._done: Any = None
        self._known: set[int] = set()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Tables that are uploaded under it are there for streams that called ``ready`` after."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._done = self._stream.record_event()
        self._known.clear()

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors that were made under ``run``: their memory is not used again before the streams
        that read them are done.
        """
        self._tensors += [] if self._stream is None else tensors

    def ready(self, *streams: Any) -> None:
        """Streams wait for what was uploaded, each once. A graph is captured after a
        synchronization, and must not wait for what is outside of it.
        """
        if self._done is None:
            return
        for stream in streams:
            if stream is None or stream.cuda_stream in self._known:
                continue
            if torch.cuda.is_current_stream_capturing():
                return
            self._known.add(stream.cuda_stream)
            stream.wait_event(self._done)
            for tensor in self._tensors:
                tensor.record_stream(stream)


class SideStream:
    """A second stream of a GPU: what is done under ``run`` begins after what was queued before
    ``fork``, and ends before what is queued after ``join``. On the CPU all is done in order.

    Memory needs no record: what one stream leaves is taken again by the same stream, whose later
    work comes after the other's, by the next fork or by join.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._stream: Any = None
        self._forked: Any = None
        self._device = device
        self.uploads: Any = None  #: the stream of tables, on GPUs
        stream: Any = torch.cuda.Stream
        if device.type == "cuda":
            self.uploads = stream(device)
            if overlap:
                self._stream = stream(device, priority=-1)

    @property
    def overlaps(self) -> bool:
        """Whether there is a second stream."""
        return self._stream is not None

    def fork(self, uploads: Optional[Uploads] = None) -> None:
        """From what is queued so far, and from what was uploaded."""
        if self.uploads is None:
            return
        current = torch.cuda.current_stream(self._device)
        if uploads is not None:
            uploads.ready(current, self._stream)
        if self._stream is not None:
            self._forked = current.record_event()

    def run(self) -> AbstractContextManager[Any]:
        """The second stream, after the fork."""
        if self._stream is not None:
            self._stream.wait_event(self._forked)
        return self.only()

    def only(self) -> AbstractContextManager[Any]:
        """The stream of ``run``, where calls are queued, and no order with the other."""
        return _NOTHING if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


WHO = "ContextParallelAttention"
_BACKWARD = ("grad", "dq", "sums")


def _name(t: int) -> str:
    return f"tensors[{t}]"


@functools.cache
def _formats_of(
    shape: AttentionShape, latent_dim: int
) -> Tuple[TensorFormat, TensorFormat, list[TensorFormat], TensorFormat]:
    """The formats of Q, of the output, of K and V or of latent rows, of log-sum-exps."""
    sizes = (shape.head_dim, shape.v_head_dim)
    q, out = (TensorFormat(shape.dtype, (shape.heads, size)) for size in sizes)
    kv = [TensorFormat(shape.dtype, (shape.kv_heads, size)) for size in sizes]
    if latent_dim:
        kv = [TensorFormat(shape.dtype, (latent_dim,))]
    return q, out, kv, TensorFormat(torch.float32, (shape.heads,))


class Moves:
    """Calls of the dispatcher. Their tables are made in advance, or when they are first used, on
    the stream that is current then. Collective where the windows must grow.
    """

    def __init__(
        self, routing: Any, dispatcher: SequenceDispatcher, shape: AttentionShape, latent_dim: int,
        tables: Any = None,
    ) -> None:  # fmt: skip
        self._routing, self._dispatcher = routing, dispatcher
        #: The relay schedules of K and V, and of their gradients, where ranks forward them.
        self._relays = {} if tables is None else {"fwd_kv": tables.relay, "sum_kv": tables.sums}
        self._q, self._out, self._kv, self._lse = _formats_of(shape, latent_dim)
        self._plans: dict[str, PlanHandle] = {}

    def there(
        self, name: str, *tensors: torch.Tensor, number: int = 0
    ) -> Callable[[], Tuple[torch.Tensor, ...]]:
        """A function that makes views of what came of q, k and v, or of q and the latent rows
        ("qkv"), or of the output's gradient ("grad"): after other work is queued.
        """
        plan = self._plan(name)
        window = self._send(plan, tensors, number)
        return functools.partial(self._dispatcher._shown, plan, window)

    def home(self, name: str, *tensors: torch.Tensor, number: int = 0) -> Tuple[torch.Tensor, ...]:
        """Views of the output ("out", "out and lse"), or of the gradient of Q ("dq"), at home."""
        plan = self._plan(name)
        return self._dispatcher._shown(plan, self._send(plan, tensors, number))

    def _send(self, plan: PlanHandle, tensors: Tuple[torch.Tensor, ...], number: int) -> Any:
        dispatcher = self._dispatcher
        rows = dispatcher._read(plan, tensors)
        return dispatcher._send(WHO, _name, plan, tensors, rows, number)

    def sums(
        self, number: int, gradients: Sequence[torch.Tensor], out: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor]:
        """Sums of the copies of own rows of K and V, in ``out``; without it those of 16-bit rows
        are in float32, to be rounded once with what stayed.
        """
        plan, dispatcher = self._plan("sums"), self._dispatcher
        sums = out or [self._empty(g, rows) for g, rows in zip(gradients, plan.own_rows)]
        given, made = (dispatcher._read(plan, tensors) for tensors in (gradients, sums))
        dispatcher._sum(plan, given, made, number)
        return sums

    def _empty(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        dtype = torch.float32 if like.dtype.itemsize == 2 else like.dtype
        return like.new_empty((rows, *like.shape[1:]), dtype=dtype)

    @property
    def is_ready(self) -> bool:
        """Whether the tables of the first dispatch are there."""
        return "qkv" in self._plans

    def prepare(self, upload: AbstractContextManager[None]) -> None:
        """Tables of all calls but those with a log-sum-exp, uploaded as ``upload`` says. Windows
        grow after the calls of the stream that is current.
        """
        with upload:
            for name in ("qkv", "out", *_BACKWARD):
                self._plan(name, reserves=False)
        self._dispatcher.reserve(*self._plans.values())

    def prepare_backward(self) -> None:
        """A backward pass makes no tables, for which windows might have to grow."""
        if all(name in self._plans for name in _BACKWARD):
            return
        self._dispatcher.reserve(*(self._plan(name, reserves=False) for name in _BACKWARD))

    def _plan(self, name: str, reserves: bool = True) -> PlanHandle:
        """Made once. (functools.cached_property of Python 3.11 has one lock for all objects, which
        ranks that are threads would wait for each other with.)
        """
        ready = self._plans.get(name)
        if ready is None:
            same = name == "dq" and self._q == self._out
            ready = self._plan("out", False) if same else self._plan_of(name, self._parts(name))
            self._plans[name] = ready
            if reserves:
                self._dispatcher.reserve(ready)
        return ready

    def _plan_of(self, name: str, parts: Sequence[Tuple[Any, ...]]) -> PlanHandle:
        if name == "sums":
            return self._dispatcher.plan_kv_gradient(*parts)
        return self._dispatcher.plan_dispatch(*parts)

    def _parts(self, name: str) -> list[Tuple[Any, ...]]:
        return [(self._table(table), *formats) for table, formats in self._formats(name)]

    def _table(self, name: str) -> SparseMetadata:
        return SparseMetadata._wrap(getattr(self._routing, name), relay=self._relays.get(name))

    def _formats(self, name: str) -> list[Tuple[str, list[TensorFormat]]]:
        """For each part: which table of the routing, and what goes that way."""
        return {
            "qkv": [("fwd_q", [self._q]), ("fwd_kv", self._kv)],
            "out": [("rev_q", [self._out])],
            "out and lse": [("rev_q", [self._out, self._lse])],
            "grad": [("fwd_q", [self._out])],
            "dq": [("rev_q", [self._q])],
            "sums": [("sum_kv", self._kv)],
        }[name]


_WHO = "ContextParallelAttention.gather"
_PLANS = "ContextParallelAttention: plans"
_MOST_NAMED = 2**16  # documents by which plans are compared, beyond that ranks
_FIRST_ROWS = 256  # a message has as many rows; a batch with more pieces makes them more


def first_difference(world: World, pieces: Sequence[IntArray], facts: dict[str, Any]) -> str:
    """Collective, where ranks have seen that their plans differ: in which document, or which option
    of the planner, first; "" where that is not it, or not all ranks came.
    """
    most = max(map(len, pieces)) + 1  # the last one of each rank is "none"
    says = {
        f"document {i} of rank {rank}": _text_of(table, i)
        for i in range(most)
        for rank, table in enumerate(pieces)
        if most * len(pieces) <= _MOST_NAMED
    } or {
        f"the documents of rank {rank}": f"{len(table)} with hash {zlib.crc32(table.tobytes()):x}"
        for rank, table in enumerate(pieces)
    }
    says |= {name: str(value) for name, value in facts.items()}
    try:
        world._world.require_same(_PLANS, [*says.items()])
    except (Disagreement, Timeout, TransportError):  # a rank makes another call, or none
        return ""
    except InvalidArgument as error:
        return str(error).removeprefix(f"{_PLANS}: ")
    return ""


def _text_of(table: IntArray, place: int) -> str:
    if place >= len(table):
        return "none"
    document, offset, length, prefix = table[place].tolist()
    text = f"{length} tokens"
    if document >= 0:
        text += f" from {offset} of number {document}"
    return f"{text}, prefix {prefix}" if prefix else text


class PieceExchange:
    """A table of pieces of each rank to all ranks, over the world itself: with its deadlines, and
    in the order of this object's calls alone.
    """

    def __init__(self, world: World, mask: str = "prefix") -> None:
        self._world, self._mask = world, mask
        self._dispatcher = SequenceDispatcher(world, num_sms=1, relay="never")
        self._device = torch.device(world.device)
        self._rows = _FIRST_ROWS
        self._ready: Any = None

    @outside_graphs
    def gather(
        self, held: RankPieces, who: str = _WHO, wrong: Optional[Error] = None
    ) -> list[IntArray]:
        """Collective. Errors of one rank's pieces, or else of its arguments, are raised on all."""
        table: IntArray = np.zeros((0, 4), np.int64)
        try:
            table = piece_table(held, self._world.rank, f"{who}: held", self._mask)
            check_table(table, self._world.rank, f"{who}: held")
        except Error as error:
            wrong = wrong or error
        while True:
            with said_by(who):
                everyone = self._send(table, wrong is not None)
            if any(message[0, 1] for message in everyone):
                agree(self._world, who, {}, wrong)
            most = max(int(message[0, 0]) for message in everyone)
            if most < self._rows:
                return [message[1 : 1 + int(message[0, 0])].copy() for message in everyone]
            self._rows = 2 * most  # the same on all ranks
            self._ready = None

    def _send(self, table: IntArray, is_wrong: bool) -> IntArray:
        message = np.zeros((self._rows, 4), np.int64)
        message[0, :2] = len(table), is_wrong
        shown = table[: self._rows - 1]
        message[1 : 1 + len(shown)] = shown
        rows = on_device(torch.from_numpy(message), self._device)
        (all_rows,) = self._dispatcher.dispatch(self._plan(rows), rows)
        if self._device.type == "cuda":
            # A copy to pageable memory would hold up the driver for a rank on the same GPU.
            torch.cuda.current_stream(self._device).synchronize()
        everyone: IntArray = all_rows.cpu().numpy().copy()
        return everyone.reshape(self._world.world_size, self._rows, 4)

    def _plan(self, rows: torch.Tensor) -> PlanHandle:
        if self._ready is None:
            size = self._world.world_size
            to_all = np.tile(np.arange(size), (size, 1, 1))
            forward, _ = compute_metadata(np.full((size, 1), self._rows), to_all)
            self._ready = self._dispatcher.plan_dispatch((forward, rows))
        return self._ready

    def close(self) -> None:
        self._dispatcher.close()
