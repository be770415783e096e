"""The ways of experts by deep_ep's calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from device import Way, settle, tensor_of
from edges import ExpertCase, ExpertRound, ExpertSizes, expert_case
from judge import Arrays, ExpertCall, ExpertJudge, differences

from experts import ExpertWay, Given, on_host
from waybill.integrations.deep_ep import Buffer


@dataclass(frozen=True)
class DeepEpWay(ExpertWay):
    """deep_ep.Buffer: dispatch and combine of many tokens, with weights home."""

    max_tokens: int = 40
    again: bool = False  #: dispatches by the handle of the first
    payload: str = "plain"  #: else rows are given with their scales, four in an int32

    def cases(self, edge: str) -> Iterator[ExpertCase]:
        """One for each number of ranks."""
        hidden = 64 if self.payload == "plain" else 128
        for world, per_node in self.topologies:
            sizes = ExpertSizes(world, per_node, self.max_tokens, hidden, 2, 3 * world)
            yield expert_case(edge, sizes)

    def excluded(self, edge: str, device: str) -> str | None:
        """Rows with scales have no odd sizes."""
        if edge == "odd_rows" and self.payload != "plain":
            return "the sizes of such rows are those of their format"
        return super().excluded(edge, device)

    def rank(self, world: Any, case: ExpertCase) -> list[list[Arrays]]:
        """What this rank gets in each round."""
        s = case.sizes
        num_bytes = 4 * s.world * s.max_tokens * s.hidden * 2
        buffer = Buffer(world, num_bytes, explicitly_destroy=True)
        calls = [_ToRanks(case, number, self.payload) for number in range(len(case.rounds))]
        given = [Given(call.choices, world) for call in calls]
        outputs = [
            tensor_of(c.call.outputs(world.rank), world.device, torch.bfloat16) for c in calls
        ]
        settle(world.device)
        world.barrier()
        made = [[self._call(buffer, s, one, rows)] for one, rows in zip(given, outputs)]
        buffer.destroy()
        return made

    def _call(self, buffer: Any, sizes: ExpertSizes, given: Given, outputs: torch.Tensor) -> Arrays:
        tokens, _, experts, inside, _ = buffer.get_dispatch_layout(given.ids, sizes.experts)
        x = given.x if given.scales is None else (packed_rows(given), packed_scales(given))
        rows, ids, weights, counts, handle, _ = buffer.dispatch(
            x, topk_idx=given.ids, topk_weights=given.weights, num_tokens_per_rank=tokens,
            num_tokens_per_expert=experts, is_token_in_rank=inside,
        )  # fmt: skip
        if self.again:
            rows = buffer.dispatch(x, handle=handle)[0]
        rows, scales = rows if isinstance(rows, tuple) else (rows, None)
        fitting = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
        fits = min(len(rows), len(outputs))
        fitting[:fits] = outputs[:fits]
        sums, home, _ = buffer.combine(fitting, handle, topk_weights=weights)
        settle(given.x.device)
        found = {"rows": rows, "ids": ids, "weights": weights, "sums": sums, "home": home}
        if scales is not None:
            found["scales"] = scales.view(torch.uint8)
        return {**on_host(found, None), "counts": np.array(counts)}

    def complaints(self, case: ExpertCase, results: list[list[list[Arrays]]]) -> list[str]:
        """What the judge says of the results of all ranks."""
        lines = []
        for number in range(len(case.rounds)):
            call = _ToRanks(case, number, self.payload)
            for rank, of_rank in enumerate(results):
                prefix = f"tokens {call.call.counts}, rank {rank}"
                lines += differences(of_rank[number][0], call.wanted(rank), prefix)
        return lines


def packed_rows(given: Given) -> torch.Tensor:
    """The codes of MXFP8 as its elements."""
    return given.x.view(torch.float8_e4m3fn)


def packed_scales(given: Given) -> torch.Tensor:
    """Codes of scales, four in an int32."""
    return given.scales.view(torch.int32)


class _ToRanks:
    """A round of deep_ep's: its tokens go to ranks, as to experts of a simulation."""

    def __init__(self, case: ExpertCase, number: int, payload: str) -> None:
        s, ids = case.sizes, case.rounds[number].ids
        self.choices = ExpertCall(case, number, rows="compact", payload=payload)
        goes = [[(of // s.local == r) & (of >= 0) for r in range(s.world)] for of in ids]
        places = tuple(
            np.stack([np.where(slot.any(1), r, -1) for r, slot in enumerate(of)], 1) for of in goes
        )
        rounds = (*[ExpertRound(())] * number, ExpertRound(places))
        to_ranks = ExpertCase(replace(s, topk=s.world, experts=s.world), rounds, case.seed)
        self.call = ExpertCall(to_ranks, number, payload=payload)
        self.judge = ExpertJudge(self.call)
        self.of_choices = ExpertJudge(self.choices)

    def wanted(self, rank: int) -> Arrays:
        """Rows by source rank and token, sums by rank."""
        choices = self.of_choices.there
        ids = choices.layout[rank].recv_topk_indices
        weights = np.where(ids >= 0, choices.recv_weights[rank], np.float32(0))
        home = np.where(self.choices.ids[rank] >= 0, self.choices.weights(rank), np.float32(0))
        both = self.judge.wanted(rank)
        named = ("rows", "sums", *(("scales",) if "scales" in both else ()))
        return {
            **{name: both[name] for name in named}, "ids": ids, "weights": weights.view("i4"),
            "home": home.view("i4"), "counts": self.choices.counted()[rank],
        }  # fmt: skip


@dataclass(frozen=True)
class LowLatencyWay(ExpertWay):
    """deep_ep.Buffer: the low-latency calls."""

    max_tokens: int = 40
    payload: str = "plain"

    def cases(self, edge: str) -> Iterator[ExpertCase]:
        """One for each number of ranks."""
        for world, per_node in self.topologies:
            sizes = ExpertSizes(world, per_node, self.max_tokens, 512, 2, 3 * world)
            yield expert_case(edge, sizes)

    def excluded(self, edge: str, device: str) -> str | None:
        """Rows of low-latency calls."""
        if edge == "odd_rows":
            return "rows of these calls are multiples of 128 elements"
        return super().excluded(edge, device)

    def calls(self, case: ExpertCase) -> list[ExpertCall]:
        """One in each round."""
        return [
            ExpertCall(case, number, payload=self.payload, weighted=True)
            for number in range(len(case.rounds))
        ]

    def rank(self, world: Any, case: ExpertCase) -> list[list[Arrays]]:
        """What this rank gets in each round."""
        s = case.sizes
        size = Buffer.get_low_latency_rdma_size_hint(s.max_tokens, s.hidden, s.world, s.experts)
        buffer = Buffer(
            world, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=s.local,
            explicitly_destroy=True,
        )  # fmt: skip
        given = [Given(call, world) for call in self.calls(case)]
        settle(world.device)
        world.barrier()
        made = [[self._call(buffer, s, one)] for one in given]
        buffer.destroy()
        return made

    def _call(self, buffer: Any, s: ExpertSizes, given: Given) -> Arrays:
        powers = self.payload == "float8_ue8m0"
        got, counts, handle, _, _ = buffer.low_latency_dispatch(
            given.x, given.ids, s.max_tokens, s.experts, use_fp8=self.payload != "plain",
            round_scale=powers, use_ue8m0=powers,
        )  # fmt: skip
        rows, scales = got if isinstance(got, tuple) else (got, None)
        settle(given.x.device)
        ends = np.concatenate([[0], np.cumsum(counts.cpu().numpy())])
        outputs = torch.full(
            (s.local, s.world * s.max_tokens, s.hidden), float("nan"), dtype=torch.bfloat16,
            device=given.x.device,
        )  # fmt: skip
        for e in range(s.local):
            part = given.outputs[ends[e] : ends[e + 1]]
            outputs[e, : len(part)] = part
        sums = buffer.low_latency_combine(outputs, given.ids, given.weights, handle)[0]
        settle(given.x.device)
        lengths = np.diff(ends)
        found = {
            "rows": torch.cat([rows[e, :n] for e, n in enumerate(lengths)]),
            "expert_counts": counts,
            "sums": sums,
        }
        if scales is not None:
            scales = torch.cat([scales[e, :n] for e, n in enumerate(lengths)])
            found["scales"] = scales.view(torch.uint8) if powers else scales
        return on_host(found, None)

    def complaints(self, case: ExpertCase, results: list[list[list[Arrays]]]) -> list[str]:
        """What the judge says of the results of all ranks."""
        names = ("rows", "expert_counts", "sums", *(() if self.payload == "plain" else ("scales",)))
        lines = []
        for number, call in enumerate(self.calls(case)):
            judge = ExpertJudge(call)
            for rank, of_rank in enumerate(results):
                wanted = judge.wanted(rank)
                wanted = {name: wanted[name] for name in names}
                prefix = f"tokens {call.counts}, rank {rank}"
                lines += differences(of_rank[number][0], wanted, prefix)
        return lines


def _deep_ep_ways() -> Iterator[Way]:
    yield DeepEpWay("deep_ep", "deep_ep, dispatch and combine")
    yield DeepEpWay("deep_ep_handle", "deep_ep, by a handle", again=True)
    yield DeepEpWay("deep_ep_mxfp8", "deep_ep, MXFP8 given, packed", payload="scaled_mxfp8")
    yield LowLatencyWay("deep_ep_low_latency", "deep_ep, low latency")
    kinds = {
        "float8": ("float8", "quantized"),
        "ue8m0": ("float8 of UE8M0 scales, packed", "float8_ue8m0"),
    }
    for name, (title, payload) in kinds.items():
        title = f"deep_ep, low latency, {title}"
        yield LowLatencyWay(f"deep_ep_low_latency_{name}", title, payload=payload)


WAYS = {way.name: way for way in _deep_ep_ways()}
