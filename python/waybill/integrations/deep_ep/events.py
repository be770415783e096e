"""Points in the work of streams, and the stream that a buffer's calls run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Dict, Optional, Tuple, TypeVar, Union

import torch

from ..._arrays import flag
from ..._errors import shown
from ...errors import InvalidArgument

_T = TypeVar("_T")


class EventHandle:
    """A point in the work of torch's current stream. Where torch has no GPU it has always passed:
    calls of ranks in host memory are done when they return.
    """

    def __init__(self) -> None:
        self._event: Any = None
        self.device: Optional[torch.device] = None  #: None in host memory
        if torch.cuda.is_available():
            self._record(torch.cuda.current_stream())

    @classmethod
    def on(cls, stream: Any) -> EventHandle:
        """An event of a stream; None is host memory's, which has none."""
        self = cls.__new__(cls)
        self._event, self.device = None, None
        if stream is not None:
            self._record(stream)
        return self

    def _record(self, stream: Any) -> None:
        cuda: Any = torch.cuda  # not all of it is typed
        self._event = cuda.Event()
        self._event.record(stream)
        self.device = stream.device

    def current_stream_wait(self) -> None:
        """Work that torch's current stream gets from now on begins after the event."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)

    def stream_wait(self, stream: Any) -> None:
        """Lets a stream wait for the event; None: the host waits."""
        if stream is not None and not callable(getattr(stream, "wait_event", None)):
            raise InvalidArgument(
                f"EventHandle.stream_wait: stream = {shown(stream)}, expected a torch.cuda.Stream"
                " or None"
            )
        if self._event is None:
            return
        if stream is None:
            self._event.synchronize()
        else:
            stream.wait_event(self._event)


class EventOverlap:
    """A call gives it to be waited for, and takes it as ``previous_event``.

    As a context manager it waits when the context is left.

    :param event: None where there is nothing to wait for
    :param extra_tensors: kept as long as this is
    """

    def __init__(
        self,
        event: Optional[EventHandle] = None,
        extra_tensors: Optional[Tuple[torch.Tensor, ...]] = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Optional[Callable[[], Any]] = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Work that torch's current stream gets from now on begins after the event."""
        if self.event is None:
            raise InvalidArgument(
                "EventOverlap: there is no event to wait for: the call had async_finish = False, or"
                " the event was released"
            )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Called once, after the next ``current_stream_wait``."""
        if self.hook_after_wait is not None:
            raise InvalidArgument("EventOverlap: there is a hook already, expected one at most")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For ``with event(release_handle=True):``."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)


class Queue:
    """Runs the calls of a buffer in the order in which they come: on GPUs all of them on one stream
    of the buffer's, which waits for the caller's; in host memory at once.
    """

    def __init__(self, device: torch.device, who: str) -> None:
        self.device = device
        self._who = who
        self._stream: Any = None
        self._reads: Dict[Any, EventHandle] = {}  #: by the stream that has them

    @property
    def stream(self) -> Any:
        """The buffer's own; None in host memory."""
        if self._stream is None and self.device.type == "cuda":
            cuda: Any = torch.cuda
            self._stream = cuda.Stream(self.device)
        return self._stream

    def note_reads(self) -> None:
        """The current stream has read memory of the buffer's stream, which may now be used again:
        the next call begins after that, also one whose ``previous_event`` is older.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        if current != self._stream:
            self._reads[current] = EventHandle.on(current)

    def run(
        self,
        body: Callable[[], _T],
        given: Iterable[Any],
        previous_event: Union[EventOverlap, EventHandle, None],
        async_finish: bool,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[_T, EventOverlap]:
        """The result of body, and the event after it (an empty one unless async_finish).

        :param body: all work on the device that the call needs: what runs before it, on the
            caller's stream, comes too late for a ``previous_event``
        :param given: tensors that body reads
        """
        async_finish = flag(async_finish, f"{self._who}: async_finish")
        allocate_on_comm_stream = flag(
            allocate_on_comm_stream, f"{self._who}: allocate_on_comm_stream"
        )
        before = self._checked(previous_event, async_finish, allocate_on_comm_stream)
        stream = self.stream
        if stream is None:
            if before is not None:
                before.stream_wait(None)
            return body(), EventOverlap(EventHandle.on(None) if async_finish else None)
        current = torch.cuda.current_stream(self.device)
        if before is None:
            stream.wait_stream(current)
        else:
            before.stream_wait(stream)
        reads, self._reads = self._reads, {}
        for event in reads.values():
            event.stream_wait(stream)
        with torch.cuda.stream(stream):
            result = body()
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(current)
        if not async_finish:
            current.wait_stream(stream)
            return result, EventOverlap()
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)
        return result, EventOverlap(EventHandle.on(stream))

    def _checked(
        self, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool
    ) -> Optional[EventHandle]:
        event = handle_of(previous_event, f"{self._who}: previous_event")
        if event is not None and self.device.type == "cuda" and event.device != self.device:
            raise InvalidArgument(
                f"{self._who}: previous_event is of {event.device or 'host memory'}, expected one"
                f" of {self.device}, where the buffer is"
            )
        if allocate_on_comm_stream and not (async_finish and event is not None):
            raise InvalidArgument(
                f"{self._who}: allocate_on_comm_stream = True with async_finish = {async_finish}"
                f" and {'an' if event is not None else 'no'} previous_event, expected both"
            )
        return event


def handle_of(event: Any, name: str) -> Optional[EventHandle]:
    """The handle of what a caller gives to be waited for, if there is one."""
    handle = event.event if isinstance(event, EventOverlap) else event
    if handle is None or isinstance(handle, EventHandle):
        return handle
    place = "holds" if isinstance(event, EventOverlap) else "is"
    raise InvalidArgument(
        f"{name} {place} a {type(handle).__name__}, expected the event of Buffer.capture() or of a"
        " call, or None"
    )
