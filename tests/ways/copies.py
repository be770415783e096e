"""The ways of copies of experts: ExpertParallel, with the weights and gradients that it moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from device import Way, settle, tensor_of, to_host
from edges import ExpertCase, ExpertSizes, expert_case
from judge import Arrays, differences

from experts import FEW, MANY, ExpertWay
from waybill.torch.moe import ExpertParallel


class Factors(torch.nn.Module):
    """Experts that multiply by a row of factors each."""

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.factors = torch.nn.Parameter(factors)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], of rows by expert; fixed_rows may leave room behind them."""
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        of_rows = self.factors.repeat_interleave(counts, 0)
        room = len(rows) - len(of_rows)
        return rows * torch.nn.functional.pad(of_rows, (0, 0, 0, room))


class Slots(Factors):
    """The same by the interface of two functions."""

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__(factors)
        self.used: dict[int, Any] = {}

    def expert_tensors(self, expert: int) -> list[torch.Tensor]:
        """Its row."""
        return [self.factors[expert]]

    def use_tensors(self, slot: int, tensors: Any) -> None:
        """That of the next call; None: none."""
        self.used[slot] = tensors

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows of a slot without a row of factors are none."""
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = rows.split(counts)
        found = [self.used.get(slot) for slot in range(len(counts))]
        return torch.cat([part * one[0] for part, one in zip(parts, found) if one is not None])


@dataclass(frozen=True)
class CopiesWay(ExpertWay):
    """A forward and a backward in each round, and a step of all weights after it: of whole numbers,
    whose sums are exact.
    """

    max_tokens: int = MANY
    kind: type[Factors] = Factors
    keep: bool = False  #: copies stay, and are void after the step
    chunks: int = 1
    limits: tuple[float, int] = (1.0, 1)  #: limit and min_rows of the copies' plans
    compiled: bool = False  #: one graph of torch.compile, with room for any rows

    def cases(self, edge: str) -> Iterator[ExpertCase]:
        """One for each number of ranks and nodes."""
        for world, per_node in self.topologies:
            yield expert_case(edge, ExpertSizes(world, per_node, self.max_tokens, 64, 2, 3 * world))

    def given(self, case: ExpertCase, number: int, rank: int) -> tuple[np.ndarray, ...]:
        """Tokens, scores and the gradient of the sums."""
        s, draws = case.sizes, np.random.default_rng((case.seed, number, rank, 31))
        count = case.rounds[number].counts[rank]
        x, gradient = (draws.integers(-3, 4, (count, s.hidden)).astype("f4") for _ in range(2))
        return x, draws.integers(1, 5, (count, s.topk)).astype("f4"), gradient

    def factors(self, case: ExpertCase, number: int) -> np.ndarray:
        """[E, hidden] in a round: each step adds 1."""
        s = case.sizes
        draws = np.random.default_rng((case.seed, 32))
        return draws.integers(1, 4, (s.experts, s.hidden)).astype("f4") + np.float32(number)

    def rank(self, world: Any, case: ExpertCase) -> list[Arrays]:
        """What this rank gets in each round."""
        s, device = case.sizes, world.device
        mine = self.factors(case, 0)[world.rank * s.local :][: s.local]
        experts = self.kind(torch.from_numpy(mine.copy()).to(device))
        room = {"fixed_rows": s.worst_rows} if self.compiled else {"capacity": 1}
        module = ExpertParallel(
            experts, num_experts=s.experts, topk=s.topk, hidden=s.hidden, max_tokens=s.max_tokens,
            dtype=torch.float32, group=world, gradients="sum", windows="own", num_sm=4,
            chunks=self.chunks, spare_experts=2, limit=self.limits[0], min_rows=self.limits[1],
            keep_copies=self.keep, **room,
        )  # fmt: skip
        call = one_graph(module) if self.compiled else module
        made = []
        for number, how in enumerate(case.rounds):
            arrays = (
                tensor_of(one, device, None, how) for one in self.given(case, number, world.rank)
            )
            x, scores, gradient = arrays
            x.requires_grad_()
            scores.requires_grad_()
            experts.factors.grad = None
            sums = call(x, scores, tensor_of(how.ids[world.rank], device, None, how))
            sums.backward(gradient)
            settle(device)
            made.append({
                "sums": to_host(sums), "of_x": to_host(x.grad), "of_scores": to_host(scores.grad),
                "of_factors": to_host(experts.factors.grad),
            })  # fmt: skip
            with torch.no_grad():
                experts.factors += 1
        module.finalize()
        return made

    def complaints(self, case: ExpertCase, results: list[list[Arrays]]) -> list[str]:
        """Against sums in plain numbers. A zero has no sign here."""
        lines, local = [], case.sizes.local
        for number, round_ in enumerate(case.rounds):
            factors = self.factors(case, number)
            of_factors = np.zeros_like(factors)
            wanted = []
            for rank, ids in enumerate(round_.ids):
                x, scores, gradient = self.given(case, number, rank)
                live = (ids >= 0).astype("f4")
                of_slots = factors[ids] * (scores * live)[..., None]
                np.add.at(of_factors, ids, (x * gradient)[:, None] * (scores * live)[..., None])
                wanted.append({
                    "sums": x * of_slots.sum(1), "of_x": gradient * of_slots.sum(1),
                    "of_scores": (factors[ids] * (x * gradient)[:, None]).sum(2) * live,
                })  # fmt: skip
            for rank, arrays in enumerate(wanted):
                arrays["of_factors"] = of_factors[rank * local : (rank + 1) * local]
                got = {n: a.view("f4") + 0.0 for n, a in results[rank][number].items()}
                want = {n: a + np.float32(0) for n, a in arrays.items()}
                lines += differences(got, want, f"tokens {round_.counts}, rank {rank}")
        return lines


def one_graph(module: ExpertParallel) -> Any:
    """The module compiled. Layers of other sizes are other graphs, of which there may be many."""
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    return torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)


def _ways() -> Iterator[Way]:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "module": ("module", {}),
        "module_kept": ("module, copies kept", {"keep": True}),
        "module_slots": ("module, two functions", {"kind": Slots}),
        "module_chunks": ("module, two chunks, `min_rows` 3", {"chunks": 2, "limits": (1.0, 3)}),
        "module_few": ("module, few tokens", {"max_tokens": FEW}),
        "module_compiled": (
            "module, `torch.compile(fullgraph=True)`",
            {"compiled": True, "patience": 3.0, "topologies": ((2, 2),)},
        ),
    }
    for name, (title, options) in kinds.items():
        yield CopiesWay(f"spare_{name}", f"spare experts, one node, {title}", **options)
    for name in ("module", "module_kept"):
        title, options = kinds[name]
        title = f"spare experts, several nodes, mapped, {title}"
        yield CopiesWay(f"spare_nodes_{name}", title, topologies=((4, 2),), **options)
    for name, title, topology in (
        ("module", "one node, processes, module", (2, 2)),
        ("nodes_module", "several nodes, processes, mapped, module", (4, 2)),
    ):
        yield CopiesWay(
            f"spare_{name}_processes", f"spare experts, {title}", topologies=(topology,),
            ranks="processes",
        )  # fmt: skip
    for backend, at in (("nccl", "NCCL"), ("nvshmem", "NVSHMEM")):
        on: dict[str, Any] = {"ranks": "processes", "backend": backend, "devices": ("cuda",)}
        for name, topologies in (("module", ((4, 2),)), ("module_kept", ((2, 1),))):
            title, options = kinds[name]
            yield CopiesWay(
                f"nodes_{backend}_spare_{name}", f"spare experts, several nodes, {at}, {title}",
                topologies=topologies, **on, **options,
            )  # fmt: skip


WAYS = {way.name: way for way in _ways()}
