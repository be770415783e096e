#!/usr/bin/env python3
"""Holds files of code to 700 lines and functions in Python to 60, its signature and docstring not
counted. (Functions in C++: 60 lines, by clang-tidy.)"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_LINES = 700
MAX_FUNCTION_LINES = 60
FOLDERS = ("include", "src", "python", "tests", "bench", "examples", "scripts", "cmake")
SUFFIXES = (".h", ".cpp", ".cuh", ".cu", ".py", ".sh", ".cmake")


def functions(node, outer=""):
    """(full name, line, lines) of the functions in a piece of Python."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{outer}.{child.name}".lstrip(".")
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            has_docstring = ast.get_docstring(child, clean=False) is not None
            body = child.body[1:] if has_docstring else child.body
            yield name, child.lineno, child.end_lineno - body[0].lineno + 1 if body else 0
        yield from functions(child, name)


def long_functions(path, text):
    for name, line, lines in functions(ast.parse(text)):
        if lines > MAX_FUNCTION_LINES:
            yield f"{path}:{line}: {name}: {lines} lines, at most {MAX_FUNCTION_LINES}"


def main():
    sizes, problems = [], []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            code = path.suffix in SUFFIXES or path.name == "CMakeLists.txt"
            if code and path.is_file():
                text = path.read_text(encoding="utf-8")
                lines, path = len(text.splitlines()), path.relative_to(ROOT)
                sizes.append((lines, path))
                if lines > MAX_LINES:
                    problems.append(f"{path}:1: {lines} lines, at most {MAX_LINES}")
                if path.suffix == ".py":
                    problems += long_functions(path, text)
    longest = "sizes: {} files, the longest {} lines ({})".format(len(sizes), *max(sizes))
    print("\n".join(problems) or longest)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
