"""Measured speeds of links and of attention kernels, as data for plans and predictions."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Union

from . import _core
from ._arrays import Path, instance, json_text, kept, number, within
from ._errors import shown
from .errors import InvalidArgument, WrongType

__all__ = ["AttentionCosts", "LinkSpeeds", "read_links"]

#: Bytes per second that make sense, and the usual ones.
_LEAST, _MOST = _core.link_speed_range
_NVLINK, _NETWORK, _BLOCK = _core.default_links


def check_speed(value: Any, name: str) -> float:
    """A speed of links that makes sense."""
    speed = number(value, name)
    if not _LEAST <= speed <= _MOST:
        raise InvalidArgument(
            f"{name} = {speed:g}, expected {_LEAST:g} to {_MOST:g} bytes per second"
        )
    return speed


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second of a rank, one direction. The defaults are those of 8 x H200, with which all
    plans, predictions and worlds begin.
    """

    nvlink_bytes_per_second: float = _NVLINK  #: inside a node
    network_bytes_per_second: float = _NETWORK  #: between nodes
    block_bytes_per_second: float = _BLOCK  #: that one multiprocessor stores
    device: str = ""  #: name of the GPUs that they were measured on; worlds of others say so

    def __post_init__(self) -> None:
        for name in ("nvlink", "network", "block"):
            name = f"{name}_bytes_per_second"
            check_speed(getattr(self, name), f"LinkSpeeds: {name}")
        if not isinstance(self.device, str):
            raise WrongType(f"LinkSpeeds: device = {shown(self.device)}, expected a name of GPUs")

    @property
    def rates(self) -> dict[str, float]:
        """Keywords for ``plan``, ``compare``, ``predict_step`` and ``waybill.moe.predict``:
        ``plan(lengths, 8, **links.rates)``.
        """
        names = ("nvlink_bytes_per_second", "network_bytes_per_second")
        return {name: getattr(self, name) for name in names}


def read_links(path: Path) -> LinkSpeeds:
    """The speeds in a file of ``waybill calibrate``, or in its JSON text.

    Give all ranks the same: plans of other speeds may be other plans.

    Raises:
        IoError: it is no such file. OSError: it cannot be read.
    """
    text, origin = json_text(path, "read_links")
    return LinkSpeeds(*_core.links_from_json(text, origin))


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
    row_pairs: int = 0  #: a row of queries takes so much besides its pairs, in pairs
    shard_pairs: int = 0  #: the same of a shard of any length
    backward_ratio: float = 2.5  #: time of backward over forward
    error: float = 0.0  #: the largest relative one of what was measured
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
            within(getattr(self, name), 0, most, f"{who}: {name}")
        if self.about is not None and not isinstance(self.about, Mapping):
            raise InvalidArgument(f"{who}: about = {shown(self.about)}, expected a dict or None")

    def seconds(self, pairs: float, rows: float, shards: float, backward: bool = False) -> float:
        """Seconds of a call with so many (query, key) pairs, rows of queries and shards."""
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
    instance(costs, AttentionCosts, f"{who}: costs", "waybill.AttentionCosts")
    return {
        "row_pairs": int(costs.row_pairs),
        "shard_pairs": int(costs.shard_pairs),
        "pairs_per_second": float(costs.pairs_per_second),
    }
