"""What all ranks hold, from what each does."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch

from .._agreement import agree
from .._arrays import IntArray
from .._dispatcher import PlanHandle
from .._errors import said_by
from .._graphs import outside_graphs
from ..errors import Disagreement, Error, InvalidArgument, Timeout, TransportError
from ..routing import compute_metadata
from ..world import World
from ._context_parallel_tables import on_device
from .batch_plan import RankPieces, check_table, piece_table
from .sequence_dispatcher import SequenceDispatcher

_WHO = "ContextParallelAttention.gather"
_PLANS = "ContextParallelAttention: plans"
_MOST_NAMED = 2**16  # documents by which plans are compared, beyond that ranks
_FIRST_ROWS = 256  # a message has as many rows; a batch with more pieces makes them more


def first_difference(world: World, pieces: Sequence[IntArray], facts: dict[str, Any]) -> str:
    """Collective, where ranks have seen that their plans differ: in which document, or which option
    of the planner, first; "" where that is not it, or not all ranks came.
    """
    most = max(len(table) for table in pieces) + 1  # the last one of each rank is "none"
    if most * len(pieces) <= _MOST_NAMED:
        says = [
            (f"document {i} of rank {rank}", _text_of(table, i))
            for i in range(most)
            for rank, table in enumerate(pieces)
        ]
    else:
        says = [
            (
                f"the documents of rank {rank}",
                f"{len(table)} with hash {zlib.crc32(table.tobytes()):x}",
            )
            for rank, table in enumerate(pieces)
        ]
    try:
        world._world.require_same(_PLANS, [*says, *((n, str(v)) for n, v in facts.items())])
    except (Disagreement, Timeout, TransportError):  # a rank makes another call, or none
        return ""
    except InvalidArgument as error:
        return str(error).removeprefix(f"{_PLANS}: ")
    return ""


def _text_of(table: IntArray, place: int) -> str:
    if place >= len(table):
        return "none"
    document, offset, length = table[place].tolist()
    if document < 0:  # whole, and without a number
        return f"{length} tokens"
    return f"{length} tokens from {offset} of number {document}"


class PieceExchange:
    """A table of pieces of each rank to all ranks, over the world itself: with its deadlines, and
    in the order of this object's calls alone.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._dispatcher = SequenceDispatcher(world, num_sms=1, relay="never")
        self._device = torch.device(world.device)
        self._rows = _FIRST_ROWS
        self._ready: Any = None

    @outside_graphs
    def gather(
        self, held: RankPieces, who: str = _WHO, wrong: Optional[Error] = None
    ) -> list[IntArray]:
        """What is wrong with a rank's pieces, or else with its arguments, is raised on all."""
        table: IntArray = np.zeros((0, 3), np.int64)
        try:
            table = piece_table(held, self._world.rank, f"{who}: held")
            check_table(table, self._world.rank, f"{who}: held")
        except Error as error:
            wrong = wrong or error
        while True:
            with said_by(who):
                everyone = self._send(table, wrong is not None)
            if any(message[0, 1] for message in everyone):
                agree(self._world, who, {}, wrong)
            most = max(int(message[0, 0]) for message in everyone)
            if most < self._rows:
                return [message[1 : 1 + int(message[0, 0])].copy() for message in everyone]
            self._rows = 2 * most  # the same on all ranks
            self._ready = None

    def _send(self, table: IntArray, is_wrong: bool) -> IntArray:
        message = np.zeros((self._rows, 3), np.int64)
        message[0, :2] = len(table), is_wrong
        shown = table[: self._rows - 1]
        message[1 : 1 + len(shown)] = shown
        rows = on_device(torch.from_numpy(message), self._device)
        (all_rows,) = self._dispatcher.dispatch(self._plan(rows), rows)
        if self._device.type == "cuda":
            # A copy to pageable memory would hold up the driver for a rank on the same GPU.
            torch.cuda.current_stream(self._device).synchronize()
        everyone: IntArray = all_rows.cpu().numpy().copy()
        return everyone.reshape(self._world.world_size, self._rows, 3)

    def _plan(self, rows: torch.Tensor) -> PlanHandle:
        if self._ready is None:
            size = self._world.world_size
            to_all = np.tile(np.arange(size), (size, 1, 1))
            forward, _ = compute_metadata(np.full((size, 1), self._rows), to_all)
            self._ready = self._dispatcher.plan_dispatch((forward, rows))
        return self._ready

    def close(self) -> None:
        self._dispatcher.close()
