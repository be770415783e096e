"""``python -m waybill bench``: Waybill and what else is installed, on this machine, in a minute.

The same rows by each way, with what came checked first. On several GPUs ranks are processes, and
the others are NCCL's all-to-all through torch, ways by hand, DeepEP and NCCL EP. On one GPU that
ranks share, and on CPUs, ranks are threads, and the other ways copy by hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ..errors import Error

__all__ = ["main"]

_EPILOG = """examples:
  python -m waybill bench                               a minute, on what is here
  python -m waybill bench --experts 64 --hidden 2048 --tokens 128,1024,8192
  python -m waybill bench --attention wlbllm            also a step of attention
  python -m waybill bench --attention 30000,500,2268
  python -m waybill bench --report > report.md          to paste into an issue
  python -m waybill bench --json bench.json --html bench.html
"""


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0 if all ways were right, 1 if one was not, 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    if importlib.util.find_spec("torch") is None:
        parser.error("bench needs torch, which is not installed: pip install torch")
    from . import attention, experts, ranks, report

    begin = time.monotonic()
    try:
        place = ranks.place_of(options.device, options.ranks, options.experts)
        sizes = experts.sizes_of(options, place)
        documents = attention.documents_of(options, place) if options.attention else None
    except ValueError as error:  # InvalidArgument too
        parser.error(str(error))
    command = " ".join(["python -m waybill bench", *arguments])
    result: dict[str, Any] = {
        "format": "waybill.bench", "version": 1, "command": command,
        "machine": report.machine(place),
    }  # fmt: skip
    try:
        print(report.headline(result, place), file=sys.stderr, flush=True)
        result["experts"] = ranks.start(place, experts.measure, sizes, options.seconds)
        if documents is not None:
            seconds = options.seconds / 2
            result["attention"] = ranks.start(place, attention.measure, documents, seconds)
    except KeyboardInterrupt:
        print("\nbench: interrupted", file=sys.stderr, flush=True)
        return 130
    except (Error, RuntimeError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr, flush=True)
        return 1
    result["seconds"] = round(time.monotonic() - begin, 1)
    print(report.markdown(result) if options.report else report.text(result), flush=True)
    for path, made in ((options.json, report.as_json), (options.html, report.html)):
        if path is not None:
            path.write_text(made(result), encoding="utf-8")
            print(f"bench: wrote {path}", file=sys.stderr)
    return 0 if report.all_right(result) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m waybill bench",
        description="Measures Waybill beside what else is installed here, after checking that each"
        " way delivers the right rows and sums.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--experts", type=_count(2**16), default=256, help="of all ranks; %(default)s")
    add("--topk", type=_count(32), default=8, help="experts of a token; %(default)s")
    add("--hidden", type=_count(2**16), default=7168, help="elements of a token; %(default)s")
    add("--tokens", type=_counts, help="of a rank; 128,4096, on CPUs 128,1024")
    add(
        "--attention", metavar="LENGTHS",
        help="also a step of attention, on documents of these lengths (30000,500,2268) or drawn"
        " from a distribution (wlbllm)",
    )  # fmt: skip
    add("--device", choices=("cuda", "cpu"), help="cuda where Waybill finds a GPU")
    add("--ranks", type=_count(64), help="as many as there are GPUs, and at least 2")
    add("--seconds", type=_count(3600), default=30, help="for the measured calls; %(default)s")
    output = parser.add_argument_group("output")
    add = output.add_argument
    add(
        "--report",
        action="store_true",
        help="print Markdown for an issue, with the machine's facts",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    add("--html", type=Path, metavar="FILE", help="also write a page")
    return parser


def _count(most: int) -> Any:
    def number(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected 1..{most}")
        return value

    return number


def _counts(text: str) -> Optional[list[int]]:
    return [_count(2**20)(part) for part in text.split(",")]
