"""Tables for notebooks, with inline style and no script, and drawings with matplotlib."""

from __future__ import annotations

from html import escape
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from .errors import InvalidArgument, Unsupported

_MAX_RANKS = 16
_TH = 'style="text-align:right;padding:2px 8px"'
_TD = 'style="text-align:right;padding:2px 8px;font-variant-numeric:tabular-nums"'


def count(value: Any) -> str:
    """1,234,567"""
    return f"{int(value):,}"


def bar(value: float, largest: float, colour: str = "#4c78a8") -> str:
    """A bar of at most 120 pixels."""
    width = 0 if largest <= 0 else round(120 * value / largest)
    return f'<div style="background:{colour};height:10px;width:{width}px"></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Cells are HTML already; the caption is text."""
    lines = ["<table><caption style='text-align:left'>", escape(caption), "</caption><tr>"]
    lines += [f"<th {_TH}>{escape(name)}</th>" for name in head]
    lines.append("</tr>")
    for row in rows:
        lines.append("<tr>" + "".join(f"<td {_TD}>{cell}</td>" for cell in row) + "</tr>")
    lines.append("</table>")
    return "".join(lines)


def plain_text(text: str) -> str:
    """A text of several lines as it is."""
    return f"<pre>{escape(text)}</pre>"


def shown_ranks(values: Any) -> list[int]:
    """All ranks of a small world; else the first, the last and those with the largest values."""
    world = len(values)
    if world <= _MAX_RANKS:
        return list(range(world))
    worst = np.argsort(-np.asarray(values), kind="stable")[: _MAX_RANKS - 8]
    return sorted({*range(4), *range(world - 4, world), *(int(rank) for rank in worst)})


def wire_rows(traffic: Any) -> tuple[Any, Any]:
    """Rows that every rank sends to others, and gets from them, of a (W, W) table of traffic."""
    local = np.diagonal(traffic)
    return traffic.sum(axis=1) - local, traffic.sum(axis=0) - local


def slice_html(dst_rank: Any, dst_offset: Any, seq_len: Any) -> str:
    """A line per shard of one rank: where its rows begin, and where they go."""
    for name, array in (("dst_rank", dst_rank), ("dst_offset", dst_offset)):
        shape = np.shape(array)
        if len(shape) not in (1, 2) or shape[0] != len(seq_len):
            raise InvalidArgument(
                f"Metadata: {name} has shape {list(shape)}, expected [{len(seq_len)}] or"
                f" [{len(seq_len)}, C]"
            )
    lens = np.asarray(seq_len).astype(np.int64)
    begins = np.cumsum(lens) - lens
    rows = []
    for j in range(min(len(lens), 32)):
        ranks, offsets = np.atleast_1d(dst_rank[j]), np.atleast_1d(dst_offset[j])
        to = [f"{int(r)} at {count(o)}" for r, o in zip(ranks, offsets) if r >= 0]
        rows.append([count(j), count(begins[j]), count(lens[j]), ", ".join(to) or "&ndash;"])
    caption = f"Metadata of one rank: {count(len(lens))} lines"
    if len(lens) > len(rows):
        caption += f", the first {len(rows)}"
    return table(["line", "first row", "rows", "to rank, at row"], rows, caption)


def metadata_html(traffic: Any, seq_len: Any) -> str:
    """A line per rank: what it sends, gets and keeps. Of (W, W) rows and (W, S) lengths."""
    local = np.diagonal(traffic)
    sent, got = wire_rows(traffic)
    largest = float(max(sent.max(initial=0), got.max(initial=0)))
    shards = (np.asarray(seq_len) > 0).sum(axis=1)
    ranks = shown_ranks(sent + got)
    rows = [
        [count(r), count(shards[r]), count(sent[r]), bar(sent[r], largest), count(got[r]),
         bar(got[r], largest, "#f58518"), count(local[r])]
        for r in ranks
    ]  # fmt: skip
    caption = (
        f"Metadata: {count(len(shards))} ranks, {count(shards.sum())} shards,"
        f" {count(sent.sum())} rows on the wire, {count(local.sum())} stay"
    )
    if len(ranks) < len(shards):
        caption += f"; the first, the last and the busiest of {len(shards)} ranks"
    return table(["rank", "shards", "rows out", "", "rows in", "", "rows that stay"], rows, caption)


def plan_html(work: Any, traffic: Sequence[Any], caption: str) -> str:
    """A line per rank: its work (W,), and its rows on the wire of two (W, W), Q and KV."""
    columns = [rows for one in traffic for rows in wire_rows(one)]
    largest = float(work.max(initial=0))
    rows = [
        [count(r), count(work[r]), bar(work[r], largest), *(count(c[r]) for c in columns)]
        for r in shown_ranks(work)
    ]
    head = ["rank", "work", "", "Q rows out", "Q rows in", "KV rows out", "KV rows in"]
    return table(head, rows, caption)


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise Unsupported(
            "matplotlib is not installed, expected it for drawings: pip install 'waybill[plot]'"
        ) from None
    return plt.subplots(layout="constrained")[1]


def heat_map(values: Any, ax: Any, title: str, xlabel: str, ylabel: str) -> Any:
    """One square per pair of ranks."""
    ax = _axes(ax)
    image = ax.imshow(values, cmap="viridis", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=title)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return ax


def bars(series: Mapping[str, Any], ax: Any, title: str) -> Any:
    """A bar per rank and series; a line at the mean of the first series."""
    ax = _axes(ax)
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        ranks = np.arange(len(values))
        ax.bar(ranks + (i - (len(series) - 1) / 2) * width, values, width, label=label)
    first = next(iter(series.values()))
    ax.axhline(float(np.mean(first)), color="grey", linewidth=1, linestyle="--", label="mean")
    ax.set(xlabel="rank", title=title)
    ax.legend()
    return ax
