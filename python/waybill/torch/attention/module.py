"""Attention of packed documents that is spread over ranks, as one module."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional, Tuple, Union, overload

import torch
from torch import nn

from ..._arrays import at_least, flag, instance
from ..._errors import known_keywords, said_by
from ..._graphs import outside_graphs
from ..._lifetime import OfThisProcess
from ...costs import AttentionCosts
from ...errors import InvalidArgument, TransportError, Unsupported
from ...planner import AttentionPlan
from ...plans import QkvPlan
from ...world import World, agree_on
from .._tensors import casts_to, require_moved
from ..kernels import Kernel as _Kernel
from ..kernels import Sequences, choose_kernel
from ..sequence_dispatcher import SequenceDispatcher
from ..world import world_of
from .fixed import Capacities, FixedPlan, FixedStep, check_fits, checked_capacities
from .moves import PieceExchange, SideStream
from .operations import PlanTicket, attend, ticket_of
from .plan import BatchPlan, BatchPlanner, InPlaceRule, RankPieces
from .step import Project, RankStep, StepMemory, keeps

_WHO = "ContextParallelAttention"
_numbers = itertools.count(1)  # numbers of modules
_Plan = Union[BatchPlan, FixedPlan, PlanTicket]


class ContextParallelAttention(OfThisProcess, nn.Module):
    """Attention over packed documents of any lengths, shared by the ranks of a group.

    Each rank holds some rows, pieces of documents back to back. Every batch gets a plan, which says
    which rank attends to which queries; rows that stay on their rank are attended to where they
    are, the others travel meanwhile. All layers of a model share one module and the batch's plan:

        pieces = attention.gather(lengths)      # collective: what all ranks hold
        plan = attention.plan(pieces)           # the same on all ranks
        out = attention(plan, q, k, v)          # collective; autograd knows it

    All ranks call it for the same plans in the same order, forward and backward. Plans of several
    batches may be in use at once.

    Args:
        group: a World, a process group, a DeviceMesh of one dimension (``mesh["cp"]``), or None for
            the default group.
        heads, kv_heads: number of query heads; of heads of K and V, a divisor of it (by default as
            many). With tensor parallelism, those of this rank.
        head_dim, v_head_dim: elements of a head of Q and K; of V and the output (by default the
            same).
        dtype: of q, k and v. Under autocast to this dtype, other floats are cast.
        mask, window: "causal", "full" or "prefix", which is full among the first tokens of each
            document, as its pieces say, and causal after them; with a window, which is causal, only
            the last ``window`` keys, the query's own included.
        scale: of scores; head_dim ** -0.5 by default.
        kernel: "auto", a name, an AttentionKernel, or a function; see ``waybill.torch.kernels``.
        in_place, block_tokens, imbalance_target, costs, latent_dim, chunk, relay: as of
            BatchPlanner.
        overlap: on GPUs, rows that travel are moved and attended to on a second stream.
        num_sms: multiprocessors that a dispatch may use.
        device, timeout_s: of the World that is made from a group, as of
            ``World.from_process_group`` (None: 60 seconds). A World has its own: others are
            refused.
    """

    _why_not_copied = "windows that other ranks write to: make one on each rank"
    planner: BatchPlanner

    @known_keywords()
    @outside_graphs
    def __init__(
        self,
        group: Any,
        heads: int,
        kv_heads: Optional[int] = None,
        head_dim: int = 128,
        v_head_dim: Optional[int] = None,
        *,
        dtype: Union[str, torch.dtype] = "bfloat16",
        mask: str = "causal",
        window: Optional[int] = None,
        scale: Optional[float] = None,
        kernel: _Kernel = "auto",
        in_place: Union[str, bool, InPlaceRule] = "auto",
        block_tokens: int = 128,
        imbalance_target: float = 1.01,
        costs: Optional[AttentionCosts] = None,
        latent_dim: Optional[int] = None,
        chunk: Optional[int] = None,
        relay: str = "auto",
        overlap: bool = True,
        num_sms: int = 16,
        device: Any = None,
        timeout_s: Optional[float] = None,
    ) -> None:
        super().__init__()
        if isinstance(group, World):
            self.world: World = world_of(group, None, device, _WHO, timeout_s=timeout_s)
        else:
            seconds = 60.0 if timeout_s is None else timeout_s
            self.world = World._of_group(_WHO, group, device, False, None, seconds)
        self.device = torch.device(self.world.device)

        nodes = self.world.topology

        def check() -> dict[str, Any]:
            self.planner = BatchPlanner(
                self.world.world_size, heads, kv_heads, head_dim, v_head_dim, dtype=dtype,
                mask=mask, window=window, scale=scale, in_place=in_place,
                block_tokens=block_tokens, imbalance_target=imbalance_target, costs=costs,
                latent_dim=latent_dim, chunk=chunk, relay=relay,
                ranks_per_node=nodes.ranks_per_node if nodes.num_nodes > 1 else None, who=_WHO,
            )  # fmt: skip
            self.kernel = choose_kernel(kernel, self.device, _WHO)
            self.kernel.check(self.planner.shape, self.device, _WHO)
            flag(overlap, f"{_WHO}: overlap")
            at_least(num_sms, 0, f"{_WHO}: num_sms", 2**31)
            return self.planner.facts()

        agree_on(self.world, _WHO, check)
        # The dispatcher follows the schedule of a plan, but for calls too short to gain by it.
        self._relay_use = "automatic" if self.planner.relay == "auto" else self.planner.relay
        self._dispatcher = SequenceDispatcher(self.world, num_sms=num_sms, relay=self._relay_use)
        self._side = SideStream(self.device, bool(overlap))
        # Compiled programs read these.
        self._dtype, self._kind = self.planner.shape.dtype, self.device.type
        self._number = next(_numbers)
        self._needs_lse = self.kernel.needs_lse
        self._fixed_dispatcher: Optional[SequenceDispatcher] = None
        self._exchange: Optional[PieceExchange] = None
        self._steps: weakref.WeakKeyDictionary[BatchPlan, RankStep] = weakref.WeakKeyDictionary()
        self._tickets: OrderedDict[int, RankStep] = OrderedDict()

    def gather(self, held: RankPieces) -> list[Any]:
        """Collective, tiny: what all ranks hold, from what this one does, in the order of its rows.

        Args:
            held: lengths of documents that lie on this rank whole, or ``Piece(document, offset,
                length)`` of documents that lie across ranks. With mask = "prefix" also ``(length,
                prefix)``, ``(document, offset, length, prefix)``; other masks refuse a prefix.
        """
        self._check_open()
        if self._exchange is None:
            with said_by(f"{_WHO}.gather"):
                self._exchange = PieceExchange(self.world, self.planner.shape.mask)
        return self._exchange.gather(held)

    def plan(self, pieces: Union[Sequence[Any], QkvPlan, AttentionPlan]) -> BatchPlan:
        """The plan of what the ranks hold, or of a plan of one's own; as ``self.planner.plan``,
        which can be pickled and needs no ranks.
        """
        return self.planner.plan(pieces)

    @outside_graphs
    def prepare(self, plan: Union[BatchPlan, FixedPlan]) -> None:
        """Makes this rank's tables of a plan now, which calls would make where they need them.
        Collective where the windows must grow.
        """
        self._step(plan).prepare()

    @outside_graphs
    def fixed_plan(self, plan: BatchPlan, capacities: Capacities) -> FixedPlan:
        """Collective: a plan in tables of one size, in which ``replace`` puts others of up to these
        capacities. Calls take it in place of a BatchPlan, with q, k and v of max_rows rows; those
        after the batch's are not looked at, and their outputs and gradients are 0. What is
        captured in a CUDA graph replays the plan that is there.
        """
        who = f"{_WHO}.fixed_plan"
        fits = capacities

        def check() -> dict[str, Any]:
            nonlocal fits
            self._check_open()
            fits = checked_capacities(capacities, who)
            self._check_planner(plan)
            self._check_fixed(who)
            check_fits(plan, fits)
            return fits._asdict()

        agree_on(self.world, who, check)
        with said_by(who):
            if self._fixed_dispatcher is None:
                # A graph holds copies by copy engine for ever.
                self._fixed_dispatcher = SequenceDispatcher(
                    self.world, num_sms=self._dispatcher.num_sms, relay=self._relay_use,
                    local_by_copy_engine=False,
                )  # fmt: skip
            step = FixedStep(plan, self._fixed_dispatcher, self.kernel, self._side, fits)
        return FixedPlan(self, step, plan)

    def _check_fixed(self, who: str) -> None:
        if self.planner.latent_dim:
            raise Unsupported(f"{who}: latent_dim is set, for which there are none")
        if self.planner.shape.mask == "prefix":
            raise Unsupported(f'{who}: mask = "prefix", for which there are none')
        if self.world.topology.num_nodes > 1:
            raise Unsupported(f"{who}: {self.world.topology.num_nodes} nodes, expected one")
        on_gpu = self.device.type == "cuda"
        if not self.kernel.takes_gaps or (on_gpu and not self.kernel.suits_graphs):
            raise Unsupported(
                f"{who}: {self.kernel} looks at lengths on the host, expected a kernel that takes"
                ' gaps and suits graphs, as "varlen" does'
            )
        if self._dispatcher.num_sms == 0:
            raise Unsupported(
                f"{who}: num_sms = 0, expected 1 or more: copies by copy engine cannot be replaced"
            )

    def _check_open(self) -> None:
        if self._dispatcher._closed:
            raise TransportError(f"{_WHO}: the module was closed on rank {self.world.rank}")

    def _check_planner(self, plan: Any) -> None:
        instance(plan, BatchPlan, f"{_WHO}: plan", "a BatchPlan, as of plan(pieces)")
        its, mine = plan.planner, self.planner
        if (its.shape, its.latent_dim, its.chunk) != (mine.shape, mine.latent_dim, mine.chunk):
            raise InvalidArgument(
                f"{_WHO}: the plan is of {its.attends_as}, expected {mine.attends_as}"
            )
        if plan.world_size != self.world.world_size:
            raise InvalidArgument(
                f"{_WHO}: the plan is of {plan.world_size} ranks, expected {self.world.world_size}"
            )

    def _step(self, plan: Union[BatchPlan, FixedPlan]) -> RankStep:
        """This rank's tables, made once."""
        if isinstance(plan, FixedPlan):
            if plan._owner is not self:
                raise InvalidArgument(f"{_WHO}: the FixedPlan is of another module")
            return plan._step
        step = self._steps.get(plan) if isinstance(plan, BatchPlan) else None
        if step is None:
            self._check_planner(plan)
            step = self._steps[plan] = RankStep(plan, self._dispatcher, self.kernel, self._side)
            step.owner = self._number
        return step

    def varlen(
        self, plan: Union[BatchPlan, FixedPlan]
    ) -> Tuple[Optional[Sequences], Optional[Sequences]]:
        """The kernel's sequences on the device: (of rows in place, of rows that came); None where
        there are none, or several calls.
        """
        step = self._step(plan)
        if self.device.type == "cuda":
            step.uploads.ready(torch.cuda.current_stream(self.device))
        home, came = (c[0].sequences if len(c) == 1 else None for c in (step.home, step.arrived))
        return home, came

    def memory(self, plan: Union[BatchPlan, FixedPlan]) -> StepMemory:
        """Bytes that a call takes on this rank besides its arguments, output and their gradients: a
        model keeps ``kept`` for each layer, the others once.
        """
        step = self._step(plan)
        return step.memory()._replace(windows=2 * step.dispatcher.window_bytes)

    @outside_graphs
    def ticket(self, plan: BatchPlan) -> PlanTicket:
        """The plan as tensors, an argument of a compiled program, which calls the module with it:
        one operation of the graph, for any batch. The last 256 are good.
        """
        if isinstance(plan, FixedPlan):
            raise Unsupported(f"{_WHO}.ticket: got a FixedPlan, expected a BatchPlan")
        if self.planner.latent_dim:
            raise Unsupported(f"{_WHO}.ticket: latent_dim is set, for which there is no operation")
        return ticket_of(self._step(plan), self._tickets)

    def forward(
        self,
        plan: _Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        token: Optional[torch.Tensor] = None,
    ) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        """Collective: attention's output [rows, heads, v_head_dim], in the rows of q.

        Args:
            plan: of this batch, the same on all ranks; in compiled programs its ticket, in CUDA
                graphs a FixedPlan.
            q: [rows, heads, head_dim]: this rank's, in the order of its pieces.
            k, v: [rows, kv_heads, head_dim], [rows, kv_heads, v_head_dim].
            return_lse: also the log-sum-exp of the scores, [rows, heads] float32, through which no
                gradient flows.
            token: with a ticket, of an earlier call: this one comes after it, also in a graph and
                backward, where neither needs the other's results. Returned too, last.
        """
        if v is None:
            raise InvalidArgument(
                f"{_WHO}: got {type(plan).__name__}, q, k and no v, expected (plan, q, k, v), with"
                " the plan of plan(pieces)"
            )
        if not isinstance(return_lse, bool):
            return_lse = flag(return_lse, f"{_WHO}: return_lse")
        if isinstance(plan, PlanTicket):
            return self._one_operation(plan, q, k, v, return_lse, token)
        if token is not None:
            raise InvalidArgument(f"{_WHO}: got a token with a BatchPlan, expected ticket(plan)")
        return self._outside_graphs(plan, q, k, v, return_lse)

    if TYPE_CHECKING:  # torch's would return Any

        @overload
        def __call__(
            self, plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            return_lse: Literal[False] = False, token: None = None,
        ) -> torch.Tensor: ...  # fmt: skip

        @overload
        def __call__(
            self, plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            return_lse: Literal[True], token: None = None,
        ) -> Tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

        @overload
        def __call__(
            self, plan: PlanTicket, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            return_lse: bool = False, *, token: torch.Tensor,
        ) -> Tuple[torch.Tensor, ...]: ...  # fmt: skip

        @overload
        def __call__(
            self, plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            return_lse: bool = False, token: Optional[torch.Tensor] = None,
        ) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]: ...  # fmt: skip

        def __call__(self, *given: Any, **options: Any) -> Any: ...

    def _one_operation(
        self, ticket: PlanTicket, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        return_lse: bool, token: Optional[torch.Tensor],
    ) -> Any:  # fmt: skip
        for name, tensor in (("q", q), ("k", k), ("v", v), ("token", token)):
            if name != "token" or tensor is not None:
                self._check_tensor(tensor, name)
        keeps(self.kernel, self.device, q, k, v)
        if casts_to(self._kind, self._dtype):
            q, k, v = (t.to(self._dtype) for t in (q, k, v))
        given = q.new_empty(0, dtype=torch.float32) if token is None else token
        out, after, lse, *_ = attend(
            *ticket, given, q, k, v, self._number, self._needs_lse, return_lse
        )
        results = (out, *((lse,) if return_lse else ()), *(() if token is None else (after,)))
        return results[0] if len(results) == 1 else results

    def _check_tensor(self, tensor: Any, name: str) -> None:
        """Checks what a compiled program may look at, under the names that callers use."""
        require_moved(tensor, f"{_WHO}: {name}")
        if name == "token":
            if tensor.dtype != torch.float32 or tensor.numel() != 0 or tensor.ndim != 1:
                raise InvalidArgument(
                    f"{_WHO}: token is {tensor.dtype} {list(tensor.shape)}, expected"
                    " torch.zeros(0), or what a call returned"
                )
        elif tensor.device.type != self._kind:
            raise InvalidArgument(f"{_WHO}: {name} lies on {tensor.device}, expected {self.device}")

    @outside_graphs
    def _outside_graphs(
        self, plan: Union[BatchPlan, FixedPlan], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        return_lse: bool,
    ) -> Any:  # fmt: skip
        return self._step(plan).attend(q, (k, v), return_lse)

    @overload
    def latent(
        self, plan: BatchPlan, q: torch.Tensor, rows: torch.Tensor, project: Project,
        *weights: torch.Tensor, return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...  # fmt: skip

    @overload
    def latent(
        self, plan: BatchPlan, q: torch.Tensor, rows: torch.Tensor, project: Project,
        *weights: torch.Tensor, return_lse: bool,
    ) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]: ...  # fmt: skip

    @outside_graphs
    def latent(
        self, plan: BatchPlan, q: torch.Tensor, rows: torch.Tensor, project: Project,
        *weights: torch.Tensor, return_lse: bool = False,
    ) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        """Collective: the same of a module with ``latent_dim``, where K and V are projected from
        latent rows: those travel, and are projected where they arrive.

        Args:
            rows: [rows, latent_dim].
            project: ``project(rows, *weights)`` returns k and v of any number of rows. It is
                computed again in backward, and must depend on nothing else that needs gradients.
            weights: tensors; each gets one gradient, of all rows that this rank projected. Under
                autocast the function computes under the same everywhere.
        """
        return_lse = flag(return_lse, f"{_WHO}: return_lse")
        return self._step(plan).attend(q, (rows, *weights), return_lse, project)

    @said_by(f"{_WHO}.close")
    def close(self) -> None:
        """Collective: gives the windows back. Without it their memory goes with the world; so it
        does when an error of this rank is in flight, and nobody is waited for.
        """
        self._dispatcher.close()
        if self._fixed_dispatcher is not None:
            self._fixed_dispatcher.close()
        if self._exchange is not None:
            self._exchange.close()

    def extra_repr(self) -> str:
        return (
            f"rank={self.world.rank}, world_size={self.world.world_size}, {self.planner.attends_as}"
        )

    def __deepcopy__(self, memo: Any) -> ContextParallelAttention:
        """A model that is copied shares it: it has no parameters."""
        return self
