"""Experts: tokens of all ranks to their experts and back, for numpy arrays: in one process
(``simulate_dispatch``), and between ranks in host memory (``EPAll2AllLayer``).

Rows are ordered by local expert, then source rank, then token, then topk slot: always. What
``simulate_dispatch`` delivers is what a layer must deliver on any world, bit for bit.
"""

import typing as _typing

from .. import compat as _compat
from .config import EPConfig
from .even_experts import (
    EvenExperts,
    ExpertPlacement,
    even_experts,
    plan_expert_placement,
    slot_ids,
)
from .layer import EPAll2AllLayer
from .payloads import quantize_fp8, quantize_rows, tile_scales
from .predict import (
    ExpertCallPrediction,
    ExpertCopyPrices,
    ExpertStepSeconds,
    ExpertSummary,
    break_even_rows,
    predict,
    price_copies,
    summarize,
)
from .simulate import (
    EPAllToAllLayoutDesc,
    ExpertDispatch,
    simulate_dispatch,
    simulate_expert_copies,
    simulate_expert_copy_gradients,
)

__all__ = [
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "EvenExperts",
    "ExpertCallPrediction",
    "ExpertCopyPrices",
    "ExpertDispatch",
    "ExpertPlacement",
    "ExpertStepSeconds",
    "ExpertSummary",
    "break_even_rows",
    "even_experts",
    "plan_expert_placement",
    "predict",
    "price_copies",
    "quantize_fp8",
    "quantize_rows",
    "simulate_dispatch",
    "simulate_expert_copies",
    "simulate_expert_copy_gradients",
    "slot_ids",
    "summarize",
    "tile_scales",
]

if not _typing.TYPE_CHECKING:
    __getattr__ = _compat.say_where(__name__)
