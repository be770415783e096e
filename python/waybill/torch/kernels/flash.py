"""The packages flash_attn (FlashAttention 2) and flash_attn_interface (FlashAttention 3)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Optional, Tuple

import torch

from ...errors import Unsupported
from ._seam import (
    AttentionKernel,
    AttentionShape,
    Gradients,
    Sequences,
    refuse_wide_heads,
    widened,
    window_of,
)

__all__ = ["FlashAttention2Kernel", "FlashAttention3Kernel"]


class _PackageKernel(AttentionKernel):
    """Forward is the package's public function. Backward is the function behind its autograd, with
    the arguments by name that the installed version has; a version in which some are missing
    computes attention again instead.
    """

    takes_gaps = True
    needs_lse = True
    suits_graphs = True
    most_head_dim = 256
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
        refuse_wide_heads(shape, self.most_head_dim, f'kernel "{self.name}"', who)

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
            max_seqlen_q=sequences.max_seqlen_q, max_seqlen_k=sequences.max_seqlen_k,
            **{name: value for name, value in options.items() if name in known},
        )  # fmt: skip
        out, lse = result[0], result[1]
        return out[..., : shape.v_head_dim], lse

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
        return dq, dk, dv[..., : shape.v_head_dim]


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
