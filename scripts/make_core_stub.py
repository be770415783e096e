#!/usr/bin/env python3
"""Writes python/waybill/_core.pyi, the types of the compiled part, from the installed module.

build/venv/bin/python scripts/make_core_stub.py           writes it
build/venv/bin/python scripts/make_core_stub.py --check   exits 1 where it differs
"""

import argparse
import pathlib
import re
import subprocess
import sys

from nanobind.stubgen import StubGen

from waybill import _core

STUB = pathlib.Path(__file__).resolve().parent.parent / "python" / "waybill" / "_core.pyi"
HEAD = "# Written by scripts/make_core_stub.py. The compiled part is private to the package.\n"


class CoreStub(StubGen):
    """nanobind's, which knows no functions in a guard (python/bindings/errors.cpp)."""

    def put(self, value, name=None, parent=None):
        super().put(getattr(value, "__wrapped__", value), name, parent)


#: What nanobind writes, and what type checkers take in its place.
CHANGES = (
    (r"^version: .*", "version: str"),  # how and of which release the module was built
    (r"^cuda_version: .*", "cuda_version: str | None"),
    (r"^has_cuda: .*", "has_cuda: bool"),
    (r"^(\w+: \w+) = .*", r"\1"),
    (r"Annotated\[NDArray.*?dict\((?:\([^)]*\)|[^()])*\)\]", "NDArray[Any]"),
    (r"(?<!import )\bNDArray\b(?!\[)", "NDArray[Any]"),
    (r"\bobject\b", "Any"),
    (r"__eq__\(self, arg: \w+", "__eq__(self, arg: object"),
    (r"\btuple\b(?!\[)", "tuple[Any, ...]"),
    (r"\blist\b(?!\[)", "list[Any]"),
    (r"\bdict\b(?![\[(])", "dict[str, Any]"),
    (r"\bdict\[str, Any\]\b(?=\()", "dict"),
    (r"^from typing import .*", "from typing import Any, overload"),
    (r"(?<=: )Callable\b(?!\[)", "Callable[..., Any]"),
    (r"^import numpy\n", ""),
)


def core_stub():
    stub = CoreStub(_core, include_docstrings=False, quiet=True)
    stub.put(_core)
    text = stub.get()
    for written, wanted in CHANGES:
        text = re.sub(written, wanted, text, flags=re.MULTILINE)
    ruff = [str(pathlib.Path(sys.executable).parent / "ruff"), "format", "--stdin-filename", STUB]
    return subprocess.run([*ruff, "-"], input=HEAD + text, check=True, stdout=-1, text=True).stdout


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    text = core_stub()
    if parser.parse_args().check:
        if STUB.read_text() == text:
            return 0
        print(f"{STUB} differs from the module: run scripts/make_core_stub.py")
        return 1
    STUB.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
