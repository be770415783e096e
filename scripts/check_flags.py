#!/usr/bin/env python3
"""Finds compile commands that let the compiler fuse a product with a sum.

`check_flags.py BUILD_DIRECTORY...` reads the compile_commands.json in each. Every file of the
project must be compiled with -ffp-contract=off, and nothing behind it may say otherwise: the same
seed gives the same plan on any machine. Prints one line for each offence and exits 1 when there is
one.
"""

import json
import pathlib
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def host_options(arguments):
    """The options that the host's compiler sees: nvcc hands on what follows -Xcompiler."""
    if pathlib.Path(arguments[0]).name != "nvcc":
        return arguments
    options = []
    for option, value in zip(arguments, [*arguments[1:], ""]):
        if option in ("-Xcompiler", "--compiler-options"):
            options += value.split(",")
        elif option.startswith(("-Xcompiler=", "--compiler-options=")):
            options += option.partition("=")[2].split(",")
    return options


def contracts(arguments):
    """Whether a product may be fused: the last option about it counts."""
    may = True
    for option in host_options(arguments):
        if option.startswith("-ffp-contract="):
            may = option != "-ffp-contract=off"
        elif option in ("-ffast-math", "-Ofast", "-ffp-model=fast"):
            may = True
    return may


def commands(build):
    """(file, arguments) of the project's own files."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = (pathlib.Path(entry["directory"]) / entry["file"]).resolve()
        arguments = entry.get("arguments") or shlex.split(entry["command"])
        while pathlib.Path(arguments[0]).name == "ccache":
            arguments = arguments[1:]
        joined = file.parent.name == "joined"  # WAYBILL_JOIN: files of the project, ten at a time
        if file.is_relative_to(ROOT) and (joined or not file.is_relative_to(ROOT / "build")):
            yield file, arguments


def main():
    builds = [pathlib.Path(argument) for argument in sys.argv[1:]]
    if not builds:
        sys.exit("usage: check_flags.py BUILD_DIRECTORY...")
    checked = 0
    offences = []
    for build in builds:
        for file, arguments in commands(build):
            checked += 1
            if contracts(arguments):
                offences.append(f"{file.relative_to(ROOT)}: no -ffp-contract=off in {build}")
    print("\n".join(sorted(offences)) or f"flags: {checked} files are compiled without contraction")
    sys.exit(1 if offences or not checked else 0)


if __name__ == "__main__":
    main()
