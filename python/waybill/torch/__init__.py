"""The functions of ``waybill`` for torch tensors, on the CPU and on CUDA devices.

Tensors in, tensors out, on the device of the inputs; tensors of the CPU share memory with what the
compiled part reads and writes. A program written for DistCA changes only its import:
the random generators without a seed draw from torch's global generator, in DistCA's order.
"""

import torch as _torch

from .. import _common
from .._common import *  # noqa: F403
from .._graphs import never_compile_calls as _never_compile_calls
from . import kernels
from ._context_parallel_fixed import Capacities, FixedPlan
from .attention_step import AttentionStep, recomputed_attention
from .batch_plan import BatchPlan, BatchPlanner, InPlaceRule, Piece
from .calibrate import calibrate_attention
from .context_parallel import ContextParallelAttention
from .generators import (
    create_qkv_dispatch,
    create_qkv_dispatch_with_custom_mapping,
    create_raw_qkv_dispatch,
    gen_seq_lens,
)
from .index_ops import (
    exclusive_cumsum,
    index_put_with_neg_padding_1d,
    mask_by_neg,
    prepend_zero,
    prepend_zero_fn,
)
from .metadata import Metadata
from .packing import PackedBatch, pack, unpack
from .routing import (
    compute_attn_layout_seqlens,
    compute_e2e_metadata,
    compute_metadata,
    compute_metadata_kv,
    mlp_layout_packed_params,
    plan_metadata,
)
from .sequence_dispatcher import SequenceDispatcher
from .simulate import orchestrate_simulate, simulate_communication, sum_kv_copies
from .start import initialize_distributed
from .world import run_threads

_never_compile_calls(_torch)

__all__ = [
    "AttentionStep",
    "BatchPlan",
    "BatchPlanner",
    "Capacities",
    "ContextParallelAttention",
    "FixedPlan",
    "InPlaceRule",
    "Metadata",
    "PackedBatch",
    "Piece",
    "SequenceDispatcher",
    "calibrate_attention",
    "compute_attn_layout_seqlens",
    "compute_e2e_metadata",
    "compute_metadata",
    "compute_metadata_kv",
    "create_qkv_dispatch",
    "create_qkv_dispatch_with_custom_mapping",
    "create_raw_qkv_dispatch",
    "exclusive_cumsum",
    "gen_seq_lens",
    "index_put_with_neg_padding_1d",
    "initialize_distributed",
    "kernels",
    "mask_by_neg",
    "mlp_layout_packed_params",
    "orchestrate_simulate",
    "pack",
    "plan_metadata",
    "prepend_zero",
    "prepend_zero_fn",
    "recomputed_attention",
    "run_threads",
    "simulate_communication",
    "sum_kv_copies",
    "unpack",
]
__all__ += _common.__all__
