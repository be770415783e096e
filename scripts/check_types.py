#!/usr/bin/env python3
"""Finds types of one name that are defined twice in one program.

In one namespace they are one type to the linker: of the functions made for both, such as a
vector's, it keeps one, whatever the sizes. In two namespaces they mislead readers, and code in the
inner one may use the wrong one. No compiler sees either. Prints one line for each offence and exits
1 when there is one.
"""

import functools
import pathlib
import re
import sys
from collections import defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")

# How host and device store the same dtype, under the same names on purpose.
TWINS = {
    name: {f"waybill::{side}::{name}" for side in ("detail", "cuda")}
    for name in ("BFloat16", "Float16", "Float32", "Float64")
}

# Comments and literals, which may hold braces and names.
NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
TOKEN = re.compile(
    r"(?P<namespace>\bnamespace(?P<path>[\w:\s]*)\{)"
    # No specialisation, no declaration, and no template's parameter: a body must follow.
    r"|(?P<type>\b(?:struct|class|union|enum(?:\s+class)?)\s+(?:\[\[[^\]]*\]\]\s*|alignas\([^)]*\)\s*)*"
    r"(?P<name>\w+)(?:\s+final)?\s*(?::(?!:)[^;{}()]*)?\{)"
    r"|(?P<open>\{)|(?P<close>\})"
)


def types_of(text):
    """(full name, line) of the types that a file defines in namespaces that have names."""
    text = NOISE.sub(lambda m: "\n" * m.group().count("\n"), text)
    scopes = []  # of each open brace: a namespace's name, "" of one without, None of all others
    for match in TOKEN.finditer(text):
        if match["close"]:
            if scopes:
                scopes.pop()
        elif match["namespace"]:
            scopes.append("".join(match["path"].split()))
        else:
            if match["type"] and all(scopes):
                yield "::".join([*scopes, match["name"]]), text.count("\n", 0, match.start()) + 1
            scopes.append(None)


def programs():
    """Name and folders of what is linked together."""
    library = ["include", "src", "python/bindings"]
    yield "the library", library
    for folder in sorted((ROOT / "tests").iterdir()):
        if any(folder.glob("*_test.cpp")):
            name = f"tests/{folder.name}"
            yield name, [*library, "tests/support", name]


@functools.cache
def types_in(folder):
    """(full name, "path:line") of the types that the files of a folder define."""
    found = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in SUFFIXES:
            place = path.relative_to(ROOT)
            text = path.read_text(encoding="utf-8")
            found += [(name, f"{place}:{line}") for name, line in types_of(text)]
    return found


def offences(program, places):
    """{name: text} of a program's types. @param places {full name: where it is defined}"""
    found, full_names = {}, defaultdict(set)
    for full, (first, *others) in places.items():
        full_names[full.rpartition("::")[2]].add(full)
        if others:
            found[full] = f"{first}: {full} is also {', '.join(others)} ({program})"
    for name, full in full_names.items():
        if len(full) > 1 and full != TWINS.get(name):
            first, *others = sorted(full)
            also = ", ".join(f"{other} in {places[other][0]}" for other in others)
            found[name] = f"{places[first][0]}: {first} is also {also} ({program})"
    return found


def main():
    problems, names = {}, set()
    for program, folders in programs():
        places = defaultdict(list)
        for folder in folders:
            for name, place in types_in(folder):
                places[name].append(place)
        names.update(places)
        problems = offences(program, places) | problems
    print("\n".join(problems.values()) or f"types: {len(names)} names, each defined once")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
