"""Options that layers are made with, for training and for decoding, on the device of a world."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from ..._arrays import choice
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
