"""What a dispatch of experts' tokens sends where, and what bounds it; nothing is moved."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from .. import _core
from .._arrays import IntArray
from .._copies import OfThisProcess
from .._errors import renamed
from ..errors import InvalidArgument
from ..links import LinkSpeeds, check_speed
from .choices import choices_of
from .config import EPConfig

_old_names = renamed(nvlink="nvlink_bytes_per_second", network="network_bytes_per_second")


class ExpertSummary(OfThisProcess):
    """Figures of a dispatch; its combine moves the same rows the other way.

    A row crosses a link once for each rank that it goes to, between nodes once for each node; what
    stays on a rank crosses none. Speeds are those of a rank's links each way, in bytes per second.
    """

    _why_not_copied = "compiled tables: summarize makes it again; its arrays can be"
    config: EPConfig
    row_bytes: int  #: of a row that travels, its scales too
    tokens: IntArray  #: [W] of each rank
    dropped: IntArray  #: [W] topk slots of its tokens that go nowhere
    computed: IntArray  #: [W] topk slots that its experts get: the rows of their products
    received: IntArray  #: [W] tokens that it gets, its own among them
    node_in: IntArray  #: [W] rows over the links inside a node
    node_out: IntArray
    network_in: IntArray  #: [W] rows between nodes
    network_out: IntArray
    expert_choices: IntArray  #: [E] topk slots of each expert

    def __init__(self) -> None:
        raise InvalidArgument("ExpertSummary: got a constructor call, expected summarize")

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
        """What the figures mean, a sentence each."""
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

    _compiled: Any


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
    self = ExpertSummary.__new__(ExpertSummary)
    self.config = config
    self._compiled = _core.summarize_experts(compiled, options, arrays)
    self.row_bytes = self._compiled.row_bytes
    for name, values in self._compiled.figures().items():
        setattr(self, name, values)
    return self
