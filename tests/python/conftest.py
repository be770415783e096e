"""Settings of all Python tests."""

import pytest
from faces import NumpyFace, torch_face
from hypothesis import HealthCheck, settings

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
