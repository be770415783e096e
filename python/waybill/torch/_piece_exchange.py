"""What all ranks hold, from what each does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .._arrays import IntArray
from .._dispatcher import ReadyPlan
from .._graphs import outside_graphs
from ..errors import InvalidArgument
from ..routing import compute_metadata
from ..world import World
from ._context_parallel_tables import on_device
from .batch_plan import RankPieces, piece_table
from .sequence_dispatcher import SequenceDispatcher

_WHO = "ContextParallelAttention.gather"
_FIRST_ROWS = 256  # a message has as many rows; a batch with more pieces makes them more


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
    def gather(self, held: RankPieces, fingerprint: int = 0) -> list[IntArray]:
        """``fingerprint``: of the planner, which must be the same everywhere."""
        table = piece_table(held, self._world.rank, _WHO)
        while True:
            everyone = self._send(table, fingerprint)
            others = [rank for rank, message in enumerate(everyone) if message[0, 1] != fingerprint]
            if others:
                raise InvalidArgument(
                    f"{_WHO}: rank {others[0]} plans with other options than rank"
                    f" {self._world.rank}, expected the same on all: sizes, in_place, block_tokens,"
                    " imbalance_target and costs"
                )
            most = max(int(message[0, 0]) for message in everyone)
            if most < self._rows:
                return [message[1 : 1 + int(message[0, 0])].copy() for message in everyone]
            self._rows = 2 * most  # the same on all ranks
            self._ready = None

    def _send(self, table: IntArray, fingerprint: int) -> IntArray:
        message = np.zeros((self._rows, 3), np.int64)
        message[0, :2] = len(table), fingerprint
        shown = table[: self._rows - 1]
        message[1 : 1 + len(shown)] = shown
        rows = on_device(torch.from_numpy(message), self._device)
        (all_rows,) = self._dispatcher.dispatch(self._plan(rows), rows)
        if self._device.type == "cuda":
            # A copy to pageable memory would hold up the driver for a rank on the same GPU.
            torch.cuda.current_stream(self._device).synchronize()
        everyone: IntArray = all_rows.cpu().numpy().copy()
        return everyone.reshape(self._world.world_size, self._rows, 3)

    def _plan(self, rows: torch.Tensor) -> ReadyPlan:
        if self._ready is None:
            size = self._world.world_size
            to_all = np.tile(np.arange(size), (size, 1, 1))
            forward, _ = compute_metadata(np.full((size, 1), self._rows), to_all)
            self._ready = self._dispatcher.plan_dispatch((forward, rows))
        return self._ready

    def close(self) -> None:
        self._dispatcher.close()
