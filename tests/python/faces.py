"""The two faces of the package behind one interface, so that a test can run on both."""

import numpy as np

import waybill


class NumpyFace:
    """``waybill``: numpy arrays."""

    name = "numpy"
    module = waybill
    array_type = np.ndarray

    def array(self, values):
        """What a user passes in."""
        return values

    def host(self, value):
        """What came out, as numpy."""
        return value

    def dtype_name(self, value):
        return value.dtype.name

    def is_scalar(self, value):
        """What stands for an array without axes."""
        return isinstance(value, np.generic)

    def zeros_like(self, value):
        return np.zeros_like(value)


class TorchFace:
    """``waybill.torch``: torch tensors."""

    name = "torch"

    def __init__(self, torch, module):
        self.torch = torch
        self.module = module
        self.array_type = torch.Tensor

    def array(self, values):
        return self.torch.from_numpy(np.array(values))

    def host(self, value):
        return value.numpy()

    def dtype_name(self, value):
        return str(value.dtype).removeprefix("torch.")

    def is_scalar(self, value):
        return isinstance(value, self.torch.Tensor) and value.ndim == 0

    def zeros_like(self, value):
        return self.torch.zeros_like(value)


def torch_face():
    """Needs torch."""
    import torch

    import waybill.torch

    return TorchFace(torch, waybill.torch)
