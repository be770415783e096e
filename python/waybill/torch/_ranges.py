"""Names of what is queued, for NVIDIA's tools and torch's profiler."""

from __future__ import annotations

from typing import Any

import torch

_profiling: Any = torch.autograd
_nvtx: Any = torch.cuda.nvtx


class named:
    """``waybill:name`` on the timeline. Without a profiler it costs a microsecond."""

    __slots__ = ("_name", "_on_gpu", "_record")

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._on_gpu = name, device.type == "cuda"
        self._record: Any = None

    def __enter__(self) -> None:
        if self._on_gpu:
            _nvtx.range_push(f"waybill:{self._name}")
        if _profiling._profiler_enabled():
            self._record = torch.profiler.record_function(f"waybill:{self._name}")
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*error)
        if self._on_gpu:
            _nvtx.range_pop()
