"""Writes results as text, Markdown, JSON and HTML."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from html import escape
from typing import Any, Optional

import torch

from .. import _core, _report
from .ranks import Place

_HEAD = ["way", "dispatch", "of known routing", "combine", "GB/s", "of Waybill", "sums"]
_LIBRARIES = {
    "deep_ep": "DeepEP",
    "nccl4py": "nccl4py",
    "nvidia-nccl-cu13": "NCCL",
    "nvidia-nccl-cu12": "NCCL",
}


def machine(place: Place) -> dict[str, Any]:
    """Facts of the machine on which figures depend."""
    facts: dict[str, Any] = {
        "waybill": importlib.metadata.version("waybill"), "torch": torch.__version__,
        "python": platform.python_version(), "system": platform.platform(),
        "cpu": _cpu(), "cores": os.cpu_count(), "ranks": str(place),
        "built for CUDA": _core.cuda_version or "no",
    }  # fmt: skip
    for package, name in _LIBRARIES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(package)
    if place.device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["GPUs"] = ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
    return facts


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def headline(result: dict[str, Any], place: Place) -> str:
    facts = result["machine"]
    return f"bench: Waybill {facts['waybill']}, torch {facts['torch']}; {place}"


def all_right(result: dict[str, Any]) -> bool:
    tables = [*result["experts"]["tables"], result.get("attention", {"lines": []})]
    return all(line.get("right", True) for table in tables for line in table["lines"])


def text(result: dict[str, Any]) -> str:
    """Tables for a terminal."""
    parts = []
    for caption, rows, _ in _tables(result):
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            if not any(row[2:]):  # without figures, it ends with its note
                lines.append(f"{row[0].ljust(widths[0])}  {row[1]}")
                continue
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        parts.append("\n".join([caption, "", *lines]))
    return "\n\n".join([*parts, _NOTES])


def markdown(result: dict[str, Any]) -> str:
    """For an issue: the machine, the command and the tables."""
    facts = "; ".join(f"{name} {value}" for name, value in result["machine"].items())
    parts = [f"`{result['command']}`, {result['seconds']} s\n\n{facts}"]
    for caption, (head, *rows), _ in _tables(result):
        lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
        parts.append("\n".join([caption, "", *("| " + " | ".join(row) + " |" for row in lines)]))
    return "\n\n".join([*parts, _NOTES])


def as_json(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


def html(result: dict[str, Any]) -> str:
    """A page without scripts, with a bar for each time."""
    facts = "".join(f"<li>{escape(k)}: {escape(str(v))}</li>" for k, v in result["machine"].items())
    body = [f"<h1>{escape(result['command'])}</h1><ul>{facts}</ul>"]
    for caption, (head, *rows), times in _tables(result):
        cells = [
            [*map(escape, row), _report.bar(time, max(times))] for row, time in zip(rows, times)
        ]
        body.append(_report.table([*head, "all calls"], cells, caption))
    body.append(f"<p>{escape(_NOTES)}</p>")
    style = "body{font-family:sans-serif;margin:2em}caption{padding:1em 0}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Waybill bench</title>'
        f"<style>{style}</style><body>{''.join(body)}</body></html>\n"
    )


_NOTES = (
    "us: the slowest rank's median of whole calls. dispatch: from ids to rows, counting included."
    " GB/s: rows that leave a rank, each once for each destination, over the dispatch. of Waybill:"
    " a way's dispatch and combine over those of Waybill's compact rows; more is slower."
)


def _tables(result: dict[str, Any]) -> Iterator[tuple[str, list[list[str]], list[float]]]:
    """(caption, head and rows, times of the rows) of each number of tokens, and of attention."""
    sizes = result["experts"]
    for table in sizes["tables"]:
        caption = (
            f"experts: {result['machine']['ranks']}; {table['tokens']} tokens each,"
            f" {sizes['hidden']} bfloat16, top {sizes['topk']} of {sizes['experts']};"
            f" {table['wire_bytes'] / 1e6:.2f} MB leave a rank; us"
        )
        lines = table["lines"]
        ours = next((line for line in lines if "compact" in line["way"]), None)
        rows = [_row(line, table["wire_bytes"], ours) for line in lines]
        yield caption, [_HEAD, *rows], [sum(line.get("us", {}).values()) for line in lines]
    if "attention" in result:
        yield _attention(result["attention"])


def _attention(found: dict[str, Any]) -> tuple[str, list[list[str]], list[float]]:
    heads, kv_heads, head_dim = found["heads"]
    step = "forward and backward" if found["backward"] else "forward alone"
    caption = (
        f"attention, {step}, planning included: {found['documents']} documents of"
        f" {found['tokens']} tokens in all, the longest {found['longest']}; {heads} heads of"
        f" {head_dim}, {kv_heads} of K and V"
    )
    times = [line["us"] for line in found["lines"]]
    rows = [["way", "us", "of Waybill", "numbers"]]
    for line, us in zip(found["lines"], times):
        right = "right" if line["right"] else "WRONG"
        rows.append([line["way"], f"{us:.1f}", f"{us / times[0]:.2f}", right])
    return caption, rows, times


def _row(line: dict[str, Any], wire_bytes: int, ours: Optional[dict[str, Any]]) -> list[str]:
    if "us" not in line:
        return [line["way"], line["note"], *[""] * (len(_HEAD) - 2)]
    us = line["us"]
    whole = us["dispatch"] + us["combine"]
    ratio = "-"
    if ours is not None and "us" in ours:
        ratio = f"{whole / (ours['us']['dispatch'] + ours['us']['combine']):.2f}"
    return [
        line["way"], *(f"{us[call]:.1f}" for call in ("dispatch", "dispatch_again", "combine")),
        f"{wire_bytes / us['dispatch'] / 1e3:.1f}", ratio, "right" if line["right"] else "WRONG",
    ]  # fmt: skip
