"""The layers behind a buffer. Ranks stand for experts: a token goes once to each of its ranks."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional

import torch

from ...errors import InvalidArgument, Unsupported
from ...torch.moe import EPAll2AllLayer
from ...world import World
from .events import Queue

__all__ = ["LayerKey", "Layers"]

_MOST_RANKS = 32  # topk slots of a token in a layer


class LayerKey(NamedTuple):
    """What a layer is for. Two with the same key are the same layer."""

    kind: str  #: of payload: "plain", "scaled", "quantized"; "floats": columns of float32
    hidden: int
    max_tokens: int
    num_experts: int  #: of all ranks; the number of ranks where only those matter
    topk: int
    fixed_rows: int
    alignment: int = 1  #: rows of an expert are padded to a multiple
    max_per_expert: Optional[int] = None  #: topk slots of an expert that a rank may have


class Layers:
    """Makes layers when they are first needed, which is collective, as the calls are."""

    def __init__(self, world: World, who: str) -> None:
        topology = world.topology
        if topology.num_nodes > 1:
            raise Unsupported(
                f"{who}: the group has {topology.num_nodes} nodes, expected one: the interface of"
                " several nodes is not served; EPAll2AllLayer serves several"
            )
        if world.world_size > _MOST_RANKS:
            raise Unsupported(
                f"{who}: the group has {world.world_size} ranks, expected at most {_MOST_RANKS}"
            )
        self.world = world
        self.queue = Queue(torch.device(world.device), who)
        self._who = who
        self._made: Dict[LayerKey, EPAll2AllLayer] = {}

    def of_ranks(self, kind: str, hidden: int, max_tokens: int) -> LayerKey:
        """A layer whose experts are the ranks, with room for all tokens of all ranks."""
        ranks = self.world.world_size
        return LayerKey(kind, hidden, max_tokens, ranks, ranks, ranks * max_tokens)

    def get(self, key: LayerKey, num_sms: int) -> EPAll2AllLayer:
        """The layer, which is made if it is not there; ``num_sms`` count then."""
        layer = self._made.get(key)
        if layer is None:
            layer = self._made[key] = self._make(key, num_sms)
        return layer

    def _make(self, key: LayerKey, num_sms: int) -> EPAll2AllLayer:
        world = self.world
        dtype = torch.float32 if key.kind == "floats" else torch.bfloat16
        try:
            return EPAll2AllLayer(
                world, key.max_tokens, key.hidden, key.topk, world.rank, key.num_experts,
                world.world_size, world.world_size, dtype, torch.float32, num_sms, dropped_id=-1,
                expert_alignment=key.alignment,
                payload="plain" if key.kind == "floats" else key.kind, fixed_rows=key.fixed_rows,
                copy_out=False, max_per_expert=key.max_per_expert,
            )  # fmt: skip
        except InvalidArgument as error:
            error.args = (
                f"{self._who}: no windows for this call, in which ranks must have the same bytes,"
                f" hidden, num_topk, num_experts, most tokens and kind of payload: {error}",
            )
            raise

    def finalize(self) -> None:
        """Collective: gives the symmetric memory of all of them back."""
        for layer in self._made.values():
            layer.finalize()
        self._made.clear()
