"""Settings of all Python tests."""

import functools

import pytest
from faces import NumpyFace, torch_face
from hypothesis import HealthCheck, settings
from ways import NumpyWay, TorchWay

import waybill

settings.register_profile(
    "waybill",
    deadline=None,
    derandomize=True,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("waybill")


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
    if device == "cuda":
        use_every_gpu_once()
    return TorchWay(device)


@functools.cache
def use_every_gpu_once():
    """What is loaded at first use may wait for a device, hence for other ranks: see world.md."""
    import torch

    for gpu in range(torch.cuda.device_count()):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            a = torch.ones(2, 3, 4, device=f"cuda:{gpu}", dtype=dtype, requires_grad=True)
            scores = torch.einsum("qhd,khd->hqk", a, a).softmax(-1)
            torch.einsum("hqk,khd->qhd", scores, a.repeat_interleave(1, 1)).sum().backward()
        torch.cuda.synchronize(gpu)


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
