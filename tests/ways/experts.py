"""The ways of experts: each runs the product on the ranks of a world, in one variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from device import Way, settle, tensor_of, to_host
from edges import EXPERT_EDGES, ExpertCase, ExpertRound, ExpertSizes, expert_case
from judge import Arrays, ExpertCall, ExpertJudge, differences

from waybill.torch.moe import EPAll2AllLayer

FEW, MANY = 128, 200  #: tokens of a rank: up to 128 other kernels do the work
TABLES = {
    "expert_counts": "recv_expert_counts",
    "expert_offsets": "recv_expert_offsets",
    "num_rows": "num_recv_tokens_per_rank",
    "num_tokens": "num_input_tokens_per_rank",
    "slots": "all_slot_experts",
    "quotas": "all_slot_quotas",
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
    spare: int = 0  #: slots per rank for copies of experts
    limits: tuple[float, int] = (1.0, 0)  #: limit and min_rows of the copies' plans
    present: bool = False  #: copies of the round before are used again
    tiles: bool = False  #: scales come in tiles of 128 rows of 4

    def excluded(self, edge: str, device: str) -> str | None:
        """Rows with scales have no odd sizes."""
        if edge == "odd_rows" and self.payload != "plain":
            if self.payload in ("scaled", "quantized"):
                return "float8 rows are multiples of 128 bytes"
            return "the sizes of such rows are those of their format"
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
                    local_combine=self.local_combine, own_order=self.own_order, spare=self.spare,
                    limits=self.limits, present=self.present, tiles=self.tiles,
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
        rows = s.worst_rows + (s.local + self.spare) * (self.alignment - 1)
        room = {"fixed_rows": rows} if self.fixed or self.graph else {"capacity": 1}
        return EPAll2AllLayer(
            world, s.max_tokens, s.hidden, s.topk, world.rank, s.experts, s.per_node, s.world,
            torch.bfloat16, num_sm=4, enable_local_combine=self.local_combine, dropped_id=-1,
            rows=self.rows, expert_alignment=self.alignment, payload=self.payload,
            copy_out=not self.views, spare_experts=self.spare,
            limit=self.limits[0], min_rows=self.limits[1],
            scale_layout="128x4" if self.tiles else "rows", **room,
        )  # fmt: skip

    def rank(self, world: Any, case: ExpertCase) -> list[list[Arrays]]:
        """What this rank gets in each call of each round."""
        layer = self.layer_on(world, case)
        given = [[Given(call, world) for call in calls] for calls in self.calls(case)]
        settle(world.device)
        world.barrier()
        stream = torch.cuda.Stream() if self.graph else None
        made, before = [], None
        for of_round in given:
            if self.graph:
                made.append(self._replay(world, layer, of_round, stream))
            else:
                results, layout = self._round(layer, of_round, before if self.present else None)
                made.append(results)
                before = layout
        layer.synchronize()
        layer.finalize()
        return made

    def _round(
        self, layer: EPAll2AllLayer, given: list[Given], present: Any
    ) -> tuple[list[Arrays], Any]:
        results, layout = [], None
        for one in given:
            found = _call(layer, one, layout if self.known else None, self.views, present)
            layout = layout or found["layout"]
            results.append(found)
        settle(layer.device)
        come = [on_host(found, self._come(one, layer)) for found, one in zip(results, given)]
        return come, layout

    def _come(self, given: Given, layer: EPAll2AllLayer) -> int | None:
        """Rows that mean something, if that is not all of them."""
        return given.call.num_rows(layer.rank) if self.fixed or self.graph else None

    def _replay(
        self, world: Any, layer: EPAll2AllLayer, given: list[Given], stream: Any
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
            results.append(on_host(found, self._come(one, layer)))
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


class Given:
    """The tensors that a rank gives to one call."""

    def __init__(self, call: ExpertCall, world: Any) -> None:
        how: ExpertRound = call.case.rounds[call.number]
        rank, device, bfloat16 = world.rank, world.device, torch.bfloat16
        self.call = call
        kinds = {"scaled": torch.float8_e4m3fn}
        dtype = kinds.get(call.payload) if call.is_given else bfloat16
        self.x = tensor_of(call.tokens(rank), device, dtype, how)
        self.scales: Any = None
        if call.is_given:
            scales = call.scales(rank)
            parts = scales if isinstance(scales, tuple) else (scales,)
            made = tuple(tensor_of(part, device) for part in parts)
            self.scales = made if isinstance(scales, tuple) else made[0]
        self.ids = tensor_of(call.ids[rank], device, None, how)
        self.weights = tensor_of(call.weights(rank), device) if call.has_weights else None
        biases = (call.bias(rank, b) for b in range(call.num_biases))
        self.biases = [tensor_of(bias, device, bfloat16, how) for bias in biases]
        self.positions = positions_of(call, world)
        self.outputs = tensor_of(call.outputs(rank), device, bfloat16)

    def take(self, other: Given) -> None:
        """The numbers of another call by the same routing, in the same memory."""
        for name in ("x", "weights", "scales", "outputs"):
            mine, new = getattr(self, name), getattr(other, name)
            for to, of in zip(*(v if isinstance(v, tuple) else (v,) for v in (mine, new))):
                if to is not None:
                    to.copy_(of)
        for mine, new in zip(self.biases, other.biases):
            mine.copy_(new)


def positions_of(call: ExpertCall, world: Any) -> torch.Tensor | None:
    """full_scatter_indices: those of all ranks."""
    if not call.own_order:
        return None
    return torch.from_numpy(call.positions()).to(world.device)


def _call(
    layer: EPAll2AllLayer, given: Given, layout: Any, views: bool, present: Any = None
) -> dict[str, Any]:
    """A dispatch, and a combine of the outputs that belong to the rows that must come."""
    rows, weights, layout = layer.dispatch(
        given.x, given.ids, given.weights, None if layout is not None else given.positions,
        scales=given.scales, layout_desc=layout, present=present,
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
    sums = None
    if given.call.has_sums:
        sums = layer.combine(outputs, layout, weighted=weighted, biases=given.biases)
    scales = layout.recv_scales if isinstance(layout.recv_scales, tuple) else (layout.recv_scales,)
    if views:
        scales = tuple(None if part is None else part.clone() for part in scales)
    named = zip(("scales", "row_scales"), scales)
    return {"rows": rows, "weights": weights, "layout": layout, "sums": sums, **dict(named)}


def on_host(found: dict[str, Any], num_rows: int | None) -> Arrays:
    """Arrays of what came, and the tables of the layout, which are not asked for while a graph is
    captured; of fixed rows the first ``num_rows``, as the others hold anything.
    """
    if "layout" in found:
        found = {**found, **{name: getattr(found["layout"], of) for name, of in TABLES.items()}}
    arrays = {n: to_host(value) for n, value in found.items() if isinstance(value, torch.Tensor)}
    for name in ("rows", "weights", "scales", "row_scales"):
        if name in arrays and num_rows is not None:
            arrays[name] = arrays[name][:num_rows]
    return arrays


@dataclass(frozen=True)
class GradientWay(ExpertWay):
    """Dispatch, experts, combine, and back: of whole numbers, whose sums are exact."""

    max_tokens: int = MANY
    spare: int = 0  #: slots per rank for copies of experts

    def cases(self, edge: str) -> Iterator[ExpertCase]:
        """One for each number of ranks and nodes."""
        for world, per_node in self.topologies:
            yield expert_case(edge, ExpertSizes(world, per_node, self.max_tokens, 64, 2, 3 * world))

    def given(self, case: ExpertCase, number: int, rank: int) -> tuple[np.ndarray, ...]:
        """Tokens, weights and the gradient of the sums."""
        s, draws = case.sizes, np.random.default_rng((case.seed, number, rank, 21))
        count = case.rounds[number].counts[rank]
        x, gradient = (draws.integers(-3, 4, (count, s.hidden)).astype("f4") for _ in range(2))
        return x, draws.integers(1, 5, (count, s.topk)).astype("f4"), gradient

    def rank(self, world: Any, case: ExpertCase) -> list[Arrays]:
        """What this rank gets in each round."""
        s, device = case.sizes, world.device
        layer = EPAll2AllLayer(
            world, s.max_tokens, s.hidden, s.topk, world.rank, s.experts, s.per_node, s.world,
            torch.float32, num_sm=4, dropped_id=-1, capacity=1, spare_experts=self.spare,
        )  # fmt: skip
        given = []
        for number, how in enumerate(case.rounds):
            arrays = self.given(case, number, world.rank)
            tensors = [tensor_of(array, device, None, how) for array in arrays]
            given.append((*tensors, tensor_of(how.ids[world.rank], device, None, how)))
        settle(device)
        world.barrier()
        made = []
        for x, weights, gradient, ids in given:
            x.requires_grad_()
            weights.requires_grad_()
            rows, of_rows, layout = layer.dispatch(x, ids, weights)
            sums = layer.combine(rows * of_rows[:, None], layout)
            sums.backward(gradient)
            settle(device)
            made.append({
                "sums": to_host(sums), "of_x": to_host(x.grad), "of_weights": to_host(weights.grad)
            })  # fmt: skip
        layer.finalize()
        return made

    def complaints(self, case: ExpertCase, results: list[list[Arrays]]) -> list[str]:
        """Against sums in plain numbers. A zero has no sign here."""
        lines = []
        for number, round_ in enumerate(case.rounds):
            for rank, ids in enumerate(round_.ids):
                x, weights, gradient = self.given(case, number, rank)
                live = (ids >= 0).astype("f4")
                total = (weights * live).sum(1, keepdims=True)
                dots = (x * gradient).sum(1, keepdims=True) * live
                wanted = {"sums": x * total, "of_x": gradient * total, "of_weights": dots}
                prefix = f"tokens {round_.counts}, rank {rank}"
                got = {
                    name: array.view("f4") + 0.0 for name, array in results[rank][number].items()
                }
                wanted = {name: array + np.float32(0) for name, array in wanted.items()}
                lines += differences(got, wanted, prefix)
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
        "views": ("views of the window", {"views": True}),
    }
    few = {"max_tokens": FEW}
    for name, (title, options) in {**kinds, **of_one_node}.items():
        yield LayerWay(f"node_{name}", f"one node, {title}", **options)
    for name, (title, options) in {**kinds, **of_one_node}.items():
        if name != "views":  # what is copied out does not depend on the number of tokens
            yield LayerWay(f"node_few_{name}", f"one node, few tokens, {title}", **few, **options)
    yield GradientWay("node_gradient", "one node, gradients")
    yield GradientWay("nodes_gradient", "several nodes, mapped, gradients", topologies=((4, 2),))
    for most in (1, 128, 129, 300):
        title = f"several nodes, mapped, max_tokens {most}"
        yield LayerWay(f"nodes_{most}", title, max_tokens=most, topologies=NODES)
    for name, (title, options) in kinds.items():
        if name != "counting":
            title = f"several nodes, mapped, {title}"
            yield LayerWay(f"nodes_{name}", title, topologies=((4, 2),), **options)
    for name in ("known", "fixed", "graph"):
        title, options = kinds[name]
        title = f"several nodes, mapped, few tokens, {title}"
        yield LayerWay(f"nodes_few_{name}", title, topologies=((4, 2),), **few, **options)


def _format_ways() -> Iterator[Way]:
    """Formats of rows."""
    kinds = {
        "mxfp8": ("MXFP8 quantised", "mxfp8"),
        "mxfp8_e5m2_given": ("MXFP8 of e5m2 given", "scaled_mxfp8_e5m2"),
        "float8_ue8m0": ("float8 of UE8M0 scales quantised", "float8_ue8m0"),
        "nvfp4": ("NVFP4 quantised", "nvfp4"),
        "nvfp4_given": ("NVFP4 given", "scaled_nvfp4"),
        "bytes": ("bytes", "bytes(208, 24)"),
    }
    for name, (title, payload) in kinds.items():
        yield LayerWay(f"format_{name}", f"one node, {title}", payload=payload)
    yield LayerWay(
        "format_few_nvfp4_given", "one node, few tokens, NVFP4 given, `fixed_rows`", max_tokens=FEW,
        payload="scaled_nvfp4", fixed=True,
    )  # fmt: skip
    yield LayerWay(
        "format_bytes_compact", "one node, bytes, compact", payload="bytes(208, 24)", rows="compact"
    )
    tiles: dict[str, Any] = {"alignment": 128, "tiles": True}
    yield LayerWay(
        "format_mxfp8_tiles", "one node, MXFP8 quantised, scales 128x4", payload="mxfp8", **tiles
    )
    yield LayerWay(
        "format_few_nvfp4_tiles", "one node, few tokens, NVFP4 quantised, 128x4, `fixed_rows`",
        max_tokens=FEW, payload="nvfp4", fixed=True, **tiles,
    )  # fmt: skip
    yield LayerWay(
        "format_nodes_mxfp8_tiles", "several nodes, mapped, MXFP8 given, scales 128x4",
        topologies=((4, 2),), payload="scaled_mxfp8", **tiles,
    )  # fmt: skip
    yield LayerWay(
        "format_mxfp8_known", "one node, MXFP8 quantised, known routing", payload="mxfp8",
        known=True,
    )  # fmt: skip
    graph: dict[str, Any] = {"graph": True, "devices": ("cuda",)}
    yield LayerWay(
        "format_nvfp4_graph", "one node, NVFP4 quantised, graph", payload="nvfp4", **graph
    )
    yield LayerWay(
        "format_mxfp8_tiles_graph", "one node, MXFP8 given, scales 128x4, graph",
        payload="scaled_mxfp8", **tiles, **graph,
    )  # fmt: skip
    yield LayerWay(
        "format_nodes_nccl_mxfp8", "several nodes, NCCL, MXFP8 quantised", payload="mxfp8",
        topologies=((2, 1),), ranks="processes", backend="nccl", devices=("cuda",),
    )  # fmt: skip
    for name in ("mxfp8", "nvfp4_given", "bytes"):
        title, payload = kinds[name]
        title = f"several nodes, mapped, {title}"
        yield LayerWay(f"format_nodes_{name}", title, topologies=((4, 2),), payload=payload)


def _spare_ways() -> Iterator[Way]:
    """Dispatches that plan copies of experts."""
    spare: dict[str, Any] = {"spare": 2}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "counting": ("counting", {}),
        "known": ("known routing", {"known": True}),
        "present": ("copies used again", {"present": True}),
        "limits": ("`limit` 1.25, `min_rows` 3", {"limits": (1.25, 3)}),
        "fixed": ("`fixed_rows`", {"fixed": True}),
        "compact": ("compact", {"rows": "compact"}),
        "padded": ("padded", {"alignment": 8}),
        "scaled": ("float8 given", {"payload": "scaled"}),
        "quantized": ("float8 quantised", {"payload": "quantized"}),
        "weighted": ("weighted, two biases", {"weighted": True}),
    }
    of_one_node = {
        "positions": ("scatter indices", {"own_order": True}),
        "local": ("local combine", {"local_combine": True}),
        "views": ("views of the window", {"views": True}),
    }
    for name, (title, options) in {**kinds, **of_one_node}.items():
        yield LayerWay(f"spare_{name}", f"spare experts, one node, {title}", **spare, **options)
    for name, (title, options) in kinds.items():
        title = f"spare experts, several nodes, mapped, {title}"
        yield LayerWay(f"spare_nodes_{name}", title, topologies=((4, 2),), **spare, **options)
    yield GradientWay("spare_gradient", "spare experts, one node, gradients", **spare)
    yield GradientWay(
        "spare_nodes_gradient", "spare experts, several nodes, mapped, gradients",
        topologies=((4, 2),), **spare,
    )  # fmt: skip
    processes: dict[str, Any] = {"ranks": "processes", **spare}
    yield LayerWay(
        "spare_processes", "spare experts, one node, processes", topologies=((2, 2),), **processes
    )
    yield LayerWay(
        "spare_nodes_processes", "spare experts, several nodes, processes, mapped",
        topologies=((2, 1), (4, 2)), **processes,
    )  # fmt: skip
    over_network = ("known", "present", "fixed", "compact", "quantized", "weighted")
    for backend, at in (("nccl", "NCCL"), ("nvshmem", "NVSHMEM")):
        on: dict[str, Any] = {**processes, "backend": backend, "devices": ("cuda",)}
        title = f"spare experts, several nodes, {at}"
        yield LayerWay(
            f"nodes_{backend}_spare", f"{title}, counting", topologies=((2, 1), (4, 2)), **on
        )
        for name in over_network:
            of_kind, options = kinds[name]
            yield LayerWay(
                f"nodes_{backend}_spare_{name}", f"{title}, {of_kind}", topologies=((2, 1),),
                **on, **options,
            )  # fmt: skip
        yield GradientWay(
            f"nodes_{backend}_spare_gradient", f"{title}, gradients", topologies=((2, 1),), **on
        )


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


WAYS = {
    way.name: way for way in (*_layer_ways(), *_format_ways(), *_process_ways(), *_spare_ways())
}
