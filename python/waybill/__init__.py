"""Waybill routes tokens between GPU ranks: computes which rows go where, proves it, simulates it.

Arrays in, numpy arrays out; ``waybill.torch`` has the same functions for torch tensors. Offsets,
lengths and counts are tokens (rows), never bytes.
"""

from . import _common
from . import moe as moe
from ._common import *  # noqa: F403
from ._core import version as __version__
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
from .routing import (
    compute_attn_layout_seqlens,
    compute_e2e_metadata,
    compute_metadata,
    compute_metadata_kv,
    mlp_layout_packed_params,
)
from .sequence_dispatcher import SequenceDispatcher
from .simulate import orchestrate_simulate, simulate_communication, source_rows, sum_kv_copies
from .world import run_threads

__all__ = [
    "Metadata",
    "SequenceDispatcher",
    "__version__",
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
    "mask_by_neg",
    "mlp_layout_packed_params",
    "orchestrate_simulate",
    "prepend_zero",
    "prepend_zero_fn",
    "run_threads",
    "simulate_communication",
    "source_rows",
    "sum_kv_copies",
]
__all__ += _common.__all__
