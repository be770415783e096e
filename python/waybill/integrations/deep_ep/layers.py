"""The layers behind a buffer. Ranks stand for experts: a token goes once to each of its ranks."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

from ...errors import InvalidArgument, Unsupported
from ...torch.moe import EPAll2AllLayer
from ...world import World

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
        self._made: Dict[LayerKey, EPAll2AllLayer] = {}

    def of_ranks(self, kind: str, hidden: int, max_tokens: int) -> LayerKey:
        """A layer whose experts are the ranks, with room for all tokens of all ranks."""
        ranks = self.world.world_size
        return LayerKey(kind, hidden, max_tokens, ranks, ranks, ranks * max_tokens)

    def get(self, key: LayerKey, num_sms: int) -> EPAll2AllLayer:
        """The layer, which is made if it is not there; ``num_sms`` count then."""
        layer = self._made.get(key)
        if layer is None:
            world = self.world
            dtype = torch.float32 if key.kind == "floats" else torch.bfloat16
            layer = self._made[key] = EPAll2AllLayer(
                world, key.max_tokens, key.hidden, key.topk, world.rank, key.num_experts,
                world.world_size, world.world_size, dtype, torch.float32, num_sms, dropped_id=-1,
                expert_alignment=key.alignment,
                payload="plain" if key.kind == "floats" else key.kind, fixed_rows=key.fixed_rows,
                copy_out=False,
            )  # fmt: skip
        return layer

    def finalize(self) -> None:
        """Collective: gives the symmetric memory of all of them back."""
        for layer in self._made.values():
            layer.finalize()
        self._made.clear()


def payload_of(x: Any, who: str, rank: int) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Rows, and their scales where they are float8."""
    x, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    place = f"{who}: x of rank {rank}"
    if not isinstance(x, torch.Tensor) or x.ndim != 2:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument(f"{place} is {shape}, expected a tensor [num_tokens, hidden]")
    expected = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    if x.dtype != expected:
        scaled = "without" if scales is None else "with"
        raise InvalidArgument(f"{place} has dtype {x.dtype}, expected {expected} {scaled} scales")
    if scales is not None:
        shape = (x.shape[0], x.shape[1] // 128)
        if x.shape[1] % 128 != 0:
            raise InvalidArgument(f"{place} has {x.shape[1]} columns, expected a multiple of 128")
        if not isinstance(scales, torch.Tensor) or scales.dtype != torch.float32:
            got = getattr(scales, "dtype", type(scales).__name__)
            raise InvalidArgument(f"{place}: scales are {got}, expected torch.float32")
        if tuple(scales.shape) != shape:
            raise InvalidArgument(f"{place}: scales {tuple(scales.shape)}, expected {shape}")
    return x, scales


def check_table(
    value: Any, name: str, shape: Tuple[int, ...], dtypes: Tuple[torch.dtype, ...], rank: int
) -> torch.Tensor:
    """A tensor of that shape and one of the dtypes."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(
            f"{name} of rank {rank} is a {type(value).__name__}, expected a tensor {shape}"
        )
    if tuple(value.shape) != shape or value.dtype not in dtypes:
        raise InvalidArgument(
            f"{name} of rank {rank} is {tuple(value.shape)} of {value.dtype}, expected {shape} of"
            f" {' or '.join(map(str, dtypes))}"
        )
    return value
