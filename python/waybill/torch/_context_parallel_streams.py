"""Streams of a module on a GPU: what travels beside what stays, and tables on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

_NOTHING = contextlib.nullcontext()


class Uploads:
    """Tables of one plan on their way to the device, on a stream of their own: behind nothing of a
    step that runs, so that they are there when the next begins.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._tensors: list[torch.Tensor] = []
        self._done: Any = None
        self._known: set[int] = set()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """What is uploaded under it is there for whoever called ``ready`` after."""
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
        """Streams wait for what was uploaded, each once. A graph is captured behind a
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


class Beside:
    """A second stream of a GPU: what is done under ``run`` begins behind what was queued before
    ``fork``, and ends before what is queued after ``join``. On the CPU all is done in order.

    Memory needs no record: what one stream leaves is taken again by the same stream, whose later
    work comes behind the other's, by the next fork or by join.
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
        """The second stream, behind the fork."""
        if self._stream is not None:
            self._stream.wait_event(self._forked)
        return self.only()

    def only(self) -> AbstractContextManager[Any]:
        """The stream of ``run``, where calls are queued, and no order with the other."""
        return _NOTHING if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
