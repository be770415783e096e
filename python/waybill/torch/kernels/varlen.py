"""The kernel of torch.nn.attention.varlen.varlen_attn: FlashAttention, as torch brings it."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from ...errors import Unsupported
from ._seam import (
    AttentionKernel,
    AttentionShape,
    Gradients,
    Sequences,
    narrowed,
    refuse_wide_heads,
    widened,
    window_of,
)

__all__ = ["VarlenKernel"]


class VarlenKernel(AttentionKernel):
    """What varlen_attn calls on a GPU, forward and backward: FlashAttention 2, or the one that
    ``torch.nn.attention.activate_flash_attention_impl`` has made torch's (it is left as it is).
    ``torch.use_deterministic_algorithms`` makes gradients of Q the same bit for bit.

    Its operations are called and not varlen_attn itself, which drops what it saved for backward
    with its graph. Smaller heads of V are padded to those of Q.
    """

    name = "varlen"
    takes_gaps = True
    needs_lse = True
    suits_graphs = True

    def check(self, shape: AttentionShape, device: torch.device, who: str) -> None:
        if device.type != "cuda":
            raise Unsupported(
                f'{who}: kernel = "varlen" on {device.type}, which has it on GPUs only: take'
                ' "dot_product"'
            )
        refuse_wide_heads(shape, 256, 'kernel "varlen"', who)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences,
        shape: AttentionShape, want_lse: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        left, right = window_of(shape)
        operation: Any = torch.ops.aten._flash_attention_forward
        out, lse, *_ = operation(
            q, k, widened(v, shape.head_dim), sequences.cu_seqlens_q, sequences.cu_seqlens_k,
            sequences.max_seqlen_q, sequences.max_seqlen_k, 0.0, (left, right) == (-1, 0), False,
            scale=shape.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return narrowed(out, shape.v_head_dim), lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: Optional[torch.Tensor], sequences: Sequences, shape: AttentionShape,
    ) -> Gradients:  # fmt: skip
        left, right = window_of(shape)
        operation: Any = torch.ops.aten._flash_attention_backward
        # Of dropout, which there is none.
        random = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = operation(
            widened(grad, shape.head_dim).contiguous(), q, k, widened(v, shape.head_dim),
            widened(out, shape.head_dim), lse, sequences.cu_seqlens_q, sequences.cu_seqlens_k,
            sequences.max_seqlen_q, sequences.max_seqlen_k, 0.0, (left, right) == (-1, 0),
            random, random.new_empty(0),
            scale=shape.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return dq, dk, narrowed(dv, shape.v_head_dim)
