#!/usr/bin/env python3
"""Holds files of code to 700 lines. (Functions: 60 lines, by clang-tidy.)"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_LINES = 700
FOLDERS = ("include", "src", "python", "tests", "bench", "examples", "scripts", "cmake")
SUFFIXES = (".h", ".cpp", ".cuh", ".cu", ".py", ".sh", ".cmake")


def main():
    sizes = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            code = path.suffix in SUFFIXES or path.name == "CMakeLists.txt"
            if code and path.is_file():
                lines = len(path.read_text(encoding="utf-8").splitlines())
                sizes.append((lines, path.relative_to(ROOT)))
    long_files = [(lines, path) for lines, path in sorted(sizes) if lines > MAX_LINES]
    for lines, path in long_files:
        print(f"{path}:1: {lines} lines, at most {MAX_LINES}")
    if not long_files:
        print(f"sizes: {len(sizes)} files, the longest {max(sizes)[0]} lines ({max(sizes)[1]})")
    return 1 if long_files else 0


if __name__ == "__main__":
    sys.exit(main())
