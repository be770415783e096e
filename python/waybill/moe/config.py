"""What all ranks of an expert-parallel layer agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .. import _core
from .._arrays import int64, library_dtype_of
from .._wrong_call import shown
from ..errors import InvalidArgument


def named_dtype(value: Any, name: str) -> str:
    """ "bfloat16" of a name, a numpy dtype or a torch dtype."""
    if isinstance(value, str) or type(value).__module__.split(".")[0] == "torch":
        return library_dtype_of(value, name)
    try:
        return library_dtype_of(np.dtype(value).name, name)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} = {shown(value)}, expected a dtype or its name") from None


_SIZES = (
    "max_tokens",
    "hidden",
    "topk",
    "num_experts",
    "rank",
    "world_size",
    "local_world_size",
)
_MOST, _MOST_SLOTS, _MOST_RANKS = 2**31 - 1, 32, 2**20
_SUMMED = ("bfloat16", "float16", "float32", "float64", "bf16", "fp16", "fp32", "fp64")


def check_fields(given: Mapping[str, Any], who: str, called: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an EPConfig, with sizes as plain integers.

    :param called: what the caller calls a field, where that is another name
    :raises InvalidArgument: in the caller's words
    """
    names = {field: f"{who}: {called.get(field, field)}" for field in given}
    checked = dict(given)
    for field in _SIZES:
        checked[field] = int64(given[field], names[field])
    world = checked["world_size"]
    ranges = (
        ("max_tokens", 1, _MOST), ("hidden", 1, _MOST), ("topk", 1, _MOST_SLOTS),
        ("world_size", 1, _MOST_RANKS), ("rank", 0, world - 1),
    )  # fmt: skip
    for field, first, last in ranges:
        if not first <= checked[field] <= last:
            expected = f"expected {first}..{last}"
            raise InvalidArgument(f"{names[field]} = {checked[field]}, {expected}")
    local, experts = checked["local_world_size"], checked["num_experts"]
    if local < 1 or world % local != 0:
        expected = f"expected a divisor of {called.get('world_size', 'world_size')} = {world}"
        raise InvalidArgument(f"{names['local_world_size']} = {local}, {expected}")
    if not 1 <= experts <= _MOST or experts % world != 0:
        expected = f"expected a multiple of {called.get('world_size', 'world_size')} = {world}"
        raise InvalidArgument(f"{names['num_experts']} = {experts}, {expected}")
    for field, expected in (
        ("token_dtype", "bfloat16, float16, float32 or float64"),
        ("weight_dtype", "float32, float16, bfloat16 or float64"),
    ):
        found = named_dtype(given[field], names[field])
        if found not in _SUMMED:
            raise InvalidArgument(f"{names[field]} = {found}, expected {expected}")
    offset = named_dtype(given["offset_dtype"], names["offset_dtype"])
    if offset != "int32":
        raise InvalidArgument(f"{names['offset_dtype']} = {offset}, expected int32")
    return checked


@dataclass(unsafe_hash=True)
class EPConfig:
    """Sizes and dtypes of an expert-parallel layer, checked when it is made and when it is used.

    Expert e lives on rank e // num_experts_per_rank. A dtype is a name, a numpy or a torch dtype.
    It may be changed: what uses it takes a copy, which cannot.
    """

    max_tokens: int  #: most tokens a rank may dispatch
    hidden: int  #: elements of a token
    topk: int  #: topk slots of a token, at most 32
    num_experts: int  #: of all ranks together, a multiple of world_size
    rank: int
    world_size: int
    local_world_size: int  #: ranks of a node, a divisor of world_size
    token_dtype: Any = "bfloat16"  #: or float16, float32; on CPUs float64
    weight_dtype: Any = "float32"  #: or float16, bfloat16; on CPUs float64
    offset_dtype: Any = "int32"  #: Triton-distributed's field; tables are int32, nothing else

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_in_use" in self.__dict__:
            raise InvalidArgument(
                f"EPConfig: {name} = {value!r} of what was made with it cannot be changed: make"
                " another from dataclasses.replace(config, ...)"
            )
        object.__setattr__(self, name, value)

    @classmethod
    def _of_words(cls, who: str, called: Mapping[str, str], *given: Any) -> EPConfig:
        """Of all fields in their order, for a caller who calls some of them otherwise; it cannot be
        changed.
        """
        check_fields(dict(zip((field.name for field in fields(cls)), given)), who, called)
        return cls(*given)._of_a_layer()

    def _of_a_layer(self) -> EPConfig:
        """A copy that cannot be changed any more, checked."""
        copy = replace(self)
        copy.__dict__["_in_use"] = True
        return copy

    @property
    def num_experts_per_rank(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.world_size

    @property
    def is_intra_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.world_size == self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks are on."""
        return self.world_size // self.local_world_size

    @property
    def token_dtype_name(self) -> str:
        """Name of token_dtype, however it was given."""
        return named_dtype(self.token_dtype, "EPConfig: token_dtype")

    @property
    def weight_dtype_name(self) -> str:
        """Name of weight_dtype, however it was given."""
        return named_dtype(self.weight_dtype, "EPConfig: weight_dtype")

    def _checked(self) -> dict[str, Any]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return check_fields(given, "EPConfig", {})

    def _compiled(self) -> Any:
        checked = self._checked()  # it may have been changed
        sizes = [checked[name] for name in _SIZES]
        return _core.ep_config(sizes, self.token_dtype_name, self.weight_dtype_name)
