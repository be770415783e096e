"""From a dispatch plan to metadata, for torch tensors. See ``waybill`` for what each returns.

Tables on a GPU are copied to the host, where routing is computed, and the results back.
"""

from __future__ import annotations

from typing import Any, Tuple, Union

import torch

from .. import routing
from .._graphs import outside_graphs
from ..errors import InvalidArgument
from ..layouts import AttnLayout, PackedSeqParams, QkvMetadata
from ..planner import AttentionPlan
from ..plans import QkvPlan
from ._tensors import device_of, host_array, on_host, tensor, tensors
from .metadata import metadata_of, metadata_over

__all__ = [
    "compute_attn_layout_seqlens",
    "compute_e2e_metadata",
    "compute_metadata",
    "compute_metadata_kv",
    "mlp_layout_packed_params",
    "plan_metadata",
]


@outside_graphs
def compute_metadata(
    seq_len: torch.Tensor,
    global_dispatch: torch.Tensor,
    return_intermediate: bool = False,
    *,
    undispatched: str = "reject",
) -> Any:
    """Routing of Q, or of any tensor whose shards go to one or several ranks.

    seq_len (W, S), global_dispatch (W, S) or (W, S, C), integers. The forward metadata holds these
    very tensors where they are int64.
    """
    device = device_of(global_dispatch, seq_len)
    own_lens, own_dispatch = _is_int64(seq_len), _is_int64(global_dispatch)
    fwd, rev, intermediates = routing._fields_of_both(
        host_array(seq_len, "compute_metadata: seq_len"),
        host_array(global_dispatch, "compute_metadata: global_dispatch"),
        return_intermediate, undispatched, True, own_lens, own_dispatch,
    )  # fmt: skip
    forward, reverse = metadata_over(fwd, device), metadata_over(rev, device)
    if own_lens:
        forward.seq_len = seq_len
        if reverse.seq_recv_mask is not None:
            reverse.recv_seq_lens = seq_len
    if own_dispatch:
        forward.dst_rank = global_dispatch
    if return_intermediate:
        return forward, reverse, tensors(intermediates, device)
    return forward, reverse


@outside_graphs
def compute_metadata_kv(
    kv_to_q_mapping: torch.Tensor,
    kv_to_q_rank: torch.Tensor,
    kv_context_size: torch.Tensor,
    q_to_num_kv_seq: torch.Tensor,
    q_to_num_kv_token: torch.Tensor,
    seq_len: torch.Tensor,
    num_seqs: torch.Tensor,
    q_dispatch: torch.Tensor,
    q_seq_to_dst: Any = None,
    max_num_local_seqs: Any = None,
    return_intermediate: bool = False,
) -> Any:
    """Routing of K and V when each query keeps a contiguous copy of its whole context."""
    device = device_of(kv_to_q_mapping, q_dispatch)
    tables = (
        kv_to_q_mapping, kv_to_q_rank, kv_context_size, q_to_num_kv_seq, q_to_num_kv_token,
        seq_len, num_seqs, q_dispatch,
    )  # fmt: skip
    fwd, rev, *rest = on_host(
        routing.compute_metadata_kv, *tables,
        q_seq_to_dst=q_seq_to_dst,
        max_num_local_seqs=max_num_local_seqs, return_intermediate=return_intermediate,
    )  # fmt: skip
    forward, reverse = metadata_of(fwd, device), metadata_of(rev, device)
    return (forward, reverse, *tensors(tuple(rest), device))


@outside_graphs
def compute_attn_layout_seqlens(
    seq_shard_len: torch.Tensor,
    seq_shard_cumsum: torch.Tensor,
    dispatch: torch.Tensor,
    prepend_zero: bool = True,
    shard_to_tuple: bool = False,
) -> AttnLayout:
    """Sequence lengths of Q and of its KV context in the attention layout of every rank."""
    who = "compute_attn_layout_seqlens"
    layout = routing.compute_attn_layout_seqlens(
        host_array(seq_shard_len, f"{who}: seq_shard_len"),
        host_array(seq_shard_cumsum, f"{who}: seq_shard_cumsum"),
        host_array(dispatch, f"{who}: dispatch"), prepend_zero, shard_to_tuple,
    )  # fmt: skip
    result: AttnLayout = tensors(layout, device_of(dispatch))
    return result


@outside_graphs
def mlp_layout_packed_params(seq_lens: torch.Tensor) -> PackedSeqParams:
    """Arguments of variable-length attention in the MLP layout of one rank; seq_lens (n,) rows."""
    params = routing.mlp_layout_packed_params(
        host_array(seq_lens, "mlp_layout_packed_params: seq_lens")
    )
    device = device_of(seq_lens)
    cu_seqlens = tensor(params.cu_seqlens_q, device)
    dtype = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else torch.int64
    longest = torch.tensor(int(params.max_seqlen_q), dtype=dtype, device=device)
    return PackedSeqParams(params.qkv_format, cu_seqlens, cu_seqlens, longest, longest)


@outside_graphs
def compute_e2e_metadata(
    mlp_seq_len: torch.Tensor,
    mlp_num_seqs: torch.Tensor,
    mlp_q_dispatch: torch.Tensor,
    kv_to_q_mapping: torch.Tensor,
    kv_to_q_rank: torch.Tensor,
    kv_context_size: torch.Tensor,
    q_to_num_kv_seq: torch.Tensor,
    q_to_num_kv_token: torch.Tensor,
    return_intermediate: bool = False,
) -> Tuple[Any, ...]:
    """compute_metadata, compute_metadata_kv and compute_attn_layout_seqlens in one call."""
    device = device_of(mlp_q_dispatch, mlp_seq_len)
    tables = (
        mlp_seq_len, mlp_num_seqs, mlp_q_dispatch, kv_to_q_mapping, kv_to_q_rank, kv_context_size,
        q_to_num_kv_seq, q_to_num_kv_token,
    )  # fmt: skip
    fwd_q, rev_q, fwd_kv, rev_kv, *rest = on_host(
        routing.compute_e2e_metadata, *tables, return_intermediate=return_intermediate
    )
    four = (metadata_of(m, device) for m in (fwd_q, rev_q, fwd_kv, rev_kv))
    return (*four, *tensors(tuple(rest), device))


@outside_graphs
def plan_metadata(plan: Union[QkvPlan, AttentionPlan], device: Any = None) -> QkvMetadata:
    """``plan.to_metadata()`` with tensors, on ``device``."""
    if not isinstance(plan, (QkvPlan, AttentionPlan)):
        raise InvalidArgument(
            f"plan_metadata: plan is a {type(plan).__name__}, expected a QkvPlan or AttentionPlan"
        )
    where = None if device is None else torch.device(device)
    *four, layout = plan.to_metadata()
    fwd_q, rev_q, fwd_kv, rev_kv = (metadata_of(m, where) for m in four)
    return QkvMetadata(fwd_q, rev_q, fwd_kv, rev_kv, tensors(layout, where))


def _is_int64(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64
