#!/usr/bin/env python3
"""Reads sources of the project one by one, as their compile commands in a build folder say.

`check_alone.py BUILD_DIRECTORY`. Builds join files (WAYBILL_JOIN) and precompile headers, so that a
missing #include or a shadowed name may go unnoticed in them. Nothing is compiled. Prints what the
compiler says and exits 1 for any error.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "python", "examples", "bench")


def commands(build):
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["file"]).resolve()
        if any(file.is_relative_to(ROOT / folder) for folder in FOLDERS):
            arguments = shlex.split(entry["command"])
            output = arguments.index("-o")
            yield entry["directory"], [*arguments[:output], *arguments[output + 2 :]]


def read(job):
    folder, arguments = job
    return subprocess.run([*arguments, "-fsyntax-only", "-O0"], cwd=folder).returncode == 0


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: check_alone.py BUILD_DIRECTORY")
    jobs = list(commands(pathlib.Path(sys.argv[1])))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(read, jobs))
    if not all(passed) or not jobs:
        sys.exit(1)
    print(f"alone: {len(jobs)} files need no other")


if __name__ == "__main__":
    main()
