"""How long a step takes, by phase, on the device and on the host."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Milliseconds of one step from its beginning: ``mark`` ends a phase. On a GPU by events, and
    beside that the host's, which is late where it ends a phase after the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float, Any]] = []
        if self._on_gpu:
            torch.cuda.synchronize()
        self.mark("begin")

    def mark(self, phase: str) -> None:
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((phase, time.perf_counter(), event))

    def finish(self) -> tuple[float, dict[str, list[float]]]:
        """(milliseconds of the step, {phase: [device, host]})."""
        if self._on_gpu:
            torch.cuda.synchronize()
        phases: dict[str, list[float]] = {}
        for (_, before, first), (phase, after, last) in zip(self._marks, self._marks[1:]):
            host = 1e3 * (after - before)
            phases[phase] = [first.elapsed_time(last) if self._on_gpu else host, host]
        return sum(device for device, _ in phases.values()), phases
