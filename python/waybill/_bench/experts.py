"""Dispatch and combine of experts' tokens by each way, with the same calls.

Each has ``dispatch()`` from tokens, ids and weights alone; ``dispatch_again()`` of the same
routing, which may use all that the first one learnt; and ``combine()`` of what arrived. ``rows``
are what arrived, ``sums`` the last combine's, [T, hidden].
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar, NamedTuple, Optional

import torch

from ..torch.moe import EPAll2AllLayer
from .ranks import Place, Rank, slowest_us


class Case:
    """The tokens of a rank: small whole numbers, of which every sum is exact in bfloat16.

    ids [T, topk] are distinct experts, all as likely.
    """

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

    def wire_bytes(self) -> int:
        """Counts the rows that leave this rank, each once for each destination."""
        away = self.goes.sum() - self.goes[:, self.rank.rank].sum()
        return int(away) * self.hidden * 2


class Way:
    """One way of a case."""

    name = ""
    row_per_slot = False  #: else a row for each token and rank
    rows: torch.Tensor
    sums: torch.Tensor

    def __init__(self, case: Case) -> None:
        self.case = case

    def dispatch(self) -> None:
        raise NotImplementedError

    def dispatch_again(self) -> None:
        raise NotImplementedError

    def combine(self) -> None:
        raise NotImplementedError

    def arrived(self) -> torch.Tensor:
        """The rows without the room after them."""
        return self.rows

    def close(self) -> None:
        pass

    def is_right(self) -> bool:
        """Whether as many rows arrived as belong here, with the values that were sent, and each
        token came back once from each place that it went to. Collective.
        """
        case = self.case
        to_rank = torch.stack([(case.ids // case.local == r).sum(1) for r in range(case.rank.size)])
        times = to_rank if self.row_per_slot else to_rank.clamp(max=1)
        values = (times.double() @ case.x.double().sum(1, keepdim=True)).squeeze(1)
        sent = torch.stack([times.sum(1).double(), values], 1).tolist()
        expected = [
            sum(theirs[case.rank.rank][i] for theirs in case.rank.gather(sent)) for i in (0, 1)
        ]
        rows = self.arrived()
        here = [float(len(rows)), float(rows.double().sum())]
        back = case.x.float() * times.sum(0).unsqueeze(1)
        return here == expected and torch.equal(self.sums.float(), back)


class Waybill(Way):
    """EPAll2AllLayer as it is made without options: a row for each topk slot."""

    name = "Waybill"
    row_per_slot = True
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rank = case.rank
        self.layer = EPAll2AllLayer(
            rank.group, len(case.x), case.hidden, case.topk, rank.rank, case.experts, rank.size,
            rank.size, **self.options,
        )  # fmt: skip

    def dispatch(self) -> None:
        case = self.case
        self.rows, _, self.layout = self.layer.dispatch(case.x, case.ids, case.weights)

    def dispatch_again(self) -> None:
        case = self.case
        self.rows, _, _ = self.layer.dispatch(case.x, case.ids, layout_desc=self.layout)

    def combine(self) -> None:
        self.sums = self.layer.combine(self.rows, self.layout)

    def close(self) -> None:
        self.layer.finalize()


class WaybillCompact(Waybill):
    """The same with rows="compact"."""

    name = "Waybill, compact rows"
    row_per_slot = False
    options: ClassVar[dict[str, Any]] = {"rows": "compact"}


class AllToAll(Way):
    """Rows packed by destination, exchanged, and added where they came from. How many come is
    said first, which the host waits for.
    """

    name = "all-to-all"

    def dispatch(self) -> None:
        case = self.case
        self.order = case.goes.t().nonzero()[:, 1]  # tokens, by destination
        counts = case.goes.sum(0)
        ones = [1] * case.rank.size
        arriving = case.rank.exchanged(counts, ones, ones)
        self.sends, self.receives = counts.tolist(), arriving.tolist()
        self.ids = self._exchange(case.ids.index_select(0, self.order))
        self.weights = self._exchange(case.weights.index_select(0, self.order))
        self.dispatch_again()

    def dispatch_again(self) -> None:
        self.rows = self._exchange(self.case.x.index_select(0, self.order))

    def combine(self) -> None:
        case = self.case
        back = case.rank.exchanged(self.rows, self.sends, self.receives)
        sums = torch.zeros(case.x.shape, dtype=torch.float32, device=case.x.device)
        # Rank by rank, so that no two rows of a call go to the same token, and the order is fixed.
        parts = (torch.split(of_all, self.sends) for of_all in (self.order, back))
        for order, rows in zip(*parts, strict=True):
            sums.index_add_(0, order, rows.float())
        self.sums = sums.bfloat16()

    def _exchange(self, packed: torch.Tensor) -> torch.Tensor:
        return self.case.rank.exchanged(packed, self.receives, self.sends)


class AllGather(Way):
    """All tokens to all ranks, which pick those of their experts; sums are scattered."""

    name = "all-gather"

    def dispatch(self) -> None:
        case = self.case
        ids = case.rank.gathered(case.ids)
        self.weights = case.rank.gathered(case.weights)
        self.mine = (ids // case.local == case.rank.rank).any(1).nonzero().squeeze(1)
        self.dispatch_again()

    def dispatch_again(self) -> None:
        self.every = self.case.rank.gathered(self.case.x)
        self.rows = self.every.index_select(0, self.mine)

    def combine(self) -> None:
        sums = torch.zeros_like(self.every).index_copy_(0, self.mine, self.rows)
        self.sums = self.case.rank.scattered(sums)


class DeepEP(Way):
    """deep_ep.Buffer on one host, with its recommended configurations."""

    name = "DeepEP"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        import deep_ep  # type: ignore[import-not-found]

        size = case.rank.size
        configs = (
            deep_ep.Buffer.get_dispatch_config(size),
            deep_ep.Buffer.get_combine_config(size),
        )
        sizes = [c.get_nvl_buffer_size_hint(2 * case.hidden, size) for c in configs]
        self.buffer = deep_ep.Buffer(case.rank.group, max(sizes))

    def dispatch(self) -> None:
        case = self.case
        per_rank, _, per_expert, goes, _ = self.buffer.get_dispatch_layout(case.ids, case.experts)
        self.rows, _, _, _, self.handle, _ = self.buffer.dispatch(
            case.x, num_tokens_per_rank=per_rank, is_token_in_rank=goes,
            num_tokens_per_expert=per_expert, topk_idx=case.ids, topk_weights=case.weights,
        )  # fmt: skip

    def dispatch_again(self) -> None:
        self.rows = self.buffer.dispatch(self.case.x, handle=self.handle)[0]

    def combine(self) -> None:
        self.sums = self.buffer.combine(self.rows, self.handle)[0]


class NcclEP(Way):
    """nccl.ep's high-throughput algorithm, a row for each token and rank. A dispatch with counting
    gives its handle the ids again, which is when NCCL EP exchanges them.
    """

    name = "NCCL EP"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from nccl import core, ep  # type: ignore[import-not-found]

        rank, self.ep = case.rank, ep
        ids = rank.gather(bytes(core.get_unique_id().as_bytes) if rank.rank == 0 else None)
        self.comm = core.Communicator.init(
            nranks=rank.size, rank=rank.rank, unique_id=core.UniqueId.from_bytes(ids[0])
        )
        tokens = len(case.x)
        most = tokens * rank.size
        self.group = ep.Group.create(
            self.comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=case.experts,
                max_dispatch_tokens_per_rank=tokens, max_recv_tokens_per_rank=most,
                max_token_bytes=2 * case.hidden,
            ),
        )  # fmt: skip
        new = case.x.new_empty
        self.room, self.sums = new(most, case.hidden), new(tokens, case.hidden)
        self.room_weights = new(most, case.topk, dtype=torch.float32)
        self.room_ids = new(most, case.topk, dtype=torch.int64)
        self.total = torch.zeros(1, dtype=torch.int32, device=case.x.device)
        self.counts = torch.zeros(case.local, dtype=torch.int32, device=case.x.device)
        self.handle = self.group.create_handle(
            ep.Layout.FLAT, ep.Tensor(case.ids), layout_info=self._counters(),
            config=ep.HandleConfig(), stream=self._stream(),
        )  # fmt: skip

    def _counters(self) -> Any:
        ep = self.ep
        return ep.LayoutInfo(
            expert_counters=ep.Tensor(self.counts), recv_total_counter=ep.Tensor(self.total)
        )

    @staticmethod
    def _stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def dispatch(self) -> None:
        ids = self.ep.Tensor(self.case.ids)
        self.handle.update(ids, layout_info=self._counters(), stream=self._stream())
        self.num_rows = int(self.total)  # the host waits, as the sizes of the experts' inputs need
        self.dispatch_again()

    def dispatch_again(self) -> None:
        ep, case = self.ep, self.case
        self.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(case.x), topk_weights=ep.Tensor(case.weights)),
            ep.DispatchOutputs(
                tokens=ep.Tensor(self.room), topk_weights=ep.Tensor(self.room_weights),
                topk_idx=ep.Tensor(self.room_ids),
            ),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(self.counts)),
            config=ep.DispatchConfig(send_only=0, round_scales=0), stream=self._stream(),
        )  # fmt: skip
        self.handle.complete(stream=self._stream())
        self.rows = self.room[: self.num_rows]

    def combine(self) -> None:
        ep = self.ep
        self.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(self.room[: max(1, self.num_rows)])),
            ep.CombineOutputs(tokens=ep.Tensor(self.sums)),
            config=ep.CombineConfig(send_only=0), stream=self._stream(),
        )  # fmt: skip
        self.handle.complete(stream=self._stream())

    def close(self) -> None:
        for part in (self.handle, self.group, self.comm):
            part.destroy()


BY_HAND = (AllToAll, AllGather)
OTHERS: tuple[type[Way], ...] = (DeepEP, NcclEP)


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
