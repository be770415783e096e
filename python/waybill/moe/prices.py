"""Predicts what copies of hot experts cost and gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence

from .. import _core
from .._arrays import IntArray, instance, int64, number
from .._errors import said_by
from ..costs import LinkSpeeds, check_speed
from .config import EPConfig
from .even_experts import spare_options
from .predict import choices_of, cost_options

_FLOPS = 600e12  #: operations per second of a rank's grouped products, nominal


@dataclass(frozen=True)
class ExpertStepSeconds:
    """One layer of experts in a step, seconds of the slowest rank."""

    dispatch: float  #: tokens travel, with counting; with copies planning, too
    cached_dispatch: float  #: gradients travel by the known routing
    combine: float  #: sums travel forward, gradients of tokens backward
    gemm: float  #: the experts' products forward; backward takes twice as long
    weights: float  #: a dispatch takes so much longer with the weights of copies on its links
    gradients: float  #: float32 gradients of copies home
    forward: float  #: dispatch, weights, products and combine
    backward: float  #: the same with twice the products, and gradients


@dataclass(frozen=True, eq=False)
class ExpertCopyPrices:
    """A step without copies and with those that ``even_experts`` plans."""

    before: ExpertStepSeconds
    after: ExpertStepSeconds
    rows_before: IntArray  #: [W] rows that each rank computes
    rows_after: IntArray
    num_copies: int
    weight_bytes: int  #: weights of one expert
    explained: List[str]  #: sentences that say what the figures mean


def price_copies(
    config: EPConfig,
    exp_indices: Sequence[Any],
    *,
    spare_experts: int,
    limit: float = 1.0,
    min_rows: int = 0,
    expert_alignment: int = 1,
    intermediate: int = 2048,
    gemm_flops_per_second: float = _FLOPS,
    dropped_id: Optional[int] = None,
    payload: str = "plain",
    nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
    network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    block_bytes_per_second: float = LinkSpeeds.block_bytes_per_second,
    num_sms: int = 32,
    path: str = "pipelined",
) -> ExpertCopyPrices:
    """Plans copies for these choices and prices one layer of a step without and with them.

    :param exp_indices: [T, topk] a rank, int32 or int64
    :param spare_experts: slots per rank for copies; ``limit`` and ``min_rows`` as in
        ``even_experts``, ``expert_alignment`` is the tile of the experts' products
    :param intermediate: an expert has three matrices of hidden x intermediate
    :param gemm_flops_per_second: operations per second of a rank's grouped products
    :raises InvalidArgument: naming argument and rank
    """
    who = "price_copies"
    speeds = (nvlink_bytes_per_second, network_bytes_per_second, block_bytes_per_second)
    costed = cost_options(who, speeds, num_sms, path)
    spare = spare_options(spare_experts, limit, min_rows, who)
    spare["expert_alignment"] = int64(expert_alignment, f"{who}: expert_alignment")
    compiled, options, arrays = choices_of(config, exp_indices, dropped_id, payload, who, **spare)
    inner = int64(intermediate, f"{who}: intermediate")
    flops = number(gemm_flops_per_second, f"{who}: gemm_flops_per_second")
    with said_by(who):
        made = _core.price_copies(compiled, options, arrays, costed, inner, flops)
    before, after = (ExpertStepSeconds(**made.pop(name)) for name in ("before", "after"))
    return ExpertCopyPrices(before=before, after=after, **made)


def break_even_rows(
    config: EPConfig,
    *,
    gemm_flops_per_second: float = _FLOPS,
    link_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
    weights: float = 2,
    gradients: float = 1,
    gemm: float = 3,
) -> int:
    """The rows from which a copy takes more time off the fullest rank than it takes itself over one
    link, if nothing hides it: a ``min_rows`` with which each copy pays.

    An expert's size does not count, as its products grow with its bytes. Of a copy of m rows, m x 2
    x elements x ``gemm`` operations are compared with elements x (bytes of the dtype x ``weights``
    + 4 x ``gradients``) bytes.

    :param link_bytes_per_second: NVLink's, or the network's where copies lie on other nodes
    :param weights: how often its weights travel: 2, forward and backward; 1 with ``keep_copies`` or
        without a backward; less where rows hide them
    :param gradients: how often float32 gradients do: 1; 0 without a backward
    :param gemm: products of a row: 3, one forward, two backward; 1 without a backward
    :raises InvalidArgument: naming the argument
    """
    who = "break_even_rows"
    instance(config, EPConfig, f"{who}: config", "an EPConfig")
    trips = {"weights": weights, "gradients": gradients, "gemm": gemm}
    given = {name: number(value, f"{who}: {name}") for name, value in trips.items()}
    flops = number(gemm_flops_per_second, f"{who}: gemm_flops_per_second")
    speed = check_speed(link_bytes_per_second, f"{who}: link_bytes_per_second")
    return _core.break_even_rows(config._compiled(), flops, speed, **given)
