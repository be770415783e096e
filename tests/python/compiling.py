"""What the tests of torch.compile share; their fixtures are in conftest.py."""

import threading

import pytest

torch = pytest.importorskip("torch")
dynamo = pytest.importorskip("torch._dynamo")

MARKS = [
    pytest.mark.usefixtures("clean_compiler"),
    pytest.mark.skipif(not dynamo.is_dynamo_supported(), reason="torch.compile does not run here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # The compiler itself causes it, and hides it where warnings are no errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def compiles(test):
    """For one test of a file."""
    for mark in MARKS:
        test = mark(test)
    return test


class Graphs:
    """A backend that counts graphs; those without an operation of tensors do not come here."""

    def __init__(self):
        self.count, self.lock = 0, threading.Lock()

    def __call__(self, module, inputs):
        with self.lock:
            self.count += 1
        return module.forward


def same(got, want):
    assert got.dtype == want.dtype and torch.equal(got, want)
