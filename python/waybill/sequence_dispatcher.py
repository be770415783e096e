"""SequenceDispatcher: moving shards of Q, K and V between ranks, for numpy and for torch."""

from __future__ import annotations

import functools
import itertools
import math
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Generic,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

import numpy as np

from . import _core
from ._arrays import AnyArray, as_numpy, dtype_name, flag, instance, int64, library_dtype
from ._errors import reworded, shown, tensor_words
from ._graphs import outside_graphs
from ._lifetime import Made, OfThisProcess, forwarded, unwinding
from .errors import Disagreement, Error, InvalidArgument, Unsupported
from .plans import relay_of, room_of, sparse_table
from .world import World, agree

#: The name of the caller's tensor at a place.
Names = Callable[[int], str]


@functools.cache
def numbered(name: str) -> Names:
    """The names of tensors that come as one sequence."""
    return lambda t: f"{name}[{t}]"


@functools.lru_cache(maxsize=256)
def named(who: str, names: Names, t: int) -> str:
    """The name of a tensor in a call's errors, cached: most calls need none."""
    return f"{who}: {names(t)}"


def of_qkv(t: int) -> str:
    """The name of Q, or of one or two tensors that follow."""
    return "q" if t == 0 else f"kv[{t - 1}]"


def row_layout(shape: Sequence[int], strides: Sequence[int], name: str) -> Tuple[int, int, int]:
    """(rows, elements of a row, elements from row to row) of a tensor [rows, ...] whose elements
    of a row are adjacent; strides in elements.
    """
    if len(shape) == 0:
        raise InvalidArgument(f"{name} has no axes, expected [rows, ...]")
    hidden = 1
    for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:])):
        if extent != 1 and stride != hidden and 0 not in shape:
            raise InvalidArgument(
                f"{name} has shape {list(shape)} and strides {list(strides)}, expected adjacent"
                " elements in a row"
            )
        hidden *= extent
    return shape[0], hidden, strides[0]


def row_shape(value: Any, name: str) -> Tuple[int, ...]:
    """The extents of a row, as a TensorFormat has them."""
    if not isinstance(value, (tuple, list)):  # torch.Size is one
        raise InvalidArgument(f"{name} has row_shape {shown(value)}, expected a tuple of integers")
    if all(type(extent) is int and 0 <= extent < 2**63 for extent in value):
        return tuple(value)
    extents = tuple(int64(extent, f"{name}: row_shape[{i}]") for i, extent in enumerate(value))
    if min(extents, default=0) < 0:
        raise InvalidArgument(f"{name} has row_shape {extents}, expected extents >= 0")
    return extents


def refuse_overlap(outputs: Sequence[Tuple[int, str, int, int, int]], names: Names) -> None:
    """Refuses outputs whose rows lie on each other: the last one would win."""
    blocks = []
    for t, (address, dtype, num_rows, hidden, stride) in enumerate(outputs):
        if num_rows > 1 and hidden > 0 and abs(stride) < hidden:
            raise InvalidArgument(
                f"{names(t)} has rows of {hidden} elements, {stride} apart, expected memory of its"
                " own for each"
            )
        if num_rows > 0 and hidden > 0:
            size = int("".join(filter(str.isdecimal, dtype.partition("_")[0])) or 8) // 8
            first = address + min(0, stride * (num_rows - 1)) * size
            blocks.append((first, num_rows, hidden * size, abs(stride) * size, t))
    for one, other in itertools.combinations(sorted(blocks), 2):
        if _overlaps(one[:4], other[:4]):
            t, u = sorted((one[4], other[4]))
            raise InvalidArgument(f"{names(u)} shares memory with {names(t)}, expected its own")


def _overlaps(one: Tuple[int, int, int, int], other: Tuple[int, int, int, int]) -> bool:
    """Whether rows (first byte, number, bytes, bytes from one to the next) lie on each other; the
    other begins after the one. Rows that alternate at two distances count as such, too.
    """
    (begin, rows, size, step), (there, others, width, distance) = one, other
    if there >= begin + (rows - 1) * step + size:
        return False
    if rows == 1 or (others > 1 and distance != step):
        return True
    place = (there - begin) % step
    return place < size or place + width > step


_Array = TypeVar("_Array")
_D = TypeVar("_D", bound="Dispatcher[Any]")

#: Rows for the compiled part: address, dtype, rows, elements of a row, elements from row to row.
Rows = Tuple[int, str, int, int, int]


class TensorFormat(NamedTuple):
    """The rows of a tensor [tokens, ...]. A tensor of that kind says the same."""

    dtype: Any  #: numpy's or torch's, or its name
    row_shape: Tuple[int, ...]  #: (hidden,), or (heads, head size)

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return math.prod(self.row_shape)


class PlanHandle(OfThisProcess, Made):
    """One rank's work for one operation, compiled, with its tables where the work is done.

    Made by plan_dispatch and plan_kv_gradient of the dispatcher to which it belongs; used any
    number of times.
    """

    __slots__ = ("_dispatcher", "_hidden", "_places", "_plan", "formats", "operation")
    _why_not_copied = (
        "tables where this rank does the work: make one with plan_dispatch, from a plan or a"
        " routing, which can be"
    )
    _made_by = "SequenceDispatcher.plan_dispatch(...)"
    _dispatcher: Any
    _plan: Any
    _hidden: list[int]  #: elements of a row of each tensor
    _places: list[Any]  #: where each tensor lies in a window, as the face shows it
    operation: str  #: "dispatch" or "kv_gradient"
    formats: Tuple[TensorFormat, ...]  #: one per tensor of all parts, in order

    own_rows: list[int] = forwarded(
        "_plan.own_rows", "Rows of this rank's tensor, one number per tensor."
    )
    window_rows: list[int] = forwarded(
        "_plan.window_rows",
        "Rows of this rank's tensor in the attention layout, one number per tensor.",
    )
    window_bytes: int = forwarded(
        "_plan.window_bytes", "Bytes that the windows must have, the largest of all ranks."
    )
    way: str = forwarded(
        "_plan.way",
        'How rows reach the ranks: "direct"; "once_per_node", once to each other node, where a '
        'rank forwards them; or "relay", as the schedule of the AttentionPlan says.',
    )
    wire_bytes: list[int] = forwarded(
        "_plan.wire_bytes", "(W,): bytes to (or from) each rank; the own one is what stays."
    )

    def __repr__(self) -> str:
        return (
            f"PlanHandle({self.operation}, {self.way}, tensors={len(self.formats)},"
            f" own_rows={self.own_rows}, window_rows={self.window_rows},"
            f" window_bytes={self.window_bytes})"
        )


class Dispatcher(OfThisProcess, Generic[_Array]):
    """The shared part of waybill.SequenceDispatcher and waybill.torch.SequenceDispatcher."""

    _why_not_copied = "windows that other ranks write to: make one on each rank's world"

    @outside_graphs
    def __init__(
        self,
        world: World,
        *,
        num_sms: int = 16,
        chunk_bytes: int = 8192,
        local_by_copy_engine: bool = True,
        max_window_bytes: Optional[int] = None,
        relay: str = "automatic",
    ) -> None:
        who = "SequenceDispatcher"
        instance(world, World, f"{who}: world", "a waybill.World")
        try:
            options = _core.sequence_options(
                num_sms,
                chunk_bytes,
                flag(local_by_copy_engine, f"{who}: local_by_copy_engine"),
                2**63 - 1 if max_window_bytes is None else max_window_bytes,
                relay,
            )
            self._check_world(world)
        except Error as error:
            reworded(error, who)
            agree(world, who, {}, error)  # the others hear it where they compare their options
            raise
        self.world = world
        self.num_sms = int(num_sms)
        self._closed = False
        self._unwinding = unwinding()
        self._dispatcher: Any = _core.Dispatcher(world._world, options)

    @outside_graphs
    def plan_dispatch(self, *parts: Sequence[Any]) -> PlanHandle:
        """Compiles and uploads this rank's part of a dispatch. Not collective.

        Each part is (metadata, tensor, ...): which way these tensors go, as SparseMetadata or
        Metadata, and their formats: TensorFormat, or tensors that have it.
        """
        return self._plan("plan_dispatch", False, parts)

    @outside_graphs
    def plan_kv_gradient(self, *parts: Sequence[Any]) -> PlanHandle:
        """Compiles this rank's part of kv_gradient; parts hold the forward metadata of K and V."""
        return self._plan("plan_kv_gradient", True, parts)

    @outside_graphs
    def replace_plan(self, plan: PlanHandle, *parts: Sequence[Any]) -> None:
        """Puts another plan of the same operation and formats into the memory of ``plan``: a graph
        that was captured with it replays the new one.

        Raises InvalidArgument, the plan unchanged, when it has more chunks than the plan was made
        with, the windows are too small, or a graph holds copies by copy engine (num_sms = 0, or
        local_by_copy_engine).
        """
        who = "replace_plan"
        self._check_plan(who, plan, getattr(plan, "operation", ""))
        given, _ = self._parts(who, parts)
        self._dispatcher.replace_plan(plan._plan, given, self._stream())
        self._place(plan)

    @outside_graphs
    def reserve(self, *plans: Union[PlanHandle, int]) -> None:
        """Collective: makes the windows large enough for these plans, or numbers of bytes."""
        sizes = [
            p.window_bytes if isinstance(p, PlanHandle) else int64(p, "reserve: bytes")
            for p in plans
        ]
        slots = [p._plan.num_slots for p in plans if isinstance(p, PlanHandle)]
        self._dispatcher.reserve(max(sizes, default=0), max(slots, default=0), self._stream())

    @outside_graphs
    def dispatch(self, plan: PlanHandle, *tensors: Any, of_dispatch: int = 0) -> Tuple[_Array, ...]:
        """Collective: sends the rows of the tensors to where the plan says.

        Args:
            tensors: [own rows or more, ...] each, in the plan's order; the elements of a row are
                adjacent, rows may have any distance. Not copied.
            of_dispatch: the dispatch whose gradients these are, as last_dispatch said after it; 0:
                of none. Ranks compare it: backward passes in another order are noticed.

        Returns:
            one view [window rows, ...] a tensor of what this rank received. Nothing is copied: the
            views show this rank's window, whose memory they keep. They hold until this rank's next
            call of this dispatcher, whose input they may be. After that other ranks write there
            and the views show their rows, silently: copy what is needed longer. Rows that no line
            of the plan writes are undefined.

        Raises:
            InvalidArgument before anything moves; Disagreement when ranks do not mean the same
            call; Timeout. On GPUs synchronize(), or a later call, raises the last two.
        """
        views = self._dispatch("dispatch", numbered("tensors"), plan, tensors, of_dispatch)
        return self._apart(views)

    @outside_graphs
    def kv_gradient(
        self,
        plan: PlanHandle,
        *gradients: Any,
        out: Optional[Sequence[Any]] = None,
        dtype: Any = None,
        of_dispatch: int = 0,
    ) -> Tuple[_Array, ...]:
        """Collective: row x of a result is the sum over the copies of row x, in float32 (float64
        for float64), in the order of the copies, rounded once; 0 without copies.

        Args:
            gradients: [window rows or more, ...] each: of the rows that this rank had received.
            out: where the sums go, [own rows, ...] each; new tensors without.
            dtype: of new tensors: that of the gradients unless said, or float32 for 16-bit ones.
            of_dispatch: as in dispatch.
        """
        who = "kv_gradient"
        self._check_plan(who, plan, who)
        results = out
        if results is None:
            of_all = None if dtype is None else self._dtype(dtype, f"{who}: dtype")
            results = [
                self._empty((rows, *fmt.row_shape), fmt.dtype if of_all is None else of_all)
                for rows, fmt in zip(plan.own_rows, plan.formats)
            ]
        elif dtype is not None:
            raise InvalidArgument(f"{who}: got out and dtype, expected one of them")
        elif not isinstance(results, (list, tuple)):
            raise InvalidArgument(
                f"{who}: out is {type(results).__name__}, expected a list of {len(plan.formats)}"
            )
        names, out_names = numbered("gradients"), numbered("out")
        rows, kept = self._given(who, names, gradients)
        sums, kept_out = self._given(who, out_names, results, writable=True)
        if out is not None:
            refuse_overlap(sums, lambda t: named(who, out_names, t))
        try:
            self._sum(plan, rows, sums, of_dispatch)
        except InvalidArgument as error:
            _reword(error, who, plan, "gradients", names, gradients)
            _reword(error, who, plan, "out", out_names, results)
            raise
        del kept, kept_out
        return tuple(results)

    @outside_graphs
    def gradient_inputs(self, plan: PlanHandle) -> Tuple[_Array, ...]:
        """Where the next kv_gradient would copy its gradients: who writes them there, and passes
        these views, saves the copy. Valid for the next call. Collective when the windows must grow.
        """
        self._check_plan("gradient_inputs", plan, "kv_gradient")
        window = self._dispatcher.gradient_inputs(plan._plan, self._stream())
        return self._apart(self._shown(plan, window))

    @outside_graphs
    def synchronize(self) -> None:
        """Returns when this rank's calls are done (on GPUs: on torch's current stream). Raises a
        Timeout or a Disagreement that one of them has met.
        """
        self._dispatcher.synchronize(self._stream())

    @outside_graphs
    def close(self) -> None:
        """Collective: waits for this rank's device, then gives the windows back. Without it their
        memory goes with the world, and so it does when an error of this rank is in flight: nobody
        is waited for then. Views that are left keep theirs.
        """
        if self._unwinding():
            return
        self._dispatcher.close()
        self._closed = True

    last_dispatch: int = forwarded(
        "_dispatcher.last_dispatch",
        "The number of this rank's last dispatch, from 1 on: what calls that belong to it say.",
    )
    window_bytes: int = forwarded(
        "_dispatcher.window_bytes", "Bytes of each of this rank's two windows."
    )

    def __enter__(self: _D) -> _D:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:  # other ranks would not come to close() when this one has failed
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"window_bytes={self.window_bytes}"
        return (
            f"SequenceDispatcher(rank={self.world.rank}, world_size={self.world.world_size},"
            f" device={self.world.device!r}, num_sms={self.num_sms}, {state})"
        )

    if TYPE_CHECKING:  # a face says this about its arrays

        def _check_world(self, world: World) -> None: ...
        def _stream(self) -> int: ...
        def _empty(self, shape: Tuple[int, ...], dtype: Any) -> _Array: ...

        # Its format, and the library's name of its dtype.
        def _format(self, value: Any, name: str) -> Tuple[TensorFormat, str]: ...

        # Its memory, and what must live until the call is over.
        def _rows(self, value: Any, name: str, writable: bool) -> Tuple[Rows, Any]: ...

        # Where [rows, ...] lie in a window, from ``offset`` bytes on, as _shown reads it.
        def _placed(self, format_: TensorFormat, rows: int, offset: int) -> Any: ...

        # Views of the tensors of a plan in a window.
        def _shown(self, plan: PlanHandle, window: Any) -> Tuple[_Array, ...]: ...

        # The dtype of the face, from it or its name.
        def _dtype(self, value: Any, name: str) -> Any: ...

    def _apart(self, views: Tuple[_Array, ...]) -> Tuple[_Array, ...]:
        """The views as callers get them."""
        return views

    # The rest follows from that.

    def _dispatch(
        self, who: str, names: Names, plan: PlanHandle, tensors: Sequence[Any], of_dispatch: int
    ) -> Tuple[_Array, ...]:
        """dispatch, whose errors name the function that was called, and its arguments."""
        self._check_plan(who, plan, "dispatch")
        rows, kept = self._given(who, names, tensors)
        views = self._shown(plan, self._send(who, names, plan, tensors, rows, of_dispatch))
        del kept
        return views

    def _send(
        self, who: str, names: Names, plan: PlanHandle, tensors: Sequence[Any], rows: list[Rows],
        of_dispatch: int,
    ) -> Any:  # fmt: skip
        """dispatch of rows that were looked at. The window is for _shown: other work may be queued
        before that.
        """
        try:
            return self._dispatcher.dispatch(plan._plan, rows, self._stream(), of_dispatch)
        except InvalidArgument as error:
            _reword(error, who, plan, "tensors", names, tensors)
            raise

    def _sum(self, plan: PlanHandle, rows: list[Rows], sums: list[Rows], of_dispatch: int) -> None:
        """kv_gradient of rows that were looked at."""
        self._dispatcher.kv_gradient(plan._plan, rows, sums, self._stream(), of_dispatch)

    def _plan(self, who: str, gradient: bool, parts: Sequence[Any]) -> PlanHandle:
        given, formats = self._parts(who, parts)
        plan = self._dispatcher.plan(gradient, given, self._stream())
        ready = PlanHandle._with(
            _dispatcher=self, _plan=plan, formats=tuple(formats),
            operation="kv_gradient" if gradient else "dispatch",
            _hidden=[format_.hidden for format_ in formats],
        )  # fmt: skip
        self._place(ready)
        return ready

    def _place(self, plan: PlanHandle) -> None:
        compiled = plan._plan
        plan._places = list(
            map(self._placed, plan.formats, compiled.window_rows, compiled.window_offsets)
        )

    def _parts(self, who: str, parts: Sequence[Any]) -> Tuple[list[Any], list[TensorFormat]]:
        given, formats = [], []
        for p, part in enumerate(parts or ((),)):
            if not isinstance(part, (tuple, list)) or len(part) < 2:
                raise InvalidArgument(
                    f"{who}: parts[{p}] = {shown(part)}, expected (metadata, tensor, ...)"
                )
            pairs = [self._format(v, f"{who}: parts[{p}][{t + 1}]") for t, v in enumerate(part[1:])]
            formats += [format_ for format_, _ in pairs]
            table = sparse_table(part[0], f"{who}: parts[{p}][0]")
            hidden = [(name, format_.hidden) for format_, name in pairs]
            given.append((table, hidden, relay_of(part[0]), *room_of(part[0])))
        return given, formats

    def _check_plan(self, who: str, plan: Any, operation: str) -> None:
        if not isinstance(plan, PlanHandle):
            made_by = "plan_kv_gradient" if operation == "kv_gradient" else "plan_dispatch"
            raise InvalidArgument(
                f"{who}: plan is a {type(plan).__name__}, expected a PlanHandle, as of"
                f" {made_by}(...): {who}(plan, ...)"
            )
        if plan._dispatcher is not self:
            raise InvalidArgument(f"{who}: the plan belongs to another dispatcher")

    def _given(
        self, who: str, names: Names, values: Sequence[Any], writable: bool = False
    ) -> Tuple[list[Rows], list[Any]]:
        pairs = [self._rows(v, named(who, names, t), writable) for t, v in enumerate(values)]
        return [rows for rows, _ in pairs], [kept for _, kept in pairs]


def _reword(
    error: InvalidArgument, who: str, plan: PlanHandle, inside: str, names: Names,
    values: Sequence[Any],
) -> None:  # fmt: skip
    """Puts the caller's names and shapes into an error about the tensors of this rank."""
    if not isinstance(error, Disagreement):
        rows = [format_.row_shape for format_ in plan.formats]
        reworded(error, who, tensor_words(who, inside, names, values, rows))


class SequenceDispatcher(Dispatcher[AnyArray]):
    """Moves shards of Q, K and V between the ranks of a world, by plans, and sums the gradients of
    the copies of K and V. For numpy arrays; ``waybill.torch.SequenceDispatcher`` takes tensors.

    Calls are collective: every rank makes the same calls in the same order, each with its own part
    of the same plan. A fast rank may be one call further than a slow one; there is no barrier. A
    call that raises anything but InvalidArgument or Unsupported leaves the dispatcher unusable.

    Every rank has two windows, used in turn, that grow when a plan needs more: at the first call
    with that plan, which then waits for all ranks, or in advance with reserve().

    As a context manager it is closed at the end of the block, unless that ends with an exception:
    the other ranks would wait in vain.

    Args:
        world: of ``run_threads``; it is kept alive.
        num_sms: multiprocessors of a GPU that a call may use, 0: its copy engines do it. Ranks in
            host memory ignore it.
        chunk_bytes: unit of work, a multiple of 16.
        local_by_copy_engine: on GPUs long rows that stay on their rank go by copy engine.
        max_window_bytes: larger plans are refused; the same on all ranks.
        relay: with the routing of an AttentionPlan that has a relay schedule, whether receivers
            forward K and V to each other: "automatic" where the links then allow clearly less time,
            "never" or "always". "always" with num_sms = 0 is refused on GPUs, whose copy engines
            forward nothing. PlanHandle.way says what was chosen.
    """

    def _check_world(self, world: World) -> None:
        if world.device != "cpu":
            raise Unsupported(
                f"SequenceDispatcher: the world's tensors lie on {world.device}, and numpy has"
                " host memory only: use waybill.torch.SequenceDispatcher"
            )

    def _stream(self) -> int:
        return 0

    def _format(self, value: Any, name: str) -> Tuple[TensorFormat, str]:
        if isinstance(value, TensorFormat):
            dtype = self._dtype(value.dtype, f"{name}: dtype")
            shape = row_shape(value.row_shape, name)
        else:
            array = as_numpy(value, name)
            if array.ndim == 0:
                raise InvalidArgument(f"{name} has no axes, expected [rows, ...]")
            dtype, shape = array.dtype, array.shape[1:]
        return TensorFormat(dtype, shape), _library_name(np.empty(0, dtype), name)

    def _rows(self, value: Any, name: str, writable: bool) -> Tuple[Rows, Any]:
        array = as_numpy(value, name)
        if writable and (not isinstance(value, np.ndarray) or not array.flags.writeable):
            raise InvalidArgument(f"{name} cannot be written, expected a writable numpy array")
        library_name = _library_name(array, name)
        rows, hidden, stride = row_layout(array.shape, _strides(array, name), name)
        return (array.__array_interface__["data"][0], library_name, rows, hidden, stride), array

    def _placed(self, format_: TensorFormat, rows: int, offset: int) -> Any:
        size = rows * format_.hidden * np.dtype(format_.dtype).itemsize
        return slice(offset, offset + size), format_.dtype, (rows, *format_.row_shape)

    def _shown(self, plan: PlanHandle, window: Any) -> Tuple[AnyArray, ...]:
        whole = window.bytes
        return tuple(whole[at].view(dtype).reshape(shape) for at, dtype, shape in plan._places)

    def _empty(self, shape: Tuple[int, ...], dtype: Any) -> AnyArray:
        return np.empty(shape, dtype)

    def _dtype(self, value: Any, name: str) -> Any:
        try:
            if value is not None:  # which is float64 to numpy
                return np.dtype(value)
        except (TypeError, ValueError):
            pass
        raise InvalidArgument(f"{name} = {shown(value)}, expected a dtype of numpy, or its name")


def _library_name(array: AnyArray, name: str) -> str:
    return library_dtype(dtype_name(array, name), array.dtype.itemsize)


def _strides(array: AnyArray, name: str) -> list[int]:
    """In elements."""
    size = array.dtype.itemsize
    if any(stride % size != 0 for stride in array.strides):
        raise InvalidArgument(
            f"{name} has strides of {array.strides} bytes, expected multiples of {size}"
        )
    return [stride // size for stride in array.strides]
