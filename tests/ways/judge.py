"""The judge: what a call must deliver, by the simulation on the CPU, and by counting.

Arrays are compared bit for bit. 16-bit tensors are int16 here, float8 ones uint8.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from edges import Batch, ExpertCase, SequenceCase

import waybill
from waybill.moe import (
    EPConfig,
    EvenExperts,
    ExpertDispatch,
    even_experts,
    simulate_dispatch,
    slot_ids,
)
from waybill.moe.payloads import Payload, payload_of

Arrays = dict[str, np.ndarray]


def bfloat16_numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers that bfloat16 holds, as float32."""
    numbers = rng.standard_normal(shape).astype(np.float32)
    return (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def bfloat16_bits(numbers: np.ndarray) -> np.ndarray:
    """Of float32 numbers that bfloat16 holds."""
    high = np.ascontiguousarray(numbers, np.float32).view(np.uint32) >> np.uint32(16)
    return high.astype(np.uint16).view(np.int16)


def differences(got: Arrays, wanted: Arrays, prefix: str) -> list[str]:
    """One line for each array that is not as wanted."""
    lines = []
    for name, want in wanted.items():
        have = got.get(name)
        if have is None:
            lines.append(f"{prefix}: no {name}")
        elif have.shape != want.shape:
            lines.append(f"{prefix}: {name} has shape {list(have.shape)}, want {list(want.shape)}")
        elif have.tobytes() != np.ascontiguousarray(want, have.dtype).tobytes():
            wrong = have != np.ascontiguousarray(want, have.dtype)
            first = np.argwhere(wrong)[0].tolist() if wrong.any() else []
            lines.append(
                f"{prefix}: {int(wrong.sum())} of {want.size} elements of {name} differ,"
                f" the first at {first}: {have[tuple(first)]}, want {want[tuple(first)]}"
            )
    return lines


# ---- Experts ----


@dataclass(frozen=True)
class ExpertCall:
    """What all ranks give to one dispatch and its combine, and what must come of them."""

    case: ExpertCase
    number: int  #: of the round
    variant: int = 0  #: other numbers by the same routing
    rows: str = "grouped"
    alignment: int = 1
    payload: str = "plain"
    has_weights: bool = True
    weighted: bool = False
    num_biases: int = 0
    local_combine: bool = False
    own_order: bool = False  #: full_scatter_indices, in no canonical order
    spare: int = 0  #: slots per rank for copies of experts
    limits: tuple[float, int] = (1.0, 0)  #: limit and min_rows of the plan
    present: bool = False  #: the copies of the round before are there
    tiles: bool = False  #: scales come in tiles of 128 rows of 4

    def _draws(self, rank: int, kind: int) -> np.random.Generator:
        return np.random.default_rng((self.case.seed, self.number, self.variant, rank, kind))

    @property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return self.case.rounds[self.number].counts

    @property
    def ids(self) -> tuple[np.ndarray, ...]:
        """[T, topk] of each rank."""
        return self.case.rounds[self.number].ids

    def tokens(self, rank: int) -> np.ndarray:
        """[T, hidden] float32; codes, or bytes, of rows that are given in their format."""
        count, hidden, draws = self.counts[rank], self.case.sizes.hidden, self._draws(rank, 0)
        if not self.is_given:
            return bfloat16_numbers(draws, (count, hidden))
        return draws.integers(0, 256, (count, self.form.columns)).astype(np.uint8)

    @cached_property
    def form(self) -> Payload:
        """Sizes and dtypes of the payload."""
        return payload_of(self.payload, "payload", self.case.sizes.hidden)

    @property
    def is_given(self) -> bool:
        """Whether rows come with their scales."""
        return self.payload.startswith(("scaled", "bytes"))

    def scales(self, rank: int) -> Any:
        """[T, groups] float32, or codes; with a float32 of each row where the format has one."""
        count, form, draws = self.counts[rank], self.form, self._draws(rank, 1)
        if form.scale_name == "float32":
            return draws.random((count, form.num_groups), "f4")
        columns = form.scale_columns if form.is_bytes else form.num_groups
        codes = draws.integers(0, 256, (count, columns)).astype(np.uint8)
        return (codes, draws.random(count, "f4")) if form.has_row_scale else codes

    def weights(self, rank: int) -> np.ndarray:
        """[T, topk] float32."""
        return self._draws(rank, 2).random((self.counts[rank], self.case.sizes.topk), "f4")

    def outputs(self, rank: int) -> np.ndarray:
        """[R, hidden] float32: what the experts of a rank make of the rows that it must get."""
        return bfloat16_numbers(self._draws(rank, 3), (self.num_rows(rank), self.case.sizes.hidden))

    def bias(self, rank: int, number: int) -> np.ndarray:
        """[T, hidden] float32."""
        return bfloat16_numbers(
            self._draws(rank, 4 + number), (self.counts[rank], self.case.sizes.hidden)
        )

    def positions(self) -> np.ndarray:
        """[sum of T, topk]: the slots of an expert in a random order, dropped ones last."""
        ids = np.concatenate([slots.reshape(-1) for slots in self.ids])
        ids = np.where(ids < 0, self.case.sizes.experts, ids)
        order = np.lexsort((self._draws(0, 9).random(ids.size), ids))
        places = np.empty(ids.size, np.int64)
        places[order] = np.arange(ids.size)
        return places.reshape(-1, self.case.sizes.topk)

    def rows_of_ranks(self) -> np.ndarray:
        """[W, E] topk slots of each expert by source rank: counted, not simulated."""
        experts = self.case.sizes.experts
        return np.stack([np.bincount(ids[ids >= 0], minlength=experts) for ids in self.ids])

    @cached_property
    def plan(self) -> EvenExperts:
        """The copies of this call."""
        return even_experts(
            self.rows_of_ranks(), spare_experts=self.spare, present=self.copies(),
            alignment=self.alignment, limit=self.limits[0], min_rows=self.limits[1],
            num_nodes=self.case.sizes.world // self.case.sizes.per_node,
        )  # fmt: skip

    def copies(self) -> np.ndarray | None:
        """[W, spare] experts that are in the spare slots already."""
        if not self.present or self.number == 0:
            return None
        before = replace(self, number=self.number - 1).plan
        return before.slots[:, self.case.sizes.local :]

    @property
    def has_sums(self) -> bool:
        """Whether the payload has a combine."""
        return not self.payload.startswith("bytes")

    def counted(self) -> np.ndarray:
        """[W, P] topk slots of each local expert, or slot: counted, not simulated."""
        sizes = self.case.sizes
        if self.spare:
            return self.plan.quotas
        return self.rows_of_ranks().sum(0).reshape(sizes.world, sizes.local)

    def places(self, source: int) -> np.ndarray:
        """[T, topk] experts, or slots, of a rank's tokens; -1 for a dropped one."""
        if not self.spare:
            return self.ids[source]
        return slot_ids(self.plan, self.rows_of_ranks(), self.ids[source], rank=source)

    def num_rows(self, rank: int) -> int:
        """Rows that a rank must get: counted, not simulated."""
        if self.rows == "grouped":
            return int((-(-self.counted()[rank] // self.alignment) * self.alignment).sum())
        local = self.case.sizes.local + self.spare
        here = [self.places(source) // local == rank for source in range(len(self.ids))]
        return int(sum(slots.any(1).sum() for slots in here))


def arrays_of_scales(scales: Any) -> Arrays:
    """Scales by name, each as whole numbers of its bits."""
    parts = scales if isinstance(scales, tuple) else (scales,)
    kinds = {1: np.uint8, 4: np.int32}
    return {
        name: np.ascontiguousarray(part).view(kinds[part.dtype.itemsize])
        for name, part in zip(("scales", "row_scales"), parts)
    }


def in_tiles(codes: np.ndarray) -> np.ndarray:
    """Scales where cuBLAS has each: "1D Block Scaling Factors Layout"."""
    rows, columns = np.indices(codes.shape)
    tall, wide = -(-codes.shape[0] // 128), -(-codes.shape[1] // 4)
    tiles = rows // 128 * wide + columns // 4
    places = np.zeros((tall * wide, 512), np.uint8)
    places[tiles, rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4] = codes
    return places.reshape(tall * 128, wide * 4)


class ExpertJudge:
    """What the simulation says of one call."""

    def __init__(self, call: ExpertCall) -> None:
        self.call, sizes = call, call.case.sizes
        self.ranks = range(sizes.world)
        self.config = EPConfig(
            sizes.max_tokens, sizes.hidden, sizes.topk, sizes.experts, 0, sizes.world,
            sizes.per_node, "bfloat16", "float32",
        )  # fmt: skip

    @cached_property
    def there(self) -> ExpertDispatch:
        """The dispatch of all ranks."""
        call, ranks = self.call, self.ranks
        return simulate_dispatch(
            self.config, [call.tokens(r) for r in ranks], list(call.ids),
            [call.weights(r) for r in ranks] if call.has_weights else None,
            call.positions() if call.own_order else None,
            scales=[call.scales(r) for r in ranks] if call.is_given else None,
            dropped_id=-1, rows=call.rows, expert_alignment=call.alignment, payload=call.payload,
            spare_experts=call.spare, limit=call.limits[0], min_rows=call.limits[1],
            present=call.copies(),
        )  # fmt: skip

    @cached_property
    def sums(self) -> list[np.ndarray]:
        """The combine of all ranks."""
        call = self.call
        return self.there.combine(
            [call.outputs(r) for r in self.ranks], call.local_combine, weighted=call.weighted,
            biases=[[call.bias(r, b) for r in self.ranks] for b in range(call.num_biases)],
        )  # fmt: skip

    def wanted(self, rank: int) -> Arrays:
        """All that this rank must have."""
        call, there = self.call, self.there
        counts = call.counted()[rank]
        arrays = {
            "num_rows": np.array([call.num_rows(r) for r in self.ranks]),
            "num_tokens": np.array(call.counts),
            "expert_counts": counts,
            "rows": self._rows(rank),
        }
        if call.has_sums:
            arrays["sums"] = bfloat16_bits(self.sums[rank])
        if call.rows == "grouped":
            padded = -(-counts // call.alignment) * call.alignment
            arrays["expert_offsets"] = np.concatenate([[0], np.cumsum(padded)])
        if call.spare:
            arrays["slots"], arrays["quotas"] = call.plan.slots, call.plan.quotas
        if there.recv_weights is not None:
            arrays["weights"] = there.recv_weights[rank].view(np.int32)
        if there.recv_scales is not None:
            arrays.update(arrays_of_scales(there.recv_scales[rank]))
            if call.tiles:
                arrays["scales"] = in_tiles(arrays["scales"])
        return arrays

    def _rows(self, rank: int) -> np.ndarray:
        rows = self.there.recv_tokens[rank]
        if self.call.payload == "plain":
            return bfloat16_bits(rows)
        return np.ascontiguousarray(rows).view(np.uint8)

    def complaints(self, results: list[Arrays], prefix: str) -> list[str]:
        """What is wrong with the results of all ranks."""
        lines = []
        for rank in self.ranks:
            simulated = len(self.there.recv_tokens[rank])
            if simulated != self.call.num_rows(rank):
                lines.append(
                    f"{prefix}, rank {rank}: the simulation has {simulated} rows, and"
                    f" {self.call.num_rows(rank)} were counted"
                )
            lines += differences(results[rank], self.wanted(rank), f"{prefix}, rank {rank}")
        return lines


# ---- Sequences ----


class SequenceJudge:
    """A batch, where its shards go, and what the simulation says of it."""

    def __init__(
        self, case: SequenceCase, number: int, kv_layout: str = "per_rank", planned: bool = False
    ) -> None:
        self.case, self.number = case, number
        self.batch: Batch = case.batches[number]
        make = _planned if planned else _plan_of
        self.plan = make(self.batch, case.world, kv_layout)

    @cached_property
    def metadata(self) -> Any:
        """Dense tables of the plan."""
        return self.plan.to_metadata()

    @cached_property
    def routing(self) -> Any:
        """The plan's four tables, as a dispatcher takes them."""
        return self.plan.to_routing()

    def given(self, rank: int, which: str) -> np.ndarray:
        """[rows, hidden] whole float32 numbers of q, k or v: of which sums are exact."""
        rng = np.random.default_rng((self.case.seed, self.number, rank, ord(which)))
        hidden = self.case.hidden[0 if which == "q" else 1]
        return rng.integers(-8, 9, (self.rows[rank], hidden)).astype(np.float32)

    def received(self, which: str) -> list[np.ndarray]:
        """What each rank gets of q, k or v."""
        table = self.metadata.fwd_q if which == "q" else self.metadata.fwd_kv
        given = [self.given(rank, which) for rank in range(self.case.world)]
        return [np.asarray(rows) for rows in waybill.simulate_communication(given, table)]

    def sums(self, which: str) -> list[np.ndarray]:
        """The gradients of each rank's rows of k or v, if each copy's gradient is the copy."""
        gradients, rows = self.received(which), self.rows
        copies = self.metadata.rev_kv.seq_recv_mask.shape[2]
        world, hidden = len(gradients), gradients[0].shape[1]
        given = np.zeros((world, max(map(len, gradients)), hidden), np.float32)
        for rank, gradient in enumerate(gradients):
            given[rank, : len(gradient)] = gradient
        planes = np.zeros((world, copies * max(rows), hidden), np.float32)
        waybill.orchestrate_simulate(given, planes, self.metadata.rev_kv)
        return [
            np.asarray(
                waybill.sum_kv_copies(planes[r, : copies * rows[r]], self.metadata.rev_kv, r)
            )
            for r in range(world)
        ]

    @cached_property
    def tables(self) -> Any:
        """The plan as plain tables."""
        return self.plan.to_qkv_plan() if hasattr(self.plan, "to_qkv_plan") else self.plan

    @cached_property
    def rows(self) -> list[int]:
        """Rows that each rank has."""
        ends, lengths = self.tables.rank_shard_offsets, np.asarray(self.tables.shard_len)
        return [int(lengths[a:b].sum()) for a, b in itertools.pairwise(ends)]

    def counted(self) -> list[int]:
        """Rows of Q that each rank must get: counted, not simulated."""
        lengths, places = np.asarray(self.tables.shard_len), np.asarray(self.tables.q_dst)
        return [int(lengths[places == rank].sum()) for rank in range(self.case.world)]


def _plan_of(batch: Batch, world: int, kv_layout: str) -> Any:
    """Shard s of rank r goes to rank r + s + 1: every rank sends to others and keeps some."""
    offsets, lengths, places = [0], [], []
    documents: dict[int, list[int]] = {}
    for rank, held in enumerate(batch.shards):
        for s, (document, length) in enumerate(held):
            documents.setdefault(document, []).append(len(lengths))
            lengths.append(length)
            places.append((rank + s + 1) % world)
        offsets.append(len(lengths))
    in_order = [documents[d] for d in sorted(documents)]
    ends = np.concatenate([[0], np.cumsum([len(d) for d in in_order])]).astype(int)
    return waybill.QkvPlan(
        world, offsets, lengths, places, ends, [s for d in in_order for s in d],
        kv_layout=kv_layout,
    )  # fmt: skip


def _planned(batch: Batch, world: int, kv_layout: str) -> Any:
    """The planner's, which has a relay schedule. A document of several ranks is cut evenly."""
    documents = {document for held in batch.shards for document, _ in held}
    if len(documents) == 1 and sum(count > 0 for count in batch.rows) > 1:
        total = sum(batch.rows)
        most = -(-total // world)
        return waybill.plan([total], world, most, kv_layout=kv_layout, block_tokens=4)
    lengths = [[length for _, length in held] for held in batch.shards]
    return waybill.plan(lengths, world, 0, kv_layout=kv_layout, block_tokens=4)
