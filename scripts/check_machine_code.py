#!/usr/bin/env python3
"""Compares the machine code of each kernel with scripts/machine_code.json: its .text, how many
instructions it has, registers, shared memory and spills, for sm_90a and sm_100.

    check_machine_code.py            builds in build/machine_code; exits 1 where a kernel differs
      --write                        writes the table: what changed belongs in the commit's message
      --objects FOLDER               of what is compiled already
      --jobs N                       compiles so many files at a time (2)

Needs nvcc and cuobjdump (CUDA's, triton's, or PyPI's nvidia-cuda-cuobjdump); no GPU. The code is
that of one compiler: the table names it, and another one is an error of its own.
"""

import argparse
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = "scripts/machine_code.json"
ARCHITECTURES = "90a-real;100-real"
FIELDS = ("text", "instructions", "registers", "shared", "spills")

# What nvcc calls the anonymous namespace of a file, after its length: with hashes of path and text.
ANONYMOUS = re.compile(r"(\d+)(?=_GLOBAL__N__)")
ARCH = re.compile(r"^arch = (sm_\w+)", re.MULTILINE)
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* (0x[0-9a-f]{16}) \*/", re.MULTILINE
)
CODE = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")
USAGE = re.compile(r"Function (\S+?):\s*\n\s*REG:(\d+) STACK:\d+ SHARED:(\d+)")
SPILL = re.compile(r"(?:@!?U?P\w+ )?(?:LDL|STL)\b")


def plain_name(name):
    """A kernel's name without what depends on the file that it stands in."""
    parts, at = [], 0
    for match in ANONYMOUS.finditer(name):
        parts += [name[at : match.start()], "12_GLOBAL__N_1"]
        at = match.end() + int(match[1])
    return "".join([*parts, name[at:]])


def sections(text):
    """(architecture, text) of each piece of machine code in what cuobjdump prints."""
    marks = [*ARCH.finditer(text)]
    for mark, after in zip(marks, [*marks[1:], None]):
        yield mark[1], text[mark.end() : after.start() if after else len(text)]


def kernels_in(sass, usage):
    """(architecture, name, entry of the table) of the kernels of an object."""
    used = {}
    for arch, text in sections(usage):
        for name, registers, shared in USAGE.findall(text):
            used[arch, name] = int(registers), int(shared)
    for arch, text in sections(sass):
        marks = [*FUNCTION.finditer(text)]
        for mark, after in zip(marks, [*marks[1:], None]):
            body = text[mark.end() : after.start() if after else len(text)]
            if (arch, mark[1]) not in used:
                continue  # a function that kernels call
            instructions = [found[1] for found in INSTRUCTION.finditer(body)]
            registers, shared = used[arch, mark[1]]
            yield (
                arch,
                plain_name(mark[1]),
                {
                    "text": hashlib.sha256("".join(CODE.findall(body)).encode()).hexdigest()[:12],
                    "instructions": sum(not i.startswith("NOP") for i in instructions),
                    "registers": registers,
                    "shared": shared,
                    "spills": sum(bool(SPILL.match(i)) for i in instructions),
                },
            )


def table_of(found):
    """{architecture: {name: entry}}; kernels of one name are numbered by their code."""
    table = {}
    for arch, name, entry in sorted(found, key=lambda item: (*item[:2], item[2]["text"])):
        kernels = table.setdefault(arch, {})
        number, full = 1, name
        while full in kernels:
            number += 1
            full = f"{name} #{number}"
        kernels[full] = entry
    return table


def differences(old, new):
    """A line for each kernel that is not as the table says."""
    for arch in sorted({*old, *new}):
        was, now = old.get(arch, {}), new.get(arch, {})
        for name in sorted({*was, *now}):
            if name not in now:
                yield f"{arch} {name}: gone"
            elif name not in was:
                yield f"{arch} {name}: new"
            elif was[name] != now[name]:
                changed = [
                    f"{field} {was[name][field]} -> {now[name][field]}"
                    for field in FIELDS
                    if was[name][field] != now[name][field]
                ]
                yield f"{arch} {name}: {', '.join(changed)}"


def find_tool(name):
    """CUDA's program, or None; triton brings cuobjdump along."""
    site = pathlib.Path(sysconfig.get_path("purelib"))
    places = [shutil.which(name), f"/usr/local/cuda/bin/{name}"]
    places += [
        folder / f"triton/backends/nvidia/bin/{name}" for folder in map(pathlib.Path, sys.path)
    ]
    places += [*site.glob(f"nvidia/*/bin/{name}")]
    places += [*ROOT.glob(f"build/venv/lib/python*/site-packages/triton/**/bin/{name}")]
    return next((str(place) for place in places if place and pathlib.Path(place).is_file()), None)


def tool(name):
    """The same; exits without it."""
    found = find_tool(name)
    if found is None:
        sys.exit(f"machine code: no {name} here; pip install nvidia-cuda-{name}")
    return found


def compiler():
    said = subprocess.run([tool("nvcc"), "--version"], capture_output=True, text=True).stdout
    return re.search(r"V[\d.]+", said)[0]


def build(jobs):
    """Compiles the sources for devices, and nothing else. @return where the objects are"""
    folder = ROOT / "build" / "machine_code"
    subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "--log-level=WARNING",
         "-DCMAKE_BUILD_TYPE=Release", "-DWAYBILL_CUDA=ON", "-DWAYBILL_JOIN=OFF",
         "-DWAYBILL_CLI=OFF", "-DWAYBILL_TESTS=OFF", "-DWAYBILL_EXAMPLES=OFF",
         f"-DCMAKE_CUDA_COMPILER={tool('nvcc')}",
         f"-DWAYBILL_CUDA_ARCHITECTURES={ARCHITECTURES}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    listed = subprocess.run(
        ["ninja", "-C", folder, "-t", "targets", "all"], capture_output=True, text=True, check=True
    ).stdout
    targets = re.findall(r"^(src/cuda/\S+\.cu\.o):", listed, re.MULTILINE)
    if not targets:
        sys.exit("machine code: the build has no sources for devices")
    subprocess.run(
        ["ninja", "-C", folder, f"-j{jobs}", *targets], check=True, stdout=subprocess.DEVNULL
    )
    return folder


def read_objects(folder):
    cuobjdump, found = tool("cuobjdump"), []
    for path in sorted(folder.rglob("*.cu.o")):
        said = [
            subprocess.run([cuobjdump, option, path], capture_output=True, text=True).stdout
            for option in ("-sass", "-res-usage")
        ]
        found += kernels_in(*said)
    if not found:
        sys.exit(f"machine code: no kernels in {folder}")
    return table_of(found)


def text_of(version, table):
    """JSON with a line per kernel."""
    parts = []
    for arch, kernels in sorted(table.items()):
        lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in kernels.items())
        parts.append(f'  "{arch}": {{\n{lines}\n  }}')
    return f'{{\n  "nvcc": {json.dumps(version)},\n' + ",\n".join(parts) + "\n}\n"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--objects", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(arguments)
    path, version = ROOT / TABLE, compiler()
    tool("cuobjdump")  # before the compiler takes its minutes
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"nvcc": version}
    made_by = old.pop("nvcc")
    if made_by != version and not given.write:
        sys.exit(f"machine code: the table is of nvcc {made_by}, here is {version}")
    new = read_objects(given.objects or build(given.jobs))
    changed = [*differences(old, new)] if old else []
    if not old and not given.write:
        sys.exit(f"machine code: no table {TABLE}; --write makes it")
    count = sum(map(len, new.values()))
    print("\n".join(changed) or f"machine code: {count} kernels as in the table")
    if given.write:
        path.write_text(text_of(version, new), encoding="utf-8")
        print(f"machine code: {count} kernels of nvcc {version} written, {len(changed)} changed")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
