"""Runs every way with every edge and says which cells are right; ``--write`` updates the table.

    python tests/ways/run.py [--device cpu|cuda] [--only PATTERN] [--ranks threads|processes]
        [--write docs/ways_and_edges.md]
    python tests/ways/run.py --device cuda --edge ordinary --as-processes --patience 10 \\
        --under "compute-sanitizer --tool racecheck --target-processes all --error-exitcode 9"

Ranks on GPUs share those that are there. A few ways have a process of their own there; after a cell
with an error, which may take the GPU from its process, a new one goes on with the next edge.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import pathlib
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

CELL_LIMIT_S = 75.0  #: then the process is ended
START_LIMIT_S = 120.0  #: for importing torch, and for a GPU
KINDS = ("threads", "processes")
Cell = tuple[str, str]
Results = dict[Cell, tuple[str, str]]
NO_RESULT = ("without a result", "a thread of this program failed: see above")


class Worker:
    """A process that runs cells one after another, and says what came of each."""

    alive: ClassVar[set[Worker]] = set()

    def __init__(self, device: str, ranks: str, under: list[str], folder: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*under, sys.executable, __file__, "--worker", ranks, "--device", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            start_new_session=True, env={**os.environ, "TMPDIR": folder},
        )  # fmt: skip
        Worker.alive.add(self)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def say(self, cell: Cell) -> None:
        """Asks for one cell."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(cell) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the answer says that it has ended

    def hear(self, limit_s: float) -> dict[str, Any] | None:
        """The next answer; None if the process ended or is silent. A line that is no answer is a
        wrong one, after which the process is not used.
        """
        try:
            line = self.lines.get(timeout=limit_s)
        except queue.Empty:
            return None
        if line is None:
            return None
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and "result" in said:
                return said
        return {"result": "wrong", "words": f"answered: {line.strip()}"[:600], "usable": False}

    def last_words(self) -> str:
        """How it ended, and the end of what it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        status = self.process.poll()
        how = "said nothing until its deadline" if status is None else f"ended with {status}"
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        return f"the process {how}: {' | '.join(lines[-3:])}"[:600]

    def leave(self, limit_s: float) -> str | None:
        """Lets the process end by itself; what it says if that is not well."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=limit_s)
        return None if self.process.poll() == 0 else self.last_words()

    def end(self) -> None:
        """Ends the process, and the ranks that it has started."""
        Worker.alive.discard(self)
        self.kill()
        self.process.wait()
        self.errors.close()

    def kill(self) -> None:
        """The same without waiting for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Run:
    """Cells of some ways; ``keep`` gets the results as they come.

    :param given: the program's arguments
    """

    def __init__(self, given: Any, ways: dict[str, Any], keep: Callable[[Results], None]) -> None:
        self.given, self.ways, self.keep = given, ways, keep
        self.folder = tempfile.TemporaryDirectory(prefix="ways-", ignore_cleanup_errors=True)
        self.until = time.monotonic() + given.limit_s
        self.results: Results = {}
        self.lock = threading.Lock()
        self.begun = time.monotonic()

    def groups(self, groups: Iterator[list[Cell]]) -> None:
        """Group after group, of which others take some too; the process of the next one starts
        meanwhile.
        """
        cells, worker = self._next(groups)
        while cells:
            following, spare = self._next(groups)
            self._group(cells, worker)
            cells, worker = following, spare

    def _next(self, groups: Iterator[list[Cell]]) -> tuple[list[Cell], Worker | None]:
        """The next group and its process; nothing if there is none."""
        with self.lock:
            cells = next(groups, [])
        return cells, self._worker(cells) if cells else None

    def _worker(self, cells: list[Cell]) -> Worker:
        ranks = ranks_of(self.ways[cells[0][0]], self.given)
        return Worker(self.given.device, ranks, shlex.split(self.given.under), self.folder.name)

    def _group(self, cells: list[Cell], worker: Worker | None) -> None:
        begun = time.monotonic()
        words = None if worker is None else self._start(worker)
        if worker is not None and words is not None:
            worker.end()
            self._keep(cells, "wrong", words)
            return
        left, failures = list(cells), 0
        while left:
            cell = left.pop(0)
            if time.monotonic() > self.until:
                self._keep([cell, *left], "no time", "the run had no time left")
                break
            words = None
            if worker is None:
                worker = self._worker(cells)
                words = self._start(worker)
            answer = self._answer(worker, cell, words)
            self._keep([cell], answer["result"], answer["words"])
            if not answer["usable"]:
                worker.end()
                worker = None
            failures = failures + 1 if answer["result"] == "wrong" and worker is None else 0
            if failures == 3 or answer["result"] == "not run":
                rest = [other for other in left if other[0] == cell[0]]
                left = left[len(rest) :]
                words = answer["words"] if failures == 0 else "three edges in a row had failed"
                self._keep(rest, "not run", words)
                failures = 0
        if worker is not None:
            if self.given.under:  # which says what it has found at the end
                words = worker.leave(CELL_LIMIT_S * self.given.patience)
                if words is not None:
                    self._keep(cells, "wrong", f"one of these ways: {words}")
            worker.end()
        self._print(cells, time.monotonic() - begun)
        with self.lock:
            self.keep(self.results)

    def _start(self, worker: Worker) -> str | None:
        """Awaits its first line; what is wrong with it."""
        said = worker.hear(START_LIMIT_S * self.given.patience)
        if said is not None and said["result"] == "ready":
            return None
        return f"did not start: {worker.last_words() if said is None else said['words']}"

    def _answer(self, worker: Worker, cell: Cell, wrong: str | None) -> dict[str, Any]:
        """:param wrong: why the process gives none"""
        answer = None
        if wrong is None:
            worker.say(cell)
            answer = worker.hear(CELL_LIMIT_S * self.given.patience)
        if answer is None:
            words = worker.last_words() if wrong is None else wrong
            answer = {"result": "wrong", "words": words, "usable": False}
        return answer

    def _keep(self, cells: list[Cell], result: str, words: str) -> None:
        with self.lock:
            for cell in cells:
                self.results[cell] = result, words

    def _print(self, cells: list[Cell], seconds: float) -> None:
        marks = {"right": ".", "refused": "r", "wrong": "X", "not run": "-", "no time": "t"}
        for way in dict.fromkeys(way for way, _ in cells):
            line = "".join(marks[self.results[c][0]] for c in cells if c[0] == way)
            at = time.monotonic() - self.begun
            print(f"{at:6.1f} s  {line:18} {way} ({seconds:.1f} s)", flush=True)


def end_all(number: int, frame: object) -> None:
    """Ends with all workers: one that stays would hold the GPU until its deadline."""
    for worker in list(Worker.alive):
        worker.kill()
    os._exit(128 + number)


def serve(device: str, kind: str) -> None:
    """The process of a worker: cells come on stdin, answers go out where stdout was."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    from ranks import WAYS, Outcome, Processes, Threads, run_cell

    ranks: Any = (Processes if kind == "processes" else Threads)(device)

    def answer(**said: Any) -> None:
        out.write(json.dumps(said) + "\n")
        out.flush()

    answer(result="ready")
    for line in sys.stdin:
        name, edge = json.loads(line)
        way = WAYS[name]
        try:
            outcome = run_cell(ranks, way, edge)
        except Exception as error:  # of the judge
            outcome = Outcome("wrong", f"judge: {type(error).__name__}: {error}", True)
        usable = ranks.is_usable(outcome)
        answer(result=outcome.result, words=outcome.words[:600], usable=usable)
    ranks.close()
    os._exit(0)


def ranks_of(way: Any, given: Any) -> str:
    """Of which kind its ranks are in this run."""
    return "processes" if given.as_processes else way.ranks


def cells_of(ways: list[Any], given: Any) -> list[Cell]:
    """Those that mean something on these ranks."""
    return [
        (way.name, edge)
        for way in ways
        for edge in way.edges
        if fnmatch.fnmatch(edge, given.edge) and way.excluded(edge, given.device) is None
    ]


def run_all(given: Any, keep: Callable[[Results], None]) -> Results:
    """The results of all cells that the arguments ask for: NO_RESULT where a thread of this program
    failed before.
    """
    from ranks import WAYS

    kinds = (given.ranks,) if given.ranks else KINDS
    ways = [
        way
        for way in WAYS.values()
        if fnmatch.fnmatch(way.name, given.only)
        and given.device in way.devices
        and way.ranks in kinds
    ]
    run = Run(given, WAYS, keep)
    of_each = 8 if given.device == "cuda" else -(-len(ways) // given.jobs)
    all_groups = [cells_of(group, given) for group in groups_of(ways, of_each)]
    groups = iter([cells for cells in all_groups if cells])
    busy = [threading.Thread(target=run.groups, args=(groups,)) for _ in range(given.jobs)]
    for one in busy:
        one.start()
    for one in busy:
        one.join()
    for worker in list(Worker.alive):  # of a thread that failed
        worker.end()
    run.folder.cleanup()
    missing = dict.fromkeys((cell for cells in all_groups for cell in cells), NO_RESULT)
    return {**missing, **run.results}


def groups_of(ways: list[Any], of_each: int) -> list[list[Any]]:
    """Ways that share a process as long as all is right: as many as start while others run. Those
    whose ranks are processes take the longest: they are the first, and fewer in a group.
    """
    alike: dict[Any, list[Any]] = {}
    for way in sorted(ways, key=lambda way: way.ranks != "processes"):
        key = way.ranks, way.backend
        alike.setdefault(key, []).append(way)
    groups = []
    for (ranks, _), group in alike.items():
        size = max(1, of_each // 4) if ranks == "processes" else of_each
        groups += [group[i : i + size] for i in range(0, len(group), size)]
    return groups


def summary(results: Results) -> int:
    """Prints every cell that is not right. The exit status: 1 if a cell is wrong or has no result,
    or none ran; 3 if time was over before all had run.
    """
    for (way, edge), (result, words) in sorted(results.items(), key=lambda item: item[1][0]):
        if result != "right":
            print(f"{result.upper()}  {way} : {edge}\n    {words}")
    kinds = ("right", "refused", "wrong", "not run", "no time", NO_RESULT[0])
    counts = dict.fromkeys(kinds, 0)
    for result, _ in results.values():
        counts[result] += 1
    print("ways and edges: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()), flush=True)
    if counts["wrong"] or counts[NO_RESULT[0]] or not results:
        return 1
    return 3 if counts["no time"] else 0


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="*", help="pattern of the ways' names")
    parser.add_argument("--write", type=pathlib.Path, help="the page; its numbers lie beside it")
    parser.add_argument("--page", type=pathlib.Path, help="writes the page again, runs nothing")
    parser.add_argument(
        "--limit-s", type=float, default=480.0, help="cells after that have no time: exit status 3"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--edge", default="*", help="pattern of the edges' names")
    parser.add_argument("--ranks", choices=KINDS, help="only ways whose ranks are these")
    parser.add_argument("--as-processes", action="store_true", help="all ranks are processes")
    parser.add_argument("--under", default="", help="a command that runs the processes")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies all deadlines")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Ranks of one process need more than CUDA's 8. Processes get what users have: with 32 each,
    # dozens beside each other found no memory for their contexts.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if given.worker == "processes" else "32"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("WAYS_PATIENCE", str(given.patience))
    if given.worker:
        serve(given.device, given.worker)
        return 0
    signal.signal(signal.SIGTERM, end_all)
    import table

    if given.page:
        table.write_page(given.page)
        return 0

    def keep(results: Results) -> None:
        if given.write:
            table.update(given.write, given.device, results)

    return summary(run_all(given, keep))


if __name__ == "__main__":
    sys.exit(main())
