#!/usr/bin/env python3
"""Holds the #include lines to the modules' DEPENDS in CMake, and the files to the lists there; the
three headers for users have all public ones; docs/architecture.md has the same table.

Prints one line for each offence and exits 1 when there is one.
"""

import functools
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

DEPENDS = re.compile(r"waybill_add_module\(\s*(\w+)\s+DEPENDS\s+([\w\s]*?)\s+(?:HEADERS|SOURCES)")


@functools.cache
def modules_of(root):
    """Which modules a module may include besides itself: DEPENDS in its CMakeLists.txt."""
    table = {}
    for cmake in sorted((root / "src").glob("*/CMakeLists.txt")):
        found = DEPENDS.search(cmake.read_text(encoding="utf-8"))
        table[cmake.parent.name] = set(found[2].split()) if found else set()
    if "cli" in table:
        table["cli"] = set(table) - {"cli"}
    return table


def modules():
    return modules_of(ROOT)


# Third-party headers, and the folders that may include them (never a public header).
THIRD_PARTY = {
    "nanobind/": ("python/bindings/",),
    "Python.h": ("python/bindings/",),
    "structmember.h": ("python/bindings/",),
    "nlohmann/": ("src/json/", "tests/"),
    "CLI/": ("src/cli/command_line.cpp",),
    "gtest/": ("tests/",),
    "gmock/": ("tests/",),
    "benchmark/": ("bench/",),
    "nvshmem": ("src/cuda/nvshmem/",),
    "nccl.h": ("src/cuda/nccl/",),
    "cuda_runtime": ("src/cuda/", "tests/cuda/", "bench/gpu/", "examples/cpp/"),
    "cuda.h": ("tests/cuda/",),  # the driver, which tests ask for a lost device
    "cuda_bf16.h": ("src/cuda/device/",),
    "cuda_fp16.h": ("src/cuda/device/",),
    "cuda_fp8.h": ("src/cuda/experts/quantize.cuh",),
}

# The folders of a module with an order of its own: each may include those before it.
FOLDERS = {
    "cuda": (
        "device",
        "network",
        "nvshmem",
        "rank",
        "nccl",
        "transport",
        "planner",
        "experts",
        "sequence",
        "self_test",
    )
}

# The folders within a folder, the same; each takes what lies above it, which takes nothing of them.
INNER_FOLDERS = {"src/cuda/experts": ("nodes", "spare", "executor")}

# What programs include: all other public headers come with them.
FOR_USERS = ("waybill/plan.h", "waybill/sequence.h", "waybill/experts.h")

SUFFIXES = (".h", ".cpp", ".cuh", ".cu")

# Headers of the operating system and the processor; in the library for .cpp files only.
SYSTEM = re.compile(
    r"((sys|netinet|linux)/\w+|dirent|sched|unistd|dlfcn|fcntl|netdb|poll|pthread|\w+intrin)\.h$"
)
STANDARD = re.compile(r"\w+$")

INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", re.MULTILINE)


def module_of(path):
    """The module that a file of include/ or src/ belongs to; None for the leaves."""
    parts = path.parts
    if parts[:2] == ("include", "waybill"):
        return parts[2] if len(parts) > 3 else None  # waybill/plan.h and others take many modules
    return parts[1] if parts[0] == "src" else None


def check_angle(path, name):
    for prefix, folders in THIRD_PARTY.items():
        if name.startswith(prefix):
            if not str(path).startswith(folders):
                return f"<{name}> belongs to {' and '.join(folders)}"
            return None
    if STANDARD.match(name):
        return None
    if not SYSTEM.match(name):
        return f"<{name}> is neither a standard header nor a known dependency"
    if path.suffix == ".h" and module_of(path):
        return f"<{name}> is a system header; include it in a .cpp file"
    return None


def check_quoted(path, name):
    module = module_of(path)
    if name.startswith("waybill/"):
        target = name.split("/")[1]
        if not (ROOT / "include" / name).is_file():
            return f'"{name}" does not exist'
        if module and target != module and target not in modules()[module]:
            allowed = ", ".join(sorted(modules()[module])) or "only std"
            return f'"{name}": {module} may include {allowed}'
        return None
    if str(path).startswith("include/"):
        return f'"{name}": a public header includes "waybill/MODULE/x.h" or <x>'
    if module in FOLDERS and name.startswith("../"):
        mine = path.parts[2]
        target = pathlib.Path(os.path.normpath(path.parent / name)).parts
        other = target[2] if target[:2] == path.parts[:2] and len(target) > 3 else ""
        order = FOLDERS[module]
        # A folder within a folder, experts/nodes, takes what lies above it.
        above = other == mine and len(target) < len(path.parts)
        inner = INNER_FOLDERS.get(path.parent.parent.as_posix(), ())
        if other == mine and path.parent.name in inner and not above:
            mine, other, order = path.parent.name, target[3], inner
        if not above:
            allowed = other in order and mine in order and order.index(other) < order.index(mine)
            if not allowed:
                return f'"{name}": {module}/{mine} may not include {other or name}'
        return None if (ROOT / path.parent / name).is_file() else f'"{name}" does not exist'
    # A private header of src, "transport/peer_status.h": of the own module, of one that may be
    # included, or of any for tests.
    if (ROOT / "src" / name).is_file() and ".." not in name and name.split("/")[0] in modules():
        target = name.split("/")[0]
        if module and target != module and target not in modules()[module]:
            allowed = ", ".join(sorted(modules()[module])) or "only std"
            return f'"{name}": {module} may include {allowed}'
        return None
    inner = INNER_FOLDERS.get(path.parent.as_posix(), ())
    if name.split("/")[0] in inner:
        return f'"{name}": {path.parent.name} may not include {name.split("/")[0]}'
    of_tests = [ROOT / "tests"] if path.parts[0] in ("tests", "bench") else []
    bases = [ROOT / path.parent, *of_tests]
    if ".." in name or not any((base / name).is_file() for base in bases):
        return f'"{name}" is not a file beside this one'
    return None


def check_file(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix in (".h", ".cuh") and not re.search(r"^#pragma once$", text, re.MULTILINE):
        yield f"{path}:1: no #pragma once"
    for match in INCLUDE.finditer(text):
        kind, name = match.groups()
        problem = (check_angle if kind == "<" else check_quoted)(path, name)
        if problem:
            yield f"{path}:{text.count(chr(10), 0, match.start(2)) + 1}: {problem}"


def check_lists(module):
    """Every source and public header of a module stands in its CMakeLists.txt."""
    cmake = ROOT / "src" / module / "CMakeLists.txt"
    listed = set(re.findall(r"[\w/]+\.(?:cpp|h)\b", cmake.read_text(encoding="utf-8")))
    for folder, pattern in (("src", "*.cpp"), ("include/waybill", "*.h")):
        for path in sorted((ROOT / folder / module).glob(pattern)):
            if path.name not in listed:
                yield f"{path.relative_to(ROOT)}:1: not named in src/{module}/CMakeLists.txt"


def check_page():
    """The column of docs/architecture.md says what CMake does."""
    page = ROOT / "docs/architecture.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        row = re.match(r"\| `(\w+)` \|.*\| ([\w, ]+) \|$", line)
        if row and modules().get(row[1]) and row[1] != "cli":
            said = set(row[2].replace(",", " ").split())
            if said != modules()[row[1]]:
                depends = ", ".join(sorted(modules()[row[1]]))
                yield f"docs/architecture.md:{number}: {row[1]} may include {depends}"


def check_for_users():
    """Every public header comes with one of the headers for users."""
    folder = ROOT / "include"
    reached, left = set(), list(FOR_USERS)
    while left:
        name = left.pop()
        if name not in reached and (folder / name).is_file():
            reached.add(name)
            text = (folder / name).read_text(encoding="utf-8")
            left += [included for kind, included in INCLUDE.findall(text) if kind == '"']
    for path in sorted(folder.rglob("*.h")):
        if path.relative_to(folder).as_posix() not in reached:
            yield f"{path.relative_to(ROOT)}:1: comes with none of {', '.join(FOR_USERS)}"


def main():
    problems = [*check_for_users(), *check_page()]
    num_files = 0
    for folder in ("include", "src", "python", "tests", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                num_files += 1
                path = path.relative_to(ROOT)
                module = module_of(path)
                if module and module not in modules():
                    problems.append(f"{path}:1: {module} is not a module")
                else:
                    problems += check_file(path)
    for module in modules():
        problems += check_lists(module)
    print("\n".join(problems) if problems else f"includes: {num_files} files keep the rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
