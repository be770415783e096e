"""Experts: tokens of all ranks to their experts and back, in one process, for numpy arrays.

Rows are ordered by local expert, then source rank, then token, then topk slot: always. What
``simulate_dispatch`` delivers is what a layer must deliver on any world, bit for bit.
"""

from .config import EPConfig
from .predict import ExpertCallPrediction, ExpertSummary, predict, summarize
from .simulate import EPAllToAllLayoutDesc, ExpertDispatch, quantize_fp8, simulate_dispatch

__all__ = [
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "ExpertCallPrediction",
    "ExpertDispatch",
    "ExpertSummary",
    "predict",
    "quantize_fp8",
    "simulate_dispatch",
    "summarize",
]
