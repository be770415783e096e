"""Attention of packed documents that is spread over ranks, as one module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Optional, Tuple, Union

import torch
from torch import nn

from .._copies import OfThisProcess
from .._graphs import outside_graphs
from ..errors import InvalidArgument
from ..world import World
from ._context_parallel_step import Beside, RankStep, Saved
from ._piece_exchange import PieceExchange
from ._tensors import require_tensor
from .batch_plan import BatchPlan, BatchPlanner, RankPieces
from .kernels import Kernel as _Kernel
from .kernels import Sequences, choose_kernel
from .sequence_dispatcher import SequenceDispatcher

__all__ = ["ContextParallelAttention"]

_WHO = "ContextParallelAttention"


class ContextParallelAttention(OfThisProcess, nn.Module):
    """Attention over packed documents of any lengths, shared by the ranks of a group.

    Each rank holds some rows, pieces of documents back to back. Every batch gets a plan, which says
    which rank attends to which queries; rows that stay on their rank are attended to where they
    are, the others travel beside that. All layers of a model share one module and the batch's plan:

        pieces = attention.gather(lengths)      # collective: what all ranks hold
        plan = attention.plan(pieces)           # the same on all ranks
        out = attention(plan, q, k, v)          # collective; autograd knows it

    All ranks call it for the same plans in the same order, forward and backward. Plans of several
    batches may be in use at once.

    Args:
        ranks: a World, a process group, a DeviceMesh of one dimension (``mesh["cp"]``), or None for
            the default group.
        heads, kv_heads: of queries; of keys and values, a divisor of it (all by default). Of this
            rank, where heads are split among tensor-parallel ranks.
        head_dim, v_head_dim: of queries and keys; of values and the output (the same by default).
        dtype: of q, k and v. Under autocast to it they are cast.
        mask, window: "causal" or "full"; with a window only the last ``window`` keys, the query's
            own included.
        scale: of scores; head_dim ** -0.5 by default.
        kernel: "auto", a name, an AttentionKernel, or a function; see ``waybill.torch.kernels``.
        in_place, block_tokens, imbalance_target: as of BatchPlanner.
        overlap: on GPUs, what travels does so on a second stream.
        num_sms: multiprocessors that a dispatch may use.
        device, timeout_s: of a World that is made of a group.
    """

    _why_not_copied = "windows that other ranks write to: make one on each rank"

    @outside_graphs
    def __init__(
        self,
        ranks: Any,
        heads: int,
        kv_heads: Optional[int] = None,
        head_dim: int = 128,
        v_head_dim: Optional[int] = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        mask: str = "causal",
        window: Optional[int] = None,
        scale: Optional[float] = None,
        kernel: _Kernel = "auto",
        in_place: Union[str, bool] = "auto",
        block_tokens: int = 128,
        imbalance_target: float = 1.01,
        overlap: bool = True,
        num_sms: int = 16,
        device: Any = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        if not isinstance(ranks, World):
            ranks = World.from_process_group(ranks, device=device, timeout_s=timeout_s)
        self.world: World = ranks
        self.planner = BatchPlanner(
            ranks.world_size, heads, kv_heads, head_dim, v_head_dim, dtype=dtype, mask=mask,
            window=window, scale=scale, in_place=in_place, block_tokens=block_tokens,
            imbalance_target=imbalance_target, who=_WHO,
        )  # fmt: skip
        self.device = torch.device(ranks.device)
        self.kernel = choose_kernel(kernel, self.device, _WHO)
        self.kernel.check(self.planner.shape, self.device, _WHO)
        self._dispatcher = SequenceDispatcher(ranks, num_sms=num_sms, relay="never")
        self._beside = Beside(self.device, overlap)
        self._exchange: Optional[PieceExchange] = None
        self._steps: weakref.WeakKeyDictionary[BatchPlan, RankStep] = weakref.WeakKeyDictionary()

    def gather(self, held: RankPieces) -> list[Any]:
        """Collective, tiny: what all ranks hold, from what this one does, in the order of its rows.

        Args:
            held: lengths of documents that lie on this rank whole, or ``Piece(document, offset,
                length)`` of documents that lie across ranks.
        """
        if self._exchange is None:
            self._exchange = PieceExchange(self.world)
        return self._exchange.gather(held)

    def plan(self, pieces: Sequence[Any]) -> BatchPlan:
        """The plan of what the ranks hold; as ``self.planner.plan``, which can be pickled and needs
        no ranks.
        """
        return self.planner.plan(pieces)

    @outside_graphs
    def prepare(self, plan: BatchPlan) -> RankStep:
        """This rank's tables of a plan, made once: forward does so where nobody has before.
        Collective where the windows must grow.
        """
        if not isinstance(plan, BatchPlan):
            raise InvalidArgument(
                f"{_WHO}: plan is a {type(plan).__name__}, expected a BatchPlan, as of plan(pieces)"
            )
        step = self._steps.get(plan)
        if step is None:
            if plan.planner.shape != self.planner.shape:
                raise InvalidArgument(
                    f"{_WHO}: the plan is of {plan.planner.shape}, expected {self.planner.shape}"
                )
            if plan.world_size != self.world.world_size:
                raise InvalidArgument(
                    f"{_WHO}: the plan is of {plan.world_size} ranks, expected"
                    f" {self.world.world_size}"
                )
            step = self._steps[plan] = RankStep(plan, self._dispatcher, self.kernel, self._beside)
        return step

    def varlen(self, plan: BatchPlan) -> Tuple[Optional[Sequences], Optional[Sequences]]:
        """What the kernel is called with, on the device: (rows in place, rows that came)."""
        step = self.prepare(plan)
        home = step.home[0].sequences if len(step.home) == 1 else None
        return home, step.arrived

    @outside_graphs
    def forward(
        self,
        plan: BatchPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:
        """Collective: attention's output [rows, heads, v_head_dim], in the rows of q.

        Args:
            plan: of this batch, the same on all ranks.
            q: [rows, heads, head_dim]: this rank's, in the order of its pieces.
            k, v: [rows, kv_heads, head_dim], [rows, kv_heads, v_head_dim].
            return_lse: also the log-sum-exp of the scores, [rows, heads] float32, through which no
                gradient flows.
        """
        step = self.prepare(plan)
        q, k, v = self._checked(step, q, k, v)
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        with torch.autocast(self.device.type, enabled=False):
            out, lse = _Attention.apply(step, keep, return_lse, q, k, v)
        return (out, lse) if return_lse else out

    def close(self) -> None:
        """Collective: gives the windows back. Without it their memory goes with the world."""
        self._dispatcher.close()
        if self._exchange is not None:
            self._exchange.close()

    def extra_repr(self) -> str:
        return f"rank={self.world.rank}, world_size={self.world.world_size}, {self.planner.shape}"

    def __deepcopy__(self, memo: Any) -> ContextParallelAttention:
        """A model that is copied shares it: it has no parameters."""
        return self

    def _checked(self, step: RankStep, *tensors: torch.Tensor) -> list[torch.Tensor]:
        shape = self.planner.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        sizes = (shape.head_dim, shape.head_dim, shape.v_head_dim)
        at = f"on rank {self.world.rank}"
        checked = []
        for name, tensor, n, size in zip("qkv", tensors, heads, sizes):
            require_tensor(tensor, f"{_WHO}: {name}")
            if tensor.device != self.device:
                raise InvalidArgument(
                    f"{_WHO}: {name} lies on {tensor.device}, expected {self.device} {at}"
                )
            if tuple(tensor.shape) != (step.rows, n, size):
                raise InvalidArgument(
                    f"{_WHO}: {name} has shape {list(tensor.shape)}, expected"
                    f" [{step.rows}, {n}, {size}], as the plan has it {at}"
                )
            if tensor.dtype != shape.dtype and self._casts():
                tensor = tensor.to(shape.dtype)
            if tensor.dtype != shape.dtype:
                raise InvalidArgument(
                    f"{_WHO}: {name} has dtype {tensor.dtype}, expected {shape.dtype} {at}"
                )
            checked.append(_adjacent_rows(tensor))
        return checked

    def _casts(self) -> bool:
        """Whether autocast is on, to the module's dtype."""
        kind = self.device.type
        return (
            torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind) == self.planner.shape.dtype
        )


class _Attention(torch.autograd.Function):
    """What is saved are tensors alone, the same number on all ranks: a checkpoint that computes
    the forward again, and its calls, does so on all of them at the same place.
    """

    @staticmethod
    def forward(
        ctx: Any, step: RankStep, keep: bool, want_lse: bool,
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    ) -> Any:  # fmt: skip
        out, lse, saved, ctx.number = step.forward(q, k, v, keep, want_lse)
        ctx.step = step
        if keep:
            ctx.save_for_backward(q, k, v, out, *saved)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @outside_graphs
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        q, k, v, out, *saved = ctx.saved_tensors  # first: a checkpoint makes its calls here
        needs = ctx.needs_input_grad
        found = ctx.step.backward(
            grad, q, k, v, out, Saved(*saved), ctx.number, (needs[3], needs[4] or needs[5])
        )
        return (None, None, None, *(t if n else None for t, n in zip(found, needs[3:])))


def _adjacent_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Slices of a common projection go as they are; rows must have adjacent elements."""
    if tensor.shape[0] > 0 and not tensor[0].is_contiguous():
        return tensor.contiguous()
    return tensor
