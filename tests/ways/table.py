"""The table of the last runs: numbers in JSON, and the page that is made of them."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import Any

from ranks import WAYS

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = {"cpu": "CPU", "gpu": "One GPU, which ranks share", "gpus": "Several GPUs"}
NEEDS = {"gpu": "needs a GPU", "gpus": "needs 2 GPUs"}
CODE = {
    "experts": ("src/cuda", "src/experts", "src/moe"),
    "sequences": ("src/cuda", "src/runtime", "src/schedule"),
}
STALE = "**Stale**: the code is another one now. "
TITLES = {"experts": "Experts", "sequences": "Sequences"}
SYMBOLS = {"right": "✓", "refused": "r", "wrong": "✗", "not run": "·", "none": "n"}


def code_hash(family: str) -> str:
    """Of the files that do a family's work: paths and content."""
    digest = hashlib.sha256()
    for folder in CODE[family]:
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.is_file()):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def machine(device: str) -> str:
    """In words."""
    if device == "cpu":
        return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    import torch

    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0)
    return f"{count} x {name}, CUDA {torch.version.cuda}, torch {torch.__version__}"


def column_of(device: str) -> str:
    """The column that a run on these ranks fills."""
    if device == "cpu":
        return "cpu"
    import torch

    return "gpus" if torch.cuda.device_count() > 1 else "gpu"


def read(page: pathlib.Path) -> dict[str, Any]:
    """What is known: {"runs": {column: {family: run}}, "cells": {column: {way: {edge: cell}}}}."""
    path = page.with_suffix(".json")
    text = path.read_text("utf-8") if path.exists() else ""
    known = json.loads(text) if text else {"runs": {}, "cells": {}}
    for column in COLUMNS:
        known["runs"].setdefault(column, {})
        known["cells"].setdefault(column, {})
    return known


@contextlib.contextmanager
def alone_with(page: pathlib.Path) -> Iterator[None]:
    """Two runs may fill one page, each on a GPU of its own."""
    with page.with_suffix(".json").open("a") as numbers:
        fcntl.flock(numbers, fcntl.LOCK_EX)
        yield


def update(page: pathlib.Path, device: str, results: dict[Any, tuple[str, str]]) -> None:
    """Puts the results of a run into their column, and writes both files. What the column had of
    other code goes.
    """
    with alone_with(page):
        _update(page, device, results)


def _update(page: pathlib.Path, device: str, results: dict[Any, tuple[str, str]]) -> None:
    known, column = read(page), column_of(device)
    cells = known["cells"][column]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    for family in {WAYS[way].family for way, _ in results}:
        if stale(known, column, family):
            others = {name for name, way in WAYS.items() if way.family != family}
            cells = {name: of_way for name, of_way in cells.items() if name in others}
        known["runs"][column][family] = {
            "date": today.isoformat(), "machine": machine(device), "code": code_hash(family),
        }  # fmt: skip
    for (way, edge), (result, words) in results.items():
        words = words.partition("\n")[0]  # torch adds advice
        words = words.replace(f"{ROOT}/", "")  # where the tree lies on that machine
        cells.setdefault(way, {})[edge] = [result, words] if words else [result]
        if result == "no time":
            del cells[way][edge]
    known["cells"][column] = {
        name: {edge: cells[name][edge] for edge in way.edges if edge in cells[name]}
        for name, way in WAYS.items()
        if cells.get(name)
    }
    text = json.dumps(known, ensure_ascii=False, indent=1)
    page.with_suffix(".json").write_text(text + "\n", "utf-8")
    write_page(page)


def cell_of(known: dict[str, Any], column: str, way: str, edge: str) -> tuple[str, str]:
    """(result, words); "none" means that the edge means nothing here."""
    excluded = WAYS[way].excluded(edge, "cpu" if column == "cpu" else "cuda")
    if excluded:
        return "none", excluded
    found = known["cells"][column].get(way, {}).get(edge)
    if found is None:
        run = known["runs"][column].get(WAYS[way].family)
        return "not run", "not in the last run" if run else NEEDS.get(column, "not in a run yet")
    return found[0], found[1] if len(found) > 1 else ""


def stale(known: dict[str, Any], column: str, family: str) -> bool:
    """Whether a column is of other code than that which is here."""
    run = known["runs"][column].get(family)
    return run is not None and run["code"] != code_hash(family)


class _Notes:
    """Words below a table, numbered in the order in which cells need them."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}

    def mark(self, result: str, words: str) -> str:
        """What stands in a cell."""
        if result == "right":
            return SYMBOLS["right"]
        number = self.numbers.setdefault((result, words), len(self.numbers) + 1)
        return f"{SYMBOLS[result]}{number}"

    def lines(self) -> list[str]:
        """One for each number. An error's words are quoted."""
        return [
            f"- {SYMBOLS[result]}{number}: " + (words if result == "none" else _quoted(words))
            for (result, words), number in self.numbers.items()
        ]


def _quoted(words: str) -> str:
    """As Markdown shows it, on one line."""
    return "`" + " ".join(words.replace("`", "'").split()) + "`"


def _table(known: dict[str, Any], column: str, family: str) -> list[str]:
    ways = [way for way in WAYS.values() if way.family == family]
    edges = list(ways[0].edges)
    run = known["runs"][column].get(family)
    lines = [f"### {TITLES[family]}: {COLUMNS[column]}", ""]
    if run is None:
        lines += [f"Not run: {NEEDS.get(column, '')}.", ""]
        return lines
    said = f"Run on {run['date']}, {run['machine']}, code {run['code']}"
    if column != "cpu" and stale(known, column, family):
        said = f"{STALE}{said}"
    lines += [f"{said}.", ""]
    lines.append("| way | " + " | ".join(str(n + 1) for n in range(len(edges))) + " |")
    lines.append("|---|" + "---|" * len(edges))
    notes = _Notes()
    for way in ways:
        cells = [cell_of(known, column, way.name, edge) for edge in edges]
        if all(result == "none" for result, _ in cells):
            continue
        marks = [notes.mark(result, words) for result, words in cells]
        lines.append(f"| {way.title} | " + " | ".join(marks) + " |")
    lines += ["", *notes.lines(), ""] if notes.numbers else [""]
    return lines


HEAD = """# Ways and edges

Each *way* to move rows is run with each *edge*. A cell is the product on the ranks of a world; the
[simulation](functions/expert_layout.md#simulate_expert_dispatch) is its judge, bit for bit, and
rows are counted beside it. `tests/ways` has both lists: a new way or edge is an entry there. Then
`python tests/ways/run.py --device cpu --write docs/ways_and_edges.md` fills the column of CPU
ranks, and with `cuda` that of the GPUs that are there; both keep the other columns. The Python
tests run all cells of CPU ranks and compare them with this page.

| sign | |
|---|---|
| ✓ | right |
| r | refused on all ranks, in the words of the note |
| ✗ | wrong, as the note says |
| · | not run: the note says what is missing |
| n | not applicable, for the reason in the note |

A column of GPUs is *stale* when its code is another one than today's. The hash of the code is that
of `src/cuda`, `src/experts` and `src/moe` for experts, and that of `src/cuda`, `src/runtime` and
`src/schedule` for sequences. Ways "over several nodes" have logical nodes of one host, with 2 x 1,
2 x 2 and 4 x 1 ranks; where a title says NCCL, each rank is a host of its own to NCCL.
"""


def page_of(known: dict[str, Any]) -> str:
    """The page."""
    lines = [HEAD]
    for family, title in TITLES.items():
        edges = next(way for way in WAYS.values() if way.family == family).edges
        lines += [f"## {title}", "", "| | edge |", "|---|---|"]
        lines += [f"| {n + 1} | {edge.title} |" for n, edge in enumerate(edges.values())]
        lines.append("")
        for column in COLUMNS:
            lines += _table(known, column, family)
    return "\n".join(lines).rstrip() + "\n"


def write_page(page: pathlib.Path) -> None:
    """Makes the page of the numbers beside it."""
    page.write_text(page_of(read(page)), "utf-8")
