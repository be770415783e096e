"""The interface of kernels: what one is asked and answers, and checks of the answer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np
import torch

from ..._arrays import int64, sequence
from ..._errors import shown
from ...errors import InvalidArgument, Unsupported
from .._tensors import on_device, require_device

Gradients = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionShape(NamedTuple):
    """Sizes and options that do not change from batch to batch."""

    heads: int
    kv_heads: int  #: each serves heads / kv_heads heads of queries
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    mask: str  #: "causal" or "full", of a call; "prefix" of a module, whose calls are of both
    window: Optional[int]  #: keys that a query meets, itself included; None is no limit
    scale: float


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences one after another. Under a causal mask the last query of a sequence is its last
    key, also where it has fewer queries than keys. One of the two may have no rows: queries without
    keys have zeros for an output, keys without queries zeros for gradients.
    """

    cu_seqlens_q: torch.Tensor  #: (n + 1,) int32, on the device: rows before each sequence
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    q_lens: Tuple[int, ...]  #: the same on the host
    k_lens: Tuple[int, ...]

    @classmethod
    def of(cls, q_lens: Sequence[int], k_lens: Sequence[int], device: Any = "cpu") -> Sequences:
        """From lengths on the host; one copy to the device."""
        who = "Sequences.of"
        place = require_device(device, f"{who}: device") or torch.device("cpu")
        lens = [_lengths(q_lens, f"{who}: q_lens"), _lengths(k_lens, f"{who}: k_lens")]
        if len(lens[0]) != len(lens[1]):
            raise InvalidArgument(
                f"{who}: k_lens are {len(lens[1])} lengths, expected {len(lens[0])}, as q_lens"
            )
        return cls.several([(lens[0], lens[1])], place)[0]

    @classmethod
    def several(cls, lens: Sequence[Tuple[Any, Any]], device: Any = "cpu") -> list[Sequences]:
        """From (lengths of queries, lengths of keys) each, in one copy to the device, for which
        nothing waits.
        """
        ends = [list(itertools.accumulate(lengths, initial=0)) for pair in lens for lengths in pair]
        table = torch.from_numpy(np.array(list(itertools.chain(*ends)), np.int32))
        flat = on_device(table, torch.device(device))
        found, at = [], 0
        for q_lens, k_lens in lens:
            n = len(q_lens) + 1
            q_tuple, k_tuple = tuple(map(int, q_lens)), tuple(map(int, k_lens))
            found.append(
                cls(
                    flat[at : at + n], flat[at + n : at + 2 * n], max(q_tuple, default=0),
                    max(k_tuple, default=0), q_tuple, k_tuple,
                )
            )  # fmt: skip
            at += 2 * n
        return found

    def __len__(self) -> int:
        return len(self.q_lens)


def _lengths(values: Any, name: str) -> list[int]:
    sequence(values, name, "a list of lengths")
    lengths = [int64(value, f"{name}[{i}]") for i, value in enumerate(values)]
    if min(lengths, default=0) < 0 or sum(lengths) >= 2**31:
        raise InvalidArgument(f"{name} = {lengths[:8]}, expected lengths >= 0, 2^31 - 1 in all")
    return lengths


class AttentionKernel:
    """Attention of packed sequences: q [rows, heads, head_dim], k and v [rows, kv_heads, ...].

    A subclass gives forward. Without a backward of its own it is computed again there, under
    autograd. Neither is called without sequences.
    """

    name = "attention"
    #: Sequences may lack queries or keys: one call then serves rows with gaps between them.
    takes_gaps = False
    #: backward reads the log-sum-exp that forward returned.
    needs_lse = False
    #: It looks at the tensors and the longest lengths of sequences alone, not at the lengths on
    #: the host: a CUDA graph replays it with other sequences.
    suits_graphs = False

    def check(self, shape: AttentionShape, device: torch.device, who: str) -> None:
        """Raises Unsupported, naming the argument, for what this kernel does not take."""

    def check_training(self, device: torch.device, who: str) -> None:
        """Raises Unsupported before a forward pass whose gradients the kernel cannot compute."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences,
        shape: AttentionShape, want_lse: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        """(out [rows, heads, v_head_dim], log-sum-exp [heads, rows] float32 where it is wanted)."""
        raise Unsupported(
            f"ContextParallelAttention: kernel {self!r} has no forward, expected a subclass of"
            " AttentionKernel that has one"
        )

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: Optional[torch.Tensor], sequences: Sequences, shape: AttentionShape,
    ) -> Gradients:  # fmt: skip
        """Gradients of q, k and v."""
        with _known_to_autograd(), torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            again, _ = self.forward(leaves[0], leaves[1], leaves[2], sequences, shape, False)
            if not again.requires_grad:
                if any(q_len and k_len for q_len, k_len in zip(sequences.q_lens, sequences.k_lens)):
                    raise Unsupported(
                        f"ContextParallelAttention: kernel {self!r}: autograd does not know how its"
                        " output depends on q, k and v, expected operations that it knows, or an"
                        " AttentionKernel with a backward of its own"
                    )
                return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            grad = grad.contiguous()
            found = torch.autograd.grad(again, leaves, grad, materialize_grads=True)
        return found[0], found[1], found[2]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class FunctionKernel(AttentionKernel):
    """A user's function ``f(q, k, v, sequences, shape)`` that autograd knows; it returns the
    output, or (output, log-sum-exp [heads, rows]).
    """

    name = "function"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences,
        shape: AttentionShape, want_lse: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        result = self.function(q, k, v, sequences, shape)
        if isinstance(result, tuple) and len(result) != 2:
            raise InvalidArgument(
                f"ContextParallelAttention: kernel {self!r} returned {len(result)} results,"
                " expected the output, or (output, log-sum-exp)"
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        if want_lse and lse is None:
            raise Unsupported(
                "ContextParallelAttention: return_lse = True, and the function that is the kernel"
                " returns no log-sum-exp, expected (output, log-sum-exp)"
            )
        return out, lse

    def __repr__(self) -> str:
        return f"FunctionKernel({self.function!r})"


def _known_to_autograd() -> contextlib.AbstractContextManager[Any]:
    """Inside an operation of torch.library autograd does not look: here it does again."""
    core: Any = torch._C
    names = ("_ForceDispatchKeyGuard", "_dispatch_tls_local_exclude_set")
    if not all(hasattr(core, name) for name in names):
        return contextlib.nullcontext()
    excluded = core._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        key = getattr(core.DispatchKey, name, None)
        if key is not None and excluded.has(key):
            excluded = excluded.remove(key)
    return core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded)


def refuse_wide_heads(shape: AttentionShape, most: int, kernel: str, who: str) -> None:
    """Refuses what FlashAttention's kernels do not take: heads of multiples of 8, 16-bit rows."""
    for name, size in (("head_dim", shape.head_dim), ("v_head_dim", shape.v_head_dim)):
        if size % 8 != 0 or not 8 <= size <= most:
            raise Unsupported(f"{who}: {name} = {size}, {kernel} takes multiples of 8 up to {most}")
    if shape.v_head_dim > shape.head_dim:
        raise Unsupported(
            f"{who}: v_head_dim = {shape.v_head_dim}, {kernel} takes at most head_dim"
            f" ({shape.head_dim})"
        )
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"{who}: dtype = {shape.dtype}, {kernel} takes bfloat16 and float16")


def window_of(shape: AttentionShape) -> Tuple[int, int]:
    """(keys to the left, keys to the right) as FlashAttention says it; -1 is no limit."""
    if shape.mask == "full":
        return -1, -1
    return (-1 if shape.window is None else shape.window - 1), 0


def narrowed(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The tensor without the zeros that ``widened`` put after each head."""
    return tensor if tensor.shape[-1] == head_dim else tensor[..., :head_dim]


def widened(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The tensor with zeros after each head, where a kernel takes heads of one size only."""
    missing = head_dim - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def attention(
    kernel: AttentionKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sequences: Sequences, shape: AttentionShape, want_lse: bool, at: str,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
    """(output, log-sum-exp where it is wanted or the kernel needs it), in memory of their own.

    :param at: "on rank 3"
    """
    given: Any = kernel.forward(q, k, v, sequences, shape, want_lse)
    if not isinstance(given, tuple) or len(given) != 2:
        got = f"{len(given)} results" if isinstance(given, tuple) else shown(given)
        raise InvalidArgument(f"{_who(kernel, at)} returned {got}, expected (output, log-sum-exp)")
    rows = q.shape[0]
    wrong = mismatch(given[0], (rows, shape.heads, shape.v_head_dim), q.device, shape.dtype)
    if wrong is not None:
        raise InvalidArgument(f"{_who(kernel, at)}: its output {wrong}")
    (out,) = _own([q, k, v], given[:1])
    if not (want_lse or kernel.needs_lse):
        return out, None
    lse = given[1]
    wrong = mismatch(lse, (shape.heads, rows), q.device, None)
    if wrong is not None:
        raise InvalidArgument(f"{_who(kernel, at)}: its log-sum-exp {wrong}")
    return out, (lse if lse.dtype == torch.float32 else lse.float()).resolve_neg()


def gradients(
    kernel: AttentionKernel, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: Optional[torch.Tensor], sequences: Sequences, shape: AttentionShape,
    at: str,
) -> Gradients:  # fmt: skip
    """Gradients of q, k and v, each in memory of its own."""
    found: Any = kernel.backward(grad, q, k, v, out, lse, sequences, shape)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        got = f"{len(found)} results" if isinstance(found, (tuple, list)) else shown(found)
        raise InvalidArgument(
            f"{_who(kernel, at)}: backward returned {got}, expected gradients of q, k and v"
        )
    for name, of, one in zip("qkv", (q, k, v), found):
        wrong = mismatch(one, tuple(of.shape), of.device, of.dtype)
        if wrong is not None:
            raise InvalidArgument(f"{_who(kernel, at)}: its gradient of {name} {wrong}")
    dq, dk, dv = _own([grad, q, k, v, out], found)
    return dq, dk, dv


def _who(kernel: AttentionKernel, at: str) -> str:
    return f"ContextParallelAttention: kernel {kernel!r} {at}"


def mismatch(
    value: Any, shape: Tuple[int, ...], device: torch.device, dtype: Optional[torch.dtype]
) -> Optional[str]:
    """The words for what is wrong with a value, and what was expected; None where nothing is."""
    if not isinstance(value, torch.Tensor):
        return f"is {shown(value)}, expected a tensor {list(shape)}"
    if value.shape != shape:
        return f"has shape {list(value.shape)}, expected {list(shape)}"
    if value.device != device:
        return f"lies on {value.device}, expected {device}"
    if dtype is not None and value.dtype != dtype:
        return f"has dtype {value.dtype}, expected {dtype}"
    return None


def _own(given: list[torch.Tensor], results: Any) -> list[torch.Tensor]:
    """Results are read as memory, and written to: not into what the kernel was given, nor into
    another of them.
    """
    taken = {tensor.data_ptr() for tensor in given}
    own = []
    for tensor in results:
        place = tensor.data_ptr()
        shared = place in taken or 0 in tensor.stride()
        if (shared and tensor.numel()) or tensor.is_neg():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            place = tensor.data_ptr()
        taken.add(place)
        own.append(tensor)
    return own
