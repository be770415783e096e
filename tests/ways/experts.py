"""The ways of experts: each runs the product on the ranks of a world, in one variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from device import Way, settle, tensor_of, to_host
from edges import EXPERT_EDGES, ExpertCase, ExpertRound, ExpertSizes, expert_case
from judge import Arrays, ExpertCall, ExpertJudge, differences

from waybill.integrations.deep_ep import Buffer
from waybill.torch.moe import EPAll2AllLayer

FEW, MANY = 128, 200  #: tokens of a rank: up to 128 other kernels do the work
TABLES = {
    "expert_counts": "recv_expert_counts",
    "expert_offsets": "recv_expert_offsets",
    "num_rows": "num_recv_tokens_per_rank",
    "num_tokens": "num_input_tokens_per_rank",
}
NODES = ((2, 1), (4, 2), (4, 1))  #: (ranks, ranks per node)


@dataclass(frozen=True)
class ExpertWay(Way):
    """A way of experts."""

    family: str = "experts"
    edges: dict[str, Any] = field(default_factory=lambda: EXPERT_EDGES)


@dataclass(frozen=True)
class LayerWay(ExpertWay):
    """EPAll2AllLayer: a dispatch and its combine, in each round."""

    max_tokens: int = MANY
    rows: str = "grouped"
    alignment: int = 1
    payload: str = "plain"
    fixed: bool = False
    local_combine: bool = False
    weighted: bool = False
    known: bool = False  #: more dispatches by the routing of the first
    graph: bool = False
    own_order: bool = False
    views: bool = False

    def excluded(self, edge: str, device: str) -> str | None:
        """Float8 rows have no odd sizes."""
        if edge == "odd_rows" and self.payload != "plain":
            return "float8 rows are multiples of 128 bytes"
        return super().excluded(edge, device)

    def cases(self, edge: str) -> Iterator[ExpertCase]:
        """One for each number of ranks and nodes."""
        hidden = 64 if self.payload == "plain" else 256
        for world, per_node in self.topologies:
            sizes = ExpertSizes(world, per_node, self.max_tokens, hidden, 2, 3 * world)
            yield expert_case(edge, sizes)

    def calls(self, case: ExpertCase) -> list[list[ExpertCall]]:
        """Those of each round."""
        return [
            [
                ExpertCall(
                    case, number, variant, self.rows, self.alignment, self.payload,
                    weighted=self.weighted, num_biases=2 if self.weighted else 0,
                    has_weights=variant != 1,
                    local_combine=self.local_combine, own_order=self.own_order,
                )
                for variant in self.variants
            ]
            for number in range(len(case.rounds))
        ]  # fmt: skip

    @property
    def variants(self) -> tuple[int, ...]:
        """0 is a call with weights, 1 one without, 2 again one with."""
        if self.graph or self.known:
            return (0, 2, 4)
        return (0,) if self.weighted else (0, 1)

    def layer_on(self, world: Any, case: ExpertCase) -> EPAll2AllLayer:
        """The layer of this way."""
        s = case.sizes
        rows = s.worst_rows + s.local * (self.alignment - 1)
        return EPAll2AllLayer(
            world, s.max_tokens, s.hidden, s.topk, world.rank, s.experts, s.per_node, s.world,
            torch.bfloat16, num_sm=4, enable_local_combine=self.local_combine, dropped_id=-1,
            rows=self.rows, expert_alignment=self.alignment, payload=self.payload, capacity=1,
            fixed_rows=rows if self.fixed or self.graph else None, copy_out=not self.views,
        )  # fmt: skip

    def rank(self, world: Any, case: ExpertCase) -> list[list[Arrays]]:
        """What this rank gets in each call of each round."""
        layer = self.layer_on(world, case)
        given = [[_Given(call, world) for call in calls] for calls in self.calls(case)]
        settle(world.device)
        world.barrier()
        stream = torch.cuda.Stream() if self.graph else None
        made = []
        for of_round in given:
            if self.graph:
                made.append(self._replay(world, layer, of_round, stream))
            else:
                made.append(self._round(layer, of_round))
        layer.synchronize()
        layer.finalize()
        return made

    def _round(self, layer: EPAll2AllLayer, given: list[_Given]) -> list[Arrays]:
        results, layout = [], None
        for one in given:
            found = _call(layer, one, layout if self.known else None, self.views)
            layout = layout or found["layout"]
            results.append(found)
        settle(layer.device)
        return [_on_host(found, self._come(one, layer)) for found, one in zip(results, given)]

    def _come(self, given: _Given, layer: EPAll2AllLayer) -> int | None:
        """Rows that mean something, if that is not all of them."""
        return given.call.num_rows(layer.rank) if self.fixed or self.graph else None

    def _replay(
        self, world: Any, layer: EPAll2AllLayer, given: list[_Given], stream: Any
    ) -> list[Arrays]:
        """The round captured, and replayed with the numbers of each call."""
        first, results = given[0], []
        _call(layer, first, None, False)
        settle(layer.device)
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(2):  # over nodes an even number
                found = _call(layer, first, None, False)
            graph.capture_end()
        world.barrier()
        for one in given:
            first.take(one)
            graph.replay()
            settle(layer.device)
            results.append(_on_host(found, self._come(one, layer)))
        world.barrier()
        del graph
        return results

    def complaints(self, case: ExpertCase, results: list[list[list[Arrays]]]) -> list[str]:
        """What the judge says of the results of all ranks."""
        lines = []
        for number, calls in enumerate(self.calls(case)):
            for i, call in enumerate(calls):
                found = [of_rank[number][i] for of_rank in results]
                s = case.sizes
                prefix = f"{s.world}/{s.per_node} ranks, tokens {call.counts}, call {i}"
                lines += ExpertJudge(call).complaints(found, prefix)
        return lines


class _Given:
    """The tensors that a rank gives to one call."""

    def __init__(self, call: ExpertCall, world: Any) -> None:
        how: ExpertRound = call.case.rounds[call.number]
        rank, device, bfloat16 = world.rank, world.device, torch.bfloat16
        scaled = call.payload == "scaled"
        self.call = call
        dtype = torch.float8_e4m3fn if scaled else bfloat16
        self.x = tensor_of(call.tokens(rank), device, dtype, how)
        self.scales = tensor_of(call.scales(rank), device) if scaled else None
        self.ids = tensor_of(call.ids[rank], device, None, how)
        self.weights = tensor_of(call.weights(rank), device) if call.has_weights else None
        biases = (call.bias(rank, b) for b in range(call.num_biases))
        self.biases = [tensor_of(bias, device, bfloat16, how) for bias in biases]
        self.positions = positions_of(call, world)
        self.outputs = tensor_of(call.outputs(rank), device, bfloat16)

    def take(self, other: _Given) -> None:
        """The numbers of another call by the same routing, in the same memory."""
        for name in ("x", "weights", "scales", "outputs"):
            mine, new = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.copy_(new)
        for mine, new in zip(self.biases, other.biases):
            mine.copy_(new)


def positions_of(call: ExpertCall, world: Any) -> torch.Tensor | None:
    """full_scatter_indices: those of all ranks."""
    if not call.own_order:
        return None
    return torch.from_numpy(call.positions()).to(world.device)


def _call(layer: EPAll2AllLayer, given: _Given, layout: Any, views: bool) -> dict[str, Any]:
    """A dispatch, and a combine of the outputs that belong to the rows that must come."""
    rows, weights, layout = layer.dispatch(
        given.x, given.ids, given.weights, None if layout is not None else given.positions,
        scales=given.scales, layout_desc=layout,
    )  # fmt: skip
    if views:
        rows = rows.clone()
        weights = None if weights is None else weights.clone()
    outputs = torch.full(
        (len(rows), given.outputs.shape[1]), float("nan"), dtype=torch.bfloat16, device=rows.device
    )
    fits = min(len(outputs), len(given.outputs))
    outputs[:fits] = given.outputs[:fits]
    weighted = given.call.weighted and weights is not None
    sums = layer.combine(outputs, layout, weighted=weighted, biases=given.biases)
    scales = layout.recv_scales
    return {
        "rows": rows, "weights": weights, "layout": layout, "sums": sums,
        "scales": scales.clone() if views and scales is not None else scales,
    }  # fmt: skip


def _on_host(found: dict[str, Any], num_rows: int | None) -> Arrays:
    """Arrays of what came, and the tables of the layout, which are not asked for while a graph is
    captured; of fixed rows the first ``num_rows``, as the others hold anything.
    """
    if "layout" in found:
        found = {**found, **{name: getattr(found["layout"], of) for name, of in TABLES.items()}}
    arrays = {n: to_host(value) for n, value in found.items() if isinstance(value, torch.Tensor)}
    for name in ("rows", "weights", "scales"):
        if name in arrays and num_rows is not None:
            arrays[name] = arrays[name][:num_rows]
    return arrays


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
        given = [_Given(call.choices, world) for call in calls]
        outputs = [
            tensor_of(c.call.outputs(world.rank), world.device, torch.bfloat16) for c in calls
        ]
        settle(world.device)
        world.barrier()
        made = [[self._call(buffer, s, one, rows)] for one, rows in zip(given, outputs)]
        buffer.destroy()
        return made

    def _call(
        self, buffer: Any, sizes: ExpertSizes, given: _Given, outputs: torch.Tensor
    ) -> Arrays:
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
        return {**_on_host(found, None), "counts": np.array(counts)}

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
        given = [_Given(call, world) for call in self.calls(case)]
        settle(world.device)
        world.barrier()
        made = [[self._call(buffer, s, one)] for one in given]
        buffer.destroy()
        return made

    def _call(self, buffer: Any, s: ExpertSizes, given: _Given) -> Arrays:
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
        return _on_host(found, None)

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


def _layer_ways() -> Iterator[Way]:
    """Of one node, then of several."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "counting": ("counting", {}),
        "known": ("known routing", {"known": True}),
        "fixed": ("`fixed_rows`", {"fixed": True}),
        "graph": ("graph", {"graph": True, "devices": ("cuda",)}),
        "compact": ("compact", {"rows": "compact"}),
        "padded": ("padded", {"alignment": 8}),
        "scaled": ("float8 given", {"payload": "scaled"}),
        "quantized": ("float8 quantised", {"payload": "quantized"}),
        "positions": ("scatter indices", {"own_order": True}),
        "weighted": ("weighted, two biases", {"weighted": True}),
    }
    of_one_node = {
        "local": ("local combine", {"local_combine": True}),
        "push": ("push", {"environment": {"WAYBILL_COMBINE": "push"}}),
        "push_local": (
            "push, local combine",
            {"environment": {"WAYBILL_COMBINE": "push"}, "local_combine": True},
        ),
        "views": ("views of the window", {"views": True}),
    }
    few = {"max_tokens": FEW}
    for name, (title, options) in {**kinds, **of_one_node}.items():
        yield LayerWay(f"node_{name}", f"one node, {title}", **options)
    for name in ("counting", "known", "fixed", "graph", "quantized", "weighted"):
        title, options = kinds[name]
        yield LayerWay(f"node_few_{name}", f"one node, few tokens, {title}", **few, **options)
    for most in (1, 128, 129, 300):
        title = f"several nodes, mapped, max_tokens {most}"
        yield LayerWay(f"nodes_{most}", title, max_tokens=most, topologies=NODES)
    for name, (title, options) in kinds.items():
        if name != "counting":
            title = f"several nodes, mapped, {title}"
            yield LayerWay(f"nodes_{name}", title, topologies=((4, 2),), **options)
    for name in ("known", "fixed", "graph", "compact", "quantized", "weighted"):
        title, options = kinds[name]
        title = f"several nodes, mapped, few tokens, {title}"
        yield LayerWay(f"nodes_few_{name}", title, topologies=((4, 2),), **few, **options)


def _process_ways() -> Iterator[Way]:
    two = ((2, 2),)
    apart = ((2, 1), (4, 2))
    processes: dict[str, Any] = {"ranks": "processes"}
    yield LayerWay("node_processes", "one node, processes", topologies=two, **processes)
    yield LayerWay(
        "node_few_processes", "one node, processes, few tokens, `fixed_rows`", topologies=two,
        max_tokens=FEW, fixed=True, **processes,
    )  # fmt: skip
    for most in (128, 129):
        yield LayerWay(
            f"nodes_processes_{most}", f"several nodes, processes, mapped, max_tokens {most}",
            topologies=apart, max_tokens=most, **processes,
        )  # fmt: skip
    for backend, title in (("nccl", "NCCL"), ("nvshmem", "NVSHMEM")):
        on: dict[str, Any] = {**processes, "backend": backend, "devices": ("cuda",)}
        for most in (1, 128, 129):
            yield LayerWay(
                f"nodes_{backend}_{most}", f"several nodes, {title}, max_tokens {most}",
                topologies=apart, max_tokens=most, **on,
            )  # fmt: skip
        yield LayerWay(
            f"nodes_{backend}_fixed", f"several nodes, {title}, `fixed_rows`", topologies=((2, 1),),
            fixed=True, **on,
        )  # fmt: skip


def _deep_ep_ways() -> Iterator[Way]:
    yield DeepEpWay("deep_ep", "deep_ep, dispatch and combine")
    yield DeepEpWay("deep_ep_handle", "deep_ep, by a handle", again=True)
    yield LowLatencyWay("deep_ep_low_latency", "deep_ep, low latency")
    yield LowLatencyWay("deep_ep_low_latency_float8", "deep_ep, low latency, float8", float8=True)


WAYS = {way.name: way for way in (*_layer_ways(), *_process_ways(), *_deep_ep_ways())}
