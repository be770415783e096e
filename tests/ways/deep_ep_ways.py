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

    def cases(self, edge: str) -> Iterator[ExpertCase]:
        """One for each number of ranks."""
        for world, per_node in self.topologies:
            yield expert_case(edge, ExpertSizes(world, per_node, self.max_tokens, 64, 2, 3 * world))

    def rank(self, world: Any, case: ExpertCase) -> list[list[Arrays]]:
        """What this rank gets in each round."""
        s = case.sizes
        num_bytes = 4 * s.world * s.max_tokens * s.hidden * 2
        buffer = Buffer(world, num_bytes, explicitly_destroy=True)
        calls = [_ToRanks(case, number) for number in range(len(case.rounds))]
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
        rows, ids, weights, counts, handle, _ = buffer.dispatch(
            given.x, topk_idx=given.ids, topk_weights=given.weights, num_tokens_per_rank=tokens,
            num_tokens_per_expert=experts, is_token_in_rank=inside,
        )  # fmt: skip
        if self.again:
            rows = buffer.dispatch(given.x, handle=handle)[0]
        fitting = torch.zeros_like(rows)
        fits = min(len(rows), len(outputs))
        fitting[:fits] = outputs[:fits]
        sums, home, _ = buffer.combine(fitting, handle, topk_weights=weights)
        settle(given.x.device)
        found = {"rows": rows, "ids": ids, "weights": weights, "sums": sums, "home": home}
        return {**on_host(found, None), "counts": np.array(counts)}

    def complaints(self, case: ExpertCase, results: list[list[list[Arrays]]]) -> list[str]:
        """What the judge says of the results of all ranks."""
        lines = []
        for number in range(len(case.rounds)):
            call = _ToRanks(case, number)
            for rank, of_rank in enumerate(results):
                prefix = f"tokens {call.call.counts}, rank {rank}"
                lines += differences(of_rank[number][0], call.wanted(rank), prefix)
        return lines


class _ToRanks:
    """A round of deep_ep's: its tokens go to ranks, as to experts of a simulation."""

    def __init__(self, case: ExpertCase, number: int) -> None:
        s, ids = case.sizes, case.rounds[number].ids
        self.choices = ExpertCall(case, number, rows="compact")
        goes = [[(of // s.local == r) & (of >= 0) for r in range(s.world)] for of in ids]
        places = tuple(
            np.stack([np.where(slot.any(1), r, -1) for r, slot in enumerate(of)], 1) for of in goes
        )
        rounds = (*[ExpertRound(())] * number, ExpertRound(places))
        to_ranks = ExpertCase(replace(s, topk=s.world, experts=s.world), rounds, case.seed)
        self.call = ExpertCall(to_ranks, number)
        self.judge = ExpertJudge(self.call)
        self.of_choices = ExpertJudge(self.choices)

    def wanted(self, rank: int) -> Arrays:
        """Rows by source rank and token, sums by rank."""
        choices = self.of_choices.there
        ids = choices.layout[rank].recv_topk_indices
        weights = np.where(ids >= 0, choices.recv_weights[rank], np.float32(0))
        home = np.where(self.choices.ids[rank] >= 0, self.choices.weights(rank), np.float32(0))
        both = self.judge.wanted(rank)
        return {
            "rows": both["rows"], "sums": both["sums"], "ids": ids, "weights": weights.view("i4"),
            "home": home.view("i4"), "counts": self.choices.counted()[rank],
        }  # fmt: skip


@dataclass(frozen=True)
class LowLatencyWay(ExpertWay):
    """deep_ep.Buffer: the low-latency calls."""

    max_tokens: int = 40
    float8: bool = False

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
        payload = "quantized" if self.float8 else "plain"
        return [
            ExpertCall(case, number, payload=payload, weighted=True)
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
        got, counts, handle, _, _ = buffer.low_latency_dispatch(
            given.x, given.ids, s.max_tokens, s.experts, use_fp8=self.float8
        )
        rows, scales = got if self.float8 else (got, None)
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
            found["scales"] = torch.cat([scales[e, :n] for e, n in enumerate(lengths)])
        return on_host(found, None)

    def complaints(self, case: ExpertCase, results: list[list[list[Arrays]]]) -> list[str]:
        """What the judge says of the results of all ranks."""
        names = ("rows", "expert_counts", "sums", *(("scales",) if self.float8 else ()))
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
    yield LowLatencyWay("deep_ep_low_latency", "deep_ep, low latency")
    yield LowLatencyWay("deep_ep_low_latency_float8", "deep_ep, low latency, float8", float8=True)


WAYS = {way.name: way for way in _deep_ep_ways()}
