"""Ranks that are threads of a process: how they run, and how all of them end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from . import _core
from ._graphs import add_note, explain
from .errors import Interrupted, PeerFailed, Timeout, Unsupported

_T = TypeVar("_T")
_PATIENCE_S = 1.0  # for ranks to end after an interrupt, before they are interrupted in Python
_LEAVE_S = 0.5  # for ranks to end after a second interrupt
_IMPORT_S = 0.01  # after which a rank that was found in the middle of an import is looked at again
_SLICE_S = 0.1  # waits have slices, between which threads that are not the main one are interrupted


class _Ranks:
    """The threads of a run, and what came of them.

    :param body: what each of them runs, with its rank
    """

    def __init__(self, world_size: int, body: Callable[[int], Any], scope: Any) -> None:
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self._body, self._scope = body, scope
        # Not Thread.join: one that was interrupted takes the thread for ended, up to Python 3.12.
        self._ended = [threading.Event() for _ in range(world_size)]
        self._inside: dict[int, int] = {}  #: the threads of ranks that are in their body
        self._leaving = threading.Lock()  #: while it is held, these threads stay there
        self.started = 0
        # Daemons: who interrupts the program twice does not wait for its ranks.
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
            self.started += 1

    def _run(self, rank: int) -> None:
        try:
            try:
                with self._leaving:
                    self._inside[rank] = threading.get_ident()
                self.results[rank] = self._in_scope(rank)
            finally:
                with self._leaving:  # from here on nobody interrupts it
                    self._inside.pop(rank, None)
        except BaseException as error:  # raised again by run_ranks
            explain(error)
            self.errors[rank] = error
            self._scope.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            Interrupted._last_raised.pop(threading.get_ident(), None)
            self._ended[rank].set()

    def _in_scope(self, rank: int) -> Any:
        _core.enter_scope(self._scope)
        try:
            return self._body(rank)
        finally:
            _core.leave_scope()

    def wait(self) -> None:
        """Returns when all have ended. Off the main thread, too, the user's interrupt ends it."""
        is_main = threading.current_thread() is threading.main_thread()
        for event in self._ended:
            while not event.wait(_SLICE_S):
                if not is_main:
                    with suppress(PeerFailed):  # in a run around this one, which awaits this
                        _core.check_interrupt()

    def end(self, why: BaseException) -> None:
        """Ends those that were started: waits of the library at once, and ranks in which none has
        raised Interrupted after a second, in Python. A second interrupt leaves ranks that do not
        end soon: a thread that the interpreter's end finds in the middle of a call of torch ends
        the program by std::terminate, so these are interrupted in Python, too.
        """
        begun = time.monotonic()
        self._scope.interrupt(f"interrupted: {type(why).__name__}")
        try:
            self._await_started(begun + _PATIENCE_S)
            notified = Interrupted._last_raised
            self._interrupt(
                lambda thread: notified.get(thread, 0.0) < begun - _PATIENCE_S, float("inf")
            )
        except KeyboardInterrupt:
            self._interrupt(lambda _: True, time.monotonic() + _LEAVE_S)
            raise

    def _await_started(self, until: float) -> None:
        for event in self._ended[: self.started]:
            while not event.is_set() and time.monotonic() < until:
                event.wait(min(_SLICE_S, max(0.0, until - time.monotonic())))

    def _interrupt(self, whom: Callable[[int], bool], until: float) -> None:
        """KeyboardInterrupt at the next step of Python's interpreter, in each rank's body. Returns
        when they have ended.
        """
        left = set(self._inside.values())
        while left and time.monotonic() < until:
            left = self._interrupt_now(left, whom)
            self._await_started(min(until, time.monotonic() + _IMPORT_S) if left else until)

    def _interrupt_now(self, threads: set[int], whom: Callable[[int], bool]) -> set[int]:
        """Returns those that are to be interrupted later."""
        with self._leaving:
            frames = sys._current_frames()
            left = set()
            for thread in threads.intersection(self._inside.values()):
                if not whom(thread):
                    continue
                if _takes_import_locks(frames.get(thread)):
                    left.add(thread)
                else:
                    _core.interrupt_thread(thread)
            return left


def _takes_import_locks(frame: Any) -> bool:
    """Whether the thread of this frame is in Python's own code of imports. An exception there
    leaves a lock taken, and others that import the same module wait for ever.
    """
    return frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")


def run_ranks(world_size: int, rank_main: Callable[[int], _T], scope: Any) -> list[_T]:
    """Runs ``rank_main(rank)`` on one thread per rank and returns what each returned.

    Waits of the library on these threads, and of their worlds on any, end with ``scope``.
    """
    ranks = _Ranks(world_size, rank_main, scope)
    try:
        ranks.start()
        ranks.wait()
    except BaseException as error:  # KeyboardInterrupt, or more threads than the host allows
        ranks.end(error)
        if isinstance(error, RuntimeError) and ranks.started < world_size:
            ranks.errors.clear()  # their tracebacks hold the ranks' worlds
            raise Unsupported(
                f"run_threads: {error}: {ranks.started} of {world_size} ranks have one, and this"
                " host allows no more (ulimit -u, pids.max of a container)"
            ) from None
        _note_own(error, ranks.errors)
        raise
    if ranks.errors:
        _raise_first(ranks.errors, world_size)
    return [ranks.results[rank] for rank in range(world_size)]


def _note_own(interrupt: BaseException, errors: dict[int, BaseException]) -> None:
    """The interrupt says what ranks had raised themselves, which is not raised any more."""
    for rank, error in sorted(errors.items()):
        for one in _chain(error):
            if isinstance(one, Exception) and _weight(one) == 0:
                add_note(interrupt, f"rank {rank}: {type(one).__name__}: {one}")
                break
    errors.clear()  # their tracebacks hold the ranks' worlds


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those during which it was raised."""
    ahead: list[Any] = [error]
    seen: set[int] = set()
    while ahead:
        one = ahead.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            ahead += [one.__context__, one.__cause__]


def _weight(error: BaseException) -> int:
    """A rank's own error comes before a deadline, which may have passed as that rank was gone, and
    that before what ranks say that were released.
    """
    if isinstance(error, PeerFailed):
        return 2
    return 1 if isinstance(error, (Timeout, Interrupted)) else 0


def _raise_first(errors: dict[int, BaseException], world_size: int) -> None:
    ranks = sorted(errors)
    first = min(ranks, key=lambda rank: (_weight(errors[rank]), rank))
    error = errors[first]
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised by rank {first} of {world_size}")
        for rank in ranks:
            if rank != first:
                error.add_note(f"rank {rank}: {type(errors[rank]).__name__}: {errors[rank]}")
    try:
        raise error
    finally:
        del error
        errors.clear()  # their tracebacks hold the ranks' worlds
