"""Ranks that are threads: they begin together, and one that fails or is interrupted ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core
from ._device_faults import explain
from .errors import Interrupted, PeerFailed, Timeout, Unsupported

_T = TypeVar("_T")
_LEAVE_S = 0.5  # for ranks to end after a second interrupt


def run_ranks(world_size: int, rank_main: Callable[[int], _T], scope: Any) -> list[_T]:
    """Runs ``rank_main(rank)`` on one thread a rank and returns what each returned.

    Waits of the library on these threads, and of their worlds on any, end with ``scope``.
    """
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}
    # Not Thread.join: one that was interrupted takes the thread for ended, up to Python 3.12.
    ended = [threading.Event() for _ in range(world_size)]

    def run(rank: int) -> None:
        _core.enter_scope(scope)
        try:
            results[rank] = rank_main(rank)
        except BaseException as error:  # raised again below
            explain(error)
            errors[rank] = error
            scope.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            _core.leave_scope()
            ended[rank].set()

    # Daemons: who interrupts the program twice does not wait for its ranks.
    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    started = 0
    try:
        for thread in threads:
            thread.start()
            started += 1
        for event in ended:
            event.wait()
    except BaseException as error:  # KeyboardInterrupt, or more threads than the host allows
        scope.interrupt(f"interrupted: {type(error).__name__}")
        _await_ended(threads[:started], ended)
        errors.clear()  # their tracebacks hold the ranks' worlds
        if isinstance(error, RuntimeError) and started < world_size:
            raise Unsupported(
                f"run_threads: {error}: {started} of {world_size} ranks have one, and this host "
                "allows no more (ulimit -u, pids.max of a container)"
            ) from None
        raise
    if errors:
        _raise_first(errors, world_size)
    return [results[rank] for rank in range(world_size)]


def _await_ended(threads: list[threading.Thread], ended: list[threading.Event]) -> None:
    """Who interrupts this, too, leaves ranks that do not end soon. A thread that the interpreter's
    end finds in the middle of a call of torch ends the program by std::terminate: so they are
    interrupted in what they do in Python.
    """
    try:
        for event, _ in zip(ended, threads):
            event.wait()
    except KeyboardInterrupt:
        for event, thread in zip(ended, threads):
            if not event.is_set() and thread.ident is not None:
                _core.interrupt_thread(thread.ident)
        until = time.monotonic() + _LEAVE_S
        for event, _ in zip(ended, threads):
            event.wait(max(0.0, until - time.monotonic()))
        raise


def end_waits() -> None:
    """Ends the waits of the library that have begun on threads other than the main one, and the
    next call of threads that make calls all the time: they raise Interrupted. For handlers of
    signals, which Python runs on the main thread; there a handler ends a wait by raising.
    """
    _core.end_waits()


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
