"""The ways of sequences: each runs SequenceDispatcher, or attention, on the ranks of a world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from device import Way, settle, tensor_of, to_host
from edges import SEQUENCE_EDGES, Batch, SequenceCase, sequence_case
from judge import Arrays, SequenceJudge, differences

import waybill.torch as wt

ONE_NODE = ((3, 3),)
NODES = ((2, 1), (4, 2), (4, 1))


@lru_cache(maxsize=512)
def judge_of(
    edge: str, world: int, per_node: int, number: int, kv_layout: str, relay: bool
) -> SequenceJudge:
    """One for all threads."""
    return SequenceJudge(sequence_case(edge, world, per_node), number, kv_layout, relay)


def as_bits(array: np.ndarray) -> np.ndarray:
    """Of float32 numbers; others as they are."""
    return array.view(np.int32) if array.dtype == np.float32 else array


@dataclass(frozen=True)
class SequenceWay(Way):
    """SequenceDispatcher: Q, K and V there, Q home, and the sums of the gradients of K and V."""

    family: str = "sequences"
    edges: dict[str, Any] = field(default_factory=lambda: SEQUENCE_EDGES)
    kv_layout: str = "per_rank"
    relay: str = "never"
    num_sms: int = 4
    in_place: bool = False  #: inputs lie in the window: of the way home, of the gradients
    replaced: bool = False  #: one plan, whose tables are replaced
    graph: bool = False  #: and which a graph holds
    parts: tuple[str, ...] = ("dispatch", "gradient")

    def cases(self, edge: str) -> Iterator[tuple[str, SequenceCase]]:
        """One for each number of ranks and nodes."""
        for world, per_node in self.topologies:
            yield edge, sequence_case(edge, world, per_node)

    def judge(self, edge: str, case: SequenceCase, number: int) -> SequenceJudge:
        """Of one batch."""
        relay = self.relay != "never"
        return judge_of(edge, case.world, case.per_node, number, self.kv_layout, relay)

    def rank(self, world: Any, case_of: tuple[str, SequenceCase]) -> list[Arrays]:
        """What this rank gets of each batch."""
        edge, case = case_of
        judges = [self.judge(edge, case, n) for n in range(len(case.batches))]
        given = [
            [
                tensor_of(judge.given(world.rank, which), world.device, None, judge.batch)
                for which in "qkv"
            ]
            for judge in judges
        ]
        gradients = [
            [
                tensor_of(judge.received(which)[world.rank], world.device, None, judge.batch)
                for which in "kv"
            ]
            for judge in judges
        ]
        dispatcher = wt.SequenceDispatcher(
            world, num_sms=self.num_sms, relay=self.relay, chunk_bytes=512,
            local_by_copy_engine=self.num_sms == 0,
        )  # fmt: skip
        settle(world.device)
        world.barrier()
        run = self._replaced if self.replaced else self._planned
        made = run(world, dispatcher, judges, given, gradients)
        dispatcher.close()
        return made

    def _planned(
        self, world: Any, dispatcher: Any, judges: Any, given: Any, gradients: Any
    ) -> list[Arrays]:
        """A plan for each batch."""
        made = []
        for judge, tensors, of_rows in zip(judges, given, gradients):
            found: dict[str, Any] = {}
            if "dispatch" in self.parts:
                found |= self._dispatch(dispatcher, judge.routing, tensors)
            if "gradient" in self.parts:
                found |= self._gradient(dispatcher, judge.routing, of_rows)
            settle(world.device)
            made.append({name: to_host(tensor) for name, tensor in found.items()})
        return made

    def _dispatch(self, dispatcher: Any, routing: Any, tensors: Any) -> dict[str, Any]:
        there = dispatcher.plan_dispatch(
            (routing.fwd_q, tensors[0]), (routing.fwd_kv, *tensors[1:])
        )
        back = dispatcher.plan_dispatch((routing.rev_q, tensors[0]))
        q, k, v = dispatcher.dispatch(there, *tensors)
        found = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        (home,) = dispatcher.dispatch(back, q if self.in_place else found["q"])
        return {**found, "home": home.clone(), "relayed": torch.tensor([there.way == "relay"])}

    def _gradient(self, dispatcher: Any, routing: Any, gradients: Any) -> dict[str, Any]:
        plan = dispatcher.plan_kv_gradient((routing.fwd_kv, *gradients))
        if self.in_place:
            places = dispatcher.gradient_inputs(plan)
            for place, gradient in zip(places, gradients):
                place[...] = gradient
            gradients = places
        dk, dv = dispatcher.kv_gradient(plan, *gradients)
        return {"dk": dk, "dv": dv}

    def _replaced(
        self, world: Any, dispatcher: Any, judges: Any, given: Any, _: Any
    ) -> list[Arrays]:
        """One plan with room for all batches."""
        largest = self._largest(judges)
        rooms = [
            max(len(rows) for judge in (*judges, largest) for rows in judge.received(which))
            for which in "qk"
        ]
        rows = max(count for judge in (*judges, largest) for count in judge.rows)
        wide = [torch.zeros(rows, t.shape[1], device=world.device) for t in given[0]]

        def parts(judge: Any) -> list[Any]:
            q = judge.routing.fwd_q.with_room(rooms[0])
            kv = judge.routing.fwd_kv.with_room(rooms[1])
            return [(q, wide[0]), (kv, *wide[1:])]

        plan = dispatcher.plan_dispatch(*parts(largest))
        dispatcher.reserve(plan)
        replay = self._captured(world, dispatcher, plan, wide) if self.graph else None
        made = []
        for judge, tensors in zip(judges, given):
            dispatcher.replace_plan(plan, *parts(judge))
            for place, tensor in zip(wide, tensors):
                place[: len(tensor)] = tensor
            views = replay() if replay else dispatcher.dispatch(plan, *wide)
            settle(world.device)
            counts = [len(judge.received(which)[world.rank]) for which in "qkv"]
            made.append({
                name: to_host(view[:count]) for name, view, count in zip("qkv", views, counts)
            })  # fmt: skip
        del replay
        return made

    def _largest(self, judges: Any) -> SequenceJudge:
        """A made-up batch: one document of as many shards, as long and on each rank, as any has."""
        case = judges[0].case
        held = [shards for judge in judges for shards in judge.batch.shards]
        number = max(map(len, held))
        longest = max((length for shards in held for _, length in shards), default=1)
        batch = Batch(tuple(((0, longest),) * number for _ in range(case.world)))
        return SequenceJudge(replace(case, batches=(batch,)), 0, self.kv_layout)

    def _captured(self, world: Any, dispatcher: Any, plan: Any, wide: Any) -> Any:
        """A graph of two dispatches, whose views of the second it returns."""
        dispatcher.dispatch(plan, *wide)
        dispatcher.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(2):  # over nodes an even number
                views = dispatcher.dispatch(plan, *wide)
            copies = [view.clone() for view in views]
            graph.capture_end()
        world.barrier()

        def replay() -> list[torch.Tensor]:
            graph.replay()
            return copies

        return replay

    def complaints(self, case_of: tuple[str, SequenceCase], results: list[Any]) -> list[str]:
        """What the judge says of the results of all ranks."""
        edge, case = case_of
        lines = []
        for number in range(len(case.batches)):
            judge = self.judge(edge, case, number)
            wanted = self._wanted(judge)
            for rank, of_rank in enumerate(results):
                prefix = f"{case.world}/{case.per_node} ranks, rows {judge.rows}, rank {rank}"
                counted, simulated = judge.counted()[rank], len(judge.received("q")[rank])
                if counted != simulated:
                    lines.append(f"{prefix}: {simulated} simulated, {counted} counted rows of q")
                of_one = {name: as_bits(arrays[rank]) for name, arrays in wanted.items()}
                lines += differences(of_rank[number], of_one, prefix)
        return lines

    def _wanted(self, judge: SequenceJudge) -> dict[str, list[np.ndarray]]:
        wanted = {}
        if "dispatch" in self.parts or self.replaced:
            wanted = {which: judge.received(which) for which in "qkv"}
        if "dispatch" in self.parts and not self.replaced:
            ranks = range(judge.case.world)
            wanted["home"] = [judge.given(rank, "q") for rank in ranks]
            if self.relay == "always":
                wanted["relayed"] = [np.array([True]) for _ in ranks]
        if "gradient" in self.parts and not self.replaced:
            wanted |= {f"d{which}": judge.sums(which) for which in "kv"}
        return {
            name: [np.ascontiguousarray(array) for array in arrays]
            for name, arrays in wanted.items()
        }


def _ways() -> Iterator[SequenceWay]:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "dispatch": ("dispatch", {"parts": ("dispatch",)}),
        "per_query": ("dispatch, KV once for each query", {"kv_layout": "per_query"}),
        "gradient": ("gradient", {"parts": ("gradient",)}),
        "relay": ("relay", {"relay": "always"}),
        "copy_engines": ("copy engines", {"num_sms": 0}),
        "in_place": ("in place: inputs in the window", {"in_place": True}),
        "replaced": ("fixed plan: tables replaced", {"replaced": True}),
        "graph": (
            "fixed plan: tables replaced in a graph",
            {"replaced": True, "graph": True, "devices": ("cuda",)},
        ),
    }
    for name, (title, options) in kinds.items():
        yield SequenceWay(f"sequence_{name}", f"one node, {title}", **options)
    for name, (title, options) in kinds.items():
        if name == "copy_engines":
            continue  # between nodes there is a kernel
        topologies = NODES if name in ("dispatch", "gradient") else ((4, 2),)
        yield SequenceWay(
            f"sequence_nodes_{name}", f"several nodes, mapped, {title}", topologies=topologies,
            **options,
        )  # fmt: skip
    processes: dict[str, Any] = {"ranks": "processes"}
    yield SequenceWay(
        "sequence_processes", "one node, processes", topologies=((2, 2),), **processes
    )
    apart = ((2, 1), (4, 2))
    yield SequenceWay(
        "sequence_nodes_processes", "several nodes, processes, mapped", topologies=apart,
        **processes,
    )  # fmt: skip
    for backend, title in (("nccl", "NCCL"), ("nvshmem", "NVSHMEM")):
        yield SequenceWay(
            f"sequence_nodes_{backend}", f"several nodes, {title}", topologies=apart,
            backend=backend, devices=("cuda",), **processes,
        )  # fmt: skip


WAYS = {way.name: way for way in _ways()}
