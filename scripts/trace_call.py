#!/usr/bin/env python3
"""Lists the files on the way of a call, from Python to the device.

    trace_call.py CALL...          experts, sequences, attention, or all; ranks are threads
      --host BUILD                 a build that counts lines (scripts/coverage.sh --build), for the
                                   files of C++ with the lines that ran
      --count                      the numbers alone

Python: the files and functions of rank 0 that ran in the second such call, by sys.settrace. Host:
the files of all ranks, by gcov. Kernels: the files that the call's kernels for GPUs include,
whichever world it ran on, as far as they are in src/cuda.
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

from coverage_table import counted_lines

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# The sources of the kernels that each call starts on one node.
KERNELS = {
    "experts": (
        "src/cuda/experts/route.cu",
        "src/cuda/experts/rows.cu",
    ),
    "sequences": ("src/cuda/sequence/dispatch_tma.cu",),
    "attention": ("src/cuda/sequence/dispatch_tma.cu", "src/cuda/sequence/kv_gradient.cu"),
}
WORLD_SIZE = 2


# The calls, each with what has to be there before. They import waybill when they run.


def experts(world):
    """Yields after each dispatch."""
    import torch

    from waybill.torch.moe import EPAll2AllLayer

    layer = EPAll2AllLayer(world, 8, 16, 2, world.rank, 4, 2, 2, torch.float32)
    tokens, ids = torch.ones(8, 16), torch.arange(16).reshape(8, 2) % 4
    yield
    while True:
        layer.dispatch(tokens, ids)
        yield


def sequences(world):
    import torch

    import waybill
    import waybill.torch as wt

    routing = waybill.plan([30, 20, 14], 2, 32, block_tokens=8).to_routing()
    dispatcher = wt.SequenceDispatcher(world)
    plan = dispatcher.plan_dispatch((routing.fwd_q, wt.TensorFormat(torch.float32, (4,))))
    rows = torch.ones(32, 4)
    yield
    while True:
        dispatcher.dispatch(plan, rows)
        yield


def attention(world):
    import torch

    import waybill.torch as wt

    attend = wt.ContextParallelAttention(world, 2, 1, 8, dtype=torch.float32, block_tokens=8)
    plan = attend.plan(attend.gather([20, 12] if world.rank else [40]))
    rows = plan.home_tokens[world.rank]
    q, k, v = (torch.ones(rows, heads, 8, requires_grad=True) for heads in (2, 1, 1))
    yield
    while True:
        attend(plan, q, k, v).sum().backward()
        yield


CALLS = {"experts": experts, "sequences": sequences, "attention": attention}


class PythonTrace:
    """The functions of the package that run on one thread."""

    def __init__(self, package):
        self.package, self.functions = str(package), collections.defaultdict(list)

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.package):
            name = os.path.relpath(code.co_filename, self.package)
            if not code.co_name.startswith("<") and code.co_name not in self.functions[name]:
                self.functions[name].append(code.co_name)

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


class Counters:
    """Those that gcov has put into the compiled part; its functions are hidden there, so that nm
    says where they lie.
    """

    def __init__(self, library):
        symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        name = str(pathlib.Path(library).resolve())
        base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(name))
        places = {line.split()[2]: int(line.split()[0], 16) for line in symbols.splitlines()
                  if " t __gcov_" in line or " T __gcov_" in line}  # fmt: skip
        if "__gcov_dump" not in places:
            sys.exit(f"trace_call: {library} counts no lines: see scripts/coverage.sh")
        function = ctypes.CFUNCTYPE(None)
        self.reset, self.dump = (function(base + places[f"__gcov_{n}"]) for n in ("reset", "dump"))


def run_call(name, counters, out):
    """Runs a call twice and writes down what the second one ran. In a process of its own."""
    import waybill
    import waybill.torch as wt

    package = pathlib.Path(waybill.__file__).parent
    meet = threading.Barrier(WORLD_SIZE)
    trace = PythonTrace(package)
    core = Counters(waybill._core.__file__) if counters else None

    def body(world):
        call = CALLS[name](world)
        next(call)
        next(call)
        meet.wait()
        if world.rank == 0:
            if core:
                core.reset()
            meet.wait()
            with trace:
                next(call)
        else:
            meet.wait()
            next(call)
        meet.wait()
        if world.rank == 0 and core:
            core.dump()
            core.reset()
        meet.wait()

    wt.run_threads(WORLD_SIZE, body)
    pathlib.Path(out).write_text(json.dumps(trace.functions), encoding="utf-8")


def core_of(build):
    """The compiled part: of a build, or of the installation."""
    folder = pathlib.Path(build, "python") if build else None
    if folder is None:
        import importlib.util

        folder = pathlib.Path(importlib.util.find_spec("waybill").origin).parent
    return next(iter(sorted(folder.glob("_core*.so")))).resolve()


def library_folder(core):
    """Where the shared library lies that an installed extension loads; "" if there is none."""
    found = sorted(core.parent.rglob("libwaybill.so*"))
    return str(found[0].parent) if found else ""


def traced(name, build):
    """({file: functions} of Python, {file: lines that ran} of C++)"""
    with tempfile.TemporaryDirectory() as scratch:
        package = pathlib.Path(scratch, "site", "waybill")
        package.mkdir(parents=True)
        for path in (ROOT / "python" / "waybill").iterdir():
            (package / path.name).symlink_to(path)
        core = core_of(build)
        (package / core.name).symlink_to(core)
        out = pathlib.Path(scratch, "python.json")
        env = {
            **os.environ,
            "PYTHONPATH": str(package.parent),
            "LD_LIBRARY_PATH": library_folder(core),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GCOV_PREFIX": f"{scratch}/counters",
        }
        command = [sys.executable, __file__, "--run", name, str(out)]
        subprocess.run([*command, *(["--host", build] if build else [])], check=True, env=env)
        python = json.loads(out.read_text(encoding="utf-8"))
        lines = lines_of(pathlib.Path(scratch, "counters")) if build else {}
    return {f"python/waybill/{file}": names for file, names in python.items()}, lines


def lines_of(folder):
    """{file: lines that ran}, from the counters in a folder and the notes that the build made."""

    def notes_of(counters):
        return pathlib.Path("/", counters.relative_to(folder)).with_suffix(".gcno")

    ran = {f: sum(lines.values()) for f, lines in counted_lines(folder, notes_of).items()}
    return {file: count for file, count in ran.items() if count}


def closure(files):
    """The files in src/cuda that these include, and they themselves."""
    reached, left = set(), [pathlib.Path(file) for file in files]
    while left:
        path = left.pop()
        if path in reached:
            continue
        if not (ROOT / path).is_file():
            sys.exit(f"trace_call: {path} is not there: KERNELS in this script names it")
        reached.add(path)
        for name in INCLUDE.findall((ROOT / path).read_text(encoding="utf-8")):
            for base in (path.parent, pathlib.Path("src"), pathlib.Path("include")):
                target = pathlib.Path(os.path.normpath(base / name))
                if (ROOT / target).is_file():
                    if target.parts[:2] == ("src", "cuda"):
                        left.append(target)
                    break
    return sorted(path.as_posix() for path in reached)


def report(name, build, only_counts):
    python, host = traced(name, build)
    kernels = closure(KERNELS[name])
    layers = [
        ("Python", {file: ", ".join(names) for file, names in python.items()}),
        ("bindings", {f: f"{n} lines" for f, n in host.items() if f.startswith("python/")}),
        ("host", {f: f"{n} lines" for f, n in host.items() if not f.startswith("python/")}),
        ("kernels", dict.fromkeys(kernels, "")),
    ]
    if not build:
        layers = [layers[0], layers[3]]
    total = sum(len(files) for _, files in layers)
    counts = ", ".join(f"{len(files)} {layer}" for layer, files in layers)
    print(f"{name}: {total} files: {counts}")
    for layer, files in layers if not only_counts else ():
        print(f"  {layer}")
        for file, text in sorted(files.items()):
            print(f"    {file}" + (f"  ({text})" if text else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("calls", nargs="*", choices=[*CALLS, "all", []], metavar="CALL")
    parser.add_argument("--host", metavar="BUILD")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run_call(given.run[0], bool(given.host), given.run[1])
        return
    names = list(CALLS) if not given.calls or "all" in given.calls else given.calls
    for name in names:
        report(name, given.host, given.count)


if __name__ == "__main__":
    main()
