"""The longest kernels and gaps of one step, by torch.profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def profiled(step: Callable[[], Any], device: torch.device, most: int = 16) -> str:
    """A table of kernels (of operations on the CPU) by time, and where a GPU had nothing to do."""
    on_gpu = device.type == "cuda"
    step()
    if on_gpu:
        torch.cuda.synchronize()
    what = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=what) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events() or ()
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu
    )
    return "\n".join([*_longest(spans, most), *(_gaps(spans, most) if on_gpu else ())])


def _longest(spans: list[tuple[float, float, str]], most: int) -> list[str]:
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for begin, end, name in spans:
        total[name][0] += 1
        total[name][1] += end - begin
    ordered = sorted(total.items(), key=lambda item: -item[1][1])[:most]
    return [
        "     us  calls  what",
        *(f"{t:7.0f} {n:6.0f}  {name[:110]}" for name, (n, t) in ordered),
    ]


def _gaps(spans: list[tuple[float, float, str]], most: int) -> list[str]:
    """Between the end of all that ran and the next begin."""
    found, until, last = [], spans[0][0] if spans else 0.0, ""
    idle = 0.0
    for begin, end, name in spans:
        if begin > until:
            idle += begin - until
            found.append((begin - until, last, name))
        if end > until:
            until, last = end, name
    whole = until - spans[0][0] if spans else 0.0
    lines = [f"{whole:7.0f} us in all, {idle:.0f} without a kernel; the longest gaps:"]
    longest = sorted(found, reverse=True)[: most // 2]
    return lines + [f"{gap:7.0f}  {before[:60]} -> {after[:60]}" for gap, before, after in longest]
