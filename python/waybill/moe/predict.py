"""What the calls of a layer of experts would take, for one node or many; nothing is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence

from .. import _core
from .._arrays import IntArray, numbers
from .._errors import renamed, said_by
from ..errors import InvalidArgument
from ..links import LinkSpeeds, check_speed
from .choices import choices_of
from .config import EPConfig

#: Seconds, or bytes per second: what is computed from more may be no number.
_MOST_COST = 1e18


@dataclass(frozen=True, eq=False)
class ExpertCallPrediction:
    """One call of all ranks. Seconds are those of ``rank``, which takes longest."""

    #: "grouped_dispatch", "cached_dispatch", "compact_combine", "summed_combine",
    #: "grouped_combine", "low_latency_dispatch" or "low_latency_combine"
    call: str
    #: begin, the longer of network and beside + the longer of NVLink and blocks, and end
    seconds: float
    begin_seconds: float  #: before rows: launches, signals of all ranks, ids, counts
    #: what rows to other nodes do not wait for, where they are pipelined: counting, adding sums
    beside_seconds: float
    network_seconds: float  #: rows between nodes
    nvlink_seconds: float  #: rows inside the node
    block_seconds: float  #: what multiprocessors store
    end_seconds: float  #: what the longest does not cover: forwarding, sums
    rank: int
    nvlink_in: IntArray  #: [W] bytes of rows
    nvlink_out: IntArray
    network_in: IntArray
    network_out: IntArray
    puts: IntArray  #: [W] to other nodes, that carry them


@renamed(
    nvlink="nvlink_bytes_per_second",
    network="network_bytes_per_second",
    block="block_bytes_per_second",
)
def predict(
    config: EPConfig,
    exp_indices: Sequence[Any],
    *,
    dropped_id: Optional[int] = None,
    payload: str = "plain",
    nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
    network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    block_bytes_per_second: float = LinkSpeeds.block_bytes_per_second,
    num_sms: int = 32,
    path: str = "pipelined",
    message_seconds: float = 0.4e-6,
    phase_seconds: float = 11e-6,
    network_message_seconds: float = 3e-6,
    network_post_seconds: float = 0.3e-6,
    path_bytes_per_second: float = 0.0,
) -> List[ExpertCallPrediction]:
    """Predicts the calls of a layer for these choices, one of each kind.

    :param exp_indices: [T, topk] a rank, int32 or int64
    :param dropped_id: the id of a topk slot that goes nowhere: num_experts, or -1
    :param payload: "plain"; "quantized" or "scaled": float8 e4m3 with scales
    :param nvlink_bytes_per_second: of a rank inside its node, each way
    :param network_bytes_per_second: of a rank between nodes, each way
    :param block_bytes_per_second: that one multiprocessor stores
    :param num_sms: multiprocessors that a call uses
    :param path: "waiting": a put is awaited before its block posts the next; "pipelined"
    :param path_bytes_per_second: above 0: nodes are parts of one host, and a block copies at this
        speed what goes to another one
    :raises InvalidArgument: naming argument and rank
    """
    who = "predict"
    speeds = {
        "nvlink_bytes_per_second": nvlink_bytes_per_second,
        "network_bytes_per_second": network_bytes_per_second,
        "block_bytes_per_second": block_bytes_per_second,
    }
    given = {name: check_speed(speed, f"{who}: {name}") for name, speed in speeds.items()}
    costs = numbers(
        who, message_seconds=message_seconds, phase_seconds=phase_seconds,
        network_message_seconds=network_message_seconds,
        network_post_seconds=network_post_seconds, path_bytes_per_second=path_bytes_per_second,
    )  # fmt: skip
    for name, cost in costs.items():
        least = 1 if name == "path_bytes_per_second" else 0
        if not (cost == 0 or least <= cost <= _MOST_COST):
            raise InvalidArgument(f"{who}: {name} = {cost:g}, expected 0 to {_MOST_COST:g}")
    given.update(costs)
    compiled, options, arrays = choices_of(config, exp_indices, dropped_id, payload, who)
    with said_by(who):
        costed = _core.expert_cost_options(**given, num_sms=num_sms, path=path)
    calls = _core.predict_experts(compiled, options, arrays, costed)
    return [ExpertCallPrediction(**call) for call in calls]
