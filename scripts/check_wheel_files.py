#!/usr/bin/env python3
"""Looks into wheels and source distributions: what must be there, what must not, and how large.

`check_wheel_files.py [--cuda] FILE...` prints a line for each finding; exits 1 when there is one.
--cuda: wheels must have the GPU worlds and machine code, which cuobjdump lists where it is there.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_BYTES = 12 << 20
INSIDE = (
    "waybill/py.typed",
    "waybill/_core.pyi",
    "waybill/__main__.py",
    "waybill/bin/waybill",
    "waybill/lib/libwaybill.so",
    "waybill/lib/cmake/waybill/waybillConfig.cmake",
    "waybill/lib/cmake/waybill/waybillTargets.cmake",
    "waybill/include/waybill/plan.h",
    "waybill-{}.data/scripts/waybill",
    "waybill-{}.dist-info/sboms/waybill.cdx.json",
    "waybill-{}.dist-info/licenses/LICENSE",
    "waybill-{}.dist-info/licenses/NOTICE",
    "waybill-{}.dist-info/licenses/THIRD_PARTY.md",
)
OF_SDIST = ("pyproject.toml", "CMakeLists.txt", "LICENSE", "NOTICE", "THIRD_PARTY.md", "PKG-INFO")
OUTSIDE = re.compile(r"(\.(a|o|cpp|cu|cuh|pyc)$)|__pycache__|/tests?/|nvshmem|libcudart|libnccl")


def version():
    text = (ROOT / "include/waybill/version.h").read_text(encoding="utf-8")
    return re.search(r'version_text = "(.*?)"', text).group(1)


def check_binary(name, data):
    """Paths of the machine that built it make other bytes elsewhere, and tell of it."""
    for path in (str(ROOT), str(pathlib.Path.home()) + "/", "/tmp/"):
        if path.encode() in data:
            yield f"{name} has the path {path}"


def check_sbom(wheel, name, cuda):
    bill = json.loads(wheel.read(name))
    if bill.get("bomFormat") != "CycloneDX":
        yield f"{name}: bomFormat = {bill.get('bomFormat')}, expected CycloneDX"
    names = {part["name"] for part in bill["components"] if part.get("licenses")}
    for part in ("nanobind", "nlohmann_json", "CLI11") + (("CUDA runtime",) if cuda else ()):
        if part not in names:
            yield f"{name}: no component {part} with a licence"


def check_machine_code(wheel):
    """The device code for which the build asked is in the library."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        print("check_wheel_files: NOTE: no cuobjdump, so machine code was not listed")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = wheel.extract("waybill/lib/libwaybill.so", folder)
        done = subprocess.run([tool, "-lelf", "-lptx", path], capture_output=True, text=True)
    found = sorted(set(re.findall(r"sm_\d+[af]?(?=\.(?:cubin|ptx))", done.stdout)))
    ptx = sorted(set(re.findall(r"(sm_\d+)\.ptx", done.stdout)))
    print(f"  code for {', '.join(found)}; PTX of {', '.join(ptx) or 'none'}")
    if not found:
        yield "libwaybill.so has no device code"


def check_wheel(path, cuda):
    release = version()
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        for name in INSIDE:
            if name.format(release) not in names:
                yield f"{name.format(release)} is missing"
        if (cuda is True) != ("waybill/include/waybill/cuda/gpu_world.h" in names):
            yield f"gpu_world.h, expected {'in it' if cuda else 'not in it'}"
        for name in sorted(names):
            if OUTSIDE.search(name):
                yield f"{name} does not belong in it"
            if name.endswith(".so") or name == "waybill/bin/waybill":
                yield from check_binary(name, wheel.read(name))
        bill = f"waybill-{release}.dist-info/sboms/waybill.cdx.json"
        if bill in names:
            yield from check_sbom(wheel, bill, cuda)
        if cuda:
            yield from check_machine_code(wheel)


def check_sdist(path):
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    for name in OF_SDIST:
        if f"{top}/{name}" not in names:
            yield f"{name} is missing"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    failed = False
    for path in options.files:
        size = path.stat().st_size
        print(f"{path.name}: {size / (1 << 20):.1f} MiB")
        is_wheel = path.suffix == ".whl"
        findings = list(check_wheel(path, options.cuda) if is_wheel else check_sdist(path))
        if size > MAX_BYTES:
            findings.append(f"{size} bytes, expected at most {MAX_BYTES}")
        for finding in findings:
            print(f"{path.name}: {finding}")
        failed = failed or bool(findings)
    sys.exit(failed)


if __name__ == "__main__":
    main()
