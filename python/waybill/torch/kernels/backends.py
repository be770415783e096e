"""FlexAttention, with a block mask made from ranges and never densely."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np
import torch

from ...errors import Unsupported
from ._seam import AttentionKernel, AttentionShape, Sequences

__all__ = ["FlexKernel"]

_BLOCK = 128


class FlexKernel(AttentionKernel):
    """torch.nn.attention.flex_attention, compiled on GPUs. Backward computes it again; there is
    none on the CPU.

    A query meets one range of keys, so the mask is two numbers per row, and which blocks meet
    follows from the sequences. Ranges of several sequences may overlap: see ``block_mask``.
    """

    name = "flex"
    takes_gaps = True
    _compiled: Any = None

    def check(self, shape: AttentionShape, device: torch.device, who: str) -> None:
        if shape.heads % shape.kv_heads != 0 or shape.head_dim & (shape.head_dim - 1):
            raise Unsupported(
                f'{who}: head_dim = {shape.head_dim}, kernel "flex" takes powers of two'
            )

    def check_training(self, device: torch.device, who: str) -> None:
        if device.type == "cpu":
            raise Unsupported(
                f'{who}: got q, k or v that require gradients, kernel "flex" has none on the CPU:'
                ' take "dot_product"'
            )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences,
        shape: AttentionShape, want_lse: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        from torch.nn.attention import flex_attention as flex

        flex_attention = flex.flex_attention
        q_begin = np.cumsum((0, *sequences.q_lens[:-1]))
        k_begin = np.cumsum((0, *sequences.k_lens[:-1]))
        mask = block_mask(
            q_begin, sequences.q_lens, k_begin, sequences.k_lens, q.shape[0], k.shape[0], shape,
            q.device,
        )  # fmt: skip
        call: Any = flex_attention
        if q.device.type == "cuda":
            if FlexKernel._compiled is None:
                FlexKernel._compiled = torch.compile(flex_attention, dynamic=True)
            call = FlexKernel._compiled
        q_, k_, v_ = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        options: dict[str, Any] = {}
        if want_lse:
            aux = getattr(flex, "AuxRequest", None)
            options = {"return_lse": True} if aux is None else {"return_aux": aux(lse=True)}
        result = call(
            q_, k_, v_, block_mask=mask, scale=shape.scale,
            enable_gqa=shape.heads != shape.kv_heads, **options,
        )  # fmt: skip
        if not want_lse:
            return result[0].transpose(0, 1), None
        out, lse = result
        return out[0].transpose(0, 1), getattr(lse, "lse", lse)[0].float()


def block_mask(
    q_begin: Any, q_len: Any, k_begin: Any, k_len: Any, num_q: int, num_k: int,
    shape: AttentionShape, device: Any,
) -> Any:  # fmt: skip
    """The BlockMask of sequences: rows of queries, and ranges of keys that may overlap. In time
    linear in rows and blocks that meet.
    """
    from torch.nn.attention.flex_attention import BlockMask

    low, high = _key_ranges(q_begin, q_len, k_begin, k_len, num_q, shape)
    rows = [
        _blocks_of(low[at : at + _BLOCK], high[at : at + _BLOCK], num_k)
        for at in range(0, max(num_q, 1), _BLOCK)
    ]
    num_blocks = max(1, -(-num_k // _BLOCK))
    tables = []
    for kind in range(2):  # partial blocks, full ones
        counts = np.array([len(row[kind]) for row in rows], np.int32)
        indices = np.zeros((len(rows), num_blocks), np.int32)
        for i, row in enumerate(rows):
            indices[i, : len(row[kind])] = row[kind]
            rest = np.setdiff1d(np.arange(num_blocks), row[kind])
            indices[i, len(row[kind]) :] = rest
        tables += [torch.from_numpy(t)[None, None].to(device) for t in (counts, indices)]
    first, last = (torch.from_numpy(t).to(device) for t in (low, high))

    def visible(batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        return (k_index >= first[q_index]) & (k_index < last[q_index])

    make: Any = BlockMask.from_kv_blocks
    return make(*tables, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(num_q, num_k))


def _key_ranges(
    q_begin: Any, q_len: Any, k_begin: Any, k_len: Any, num_q: int, shape: AttentionShape
) -> Tuple[Any, Any]:
    """The first key of each query, and the one behind its last."""
    low, high = np.zeros(num_q, np.int64), np.zeros(num_q, np.int64)
    for qb, ql, kb, kl in zip(q_begin, q_len, k_begin, k_len):
        if ql == 0 or kl == 0:
            continue
        if shape.mask == "full":
            low[qb : qb + ql], high[qb : qb + ql] = kb, kb + kl
            continue
        end = np.arange(kb + kl - ql + 1, kb + kl + 1)
        high[qb : qb + ql] = end
        low[qb : qb + ql] = kb if shape.window is None else np.maximum(kb, end - shape.window)
    return low, high


def _blocks_of(low: Any, high: Any, num_k: int) -> Tuple[Any, Any]:
    """(blocks that some rows meet in part, blocks that all rows meet whole)."""
    some = low < high
    if not some.any():
        return [], []
    met = np.zeros(-(-num_k // _BLOCK), bool)
    for begin, end in set(zip(low[some] // _BLOCK, (high[some] - 1) // _BLOCK)):
        met[begin : end + 1] = True
    blocks = np.nonzero(met)[0]
    whole = np.zeros(len(blocks), bool)
    if some.all() and len(low) == _BLOCK:
        whole = (blocks * _BLOCK >= low.max()) & ((blocks + 1) * _BLOCK <= high.min())
    return blocks[~whole], blocks[whole]
