"""``python -m waybill``: the program ``waybill`` that comes with the package, ``selftest``, and
``bench``.

``doctor`` gets what Python knows.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from typing import NoReturn


def program() -> str:
    """Path of the program: where this package's installer put it, else the one on PATH."""
    for file in importlib.metadata.files("waybill") or []:
        if file.name == "waybill" and file.parent.name in ("bin", "Scripts"):
            path = os.path.normpath(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    found = shutil.which("waybill")
    if found is None:
        sys.exit("waybill: the program is not installed beside the package; run pip install again")
    return found


def main() -> NoReturn:
    """Checks this installation, or becomes the program with this process's arguments."""
    if sys.argv[1:2] == ["selftest"]:
        from . import _selftest

        sys.exit(_selftest.main(sys.argv[2:]))
    if sys.argv[1:2] == ["bench"]:
        from . import _bench

        sys.exit(_bench.main(sys.argv[2:]))
    path = program()
    arguments = sys.argv[1:]
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
