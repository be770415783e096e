"""Speeds of a machine's links, as ``waybill calibrate`` measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _core
from ._arrays import number
from ._errors import shown
from ._files import Path, json_text
from .errors import InvalidArgument, WrongType

__all__ = ["LinkSpeeds", "read_links"]


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


def check_speeds(
    who: str, nvlink: Any, network: Any, may_be_none: bool = False
) -> dict[str, float]:
    """Both, as the arguments that calls have; one that may be None, and is, is left out."""
    given = {"nvlink_bytes_per_second": nvlink, "network_bytes_per_second": network}
    left = {k: v for k, v in given.items() if not (may_be_none and v is None)}
    return {k: check_speed(v, f"{who}: {k}") for k, v in left.items()}


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
        return {
            "nvlink_bytes_per_second": self.nvlink_bytes_per_second,
            "network_bytes_per_second": self.network_bytes_per_second,
        }


def read_links(path: Path) -> LinkSpeeds:
    """The speeds in a file of ``waybill calibrate``, or in its JSON text.

    Give all ranks the same: plans of other speeds may be other plans.

    Raises:
        IoError: it is no such file. OSError: it cannot be read.
    """
    text, origin = json_text(path, "read_links")
    return LinkSpeeds(*_core.links_from_json(text, origin))
