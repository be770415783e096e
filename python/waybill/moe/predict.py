"""Counts what a dispatch of experts' tokens sends; predicts its calls, and what copies cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

from .. import _core
from .._arrays import AnyArray, IntArray, converted, instance, int64, number
from .._errors import renamed, said_by
from .._lifetime import Made, OfThisProcess
from ..costs import LinkSpeeds, check_speed
from ..errors import InvalidArgument
from .config import EPConfig
from .even_experts import spare_options
from .simulate import ids_of_ranks


def choices_of(
    config: Any,
    exp_indices: Sequence[Any],
    dropped_id: Optional[int],
    payload: str,
    who: str,
    **spare: Any,
) -> Tuple[Any, Any, List[AnyArray]]:
    """(compiled config, compiled options of a grouped dispatch, ids of each rank).

    :raises InvalidArgument: naming argument and rank
    """
    instance(config, EPConfig, f"{who}: config", "an EPConfig")
    compiled = config._compiled()
    with said_by(who):
        options = _core.ep_dispatch_options(
            compiled, dropped_id, "grouped", payload=payload, **{"expert_alignment": 1, **spare}
        )
    arrays = ids_of_ranks(exp_indices, config.topk, f"{who}: exp_indices", config.world_size)
    return compiled, options, arrays


_old_names = renamed(nvlink="nvlink_bytes_per_second", network="network_bytes_per_second")


class ExpertSummary(OfThisProcess, Made):
    """Figures of a dispatch; its combine moves the same rows the other way.

    A row crosses a link once for each rank that it goes to, between nodes once for each node; what
    stays on a rank crosses none. Speeds are those of a rank's links each way, in bytes per second.
    """

    _why_not_copied = "compiled tables: summarize makes it again; its arrays can be"
    config: EPConfig
    row_bytes: int  #: bytes of a row that travels, its scales too
    tokens: IntArray  #: [W] of each rank
    dropped: IntArray  #: [W] topk slots of its tokens that go nowhere
    computed: IntArray  #: [W] topk slots that its experts get: the rows of their products
    received: IntArray  #: [W] tokens that it gets, its own among them
    node_in: IntArray  #: [W] rows over the links inside a node
    node_out: IntArray
    network_in: IntArray  #: [W] rows between nodes
    network_out: IntArray
    expert_choices: IntArray  #: [E] topk slots of each expert
    _compiled: Any
    _made_by = "summarize"

    @_old_names
    def limit_seconds(
        self,
        *,
        nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
        network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    ) -> float:
        """The time of the rank and link that need longest: no dispatch can be faster."""
        return self._compiled.limit_seconds(
            *_speeds(nvlink_bytes_per_second, network_bytes_per_second)
        )

    def placement(self) -> IntArray:
        """[E] The rank for each expert, as many on each, that makes the busiest rank's work little
        more than the others'.
        """
        return self._compiled.placement()

    @_old_names
    def explain(
        self,
        *,
        nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
        network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    ) -> List[str]:
        """Sentences that say what the figures mean."""
        return self._compiled.explain(*_speeds(nvlink_bytes_per_second, network_bytes_per_second))

    @_old_names
    def text(
        self,
        *,
        nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
        network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    ) -> str:
        """Figures, a line per rank with bars, and ``explain()``, 80 columns wide."""
        return self._compiled.text(*_speeds(nvlink_bytes_per_second, network_bytes_per_second))

    def __str__(self) -> str:
        return self.text()


def _speeds(nvlink: Any, network: Any) -> Tuple[float, float]:
    return (
        check_speed(nvlink, "ExpertSummary: nvlink_bytes_per_second"),
        check_speed(network, "ExpertSummary: network_bytes_per_second"),
    )


def summarize(
    config: EPConfig,
    exp_indices: Sequence[Any],
    *,
    dropped_id: Optional[int] = None,
    payload: str = "plain",
) -> ExpertSummary:
    """Counts what a dispatch of these choices would send.

    :param exp_indices: [T, topk] a rank, int32 or int64
    :param dropped_id: the id of a topk slot that goes nowhere: num_experts, or -1
    :param payload: "plain"; "quantized" or "scaled": float8 e4m3 with scales
    :raises InvalidArgument: naming argument and rank
    """
    compiled, options, arrays = choices_of(config, exp_indices, dropped_id, payload, "summarize")
    made = _core.summarize_experts(compiled, options, arrays)
    return ExpertSummary._with(
        config=config, _compiled=made, row_bytes=made.row_bytes, **made.figures()
    )


#: Seconds, or bytes per second: what is computed from more may be no number.
_MOST_COST = 1e18


def cost_options(who: str, given: Mapping[str, Any]) -> Any:
    """The compiled options of predictions; seconds that are not given are the model's."""
    made = converted(
        who, given, (_cost, "message_seconds phase_seconds network_message_seconds"),
        (_cost, "network_post_seconds path_bytes_per_second"),
        (check_speed, "nvlink_bytes_per_second network_bytes_per_second block_bytes_per_second"),
    )  # fmt: skip
    with said_by(who):
        return _core.expert_cost_options(**made, num_sms=given["num_sms"], path=given["path"])


def _cost(value: Any, name: str) -> float:
    cost = number(value, name)
    least = 1 if name.endswith(": path_bytes_per_second") else 0
    if not (cost == 0 or least <= cost <= _MOST_COST):
        raise InvalidArgument(f"{name} = {cost:g}, expected 0 to {_MOST_COST:g}")
    return cost


@dataclass(frozen=True, eq=False)
class ExpertCallPrediction:
    """One call of all ranks. Seconds are those of ``rank``, which takes longest."""

    #: "grouped_dispatch", "cached_dispatch", "compact_combine", "summed_combine",
    #: "grouped_combine", "low_latency_dispatch" or "low_latency_combine"
    call: str
    #: begin + max(network, overlapped_seconds + max(NVLink, blocks)) + end
    seconds: float
    begin_seconds: float  #: before rows: launches, signals of all ranks, ids, counts
    #: counting and adding sums, for which pipelined rows to other nodes do not wait
    overlapped_seconds: float
    network_seconds: float  #: rows between nodes
    nvlink_seconds: float  #: rows inside the node
    block_seconds: float  #: bytes that multiprocessors store
    end_seconds: float  #: the longest does not cover it: forwarding, sums
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
    spare_experts: int = 0,
    limit: float = 1.0,
    min_rows: int = 0,
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
    :param spare_experts: slots per rank for copies of other ranks' experts: rows go to the slots
        that ``even_experts`` plans; ``limit`` and ``min_rows`` are its arguments
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
    costed = cost_options(who, locals())
    spare = spare_options(spare_experts, limit, min_rows, who)
    compiled, options, arrays = choices_of(config, exp_indices, dropped_id, payload, who, **spare)
    calls = _core.predict_experts(compiled, options, arrays, costed)
    return [ExpertCallPrediction(**call) for call in calls]


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
    costed = cost_options(who, locals())
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
        without a backward
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
