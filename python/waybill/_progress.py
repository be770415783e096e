"""One line on standard error for calls that take long, as the program writes it."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import Iterator

_AFTER_S = 2.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Writes what is going on, once it has taken two seconds, where standard error is a terminal.
    The line is rewritten each second, and is gone at the end.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    writer = threading.Thread(target=_write, args=(what, ended), daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _write(what: str, ended: threading.Event) -> None:
    seconds, wait = int(_AFTER_S), _AFTER_S
    while not ended.wait(wait):
        print(f"\rwaybill: {what}, {seconds} s ...", end="", file=sys.stderr, flush=True)
        seconds, wait = seconds + 1, 1.0
    if wait != _AFTER_S:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
