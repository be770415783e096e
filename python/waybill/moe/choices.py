"""What a router chose for all ranks, as the compiled part takes it."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from .. import _core
from .._arrays import AnyArray
from .._errors import said_by
from ..errors import InvalidArgument
from .arrays import ids, per_rank
from .config import EPConfig


def choices_of(
    config: Any, exp_indices: Sequence[Any], dropped_id: Optional[int], payload: str, who: str
) -> Tuple[Any, Any, List[AnyArray]]:
    """(compiled config, compiled options of a grouped dispatch, ids of each rank).

    :raises InvalidArgument: naming argument and rank
    """
    if not isinstance(config, EPConfig):
        raise InvalidArgument(f"{who}: config is a {type(config).__name__}, expected an EPConfig")
    compiled = config._compiled()
    with said_by(who):
        options = _core.ep_dispatch_options(compiled, dropped_id, "grouped", 1, payload)
    entries = per_rank(exp_indices, f"{who}: exp_indices", config.world_size)
    arrays = [ids(v, config.topk, f"{who}: exp_indices[{r}]") for r, v in enumerate(entries)]
    return compiled, options, arrays
