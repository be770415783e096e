"""What a kernel of attention takes on a device: data, measured once, for plans and predictions."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Union

from ._arrays import int64, number
from ._errors import shown
from ._files import json_text, kept
from .errors import InvalidArgument

__all__ = ["AttentionCosts"]

_FORMAT = "waybill.attention_costs"
_MOST_ROW_PAIRS, _MOST_SHARD_PAIRS = 2**20, 2**40


@dataclass(frozen=True)
class AttentionCosts:
    """How long a kernel takes: ``(pairs + row_pairs * rows + shard_pairs * shards) /
    pairs_per_second``, in (query, key) pairs, of shards of queries with their context.

    From ``waybill.torch.calibrate_attention``, or by hand. Plans that are made with it even out
    what the kernel takes and not pairs alone. It must be the same on all ranks that plan.
    """

    pairs_per_second: float  #: forward
    row_pairs: int = 0  #: what a row of queries takes beside its pairs, in pairs
    shard_pairs: int = 0  #: what a shard of any length does
    backward_ratio: float = 2.5  #: time of backward over forward
    error: float = 0.0  #: of what was measured, the largest relative one
    about: Optional[Mapping[str, Any]] = field(
        default=None, hash=False
    )  #: device, kernel, sizes, versions

    def __post_init__(self) -> None:
        who = "AttentionCosts"
        for name, least in (("pairs_per_second", 0), ("backward_ratio", 0), ("error", -1)):
            value = number(getattr(self, name), f"{who}: {name}")
            if not math.isfinite(value) or value <= least:
                raise InvalidArgument(f"{who}: {name} = {value}, expected a number > {least}")
        for name, most in (("row_pairs", _MOST_ROW_PAIRS), ("shard_pairs", _MOST_SHARD_PAIRS)):
            whole = int64(getattr(self, name), f"{who}: {name}")
            if not 0 <= whole <= most:
                raise InvalidArgument(f"{who}: {name} = {whole}, expected 0..{most}")
        if self.about is not None and not isinstance(self.about, Mapping):
            raise InvalidArgument(f"{who}: about = {shown(self.about)}, expected a dict or None")

    def seconds(self, pairs: float, rows: float, shards: float, backward: bool = False) -> float:
        """Of a call with so many (query, key) pairs, rows of queries and shards."""
        work = pairs + self.row_pairs * rows + self.shard_pairs * shards
        return work / self.pairs_per_second * (self.backward_ratio if backward else 1.0)

    def to_json(self, path: Union[str, os.PathLike[str], None] = None) -> str:
        """The text of format ``waybill.attention_costs``; also written to ``path`` when given."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["about"] = None if self.about is None else dict(self.about)
        try:
            given = {"format": _FORMAT, "version": 1, **values}
            text = json.dumps(given, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"AttentionCosts.to_json: about holds no JSON: {error}") from None
        return kept(text + "\n", path)

    @classmethod
    def from_json(cls, text: Union[str, os.PathLike[str]]) -> AttentionCosts:
        """From a text of that format, or from a file that holds one."""
        who = "AttentionCosts.from_json"
        content, origin = json_text(text, who)
        try:
            values = json.loads(content)
        except json.JSONDecodeError as error:
            raise InvalidArgument(f"{origin}: {error}") from None
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise InvalidArgument(f'{origin}: expected an object with "format": "{_FORMAT}"')
        version = values.pop("version", None)
        if version != 1:
            raise InvalidArgument(f"{origin}: version = {version}, expected 1")
        names = set(cls.__dataclass_fields__)
        if set(values) != names:
            wrong = sorted(set(values) ^ names)[0]
            what = "missing" if wrong in names else "unknown"
            raise InvalidArgument(f'{origin}: "{wrong}" is {what}, expected {sorted(names)}')
        if not isinstance(values["about"], (dict, type(None))):
            raise InvalidArgument(f'{origin}: "about" is no object')
        return cls(**values)


def planned(costs: Optional[AttentionCosts], who: str) -> dict[str, Any]:
    """The planner's options of it."""
    if costs is None:
        return {"row_pairs": 0, "shard_pairs": 0}
    if not isinstance(costs, AttentionCosts):
        raise InvalidArgument(
            f"{who}: costs is a {type(costs).__name__}, expected waybill.AttentionCosts"
        )
    return {
        "row_pairs": int(costs.row_pairs),
        "shard_pairs": int(costs.shard_pairs),
        "pairs_per_second": float(costs.pairs_per_second),
    }


def predicted(costs: AttentionCosts, forward_flops_per_second: float) -> dict[str, Any]:
    """The options of predict_step; backward has 2.5 times the operations of forward."""
    given = planned(costs, "predict_step")
    ratio = 2.5 / costs.backward_ratio
    return {**given, "backward_flops_per_second": float(forward_flops_per_second) * ratio}
