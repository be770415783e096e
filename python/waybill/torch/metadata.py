"""Metadata whose arrays are torch tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple, Type, TypeVar

import numpy as np
import torch

from .. import metadata as numpy_metadata
from .._graphs import outside_graphs
from ._tensors import device_of, host_array, tensor

_M = TypeVar("_M", bound="Metadata")
# torch writes pickles of tensors without a sign that it does not read: they travel as these.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclasses.dataclass(eq=False, repr=False)
class Metadata(numpy_metadata.Metadata):
    """``waybill.Metadata`` of torch tensors; results lie on the device of dst_rank."""

    @outside_graphs
    def get_slice(self: _M, rank: int) -> _M:
        """The lines of one rank, without those that move nothing."""
        return super().get_slice(rank)._placed(self.device)

    @outside_graphs
    def normalize_dtype(self: _M) -> _M:
        """The dtypes of device tables: int32 ranks, uint32 offsets and lengths, uint64 counts."""
        return super().normalize_dtype()._placed(self.device)

    def cuda(self: _M, device: Any = None) -> _M:
        """Every tensor on the current (or given) GPU, contiguous."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to(torch.device("cuda") if device is None else device)

    def cpu(self: _M) -> _M:
        """Every tensor in host memory, contiguous."""
        return self.to(torch.device("cpu"))

    def to(self: _M, device: Any) -> _M:
        """Every tensor on ``device``, contiguous."""
        return self._map(lambda t: t.to(device).contiguous())

    @outside_graphs
    def numpy(self) -> numpy_metadata.Metadata:
        """The same for numpy; tensors of the CPU share their memory."""
        return numpy_metadata.Metadata(*self._values())

    @classmethod
    def from_numpy(cls: Type[_M], metadata: numpy_metadata.Metadata) -> _M:
        """The same for torch; arrays share their memory."""
        return cls._from_fields(metadata._values())

    @property
    def device(self) -> Optional[torch.device]:
        """Where dst_rank lies."""
        return device_of(self.dst_rank)

    def __getstate__(self) -> dict[str, Any]:
        dtypes = {n: v.dtype for n, v in vars(self).items() if isinstance(v, torch.Tensor)}
        unsigned = {n: dtype for n, dtype in dtypes.items() if dtype in _SIGNED}
        bits = {n: getattr(self, n).view(_SIGNED[dtype]) for n, dtype in unsigned.items()}
        return {"fields": {**vars(self), **bits}, "unsigned": unsigned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["fields"])
        for name, dtype in state["unsigned"].items():
            setattr(self, name, getattr(self, name).view(dtype))

    def _placed(self: _M, device: Optional[torch.device]) -> _M:
        return self if device is None or device.type == "cpu" else self.to(device)

    def _map(self: _M, change: Any) -> _M:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self)(
            **{n: change(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        )

    @staticmethod
    def _host(value: Any) -> Any:
        return host_array(value)

    @classmethod
    def _from_fields(cls: Type[_M], fields: Tuple[Any, ...]) -> _M:
        return cls(*[tensor(f) if isinstance(f, np.ndarray) else f for f in fields])


def metadata_of(
    metadata: numpy_metadata.Metadata, device: Optional[torch.device] = None
) -> Metadata:
    """A function's result, whose fields are arrays already, on the device of its inputs."""
    return Metadata._from_fields(tuple(vars(metadata).values()))._placed(device)
