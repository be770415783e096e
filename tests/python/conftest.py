"""Settings of all Python tests."""

import gc
import importlib
import os
import pathlib
import shutil
import signal
import sys

import delays
import pytest
from faces import NumpyFace, torch_face
from hypothesis import HealthCheck, settings
from ways import NumpyWay, TorchWay

import waybill
from waybill import _core

# Threads of torch that wait for each other take the cores of tests that run beside; torch reads it
# when it is imported, and processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else inductor starts processes that import torch, to compile side by side.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

settings.register_profile(
    "waybill",
    deadline=None,
    derandomize=True,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("waybill")

if _core.late_streams():
    delays.install()

# A shell starts what runs in its background with SIGINT ignored, which processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def needs_gpu(item):
    """Whether the name of a test's file, its parameters or conditions speak of GPUs."""
    if "gpu" in item.path.name:
        return True
    parameters = getattr(item, "callspec", None)
    if parameters and "cuda" in parameters.id:
        return True
    return any("GPU" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if needs_gpu(item):
            item.add_marker("gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that is skipped for want of a GPU is one of those that ``-m gpu`` selects."""
    report = yield
    if report.skipped and "GPU" in str(report.longrepr[2]) and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr[2]}: mark it with pytest.mark.gpu"
    return report


def pytest_collection_finish(session):
    """No search for garbage looks at modules again: with torch one takes a third of a second. And
    torch's first backward imports sympy, up to a minute where no bytecode is kept, which no rank
    may do while the kernel of another waits for it.
    """
    if "torch" in sys.modules and any(item.get_closest_marker("gpu") for item in session.items):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # what is not given back at the end is said


@pytest.fixture(scope="session", params=["numpy", "torch"])
def face(request):
    """The package as users of numpy see it, and as users of torch do."""
    if request.param == "numpy":
        return NumpyFace()
    pytest.importorskip("torch")
    return torch_face()


def _tensors_on(device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not (waybill.num_gpus() and torch.cuda.is_available()):
        pytest.skip("no GPU, or an installation without CUDA")
    return TorchWay(device)


@pytest.fixture(params=["numpy", "torch-cpu", "torch-cuda"])
def way(request):
    """What ranks are made of. Those on GPUs need an installation with CUDA, and a GPU."""
    if request.param == "numpy":
        return NumpyWay()
    return _tensors_on(request.param.removeprefix("torch-"))


@pytest.fixture(params=["cpu", "cuda"])
def torch_way(request):
    """The same without numpy."""
    return _tensors_on(request.param)


@pytest.fixture
def clean_compiler():
    """No graphs of other tests, nor for them."""
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def backend(request):
    """Of torch.compile; inductor needs a compiler of C++."""
    if request.param == "inductor" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler")
    return request.param


@pytest.fixture
def project(monkeypatch, tmp_path):
    """project(name of a script, {path: text}): the script, over a project of these files."""
    scripts = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"
    monkeypatch.syspath_prepend(str(scripts))

    def load(name, files=()):
        sys.modules.pop(name, None)
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "ROOT", tmp_path, raising=False)
        for path, text in dict(files).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return script

    return load
