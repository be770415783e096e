#!/usr/bin/env python3
"""Looks which code for devices is in compiled files: machine code for every architecture that was
asked for, and PTX of the last one alone. PTX of an older one would run on newer devices, too, but
without what these can do more.

    check_device_code.py ARCHITECTURES FILE...     such as "80-real;90-real;100-real;120" library.a

Reads the fat binaries that nvcc puts into objects, archives and programs; needs no tool of CUDA.
Prints one line for each offence and exits 1 when there is one.
"""

import pathlib
import struct
import sys

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, SASS = 1, 2


def fat_binaries(data):
    """Of each the set of (kind, architecture)."""
    at = data.find(MAGIC)
    while at >= 0:
        _, version, head, size = struct.unpack_from("<IHHQ", data, at)
        end = at + head + size
        if version != 1 or end > len(data):  # not one: these four bytes are something else
            at = data.find(MAGIC, at + 4)
            continue
        codes = set()
        at += head
        while at < end:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
            codes.add((kind, struct.unpack_from("<I", data, at + 28)[0]))
            at += head + size
        yield codes
        at = data.find(MAGIC, end)


def expected(architectures):
    """ "90-real" is machine code, "120" that and PTX; the letter of "90a" is not in the number."""
    codes = set()
    for text in architectures.split(";"):
        number = int("".join(c for c in text.removesuffix("-real") if c.isdigit()))
        codes.add((SASS, number))
        if number >= 90 and not text.endswith(("-real", "a", "f")):
            codes.add((PTX, number))
    return codes


def text_of(codes):
    names = {PTX: "PTX", SASS: "code"}
    return ", ".join(f"{names.get(kind, kind)} {arch}" for kind, arch in sorted(codes)) or "nothing"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    wanted = expected(sys.argv[1])
    offences = 0
    found = 0
    for name in sys.argv[2:]:
        for codes in fat_binaries(pathlib.Path(name).read_bytes()):
            found += 1
            if codes == wanted:
                continue
            offences += 1
            print(f"{name}: {text_of(codes)}; expected {text_of(wanted)}")
    if found == 0:
        sys.exit(f"device code: none in {' '.join(sys.argv[2:])}")
    if offences:
        sys.exit(1)
    print(f"device code: {found} fat binaries have {text_of(wanted)}")


if __name__ == "__main__":
    main()
