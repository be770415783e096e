"""Sizes and dtypes that all ranks of an expert-parallel layer agree on."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from .. import _core
from .._arrays import converted, int64, library_dtype_of
from .._errors import said_by
from ..errors import InvalidArgument


@dataclass(unsafe_hash=True)
class EPConfig:
    """Sizes and dtypes of an expert-parallel layer, checked when it is made and when it is used.

    Expert e lives on rank e // num_experts_per_rank. A dtype is a name, a numpy or a torch dtype.
    It may be changed: what uses it takes a copy, which cannot.
    """

    max_tokens: int  #: most tokens a rank may dispatch
    hidden: int  #: elements of a token
    topk: int  #: topk slots of a token, at most 32, also more than num_experts
    num_experts: int  #: experts of all ranks together, a multiple of world_size
    rank: int
    world_size: int
    local_world_size: int  #: ranks of a node, a divisor of world_size
    token_dtype: Any = "bfloat16"  #: or float16, float32; on CPUs float64
    weight_dtype: Any = "float32"  #: or float16, bfloat16; on CPUs float64
    offset_dtype: Any = "int32"  #: Triton-distributed's field; tables are int32, nothing else

    def __post_init__(self) -> None:
        sizes, _ = self._checked()
        self.__dict__.update(sizes)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_in_use" in self.__dict__:
            raise InvalidArgument(
                f"EPConfig: {name} = {value!r} of what was made with it cannot be changed: make"
                " another from dataclasses.replace(config, ...)"
            )
        object.__setattr__(self, name, value)

    @classmethod
    def _of_words(cls, who: str, called: Mapping[str, str], *given: Any) -> tuple[EPConfig, Any]:
        """_for_use with all fields in their order; ``called`` has the caller's names of some."""
        config = cls.__new__(cls)
        config.__dict__.update(zip((field.name for field in fields(cls)), given))
        with said_by(who, words=called):
            return config._for_use()

    def _for_use(self) -> tuple[EPConfig, Any]:
        """A copy that cannot be changed any more, and the compiled one."""
        config = copy(self)
        sizes, compiled = self._checked()
        config.__dict__.update(sizes, _in_use=True)
        return config, compiled

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
        return library_dtype_of(self.token_dtype, "EPConfig: token_dtype")

    @property
    def weight_dtype_name(self) -> str:
        """Name of weight_dtype, however it was given."""
        return library_dtype_of(self.weight_dtype, "EPConfig: weight_dtype")

    def _compiled(self) -> Any:
        return self._checked()[1]  # it may have been changed

    def _checked(self) -> tuple[dict[str, int], Any]:
        """Its sizes as plain integers, and the compiled one, which looks at their ranges."""
        names = [field.name for field in fields(self)]
        sizes = converted("EPConfig", vars(self), (int64, " ".join(names[:-3])))
        token, weight, offset = (
            library_dtype_of(getattr(self, name), f"EPConfig: {name}") for name in names[-3:]
        )
        if offset != "int32":
            raise InvalidArgument(f"EPConfig: offset_dtype = {offset}, expected int32")
        with said_by("EPConfig"):
            return sizes, _core.ep_config(**sizes, token_dtype=token, weight_dtype=weight)
