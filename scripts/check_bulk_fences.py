#!/usr/bin/env python3
"""Finds shared memory that lanes read and a bulk copy fills again without a fence between.

    check_bulk_fences.py                          looks at the sources
    check_bulk_fences.py --machine-code FILE...   looks at compiled kernels: objects, libraries

No test on Hopper can fail for a missing fence: wrong rows were seen on Blackwell alone. So the
sources say of each bulk load who reads it (bulk_load_to_read: lanes; bulk_load_to_copy: the copy
engine alone), lanes give such memory back with release_stage(), and every kernel of these sources
that loads in bulk has that fence in its machine code, for sm_90 and later.

Prints one line per offence and exits 1 if there is one; 3 if there is no cuobjdump.
"""

import itertools
import pathlib
import re
import subprocess
import sys

from check_machine_code import find_tool

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRIMITIVES = "src/cuda/device/bulk.cuh"
#: Kernels whose lanes read what bulk copies bring, as their names begin.
READING_KERNELS = ("combine_kernel", "kv_gradient_kernel")

LOAD = "UBLKCP.S.G"
FENCE = ("MEMBAR.ALL.CTA", "FENCE.VIEW.ASYNC.S")  # of release_stage(), one right after the other


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def source_offences(path, text):
    """What is wrong in one source of the module cuda."""
    code = without_comments(text)
    for asm in ("cp.async.bulk", "fence.proxy"):
        if f'"{asm}' in code:
            yield f"{path}: {asm} stands in {PRIMITIVES} alone; call its functions"
    if "bulk_load_to_read(" in code and "release_stage()" not in code:
        yield f"{path}: lanes read what bulk_load_to_read() brings: release_stage() is missing"
    if "bulk_load_to_copy(" in code and "bulk_store(" not in code:
        yield (
            f"{path}: bulk_load_to_copy() without bulk_store(): if lanes read it, it is "
            "bulk_load_to_read()"
        )


def check_sources():
    offences = []
    loads = 0
    for path in sorted((ROOT / "src").rglob("*.cu*")):
        name = path.relative_to(ROOT).as_posix()
        if name == PRIMITIVES:
            continue
        text = path.read_text(encoding="utf-8")
        loads += "bulk_load_to_" in text
        offences += source_offences(name, text)
    if loads == 0:
        offences.append("no source calls bulk_load_to_read() or bulk_load_to_copy()")
    return offences, f"{loads} sources load in bulk"


def kernels(sass):
    """(architecture, name, instructions) of each kernel in what cuobjdump -sass prints."""
    architecture, name, instructions = "", "", []
    for line in sass.splitlines():
        if "arch = " in line:
            architecture = line.split("arch = ")[1].strip()
        elif "Function : " in line:
            if name:
                yield architecture, name, instructions
            name, instructions = line.split("Function : ")[1].strip(), []
        else:
            found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
            if found:
                instructions.append(found.group(1))
    if name:
        yield architecture, name, instructions


def has_fence(instructions):
    return any(
        first.startswith(FENCE[0]) and second.startswith(FENCE[1])
        for first, second in itertools.pairwise(instructions)
    )


def machine_code_offences(sass):
    """(offences, number of kernels looked at)"""
    offences, looked_at = [], 0
    for architecture, name, instructions in kernels(sass):
        reads = any(f"{len(kernel)}{kernel}" in name for kernel in READING_KERNELS)
        if not reads or not any(i.startswith(LOAD) for i in instructions):
            continue
        looked_at += 1
        if not has_fence(instructions):
            offences.append(f"{name} ({architecture}): {' and '.join(FENCE)} are missing")
    return offences, looked_at


def check_machine_code(files):
    tool = find_tool("cuobjdump")
    if tool is None:
        print("bulk fences: SKIPPED: no cuobjdump, so NO machine code was looked at")
        sys.exit(3)
    offences, looked_at = [], 0
    for file in files:
        sass = subprocess.run([tool, "-sass", file], check=True, capture_output=True, text=True)
        wrong, number = machine_code_offences(sass.stdout)
        offences += wrong
        looked_at += number
    if looked_at == 0:
        offences.append(f"no kernel of {', '.join(READING_KERNELS)} loads in bulk")
    return offences, f"{looked_at} kernels have their fence"


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--machine-code"] and len(arguments) > 1:
        offences, summary = check_machine_code(arguments[1:])
    elif not arguments:
        offences, summary = check_sources()
    else:
        sys.exit(__doc__)
    for offence in offences:
        print(offence)
    if offences:
        sys.exit(1)
    print(f"bulk fences: {summary}")


if __name__ == "__main__":
    main()
