#!/usr/bin/env python3
"""Makes Waybill a backend of a checkout of CollectiveX, for its own launcher.

    python bench/collectivex/add_backend.py CHECKOUT  # InferenceX, or its folder CollectiveX
    cd CHECKOUT/experimental/CollectiveX && python -m unittest discover tests

CHECKOUT is changed: git diff shows how. Its tests then cover Waybill too; they need no GPU.
Exit: 0 done, 1 the checkout is of another version, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
EIGHT_GPUS = [8]
PREPARE = """    waybill)
      python3 -c "import waybill.torch" || return 1
      ;;
"""
IMPORT = """    elif args.backend == "waybill":
        from ep_waybill import WaybillBackend as Backend
"""
# File: (what stands there, what becomes of it). Each must be there once.
CHANGES = {
    "sweep_matrix.py": [
        (r"^(BACKEND_PRECISIONS = \{\n)", r'\1    "waybill": ("bf16", "fp8"),\n'),
    ],
    "bench/run_ep.py": [
        (r'(choices=\["deepep-v2",)', r'\1 "waybill",'),
        (r'(args\.backend in \("mori",)', r'\1 "waybill",'),
        (r"^(    else:\n        from ep_deepep_v2 )", IMPORT + r"\1"),
    ],
    "runtime/prepare_backend.sh": [(r"^(    mori\)\n)", PREPARE + r"\1")],
    "launchers/launch_single-slurm.sh": [(r"^(  deepep-v2) \|", r"\1 | waybill |")],
    "launchers/launch_gb-nv.sh": [(r"^(  deepep-v2) \|", r"\1 | waybill |")],
}


class OtherVersion(Exception):
    """The checkout lacks what is to be changed."""


def checkout_folder(given: Path) -> Path:
    inside = given / "experimental" / "CollectiveX"
    folder = inside if inside.is_dir() else given
    if not (folder / "bench" / "ep_harness.py").is_file():
        raise ValueError(f"{folder} is no checkout of CollectiveX: bench/ep_harness.py")
    return folder


def changed_text(name: str, text: str) -> str:
    for pattern, replacement in CHANGES[name]:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise OtherVersion(f"{name}: {pattern} is there {count} times")
    return text


def changed_platforms(text: str) -> str:
    """The table of platforms, with Waybill where DeepEP runs on a node of eight NVIDIA GPUs."""
    table = json.loads(text)
    table["backend_maturity"]["waybill"] = "candidate"
    for platform in table["platforms"].values():
        if platform["gpus_per_node"] == 8 and "deepep-v2" in platform["backends"]:
            platform["backends"]["waybill"] = EIGHT_GPUS
            platform.setdefault("ll_backends", {})["waybill"] = EIGHT_GPUS
    return json.dumps(table, indent=2) + "\n"


def add_backend(folder: Path) -> list[str]:
    """Changes the checkout, or nothing where a file is not as expected; the names of files."""
    if (folder / "bench" / "ep_waybill.py").exists():
        raise OtherVersion("bench/ep_waybill.py is there already")
    texts = {name: changed_text(name, (folder / name).read_text()) for name in CHANGES}
    platforms = "configs/platform_config.json"
    texts[platforms] = changed_platforms((folder / platforms).read_text())
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name, place in (("ep_waybill.py", "bench"), ("test_waybill.py", "tests")):
        shutil.copy(FOLDER / name, folder / place)
        texts[f"{place}/{name}"] = ""
    return list(texts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    try:
        folder = checkout_folder(parser.parse_args().checkout)
    except ValueError as error:
        parser.error(str(error))
    try:
        names = add_backend(folder)
    except OtherVersion as error:
        print(f"add_backend: nothing changed: {error}", file=sys.stderr)
        return 1
    print(f"changed in {folder}:", *names, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
