"""``python -m waybill``: the program ``waybill`` that comes with the package, and three commands.

``selftest`` checks this installation, ``bench`` measures. ``cmake-dir`` prints the folder in which
CMake finds the library in C++: ``cmake -Dwaybill_DIR="$(python -m waybill cmake-dir)"``. ``doctor``
gets what Python knows.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import NoReturn

from . import _core

_FOLDER = os.path.dirname(os.path.abspath(_core.__file__))


def program() -> str:
    """Path of the program, in the folder of the package."""
    path = os.path.join(_FOLDER, "bin", "waybill")
    if not os.access(path, os.X_OK):
        sys.exit("waybill: the program is not installed beside the package; run pip install again")
    return path


def main() -> NoReturn:
    """Checks this installation, or becomes the program with this process's arguments."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["selftest"]:
        from . import _selftest

        sys.exit(_selftest.main(arguments[1:]))
    if arguments == ["cmake-dir"]:
        print(os.path.join(_FOLDER, "lib", "cmake", "waybill"))
        sys.exit(0)
    if arguments[:1] == ["bench"]:
        from . import _bench

        sys.exit(_bench.main(arguments[1:]))
    path = program()
    if arguments[:1] == ["doctor"]:
        arguments += _facts()
    os.execv(path, ["waybill", *arguments])


def _facts() -> list[str]:
    """Facts for the program: versions of Python and torch; the NCCL that came with torch."""
    found = ["--python", sys.version.split()[0]]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found += ["--torch", importlib.metadata.version("torch")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or []:
        library = os.path.join(folder, "nccl", "lib", "libnccl.so.2")
        if os.path.exists(library):
            os.environ.setdefault("WAYBILL_NCCL_LIBRARY", library)
    return found


if __name__ == "__main__":
    main()
