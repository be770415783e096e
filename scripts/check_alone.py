#!/usr/bin/env python3
"""Reads every source and header of the project by itself, as the compile commands of a build say.

`check_alone.py BUILD_DIRECTORY`. Builds join files (WAYBILL_JOIN) and precompile headers, so that a
missing #include or a shadowed name may go unnoticed in them. Nothing is compiled. Prints what the
compiler says and exits 1 for any error.

Each header is read before all others once: by the source of its name, if that includes it first, or
by a line that includes it. Public headers see no others than public ones.

Most of the time would go into headers of the standard library. They are precompiled in a few sets.
A file gets a set only if all of it is among what the file includes, directly or through headers of
the project, before its first line of code: so its code sees what it would see without the set. So
does the code of the headers that it includes, when they are read themselves.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "python", "examples", "bench")
NEED_CUDA = re.compile(r"(src/cuda|tests/cuda|bench/gpu)/")
LIBRARY = "algorithm array limits memory optional span string variant vector"
THREADS = "atomic chrono functional memory mutex optional string vector"
# The first that fits is taken, so those that take longest to read stand first.
SETS = [
    frozenset(names.split())
    for names in (
        f"nanobind/nanobind.h {THREADS}",
        f"gtest/gtest.h nlohmann/json.hpp {LIBRARY}",
        f"gtest/gtest.h random {THREADS} {LIBRARY}",
        f"gtest/gtest.h random {LIBRARY}",
        "gtest/gtest.h memory optional string vector",
        "gtest/gtest.h",
        f"{LIBRARY} {THREADS}",
        f"{LIBRARY} random",
        THREADS,
        LIBRARY,
        "memory optional string vector",
        "algorithm span string vector",
        "string",
    )
]
FEWEST_USERS = 5  # of a set, for it to be worth precompiling
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')
MEANINGLESS = re.compile(r"\s*(//.*|/\*.*\*/|#\s*pragma\b.*)?$")
# What matters when nothing is compiled; a precompiled set and its users must agree on the rest.
KEPT_FLAGS = ("-I", "-isystem", "/", "-D", "-W", "-std=")


def includes_before_code(path):
    """[(in quotes, name)] that every compiler sees: up to the first line of code, without #if."""
    found = []
    conditions = 0
    for line in path.read_text().splitlines():
        include = INCLUDE.match(line)
        if re.match(r"\s*#\s*if", line):
            conditions += 1
        elif re.match(r"\s*#\s*endif", line):
            conditions -= 1
        elif conditions == 0 and include:
            found.append((include[1] == '"', include[2]))
        elif conditions == 0 and not MEANINGLESS.match(line):
            break
    return found


@functools.cache
def find(folder, name, search):
    for base in (folder, *search):
        if (pathlib.Path(base) / name).is_file():
            return (pathlib.Path(base) / name).resolve()
    return None


@functools.cache
def library_headers(path, search):
    """Names of the headers of others that `path` includes before its code."""
    names = set()
    for quoted, name in includes_before_code(path):
        own = find(path.parent, name, search) if quoted else None
        if own and NEED_CUDA.match(str(own.relative_to(ROOT))):
            break  # nobody reads it by itself: it counts as code
        names |= library_headers(own, search) if own else {name}
    return frozenset(names)


class Reader:
    """One run of the compiler: over `source`, or over a line that includes the header `source`."""

    def __init__(self, source, flags, first):
        self.source = source
        self.flags = flags
        search = tuple(f[2:] for f in flags if f.startswith(f"-I{ROOT}"))
        seen = library_headers(first, search)
        fitting = [headers for headers in SETS if headers <= seen]
        standard = next((f for f in flags if f.startswith("-std=")), "")
        self.key = (fitting[0], standard) if fitting and standard else None

    def run(self, precompiled):
        command = ["-fsyntax-only", *self.flags]
        if self.key in precompiled:
            command += ["-include", str(precompiled[self.key])]
        if self.source.suffix == ".h":
            return compiled([*command, "-x", "c++", "-"], f'#include "{self.source}"\n')
        return compiled([*command, str(self.source)])


def compiled(arguments, text=None):
    return subprocess.run(["g++", "-O0", *arguments], input=text, text=True).returncode == 0


def flags_of_sources(build):
    """{source: what its compile command says}"""
    result = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["file"]).resolve()
        if any(source.is_relative_to(ROOT / folder) for folder in FOLDERS):
            arguments = shlex.split(entry["command"])[1:]
            output = arguments.index("-o")
            del arguments[output : output + 2]
            arguments.remove(entry["file"])
            result[source] = [a for a in arguments if a.startswith(KEPT_FLAGS)]
    return result


def flags_of_header(header, sources):
    """Those of a source beside it, or as near as there is one; public headers see public ones."""
    if header.is_relative_to(ROOT / "include"):
        flags = sources[ROOT / "src/core/dtype.cpp"]
        return [f for f in flags if not f.startswith("-I")] + [f"-I{ROOT / 'include'}"]
    for folder in header.parents:
        for source, flags in sources.items():
            if source.is_relative_to(folder):
                return flags
    raise ValueError(header)


def readers(build):
    sources = flags_of_sources(build)
    headers = {
        path
        for folder in (*FOLDERS, "include")
        for path in (ROOT / folder).rglob("*.h")
        if not NEED_CUDA.match(str(path.relative_to(ROOT)))
    }
    for source, flags in sources.items():
        search = tuple(f[2:] for f in flags if f.startswith(f"-I{ROOT}"))
        quoted, name = (includes_before_code(source) or [(False, "")])[0]
        first = find(source.parent, name, search) if quoted else None
        private = first in headers and not first.is_relative_to(ROOT / "include")
        if private and first.stem == source.stem:
            headers.remove(first)
            yield Reader(source, flags, first)
        else:
            yield Reader(source, flags, source)
    for header in sorted(headers):
        yield Reader(header, flags_of_header(header, sources), header)


def precompile(build, jobs, pool):
    """{key of a reader: the file to include}"""
    users = {}
    for job in jobs:
        users.setdefault(job.key, []).append(job)
    folder = build / "alone"
    folder.mkdir(exist_ok=True)
    made = {}
    for key, its_users in users.items():
        if key and len(its_users) >= FEWEST_USERS:
            made[key] = folder / f"set_{len(made)}.h"
            made[key].write_text("".join(f"#include <{name}>\n" for name in sorted(key[0])))

    def make(key):
        out = ["-x", "c++-header", "-o", f"{made[key]}.gch", str(made[key])]
        return compiled([*users[key][0].flags, *out])

    if not all(pool.map(make, made)):
        sys.exit(1)
    return made


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: check_alone.py BUILD_DIRECTORY")
    build = pathlib.Path(sys.argv[1]).resolve()
    jobs = list(readers(build))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        precompiled = precompile(build, jobs, pool)
        passed = list(pool.map(lambda job: job.run(precompiled), jobs))
    if not all(passed) or not jobs:
        sys.exit(1)
    print(f"alone: {len(jobs)} files need no other; {len(precompiled)} sets were precompiled")


if __name__ == "__main__":
    main()
