"""Where the time of a step goes: kernels, gaps between them and calls of the runtime, by torch's
profiler.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")


def profiled(
    steps_of: dict[str, Callable[[int], Any]], steps: int, device: torch.device
) -> dict[str, list[str]]:
    """What ``step(0)``, ``step(1)``, ... of each way spend: lines of text. All ways are seen by one
    session of the profiler, one after another.
    """
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    _settle(on_gpu)
    with torch.profiler.profile(activities=activities) as session:
        for way, step in steps_of.items():
            for i in range(steps):
                with torch.profiler.record_function(_mark(way)):
                    step(i)
                    _settle(on_gpu)
    events = _events(session)
    return {way: summary(_of_way(events, way), steps) for way in steps_of}


def _settle(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _mark(way: str) -> str:
    return f"step of {way}"


def _events(session: Any) -> list[dict[str, Any]]:
    """Those with a begin and an end."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        session.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    return [event for event in events if event.get("ph") == "X"]


def _of_way(events: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    """What began while its steps ran, which end with nothing left on the device."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == _mark(way)]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in marks]
    names = {_mark(way): "step"}
    return [
        {**event, "name": names.get(event["name"], event["name"])}
        for event in events
        if any(begin <= event["ts"] <= end for begin, end in spans)
    ]


def summary(events: list[dict[str, Any]], steps: int) -> list[str]:
    """Lines about the events of some steps; times are microseconds of the mean step."""
    on_gpu = sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda e: e["ts"])
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    lines = ["host, phases:"]
    lines += _totals(marks, steps, 14)
    lines.append("host, calls of the runtime:")
    lines += _totals([e for e in events if e.get("cat") in _RUNTIME], steps, 10)
    lines.append("host, operations of torch:")
    lines += _totals([e for e in events if e.get("cat") == "cpu_op"], steps, 12)
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
