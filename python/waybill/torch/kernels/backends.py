"""The kernels that come with torch, and those of the packages for FlashAttention."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Optional, Tuple

import numpy as np
import torch

from ...errors import Unsupported
from .seam import (
    AttentionKernel,
    AttentionShape,
    Gradients,
    Sequences,
    narrowed,
    refuse_wide_heads,
    widened,
    window_of,
)


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


def _longest_q(sequences: Sequences) -> int:
    """For FlashAttention 2's forward pass. With grouped heads it takes 1 to say that *each*
    sequence has one query, and fails where some have none; a larger bound changes nothing else.
    """
    return max(sequences.max_seqlen_q, 2)


class VarlenKernel(AttentionKernel):
    """The operations that varlen_attn calls on a GPU, forward and backward: FlashAttention 2, or
    the one that ``torch.nn.attention.activate_flash_attention_impl`` has made torch's (it is left
    as it is). ``torch.use_deterministic_algorithms`` makes gradients of Q the same bit for bit.

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
            _longest_q(sequences), sequences.max_seqlen_k, 0.0, (left, right) == (-1, 0), False,
            scale=shape.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return narrowed(out, shape.v_head_dim), lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: Optional[torch.Tensor], sequences: Sequences, shape: AttentionShape,
    ) -> Gradients:  # fmt: skip
        left, right = window_of(shape)
        operation: Any = torch.ops.aten._flash_attention_backward
        # It is for dropout, which there is none of.
        random = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = operation(
            widened(grad, shape.head_dim).contiguous(), q, k, widened(v, shape.head_dim),
            widened(out, shape.head_dim), lse, sequences.cu_seqlens_q, sequences.cu_seqlens_k,
            sequences.max_seqlen_q, sequences.max_seqlen_k, 0.0, (left, right) == (-1, 0),
            random, random.new_empty(0),
            scale=shape.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return dq, dk, narrowed(dv, shape.v_head_dim)


class _PackageKernel(AttentionKernel):
    """Forward is the package's public function. Backward is the function that its autograd calls,
    with the arguments by name that the installed version has; a version in which some are missing
    computes attention again instead.
    """

    takes_gaps = True
    needs_lse = True
    suits_graphs = True
    max_head_dim = 256
    pads_v = True  #: heads of V must be as wide as those of Q
    module_name: str
    backward_name: str

    def __init__(self) -> None:
        try:
            module = importlib.import_module(self.module_name)
        except ImportError as error:
            raise Unsupported(
                f'ContextParallelAttention: kernel = "{self.name}" needs the package'
                f" {self.module_name}: {error}"
            ) from None
        self._attend: Callable[..., Any] = module.flash_attn_varlen_func
        self._backward: Optional[Callable[..., Any]] = getattr(module, self.backward_name, None)

    def check(self, shape: AttentionShape, device: torch.device, who: str) -> None:
        refuse_wide_heads(shape, self.max_head_dim, f'kernel "{self.name}"', who)

    def _v(self, v: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        return widened(v, shape.head_dim) if self.pads_v else v

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences,
        shape: AttentionShape, want_lse: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        window = window_of(shape)
        options: dict[str, Any] = {
            "softmax_scale": shape.scale, "causal": shape.mask == "causal", "window_size": window,
            "return_attn_probs": True,
        }  # fmt: skip
        known = _parameters(self._attend)
        result = self._attend(
            q, k, self._v(v, shape), sequences.cu_seqlens_q, sequences.cu_seqlens_k,
            max_seqlen_q=_longest_q(sequences), max_seqlen_k=sequences.max_seqlen_k,
            **{name: value for name, value in options.items() if name in known},
        )  # fmt: skip
        out, lse = result[0], result[1]
        return narrowed(out, shape.v_head_dim), lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: Optional[torch.Tensor], sequences: Sequences, shape: AttentionShape,
    ) -> Gradients:  # fmt: skip
        v_ = self._v(v, shape)
        width = v_.shape[-1]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v_)
        left, right = window_of(shape)
        given = {
            "dout": widened(grad, width).contiguous(), "q": q, "k": k, "v": v_,
            "out": widened(out, width), "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv,
            "cu_seqlens_q": sequences.cu_seqlens_q, "cu_seqlens_k": sequences.cu_seqlens_k,
            "max_seqlen_q": sequences.max_seqlen_q, "max_seqlen_k": sequences.max_seqlen_k,
            "dropout_p": 0.0, "softmax_scale": shape.scale, "causal": shape.mask == "causal",
            "is_causal": shape.mask == "causal", "window_size": (left, right),
            "window_size_left": left, "window_size_right": right, "softcap": 0.0,
            "alibi_slopes": None, "deterministic": torch.are_deterministic_algorithms_enabled(),
        }  # fmt: skip
        known = {} if self._backward is None else _parameters(self._backward)
        missing = [
            name
            for name, parameter in known.items()
            if parameter.default is parameter.empty and name not in given
        ]
        if self._backward is None or missing or not {"dq", "dk", "dv", "softmax_lse"} <= set(known):
            return super().backward(grad, q, k, v, out, lse, sequences, shape)
        self._backward(**{name: value for name, value in given.items() if name in known})
        return dq, dk, narrowed(dv, shape.v_head_dim)


class FlashAttention2Kernel(_PackageKernel):
    """flash_attn.flash_attn_varlen_func."""

    name = "flash_attn"
    module_name = "flash_attn.flash_attn_interface"
    backward_name = "_flash_attn_varlen_backward"


class FlashAttention3Kernel(_PackageKernel):
    """flash_attn_interface.flash_attn_varlen_func, for Hopper."""

    name = "flash_attn_3"
    module_name = "flash_attn_interface"
    backward_name = "_flash_attn_backward"
    pads_v = False


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """By name; an operation of torch.library has those of the function it was made from."""
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


_BLOCK = 128


class FlexKernel(AttentionKernel):
    """torch.nn.attention.flex_attention, compiled on GPUs. Backward computes it again; there is
    none on the CPU.

    A query meets one range of keys, so the mask is two numbers per row, and which blocks meet
    follows from the sequences.
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

        mask = block_mask(sequences, shape, q.device)
        call: Any = flex.flex_attention
        if q.device.type == "cuda":
            if FlexKernel._compiled is None:
                FlexKernel._compiled = torch.compile(call, dynamic=True)
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


def block_mask(sequences: Sequences, shape: AttentionShape, device: Any) -> Any:
    """The BlockMask of sequences, in time linear in rows and blocks that meet."""
    from torch.nn.attention.flex_attention import BlockMask

    low, high = _key_ranges(sequences, shape)
    num_q, num_k = len(low), sum(sequences.k_lens)
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


def _key_ranges(sequences: Sequences, shape: AttentionShape) -> Tuple[Any, Any]:
    """The first key of each query, and the one after its last."""
    num_q = sum(sequences.q_lens)
    low, high = np.zeros(num_q, np.int64), np.zeros(num_q, np.int64)
    q_end = k_end = 0
    for q_len, k_len in zip(sequences.q_lens, sequences.k_lens):
        rows, first = slice(q_end, q_end + q_len), k_end
        q_end, k_end = q_end + q_len, k_end + k_len
        if k_len == 0:
            continue
        if shape.mask == "full":
            low[rows], high[rows] = first, k_end
            continue
        high[rows] = end = np.arange(k_end - q_len + 1, k_end + 1)
        low[rows] = first if shape.window is None else np.maximum(first, end - shape.window)
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
