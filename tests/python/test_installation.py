"""What an installation says of itself: waybill doctor, and which CUDA a build finds."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake")
pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")


def fake_nvcc(folder, version):
    path = folder / version / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    path.chmod(0o755)
    return path


def find(folder, **environment):
    script = folder / "find.cmake"
    script.write_text(
        f"include({ROOT}/cmake/waybill_cuda.cmake)\nset(WAYBILL_CUDA AUTO)\nwaybill_find_cuda()\n"
        'message(NOTICE "WAYBILL_CUDA=${WAYBILL_CUDA} ${CMAKE_CUDA_COMPILER}")\n'
    )
    names = ("CUDACXX", "CUDA_HOME", "CUDA_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [CMAKE, "-P", str(script)], env={**kept, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_takes_what_the_environment_names_and_says_so(tmp_path):
    nvcc = fake_nvcc(tmp_path, "13.1")
    home = {"CUDA_HOME": str(nvcc.parents[1])}
    for environment in (home, {"CUDACXX": str(nvcc)}, {"CUDA_PATH": home["CUDA_HOME"]}):
        said = find(tmp_path, **environment)
        assert f"waybill: CUDA 13.1 is at {nvcc}: building for GPUs too" in said
        assert "SKBUILD_CMAKE_DEFINE=WAYBILL_CUDA=OFF pip install ." in said
        assert f"WAYBILL_CUDA=ON {nvcc}" in said


def test_passes_over_an_older_one(tmp_path):
    old, new = fake_nvcc(tmp_path, "12.9"), fake_nvcc(tmp_path, "13.0")
    said = find(tmp_path, CUDACXX=str(old), CUDA_HOME=str(new.parents[1]))
    assert f"WAYBILL_CUDA=ON {new}" in said
    assert str(old) not in find(tmp_path, CUDACXX=str(old), PATH=str(old.parent))


def test_doctor_knows_python_and_torch():
    ran = subprocess.run(
        [sys.executable, "-m", "waybill", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(ran.stdout)
    assert ran.returncode == (0 if found["works"] else 1), ran.stderr
    lines = {line["name"]: line for line in found["checks"]}
    assert lines["Python"]["value"] == sys.version.split()[0]
    try:
        assert lines["torch"]["value"] == importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        assert lines["torch"]["state"] == "note"
    assert all(line["state"] == "good" or line["advice"] for line in found["checks"])
