#!/usr/bin/env python3
"""Runs clang-tidy over the sources of src, ten of a folder with the same flags at a time.

`run_clang_tidy.py BUILD_DIRECTORY`, a build that is configured without joined files. Most of
clang-tidy's time goes into headers of the standard library, which are read once for ten this way.
Two checks look at what a file itself declares, not at what it includes: they get single files.
Files of the module cuda are not in the build: they have the command of a file that is. Prints
what clang-tidy says and exits 1 for any finding.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SINGLE = "misc-unused-alias-decls,misc-unused-using-decls"
DECLARES = re.compile(r"^\s*(using [\w:]+::\w+;|namespace \w+ = )", re.MULTILINE)
AT_ONCE = 10
# What a file calls a local may be a constant of another; scripts/check_alone.py sees real ones.
JOINED = ["--checks=-bugprone-suspicious-include", "--extra-arg=-Wno-shadow"]


def flags_of(entry):
    """Without the compiler, the output and the input."""
    arguments = shlex.split(entry["command"])
    output = arguments.index("-o")
    return tuple(arguments[1:output]) + tuple(
        a for a in arguments[output + 2 :] if a not in ("-c", entry["file"])
    )


def sources_by_flags(build):
    """{(folder, flags): [source]}"""
    entries = json.loads((build / "compile_commands.json").read_text())
    known = {pathlib.Path(e["file"]).resolve(): flags_of(e) for e in entries}
    any_flags = known[ROOT / "src/core/dtype.cpp"]
    groups = {}
    # In the order of the build, which joins them as well: names that two files give may clash.
    all_sources = set((ROOT / "src").rglob("*.cpp"))
    built = [source for source in known if source in all_sources]
    for source in built + sorted(all_sources - set(built)):
        key = (source.parent, known.get(source, any_flags))
        groups.setdefault(key, []).append(source)
    return groups


def runs(build):
    """Commands of clang-tidy; joined files are written into `build`."""
    folder = build / "clang_tidy"
    folder.mkdir(exist_ok=True)
    number = 0
    for (_, flags), sources in sources_by_flags(build).items():
        behind = ["--", *flags, f"-I{ROOT / 'src'}", "-Wno-unknown-warning-option"]
        for first in range(0, len(sources), AT_ONCE):
            joined = folder / f"joined_{number}.cpp"
            number += 1
            group = sources[first : first + AT_ONCE]
            joined.write_text("".join(f'#include "{source}"\n' for source in group))
            yield [*JOINED, str(joined), *behind]
        for source in sources:
            if DECLARES.search(source.read_text()):
                yield [f"--checks=-*,{SINGLE}", str(source), *behind]


def run(arguments):
    config = f"--config-file={ROOT / '.clang-tidy'}"
    command = ["clang-tidy", "--quiet", config, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout or done.stderr, flush=True)
    return done.returncode == 0


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: run_clang_tidy.py BUILD_DIRECTORY")
    jobs = list(runs(pathlib.Path(sys.argv[1]).resolve()))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(run, jobs))
    if not all(passed) or not jobs:
        sys.exit(1)
    print(f"clang-tidy: {len(jobs)} runs found nothing")


if __name__ == "__main__":
    main()
