"""Where the time of a step goes: on the device and on the host by phase, and a profile of kernels,
gaps between them and calls of the runtime.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")


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


def profiled(steps: int, step: Callable[[int], Any], on_gpu: bool) -> list[str]:
    """What ``step(0)``, ``step(1)``, ... spend, from torch's profiler: lines of text."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for i in range(steps):
            with torch.profiler.record_function("step"):
                step(i)
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    return summary(events, steps)


def summary(events: list[dict[str, Any]], steps: int) -> list[str]:
    """Lines about a trace of torch's profiler; times are microseconds of the mean step."""
    complete = [e for e in events if e.get("ph") == "X"]
    on_gpu = sorted((e for e in complete if e.get("cat") in _ON_GPU), key=lambda e: e["ts"])
    marks = [e for e in complete if e.get("cat") == "user_annotation"]
    lines = ["host, phases:"]
    lines += _totals(marks, steps, 14)
    lines.append("host, calls of the runtime:")
    lines += _totals([e for e in complete if e.get("cat") in _RUNTIME], steps, 10)
    lines.append("host, operations of torch:")
    lines += _totals([e for e in complete if e.get("cat") == "cpu_op"], steps, 12)
    if on_gpu:
        lines.append("device, by kernel and stream:")
        lines += _totals(on_gpu, steps, 16, lambda e: f"{_stream(e)} {_short(e['name'])}")
        lines += _timeline(marks, on_gpu)
    return lines


def _stream(event: dict[str, Any]) -> str:
    return f"s{event.get('args', {}).get('stream', '?')}"


def _short(name: str) -> str:
    """A kernel's name without its arguments."""
    for opening in ("void ", "at::native::"):
        name = name.removeprefix(opening)
    return name.split("(")[0][:70]


def _totals(
    events: list[dict[str, Any]], steps: int, most: int,
    name_of: Callable[[dict[str, Any]], str] = lambda e: _short(e["name"]),
) -> list[str]:  # fmt: skip
    found: dict[str, list[float]] = {}
    for event in events:
        found.setdefault(name_of(event), []).append(event["dur"])
    largest = sorted(found.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        f"  {sum(times) / steps:9.1f} us {len(times) / steps:6.1f} x  {name}"
        for name, times in largest
    ]


def _timeline(marks: list[dict[str, Any]], on_gpu: list[dict[str, Any]]) -> list[str]:
    """The last step: each kernel of 3 us and more on its stream, and where the device is idle."""
    begin = max(e["ts"] for e in marks if e["name"] == "step")
    last = [e for e in on_gpu if e["ts"] >= begin]
    if not last:
        return ["device: nothing in the last step"]
    busy, end, gaps = 0.0, begin, []
    for event in last:
        stop = event["ts"] + event["dur"]
        if event["ts"] > end:
            gaps.append((event["ts"] - end, end - begin, _short(event["name"])))
        busy += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    lines = [
        f"device, last step: {end - begin:.0f} us from the host's begin, busy {busy:.0f},"
        f" idle {end - begin - busy:.0f}; idle for the longest:"
    ]
    lines += [
        f"  {gap:7.1f} us at {at:8.0f} before {name}" for gap, at, name in sorted(gaps)[:-9:-1]
    ]
    lines.append("device, last step: begin, duration, stream, what")
    lines += [
        f"  {e['ts'] - begin:8.0f} {e['dur']:8.1f} {_stream(e):>5} {_short(e['name'])}"
        for e in last
        if e["dur"] >= 3
    ]
    return lines
