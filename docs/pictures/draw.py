#!/usr/bin/env python3
"""Draws the pictures of the pages, from the pages' tables and from a plan of the package.

    draw.py           writes the pictures
    draw.py --check   exits 1 where one is not as it would be drawn

Needs the installed package, for the plan.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import waybill

PICTURES = Path(__file__).resolve().parent
DOCS = PICTURES.parent
INK, SOFT, GRID = "#1a1a1a", "#4d4d4d", "#c9c9c9"
COLORS = ["#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#3b8ea5", "#7a4b2a", "#5c677d"]
PALE = ["#dcebf7", "#fae3dd", "#dff0e2", "#ede3f2", "#f8eccb", "#dcf0f5", "#efe2d8", "#e6e9ee"]


class Picture:
    """An SVG with a white ground: boxes, lines, arrows and words."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.size = (width, height)
        self.parts = [
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/></marker>'
            "</defs>",
        ]

    def text(self, x, y, words, size=13, anchor="middle", color=INK, bold=False) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(str(words))}</text>'
        )

    def box(self, x, y, width, height, words="", fill="#ffffff", line=SOFT, size=13) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
            f'fill="{fill}" stroke="{line}"/>'
        )
        lines = words.split("\n") if words else []
        for i, line_words in enumerate(lines):
            down = height / 2 + size * (0.35 + 1.25 * (i - (len(lines) - 1) / 2))
            self.text(x + width / 2, y + down, line_words, size)

    def line(self, points, color=SOFT, width=1.5, arrow=False, dash="") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = ' marker-end="url(#tip)"' * arrow + f' stroke-dasharray="{dash}"' * bool(dash)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{more}/>'
        )

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def table(page: str, header: str) -> list[list[str]]:
    """The rows of the table of a page whose header begins with these cells."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def number(cell: str) -> float:
    """The first figure of a cell."""
    return float(re.search(r"\d+(?:\.\d+)?", cell).group())


def architecture() -> Picture:
    """The modules and what each includes, from the table of docs/architecture.md."""
    rows = table("architecture.md", "| module | holds |")
    found = {row[0].strip("`"): row[2] for row in rows if row[0].startswith("`")}
    needs = {name: set(re.findall(r"\w+", may)) & set(found) for name, may in found.items()}
    # The program and the bindings may include all.
    names = [name for name in found if needs[name] - {"cli"} or name == "core"]
    level: dict[str, int] = {}
    while len(level) < len(names):
        for name in names:
            if needs[name] <= set(level):
                level[name] = 1 + max((level[other] for other in needs[name]), default=-1)
    by_level: dict[int, list[str]] = {}
    for name in names:
        by_level.setdefault(level[name], []).append(name)
    top = max(by_level)
    picture = Picture(760, 90 + 78 * (top + 1), "The modules, and what each includes")
    place = {}
    for depth, row in by_level.items():
        for i, name in enumerate(row):
            x = (i + 0.5) / len(row) if depth % 2 else (i + 1) / (len(row) + 1)
            x = 0.85 if name == "simulate" else x  # out of the way of an arrow
            place[name] = (760 * x, 40 + 78 * (top - depth))
    for name in names:
        indirect = set().union(*(reach(other, needs) for other in needs[name]))
        for other in sorted(needs[name] - indirect):
            x, y = place[name]
            to_x, to_y = place[other]
            picture.line([(x, y + 34), (to_x, to_y - 1)], arrow=True)
    for name, (x, y) in place.items():
        picture.box(x - 56, y, 112, 34, name, PALE[level[name] % len(PALE)])
    words = "An arrow leads to a module that is included; modules further down may be, too."
    picture.text(380, 65 + 78 * (top + 1), words, 12, color=SOFT)
    return picture


def reach(name: str, needs: dict[str, set[str]]) -> set[str]:
    return set(needs[name]).union(*(reach(other, needs) for other in needs[name]))


def token() -> Picture:
    """The way of one token of rank 0 whose topk are experts 1, 3 and 5 of six on three ranks."""
    picture = Picture(760, 400, "The way of a token: dispatch to its experts and combine")
    columns = [110, 380, 650]
    for rank, x in enumerate(columns):
        picture.box(x - 100, 14, 200, 372, fill="#fafafa", line=GRID)
        picture.text(x, 34, f"rank {rank}", 13, bold=True)
    picture.box(40, 50, 140, 30, "token, experts 1 3 5", PALE[0])
    picture.text(380, 66, "dispatch: one row per rank", 12, color=SOFT)
    picture.text(380, 82, "with an expert of the token", 12, color=SOFT)
    for rank, x in enumerate(columns):
        picture.line([(110, 80), (x, 118)], COLORS[0], arrow=True)
        picture.box(x - 62, 120, 124, 28, "row of the token", PALE[0])
        for i, side in enumerate((-48, 48)):
            expert = 2 * rank + i
            picture.box(x + side - 42, 184, 84, 34, f"expert {expert}", PALE[2] if i else "#fff")
        picture.line([(x, 148), (x + 48, 182)], COLORS[0], arrow=True)
        picture.line([(x + 48, 218), (x, 252)], COLORS[1], arrow=True)
        picture.box(x - 72, 254, 144, 28, "weighted, summed", PALE[1], size=12)
        picture.line([(x, 282), (110, 330)], COLORS[1], arrow=True)
    picture.text(380, 345, "combine: one row", 12, color=SOFT)
    picture.text(380, 361, "per rank goes home", 12, color=SOFT)
    picture.box(40, 332, 140, 40, "sum, in\na fixed order", PALE[1], size=12)
    return picture


LENGTHS = [[6000], [1500, 1500, 1500, 1500], [3000, 2000, 1000], [800] * 7 + [400]]


def planned():
    """(plan, shards): home, destination, document, length and work of each shard."""
    plan = waybill.plan(LENGTHS, len(LENGTHS))
    qkv = plan.to_qkv_plan()
    document = {}
    for doc in range(qkv.num_documents):
        for i in range(int(qkv.doc_shard_offsets[doc]), int(qkv.doc_shard_offsets[doc + 1])):
            document[int(qkv.doc_shards[i])] = doc
    shards = []
    for home in range(len(LENGTHS)):
        for s in range(int(qkv.rank_shard_offsets[home]), int(qkv.rank_shard_offsets[home + 1])):
            place = (home, int(qkv.q_dst[s]), document[s])
            shards.append((*place, int(qkv.shard_len[s]), int(qkv.shard_work[s])))
    return plan, shards


def document_way() -> Picture:
    """The queries of four ranks at home and where their attention is computed."""
    _, shards = planned()
    picture = Picture(760, 470, "The way of a document: queries at home, and where attention is")
    scale = 600 / max(sum(s[3] for s in shards if s[1] == rank) for rank in range(4))
    words = (
        "home: documents as packed, equally many tokens per rank",
        "attention: equal work per rank (the first document is cut; K and V follow)",
    )
    for half in (0, 1):
        top = 34 + 226 * half
        picture.text(20, top - 12, words[half], 13, "start", bold=True)
        for rank in range(4):
            x, y = 100.0, top + 46 * rank
            picture.text(86, y + 21, f"rank {rank}", 13, "end")
            for home, dst, doc, length, _ in shards:
                if (home, dst)[half] != rank:
                    continue
                moved = home != dst
                color = COLORS[0] if doc == 0 else PALE[1 + doc % 7]
                picture.box(x, y, length * scale, 32, fill=color, line="#ffffff")
                if half and moved:
                    picture.box(x + 1, y + 1, length * scale - 2, 30, fill="none", line=INK)
                x += length * scale
    words = "blue: the document of 6000 tokens; framed: queries that another rank computes"
    picture.text(100, 458, words, 12, "start", SOFT)
    return picture


def balance() -> Picture:
    """The work of attention of each rank, where documents lie and as planned."""
    plan, shards = planned()
    before = [sum(s[4] for s in shards if s[0] == rank) for rank in range(4)]
    after = [int(work) for work in plan.work]
    mean = sum(after) / 4
    picture = Picture(760, 320, "Attention of each rank before and after planning")
    for side, work in enumerate((before, after)):
        left = 60 + 370 * side
        words = ("every document at home", "as planned")[side]
        picture.text(left + 130, 20, words, 13, bold=True)
        busiest = f"the busiest rank has {max(work) / mean:.2f} x the mean"
        picture.text(left + 130, 38, busiest, 12, color=SOFT)
        for rank, pairs in enumerate(work):
            height = 190 * pairs / max(before)
            x = left + 70 * rank
            picture.box(x, 262 - height, 52, height, fill=COLORS[side], line=COLORS[side])
            picture.text(x + 26, 254, f"{pairs / 1e6:.1f}", 12, color="#ffffff")
            picture.text(x + 26, 280, f"rank {rank}", 12)
        level = 262 - 190 * mean / max(before)
        picture.line([(left - 10, level), (left + 275, level)], INK, 1, dash="5 4")
    words = "millions of (query, key) pairs; dashed: the mean. Four ranks of 6000 tokens."
    picture.text(380, 308, words, 12, color=SOFT)
    return picture


def plot(picture: Picture, series, unit: str, low: float, high: float) -> None:
    """Lines over MiB per rank; x and y are logarithms."""
    left, top, width, height = 80, 50, 500, 250

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + width * math.log(x / 0.8) / math.log(320 / 0.8),
            top + height * (1 - math.log(y / low) / math.log(high / low)),
        )

    for mib in (1, 8, 64, 256):
        x, _ = at(mib, low)
        picture.line([(x, top), (x, top + height)], GRID, 1)
        picture.text(x, top + height + 18, mib, 12)
    ticks = [base * 10**power for power in range(4) for base in (1, 2, 5)]
    for tick in [tick for tick in ticks if low <= tick <= high]:
        _, y = at(1, tick)
        picture.line([(left, y), (left + width, y)], GRID, 1)
        picture.text(left - 8, y + 4, tick, 12, "end")
    picture.text(left + width / 2, top + height + 38, "MiB per rank", 12, color=SOFT)
    picture.text(left, top - 8, unit, 12, "start", SOFT)
    for i, (name, points) in enumerate(series):
        spots = [at(x, y) for x, y in points]
        picture.line(spots, COLORS[i], 2.5, dash="" if i == 0 else "7 4" if i == 1 else "2 3")
        for x, y in spots:
            picture.box(x - 3, y - 3, 6, 6, fill=COLORS[i], line=COLORS[i])
        picture.line([(600, 72 + 26 * i), (628, 72 + 26 * i)], COLORS[i], 2.5,
                     dash="" if i == 0 else "7 4" if i == 1 else "2 3")  # fmt: skip
        picture.text(634, 76 + 26 * i, name, 12, "start")


def against_nccl():
    rows = table("performance/gpu_sequences.md", "| MiB per rank | NCCL us |")
    return [
        ("dispatch", [(number(row[0]), number(row[3])) for row in rows]),
        ("NCCL", [(number(row[0]), number(row[1])) for row in rows]),
        ("NCCL and packing", [(number(row[0]), number(row[2])) for row in rows]),
    ]


def latency() -> Picture:
    picture = Picture(760, 370, "Time of a dispatch and of NCCL over bytes per rank")
    words = "Dispatch of sequences beside NCCL all-to-all, 8 x H200, 22 Nov 2026"
    picture.text(20, 24, words, 14, "start", bold=True)
    plot(picture, against_nccl(), "us (lower is better)", 10, 2000)
    return picture


def bandwidth() -> Picture:
    """Bytes that leave a rank over the time: the table's MiB, 7 of 8 parts of which leave."""
    picture = Picture(760, 370, "Bytes per second of a dispatch and of NCCL over bytes per rank")
    words = "Rate on the wire, from the same table: 7/8 of the bytes leave their rank"
    picture.text(20, 24, words, 14, "start", bold=True)
    series = [
        (name, [(mib, mib * 2**20 * 7 / 8 / us / 1000) for mib, us in points])
        for name, points in against_nccl()
    ]
    plot(picture, series, "GB/s (higher is better)", 5, 500)
    return picture


def experts() -> Picture:
    """Waybill, DeepEP and NCCL side by side, from the table of docs/performance/gpu_moe.md."""
    rows = table("performance/gpu_moe.md", "| 8 x H200 | Waybill |")[:3]
    picture = Picture(760, 330, "Experts: times of Waybill, DeepEP and NCCL")
    words = "Experts, 4096 tokens of 7168 bfloat16, top 8 of 256, 8 x H200, 20 SMs"
    picture.text(20, 24, words, 14, "start", bold=True)
    most = max(number(cell) for row in rows for cell in row[1:4])
    for i, row in enumerate(rows):
        y = 48 + 84 * i
        label = row[0].removeprefix("4096 tokens, ").removesuffix(", 20 SMs")
        picture.text(20, y + 38, label, 13, "start")
        for j, (name, cell) in enumerate(zip(("Waybill", "NCCL", "DeepEP V1"), row[1:4])):
            width = 330 * number(cell) / most
            picture.box(230, y + 24 * j, width, 20, fill=COLORS[j], line=COLORS[j])
            words = f"{name} {number(cell):g} us"
            picture.text(238 + width, y + 15 + 24 * j, words, 12, "start")
    picture.text(20, 318, "Medians of the slowest rank; lower is better.", 12, "start", SOFT)
    return picture


DRAWN = {
    "architecture": architecture,
    "token": token,
    "document": document_way,
    "balance": balance,
    "latency": latency,
    "bandwidth": bandwidth,
    "experts": experts,
}


def main() -> int:
    stale = []
    for name, draw in DRAWN.items():
        file = PICTURES / f"{name}.svg"
        text = draw().svg()
        if "--check" not in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    for name in stale:
        print(f"docs/pictures/{name}.svg: is not what docs/pictures/draw.py draws")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
