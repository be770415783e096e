#!/usr/bin/env python3
"""Which lines the tests ran, per folder of the product: writes scripts/coverage.json.

    coverage_table.py BUILD [PYTHON]   a build that counts lines, whose tests have run; and what
                                       coverage.py has written as JSON
    coverage_table.py --compare OLD    exits 1 where a folder of scripts/coverage.json has a smaller
                                       share of lines run than in another such file

scripts/coverage.sh runs the tests and this. Needs gcov.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = "scripts/coverage.json"
ROOMS = ("include/", "src/", "python/")
BATCH = 20  # files of counters that gcov reads at a time
TOLERANCE = 0.5  # per cent: threads do not run the same lines each time


def counted_lines(folder, notes_of=None):
    """{file: {line: whether it ran}} of the project's files, from the counters in a folder.

    @param notes_of where the notes lie that belong to a file of counters, if not beside it
    """
    found = collections.defaultdict(dict)
    counters = sorted(folder.rglob("*.gcda"))
    for path in counters if notes_of else ():
        path.with_suffix(".gcno").symlink_to(notes_of(path))
    for first in range(0, len(counters), BATCH):
        done = subprocess.run(
            ["gcov", "--json-format", "--stdout", *map(str, counters[first : first + BATCH])],
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
        if done.returncode != 0:  # such as counters of an earlier build
            print(f"coverage: {done.stderr.strip()}", file=sys.stderr)
        for part in done.stdout.splitlines():
            for file in json.loads(part)["files"]:
                path = pathlib.Path(file["file"])
                if not path.is_relative_to(ROOT):
                    continue
                lines = found[path.relative_to(ROOT).as_posix()]
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, False) or line["count"] > 0
    return dict(found)


def python_lines(path):
    """The same from coverage.py's JSON. The package may have been run from another folder."""
    found = {}
    for name, file in json.loads(path.read_text(encoding="utf-8"))["files"].items():
        inside = f"python/waybill/{name.split('/waybill/', 1)[-1].removeprefix('waybill/')}"
        if (ROOT / inside).is_file():
            ran = dict.fromkeys(file["executed_lines"], True)
            found[inside] = dict.fromkeys(file["missing_lines"], False) | ran
    return found


def table_of(files):
    """{room: {"lines": N, "run": N, "percent": P}}"""
    rooms = collections.defaultdict(lambda: [0, 0])
    for name, lines in files.items():
        if name.startswith(ROOMS):
            room = rooms[name.rpartition("/")[0]]
            room[0] += len(lines)
            room[1] += sum(lines.values())
    return {
        room: {"lines": lines, "run": run, "percent": round(100 * run / lines, 1)}
        for room, (lines, run) in sorted(rooms.items())
        if lines
    }


def compare(old, new):
    """A line for each room with a smaller share."""
    for room, was in sorted(old.items()):
        now = new.get(room)
        if now is not None and now["percent"] < was["percent"] - TOLERANCE:
            yield f"{room}: {now['percent']} % of its lines run, before {was['percent']} %"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("build", nargs="?", type=pathlib.Path)
    parser.add_argument("python", nargs="?", type=pathlib.Path)
    parser.add_argument("--compare", type=pathlib.Path)
    given = parser.parse_args(arguments)
    path = ROOT / TABLE
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if given.compare:
        worse = [*compare(json.loads(given.compare.read_text(encoding="utf-8")), table)]
        print("\n".join(worse) or f"coverage: {len(table)} folders, none lower")
        return 1 if worse else 0
    if given.build is None:
        parser.error("a build, or --compare")
    files = counted_lines(given.build.resolve())
    files |= python_lines(given.python) if given.python else {}
    table |= table_of(files)
    rows = [f"  {json.dumps(room)}: {json.dumps(table[room])}" for room in sorted(table)]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print("\n".join(f"{room:42} {table[room]['percent']:5} %" for room in sorted(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
