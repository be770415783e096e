"""torch's scaled_dot_product_attention, one call per sequence: any device, any dtype."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from ._seam import AttentionKernel, AttentionShape, Sequences

__all__ = ["DotProductKernel"]


class DotProductKernel(AttentionKernel):
    """For the CPU, and to compare with. On GPUs a call per sequence is slow."""

    name = "dot_product"
    takes_gaps = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences,
        shape: AttentionShape, want_lse: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        outs, lses = [], []
        lens = (sequences.q_lens, sequences.k_lens, sequences.k_lens)
        for q_, k_, v_ in zip(*(torch.split(t, list(n)) for t, n in zip((q, k, v), lens))):
            if q_.shape[0] == 0:
                continue
            if k_.shape[0] == 0:
                outs.append(q_.new_zeros(q_.shape[0], shape.heads, shape.v_head_dim))
                lses.append(q_.new_full((shape.heads, q_.shape[0]), float("inf")))
                continue
            groups = shape.heads // shape.kv_heads
            if groups > 1:
                k_, v_ = (t.repeat_interleave(groups, 1) for t in (k_, v_))
            q_, k_, v_ = (t.transpose(0, 1) for t in (q_, k_, v_))
            visible = _visible(q_.shape[1], k_.shape[1], shape, q.device)
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(q_, k_, v_, attn_mask=visible, scale=shape.scale)
            outs.append(out.transpose(0, 1))
            if want_lse:
                lses.append(_log_sum_exp(q_, k_, visible, shape.scale))
        lse = torch.cat(lses, 1).float() if want_lse else None
        return torch.cat(outs), lse


def _visible(
    num_q: int, num_k: int, shape: AttentionShape, device: torch.device
) -> Optional[torch.Tensor]:
    if shape.mask == "full":
        return None
    visible = torch.ones(num_q, num_k, dtype=torch.bool, device=device).tril(num_k - num_q)
    return visible if shape.window is None else visible.triu(num_k - num_q - shape.window + 1)


def _log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, visible: Optional[torch.Tensor], scale: float
) -> torch.Tensor:
    scores = (q @ k.transpose(1, 2)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.logsumexp(-1)
