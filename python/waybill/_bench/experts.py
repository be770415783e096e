"""Dispatch and combine of experts' tokens by each way, with the same calls.

A way is a function that is given a ``Way`` and returns its calls: ``dispatch()`` from tokens, ids
and weights alone; ``dispatch_again()`` of the same routing, which may use all that the first one
learnt; and ``combine()`` of what arrived. They set ``rows``, what arrived, and ``sums``, the
combine's, [T, hidden].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, Optional

import torch

from ..torch.moe import EPAll2AllLayer
from .ranks import Place, Rank, slowest_us


class Way:
    """The tokens of a rank, of small whole numbers, of which every sum is exact in bfloat16; ids
    [T, topk] are distinct experts, all as likely. A copy of it has what one way makes of them.
    """

    row_per_slot = False  #: else a row for each token and rank
    rows: torch.Tensor
    sums: torch.Tensor
    num_sm: Optional[int] = None  #: where the way says it

    def __init__(self, rank: Rank, tokens: int, hidden: int, topk: int, experts: int) -> None:
        made = torch.Generator().manual_seed(rank.rank)
        values = torch.randint(0, 256 // topk, (tokens, hidden), generator=made, dtype=torch.uint8)
        scores = torch.rand(tokens, experts, generator=made)
        self.rank, self.hidden, self.topk, self.experts = rank, hidden, topk, experts
        self.local = experts // rank.size
        self.x = values.to(rank.device).bfloat16()
        self.ids = scores.topk(topk).indices.to(rank.device)
        self.weights = torch.rand(tokens, topk, generator=made).to(rank.device)
        self.goes = torch.zeros(tokens, rank.size, dtype=torch.bool, device=rank.device)
        self.goes.scatter_(1, self.ids // self.local, True)  # to which ranks a token goes
        self.close: Callable[[], Any] = lambda: None

    def wire_bytes(self) -> int:
        """Counts the rows that leave this rank, each once for each destination."""
        away = self.goes.sum() - self.goes[:, self.rank.rank].sum()
        return int(away) * self.hidden * 2

    def is_right(self) -> bool:
        """Whether as many rows arrived as belong here, with the values that were sent, and each
        token came back once from each place that it went to. Collective.
        """
        rank = self.rank
        to_rank = torch.stack([(self.ids // self.local == r).sum(1) for r in range(rank.size)])
        times = to_rank if self.row_per_slot else to_rank.clamp(max=1)
        values = (times.double() @ self.x.double().sum(1, keepdim=True)).squeeze(1)
        sent = torch.stack([times.sum(1).double(), values], 1).tolist()
        expected = [sum(theirs[rank.rank][i] for theirs in rank.gather(sent)) for i in (0, 1)]
        here = [float(len(self.rows)), float(self.rows.double().sum())]
        back = self.x.float() * times.sum(0).unsqueeze(1)
        return here == expected and torch.equal(self.sums.float(), back)


Call = Callable[[], None]
Make = Callable[[Way], tuple[Call, Call, Call]]
CALLS = ("dispatch", "dispatch_again", "combine")


def waybill(way: Way, rows: str = "grouped") -> tuple[Call, Call, Call]:
    """EPAll2AllLayer; as it is made without options, a row for each topk slot."""
    rank, x, ids = way.rank, way.x, way.ids
    layer = EPAll2AllLayer(
        rank.group, len(x), way.hidden, way.topk, rank.rank, way.experts, rank.size, rank.size,
        rows=rows,
    )  # fmt: skip
    way.row_per_slot, way.close, way.num_sm = rows == "grouped", layer.finalize, layer.num_sm
    layout: Any = None

    def dispatch() -> None:
        nonlocal layout
        way.rows, _, layout = layer.dispatch(x, ids, way.weights)

    def again() -> None:
        way.rows, _, _ = layer.dispatch(x, ids, layout_desc=layout)

    def combine() -> None:
        way.sums = layer.combine(way.rows, layout)

    return dispatch, again, combine


def all_to_all(way: Way) -> tuple[Call, Call, Call]:
    """Rows packed by destination, exchanged, and added where they came from. How many come is
    said first, which the host waits for.
    """
    rank, x = way.rank, way.x
    order = torch.empty(0)
    sends: list[int] = []
    receives: list[int] = []

    def exchanged(values: torch.Tensor) -> torch.Tensor:
        return rank.exchanged(values.index_select(0, order), receives, sends)

    def dispatch() -> None:
        nonlocal order, sends, receives
        order = way.goes.t().nonzero()[:, 1]  # tokens, by destination
        counts, ones = way.goes.sum(0), [1] * rank.size
        arriving = rank.exchanged(counts, ones, ones)
        sends, receives = counts.tolist(), arriving.tolist()
        exchanged(way.ids)
        exchanged(way.weights)
        again()

    def again() -> None:
        way.rows = exchanged(x)

    def combine() -> None:
        back = rank.exchanged(way.rows, sends, receives)
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # Rank by rank, so that no two rows of a call go to the same token, and the order is fixed.
        for tokens, rows in zip(*(torch.split(one, sends) for one in (order, back)), strict=True):
            sums.index_add_(0, tokens, rows.float())
        way.sums = sums.bfloat16()

    return dispatch, again, combine


def all_gather(way: Way) -> tuple[Call, Call, Call]:
    """All tokens to all ranks, which pick those of their experts; sums are scattered."""
    rank = way.rank
    every = mine = torch.empty(0)

    def dispatch() -> None:
        nonlocal mine
        ids = rank.gathered(way.ids)
        rank.gathered(way.weights)
        mine = (ids // way.local == rank.rank).any(1).nonzero().squeeze(1)
        again()

    def again() -> None:
        nonlocal every
        every = rank.gathered(way.x)
        way.rows = every.index_select(0, mine)

    def combine() -> None:
        way.sums = rank.scattered(torch.zeros_like(every).index_copy_(0, mine, way.rows))

    return dispatch, again, combine


def deep_ep(way: Way) -> tuple[Call, Call, Call]:
    """deep_ep.Buffer on one host, with its recommended configurations."""
    from deep_ep import Buffer  # type: ignore[import-not-found]

    size, handle = way.rank.size, None
    configs = (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size))
    sizes = [config.get_nvl_buffer_size_hint(2 * way.hidden, size) for config in configs]
    buffer = Buffer(way.rank.group, max(sizes))

    def dispatch() -> None:
        nonlocal handle
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(way.ids, way.experts)
        way.rows, _, _, _, handle, _ = buffer.dispatch(
            way.x, num_tokens_per_rank=per_rank, is_token_in_rank=goes,
            num_tokens_per_expert=per_expert, topk_idx=way.ids, topk_weights=way.weights,
        )  # fmt: skip

    def again() -> None:
        way.rows = buffer.dispatch(way.x, handle=handle)[0]

    def combine() -> None:
        way.sums = buffer.combine(way.rows, handle)[0]

    return dispatch, again, combine


def nccl_ep(way: Way) -> tuple[Call, Call, Call]:
    """nccl.ep's high-throughput algorithm, a row for each token and rank. A dispatch with counting
    gives its handle the ids again, which is when NCCL EP exchanges them.
    """
    from nccl import core, ep  # type: ignore[import-not-found]

    rank, x, num_rows = way.rank, way.x, 0
    unique = rank.gather(bytes(core.get_unique_id().as_bytes) if rank.rank == 0 else None)[0]
    comm = core.Communicator.init(
        nranks=rank.size, rank=rank.rank, unique_id=core.UniqueId.from_bytes(unique)
    )
    tokens, most = len(x), len(x) * rank.size
    group = ep.Group.create(
        comm,
        ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=way.experts,
            max_dispatch_tokens_per_rank=tokens, max_recv_tokens_per_rank=most,
            max_token_bytes=2 * way.hidden,
        ),
    )  # fmt: skip
    room, way.sums = x.new_empty(most, way.hidden), x.new_empty(tokens, way.hidden)
    room_weights = x.new_empty(most, way.topk, dtype=torch.float32)
    room_ids = x.new_empty(most, way.topk, dtype=torch.int64)
    total = torch.zeros(1, dtype=torch.int32, device=x.device)
    counts = torch.zeros(way.local, dtype=torch.int32, device=x.device)

    def counters() -> Any:
        return ep.LayoutInfo(expert_counters=ep.Tensor(counts), recv_total_counter=ep.Tensor(total))

    handle = group.create_handle(
        ep.Layout.FLAT, ep.Tensor(way.ids), layout_info=counters(), config=ep.HandleConfig(),
        stream=_stream(),
    )  # fmt: skip

    def dispatch() -> None:
        nonlocal num_rows
        handle.update(ep.Tensor(way.ids), layout_info=counters(), stream=_stream())
        num_rows = int(total)  # the host waits, as the sizes of the experts' inputs need
        again()

    def again() -> None:
        handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(x), topk_weights=ep.Tensor(way.weights)),
            ep.DispatchOutputs(
                tokens=ep.Tensor(room), topk_weights=ep.Tensor(room_weights),
                topk_idx=ep.Tensor(room_ids),
            ),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts)),
            config=ep.DispatchConfig(send_only=0, round_scales=0), stream=_stream(),
        )  # fmt: skip
        handle.complete(stream=_stream())
        way.rows = room[:num_rows]

    def combine() -> None:
        handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(room[: max(1, num_rows)])),
            ep.CombineOutputs(tokens=ep.Tensor(way.sums)),
            config=ep.CombineConfig(send_only=0), stream=_stream(),
        )  # fmt: skip
        handle.complete(stream=_stream())

    way.close = lambda: [part.destroy() for part in (handle, group, comm)]
    return dispatch, again, combine


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


OURS: dict[str, Make] = {
    "Waybill": waybill,
    "Waybill, compact rows": partial(waybill, rows="compact"),
}
BY_HAND: dict[str, Make] = {"all-to-all": all_to_all, "all-gather": all_gather}
OTHERS: dict[str, Make] = {"DeepEP": deep_ep, "NCCL EP": nccl_ep}

#: Tokens of a rank in each table, their elements, topk and experts of all ranks.
Sizes = tuple[list[int], int, int, int]


def sizes_of(options: argparse.Namespace, place: Place) -> Sizes:
    if options.topk > options.experts:
        raise ValueError(f"--topk: got {options.topk}, expected 1..{options.experts}, the experts")
    tokens = options.tokens or ([128, 4096] if place.device == "cuda" else [128, 1024])
    return tokens, options.hidden, options.topk, options.experts


def measure(rank: Rank, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """A table for each number of tokens, the same on all ranks. Collective."""
    of_tables, *rest = sizes
    ways = {**OURS, **{f"{name} by hand ({rank.how})": way for name, way in BY_HAND.items()}}
    each = seconds / (len(of_tables) * (len(ways) + len(OTHERS)) * len(CALLS))
    tables = []
    for tokens in of_tables:
        if rank.rank == 0:
            print(f"bench: experts, {tokens} tokens each", file=sys.stderr, flush=True)
        case = Way(rank, tokens, *rest)
        lines = [line_of(name, make, case, each) for name, make in ways.items()]
        for name, make in OTHERS.items():  # which need a GPU for each rank
            note = {"way": name, "note": "needs 2 GPUs"}
            lines.append(note if rank.how == "copies" else line_of(name, make, case, each))
        most = max(rank.gather(case.wire_bytes()))
        tables.append({"tokens": tokens, "wire_bytes": most, "lines": lines})
    return {**dict(zip(("hidden", "topk", "experts"), rest)), "tables": tables}


@torch.no_grad()
def line_of(name: str, make: Make, case: Way, seconds: float) -> dict[str, Any]:
    """us of each call; a note alone where the way cannot be made on some rank. Collective."""
    way, gather, trouble = copy(case), case.rank.gather, ""
    calls: tuple[Call, ...] = ()
    try:
        calls = make(way)
    except ImportError:
        trouble = "not installed"
    except Exception as error:  # another library's, of any kind
        if name in OURS:
            raise
        trouble = f"not here: {type(error).__name__}: {error}"
    troubles = [said for said in gather(trouble) if said]
    if troubles:
        return {"way": name, "note": troubles[0].splitlines()[0]}
    dispatch, _, combine = calls
    dispatch()
    combine()
    right = all(gather(way.is_right()))
    us = {call: slowest_us(way.rank, made, seconds) for call, made in zip(CALLS, calls)}
    right = right and all(gather(way.is_right()))
    way.close()
    line: dict[str, Any] = {"way": name, "right": right, "us": us}
    return line if way.num_sm is None else {**line, "num_sm": way.num_sm}
