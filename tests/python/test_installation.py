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


def fake_gpus(folder, text):
    """A PATH whose nvidia-smi prints `text`: capability and driver of each GPU."""
    path = folder / "driver" / "nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


def decide(folder, **environment):
    """What a build with WAYBILL_CUDA=AUTO decides, and says."""
    script = folder / "decide.cmake"
    script.write_text(
        f"include({ROOT}/cmake/waybill_cuda.cmake)\nset(WAYBILL_CUDA AUTO)\n"
        "waybill_find_nvcc(waybill_nvcc waybill_nvcc_version)\nwaybill_decide_cuda()\n"
        'waybill_say_cuda("${waybill_found}")\n'
        'message(NOTICE "CUDA=${WAYBILL_CUDA} ${waybill_nvcc} ${WAYBILL_CUDA_ARCHITECTURES}")\n'
    )
    names = ("CUDACXX", "CUDA_HOME", "CUDA_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [CMAKE, "-P", str(script)], env={**kept, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_builds_for_the_gpus_that_are_here(tmp_path):
    nvcc = fake_nvcc(tmp_path, "13.1")
    gpus = {"PATH": fake_gpus(tmp_path, r"9.0, 580.82\n9.0, 580.82\n10.3, 580.82\n")}
    home = {"CUDA_HOME": str(nvcc.parents[1])}
    for environment in (home, {"CUDACXX": str(nvcc)}, {"CUDA_PATH": home["CUDA_HOME"]}):
        said = decide(tmp_path, **environment, **gpus)
        assert "waybill: CUDA 13.1 and GPUs (3) are here: building for GPUs too (90, 100)" in said
        assert "SKBUILD_CMAKE_DEFINE=WAYBILL_CUDA=OFF pip install ." in said
        assert f"CUDA=ON {nvcc} 90;100" in said


def test_another_gpu_is_built_for_with_all_architectures(tmp_path):
    nvcc = fake_nvcc(tmp_path, "13.1")
    said = decide(tmp_path, CUDACXX=str(nvcc), PATH=fake_gpus(tmp_path, r"13.0, 700.1\n"))
    assert said.endswith(f"CUDA=ON {nvcc} \n")  # none named: the default


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (r"9.0, 570.12\n", "driver 570.12 of the GPUs does not take it (580 or later does)"),
        (r"NVIDIA-SMI has failed\n", "CUDA 13.1 is here, but no GPU with a driver"),
    ],
)
def test_builds_for_host_memory_where_no_gpu_could_run_it(tmp_path, gpus, why):
    nvcc = fake_nvcc(tmp_path, "13.1")
    said = decide(tmp_path, CUDACXX=str(nvcc), PATH=fake_gpus(tmp_path, gpus))
    assert why in said and "building for host memory alone" in said
    assert "SKBUILD_CMAKE_DEFINE=WAYBILL_CUDA=ON pip install ." in said and "CUDA=OFF" in said


def test_passes_over_an_older_nvcc(tmp_path):
    old, new = fake_nvcc(tmp_path, "12.9"), fake_nvcc(tmp_path, "13.0")
    path = fake_gpus(tmp_path, r"9.0, 580.82\n")
    said = decide(tmp_path, CUDACXX=str(old), CUDA_HOME=str(new.parents[1]), PATH=path)
    assert f"CUDA=ON {new}" in said
    assert str(old) not in decide(tmp_path, CUDACXX=str(old), PATH=f"{old.parent}:{path}")


def test_pip_prints_what_a_build_says(tmp_path):
    """A process named pip keeps the build's output; its own standard error gets the text."""
    installer = tmp_path / "pip"
    installer.write_text(
        "import subprocess, sys\n"
        f"script = {str(ROOT / 'cmake' / 'tell_installer.py')!r}\n"
        "command = [sys.executable, script, 'for', 'GPUs']\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "print(done.stdout + done.stderr)\n"
    )
    done = subprocess.run([sys.executable, installer], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("\n", "\n  for GPUs\n")


def test_cmake_finds_the_library_in_the_package():
    command = [sys.executable, "-m", "waybill", "cmake-dir"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert (folder / "waybillConfig.cmake").is_file()
    package = folder.parents[2]
    assert (package / "lib" / "libwaybill.so").is_file()
    assert (package / "include" / "waybill" / "version.h").is_file()


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
