"""What the checks are made of: a plan, its rows, and what is said about this installation."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._arrays import AnyArray
from ..layouts import QkvMetadata
from ..planner import AttentionPlan, plan
from ..simulate import orchestrate_simulate, simulate_communication, sum_kv_copies
from ..sparse import QkvRouting

#: A check returns what it did, in a few words, or raises.
Check = Callable[[], str]

LENGTHS = (300, 180, 97, 64, 33, 20, 11, 3)
HIDDEN = 32
TIMEOUT_S = 30.0


class Skipped(Exception):
    """A check that does not apply here; the text says why."""


def describe() -> str:
    """One line: versions, and where the package lies."""
    folder = Path(__file__).resolve().parent.parent
    parts = [f"waybill {_core.version} in {folder}", f"Python {platform.python_version()}"]
    for name in ("numpy", "torch"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    parts.append(f"{_core.num_gpus()} GPUs" if _core.has_cuda else "built without CUDA")
    return ", ".join(parts)


def expect(holds: Any, what: str) -> None:
    """An assertion that `python -O` does not leave out."""
    if not holds:
        raise AssertionError(what)


def planned(world_size: int) -> AttentionPlan:
    """Documents of uneven lengths, cut and spread over the ranks."""
    return plan(list(LENGTHS), world_size, 0)


def rows_of(made: AttentionPlan, rank: int) -> int:
    """Rows of a rank in the MLP layout."""
    begin, end = made.to_qkv_plan().rank_shard_offsets[rank : rank + 2]
    return int(made.to_qkv_plan().shard_len[begin:end].sum())


def payload(rank: int, rows: int, kind: int) -> AnyArray:
    """Small whole numbers: every sum of them is exact, in any order."""
    numbers = np.random.default_rng(100 * kind + rank).integers(1, 9, (rows, HIDDEN))
    return numbers.astype(np.float32)


def payloads(made: AttentionPlan, world_size: int, kind: int) -> list[AnyArray]:
    """One array a rank."""
    return [payload(rank, rows_of(made, rank), kind) for rank in range(world_size)]


def expected_rows(tensors: list[AnyArray], metadata: Any) -> list[AnyArray]:
    """What each rank receives, by the simulation."""
    return [np.asarray(rows) for rows in simulate_communication(tensors, metadata)]


def expected_gradients(received: list[AnyArray], metadata: QkvMetadata, rows: list[int]) -> Any:
    """The sums of the copies of each rank's rows, when every rank returns what it received."""
    reverse = metadata.rev_kv
    assert reverse.seq_recv_mask is not None
    copies = reverse.seq_recv_mask.shape[2]
    world, most = len(received), max(len(r) for r in received)
    hidden = received[0].shape[1]
    given = np.zeros((world, most, hidden), np.float32)
    for rank, values in enumerate(received):
        given[rank, : len(values)] = values
    planes = np.zeros((world, copies * max(rows), hidden), np.float32)
    orchestrate_simulate(given, planes, reverse)
    return [
        sum_kv_copies(planes[rank, : copies * rows[rank]], reverse, rank) for rank in range(world)
    ]


class Step(NamedTuple):
    """A step of attention on ranks: what each has, and what the simulation says that it gets."""

    routing: QkvRouting
    q: list[AnyArray]
    k: list[AnyArray]
    want_q: list[AnyArray]
    want_k: list[AnyArray]
    want_sums: list[AnyArray]  #: gradients of K, when every rank returns what it received


def planned_step(world_size: int) -> Step:
    """That of planned()."""
    made = planned(world_size)
    metadata = made.to_metadata()
    q, k = (payloads(made, world_size, kind) for kind in (0, 1))
    want_q, want_k = expected_rows(q, metadata.fwd_q), expected_rows(k, metadata.fwd_kv)
    rows = [rows_of(made, rank) for rank in range(world_size)]
    want_sums = expected_gradients(want_k, metadata, rows)
    return Step(made.to_routing(), q, k, want_q, want_k, want_sums)
