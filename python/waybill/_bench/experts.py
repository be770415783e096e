"""Dispatch and combine of experts' tokens by each way, side by side."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple, Optional

import torch

from .expert_ways import BY_HAND, OTHERS, Case, Way, Waybill, WaybillCompact
from .ranks import Place, Rank, slowest_us

CALLS = ("dispatch", "dispatch_again", "combine")


class Sizes(NamedTuple):
    """A workload; tokens are those of a rank."""

    tokens: list[int]
    hidden: int
    topk: int
    experts: int

    @classmethod
    def of(cls, options: argparse.Namespace, place: Place) -> Sizes:
        if options.topk > options.experts:
            raise ValueError(
                f"--topk: got {options.topk}, expected 1..{options.experts}, the experts"
            )
        tokens = options.tokens or ([128, 4096] if place.device == "cuda" else [128, 1024])
        return cls(tokens, options.hidden, options.topk, options.experts)


def measure(rank: Rank, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """A table for each number of tokens, the same on all ranks. Collective."""
    ways: dict[str, type[Way]] = {way.name: way for way in (Waybill, WaybillCompact)}
    ways.update((f"{way.name} by hand ({rank.how})", way) for way in BY_HAND)
    each = seconds / (len(sizes.tokens) * (len(ways) + len(OTHERS)) * len(CALLS))
    tables = []
    for tokens in sizes.tokens:
        if rank.rank == 0:
            print(f"bench: experts, {tokens} tokens each", file=sys.stderr, flush=True)
        case = Case(rank, tokens, sizes.hidden, sizes.topk, sizes.experts)
        lines = [line_of(name, way, case, each) for name, way in ways.items()]
        lines += [other_line(way, case, each) for way in OTHERS]
        most = max(rank.gather(case.wire_bytes()))
        tables.append({"tokens": tokens, "wire_bytes": most, "lines": lines})
    return {"hidden": sizes.hidden, "topk": sizes.topk, "experts": sizes.experts, "tables": tables}


def other_line(way: type[Way], case: Case, seconds: float) -> dict[str, Any]:
    """Returns the line of another library, which needs a GPU for each rank."""
    if case.rank.how == "copies":
        return {"way": way.name, "note": "needs 2 GPUs"}
    return line_of(way.name, way, case, seconds)


@torch.no_grad()
def line_of(name: str, make: type[Way], case: Case, seconds: float) -> dict[str, Any]:
    """us of each call; a note alone where the way cannot be made on some rank. Collective."""
    way: Optional[Way] = None
    trouble = ""
    try:
        way = make(case)
    except ImportError:
        trouble = "not installed"
    except Exception as error:  # another library's, of any kind
        if issubclass(make, Waybill):
            raise
        trouble = f"not here: {type(error).__name__}: {error}"
    troubles = [said for said in case.rank.gather(trouble) if said]
    if way is None or troubles:
        return {"way": name, "note": troubles[0].splitlines()[0]}
    way.dispatch()
    way.combine()
    right = all(case.rank.gather(way.is_right()))
    us = {call: slowest_us(case.rank, getattr(way, call), seconds) for call in CALLS}
    right = right and all(case.rank.gather(way.is_right()))
    way.close()
    line: dict[str, Any] = {"way": name, "right": right, "us": us}
    layer = getattr(way, "layer", None)
    if layer is not None:
        line["num_sm"] = layer.num_sm
    return line
