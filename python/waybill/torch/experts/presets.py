"""Options that layers are made with, for training and for decoding, on the device of a world."""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Tuple, Union

import torch

from ..._arrays import at_least, choice, int64
from ...errors import InvalidArgument, WrongType
from ...world import World

PRESETS = ("training", "decoding")
_HOST_SMS = 20  # ranks in host memory ignore it
_FEW_TOKENS = 128  # tokens of a rank: a call is then bound by latency, not by links


def suggested_sms(world: World, max_tokens: int) -> int:
    """Multiprocessors for a call: of many tokens as many as fill the links, a quarter of the device
    (three eighths where rows go on to other nodes); of few tokens half, which shortens the call.
    """
    if world.device == "cpu":
        return _HOST_SMS
    count = torch.cuda.get_device_properties(world.device).multi_processor_count
    if max_tokens <= _FEW_TOKENS:
        return max(1, min(64, count // 2))
    one_node = world.topology.ranks_per_node == world.world_size
    return max(1, min(32, count // 4) if one_node else min(48, 3 * count // 8))


def number_of_rows(
    fixed_rows: Union[int, float, None], who: str, *, world_size: int, max_tokens: int, topk: int,
    num_experts: int, rows: str, expert_alignment: int, spare_experts: int = 0,
) -> Optional[int]:  # fmt: skip
    """``fixed_rows`` as a number: a float is a share of what a rank gets at worst, when all tokens
    of all ranks choose its experts, each as many different ones as there are.
    """
    if not isinstance(fixed_rows, float):
        if fixed_rows is None:
            return None
        if isinstance(fixed_rows, bool):  # which would be one row
            raise WrongType(f"{who}: fixed_rows = {fixed_rows}, expected a number of rows")
        return at_least(fixed_rows, 1, f"{who}: fixed_rows")
    if not 0 < fixed_rows <= 1:
        raise InvalidArgument(
            f"{who}: fixed_rows = {fixed_rows}, expected a number of rows, or a share of the worst"
            " case, > 0.0 and <= 1.0"
        )
    local = max(1, num_experts // world_size)
    each = min(topk, local) if rows == "grouped" else 1
    share = math.ceil(fixed_rows * world_size * max_tokens * each)
    slots = local + spare_experts
    return max(1, share) + (slots * (expert_alignment - 1) if rows == "grouped" else 0)


def preset_options(
    name: Optional[str], world: World, *, max_tokens: int, num_experts: int, topk: int
) -> Dict[str, Any]:
    """Keyword arguments of ``EPAll2AllLayer``. On one node rows of a token are summed on each rank
    before they travel. "decoding" has room for any routing in which a token chooses different
    experts, so that no host waits, and results are views.
    """
    name = PRESETS[0] if name is None else choice(name, "ExpertParallel: preset", *PRESETS)
    ranks = world.world_size
    options: Dict[str, Any] = {
        "num_sm": suggested_sms(world, max_tokens),
        "enable_local_combine": world.topology.ranks_per_node == ranks,
    }
    if name == "decoding":
        options["fixed_rows"] = 1.0
        options["copy_out"] = False
    return options


def room_of(
    capacity: Optional[int], fixed_rows: Optional[int], max_per_expert: Optional[int], who: str
) -> Tuple[int, int]:
    """(capacity factor of buffers that grow, most topk slots of an expert; 0: any number)."""
    factor = 2 if capacity is None else int64(capacity, f"{who}: capacity")
    if capacity is not None and fixed_rows is not None:
        raise InvalidArgument(
            f"{who}: capacity = {factor}, expected none: fixed_rows = {fixed_rows} says how many"
            " rows the buffers have"
        )
    if max_per_expert is None:
        return factor, 0
    return factor, at_least(max_per_expert, 1, f"{who}: max_per_expert")
