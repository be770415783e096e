"""What all ranks of an expert-parallel layer agree on."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        for name in _SIZES:
            value = int64(getattr(self, name), f"EPConfig: {name}")
            setattr(self, name, value)
        self._compiled()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_in_use" in self.__dict__:
            raise InvalidArgument(
                f"EPConfig: {name} = {value!r} of what was made with it cannot be changed: make"
                " another from dataclasses.replace(config, ...)"
            )
        object.__setattr__(self, name, value)

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

    def _compiled(self) -> Any:
        sizes = [getattr(self, name) for name in _SIZES]
        offset = named_dtype(self.offset_dtype, "EPConfig: offset_dtype")
        if offset != "int32":
            raise InvalidArgument(f"EPConfig: offset_dtype = {offset}, expected int32")
        return _core.ep_config(sizes, self.token_dtype_name, self.weight_dtype_name)
