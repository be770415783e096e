"""EPAll2AllLayer: tokens to their experts on all ranks, and back, for autograd."""

from __future__ import annotations

import threading
from typing import Any, Optional, Sequence, Tuple, Union

import torch

from ... import _core
from ..._agreement import agreed_world
from ..._arrays import choice, flag, int64
from ..._copies import OfThisProcess
from ..._errors import on_rank, said_by
from ..._graphs import outside_graphs
from ..._unwinding import Unwinding
from ...errors import InvalidArgument
from ...moe import EPAllToAllLayoutDesc, EPConfig
from .._tensors import require_moved, stream_of
from .autograd import Combine, Dispatch
from .calls import LayerCalls, checked_layout
from .presets import number_of_rows, room_of, suggested_sms
from .tensors import (
    as_autocast,
    group_of_layer,
    torch_dtype,
    world_of,
)


class EPAll2AllLayer(OfThisProcess, LayerCalls):
    """Takes tokens to their experts on all ranks, and what the experts made of them back.

    All calls are collective: every rank makes the same calls in the same order, forward and
    backward, and a rank without tokens calls too. Several dispatches may come before their
    combines. What arrives is that of ``waybill.moe.simulate_dispatch``, bit for bit.

    Autograd knows dispatch and combine. Whether input, and whether weight, need gradients is the
    same on all ranks, also on one without tokens. Ranks compare that, and what else a call means:
    a difference is a ``Disagreement`` on all of them, and the layer is unusable afterwards.

    Under autocast input, weight and biases may be floats of any dtype; else they have the layer's.

    A module without parameters. Its attributes are those of the arguments; to change one, make
    another layer.

    :param ep_group: a ``waybill.World``, a process group of torch.distributed (None: the default
        one) or a DeviceMesh of one dimension; all ranks of it are the layer's. Layers of a group
        share a World
    :param max_tokens: most tokens that a rank gives to a dispatch
    :param hidden: elements of a token
    :param topk: experts of a token, 1 to 32
    :param rank, world_size: those of the group; local_world_size: ranks of a node
    :param num_tot_experts: experts of all ranks, a multiple of world_size
    :param dtype, weight_dtype: of tokens and of weights: bfloat16, float16 or float32; float64 with
        ranks in host memory
    :param num_sm: multiprocessors that a call may use; ranks in host memory ignore it. None: what
        suits device, topology and max_tokens
    :param enable_local_combine: one node: a rank's rows of a token are summed there, rounded,
        before they travel. Compact rows are such sums, and between nodes a node's sums travel, in
        any case
    :param use_aot: accepted; kernels are always compiled ahead of time
    :param dropped_id: the id of a topk slot that goes nowhere: num_tot_experts, or -1
    :param rows: "grouped", a row per topk slot; "compact", a row per token and rank
    :param expert_alignment: rows of each local expert padded to a multiple, with zeros
    :param payload: "plain"; "quantized": rows travel as float8 e4m3 with scales; "scaled": given so
    :param capacity: the first buffers have max_tokens * topk * capacity rows, None: 2; without
        ``fixed_rows``, which says how many
    :param fixed_rows: rows of the buffers, for ever; a float is a share of the worst case, in which
        all tokens of all ranks choose this rank's experts, each different ones. Nothing waits for
        counts on the host, results have this many rows, and ``check_overflow`` reports what did not
        fit; combine gives NaN for its tokens
    :param copy_out: False: dispatch returns views of the symmetric buffer, which hold until this
        rank begins the second dispatch after
    :param max_per_expert: topk slots of one expert that a rank may have in a dispatch, None: any
        number. More, of tokens that choose an expert twice, are an InvalidArgument: in host memory
        before any communication, on GPUs the device reports it
    :param combine: provisional, until both have been timed over links: "pull": ranks fetch expert
        outputs from where they are; "push": they send them to the ranks of the tokens, which takes
        more memory. The same on all ranks; results are the same bits. Over several nodes they pull.
        The attribute is ``combine_way``
    :param device: of ranks from a process group: "cpu", "cuda" for torch's current device,
        "cuda:1"; None is "cuda" where the group's backend is NCCL, else "cpu"
    """

    _why_not_copied = "buffers that other ranks write to: make one on each rank's world or group"

    @outside_graphs
    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: Any = torch.bfloat16,
        weight_dtype: Any = torch.float32,
        num_sm: Optional[int] = None,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        dropped_id: Optional[int] = None,
        rows: str = "grouped",
        expert_alignment: int = 1,
        payload: str = "plain",
        capacity: Optional[int] = None,
        fixed_rows: Union[int, float, None] = None,
        copy_out: bool = True,
        max_per_expert: Optional[int] = None,
        combine: str = "pull",
        device: Any = None,
    ) -> None:
        super().__init__()
        who = "EPAll2AllLayer"
        fixed: Optional[int] = None
        compiled: Any = None
        options: Any = None
        most, factor = 0, 2

        def check() -> dict[str, Any]:
            """All arguments but those of the world, which the compiled part compares."""
            nonlocal fixed, most, factor, compiled, options
            given = {"dtype": dtype, "weight_dtype": weight_dtype}
            dtypes = [torch_dtype(one, f"{who}: {name}") for name, one in given.items()]
            called = {"num_experts": "num_tot_experts", "token_dtype": "dtype"}
            self.ep_config, compiled = EPConfig._of_words(
                who, called, max_tokens, hidden, topk, num_tot_experts, rank, world_size,
                local_world_size, *dtypes, torch.int32,
            )  # fmt: skip
            self._take_sizes(self.ep_config)
            self._options: dict[str, Any] = {
                "dropped_id": (
                    None if dropped_id is None else int64(dropped_id, f"{who}: dropped_id")
                ),
                "rows": choice(rows, f"{who}: rows", *_core.ep_row_names),
                "expert_alignment": int64(expert_alignment, f"{who}: expert_alignment"),
            }  # those that the layer of the weights' gradients has, too
            choice(payload, f"{who}: payload", *_core.ep_payload_names)
            with said_by(who, words=called):
                options = _core.ep_dispatch_options(compiled, **self._options, payload=payload)
            fixed = number_of_rows(
                fixed_rows, who, world_size=self.world_size, max_tokens=self.max_tokens, rows=rows,
                topk=self.topk, num_experts=self.num_tot_experts, expert_alignment=expert_alignment,
            )  # fmt: skip
            self.num_sm = 1 if num_sm is None else int64(num_sm, f"{who}: num_sm")
            if not 1 <= self.num_sm < 2**31:
                raise InvalidArgument(f"{who}: num_sm = {self.num_sm}, expected >= 1")
            self.copy_out = flag(copy_out, f"{who}: copy_out")
            self.enable_local_combine = flag(enable_local_combine, f"{who}: enable_local_combine")
            self.use_aot = flag(use_aot, f"{who}: use_aot")
            self.combine_way = choice(combine, f"{who}: combine", "pull", "push")
            factor, most = room_of(capacity, fixed, max_per_expert, who)
            return {}

        self.world = agreed_world(
            lambda: world_of(ep_group, local_world_size, device, who, "ep_group"), who, check
        )
        self.num_sm = self.num_sm if num_sm else suggested_sms(self.world, self.max_tokens)
        self._group = group_of_layer(ep_group)
        self.device = torch.device(self.world.device)
        self.payload, self.rows, self.fixed_rows = payload, rows, fixed
        given_id = self._options["dropped_id"]
        self.dropped_id: int = self.num_tot_experts if given_id is None else given_id
        sizes = (factor, fixed or 0, most)
        made = _core.layer_options(
            options, self.num_sm, self.enable_local_combine, *sizes, self.combine_way == "push"
        )
        self._layer: Any = _core.ExpertLayer(self.world._world, compiled, made)
        self._lock = threading.RLock()
        self._unwinding = Unwinding()
        self._lent = []
        self._slot_layers: list[EPAll2AllLayer] = []  # one at most; no submodule: a part of this

    def _take_sizes(self, config: EPConfig) -> None:
        """The attributes of Triton-distributed's layer."""
        self.max_tokens, self.hidden, self.topk = config.max_tokens, config.hidden, config.topk
        self.rank, self.world_size = config.rank, config.world_size
        self.local_world_size, self.nnodes = config.local_world_size, config.num_nodes
        self.node_id = config.rank // config.local_world_size
        self.is_intra_node = config.is_intra_node
        self.num_tot_experts = config.num_experts
        self.experts_per_rank = config.num_experts_per_rank
        self.dtype: torch.dtype = config.token_dtype
        self.weight_dtype: torch.dtype = config.weight_dtype
        self.offset_dtype: torch.dtype = config.offset_dtype

    @property
    def ep_group(self) -> Any:
        """The World or process group that it was made from; None when the group is gone."""
        return self.world if self._group is None else self._group()

    @outside_graphs
    @on_rank
    def dispatch(
        self,
        input: torch.Tensor,
        exp_indices: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        full_scatter_indices: Optional[torch.Tensor] = None,
        *,
        scales: Optional[torch.Tensor] = None,
        layout_desc: Optional[EPAllToAllLayoutDesc] = None,
        copy_out: Optional[bool] = None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EPAllToAllLayoutDesc]:
        """Collective: (rows [R, hidden], weights [R] or None, descriptor).

        :param input: [T, hidden], T at most max_tokens, also 0
        :param exp_indices: [T, topk], int32 or int64
        :param weight: [T, topk]: each travels with its topk slot; of compact rows [R, topk] arrive
        :param full_scatter_indices: [sum of T over all ranks, topk], the same on all ranks, not
            those of this rank alone: positions in the outputs of all ranks, one after another
        :param scales: of a "scaled" payload: [T, hidden / 128] float32; what arrives is
            ``layout_desc.recv_scales``
        :param layout_desc: of an earlier dispatch of the same ``exp_indices``, on all ranks:
            nothing is counted
        :param copy_out: of this call, instead of the layer's
        :raises InvalidArgument: before any communication; Disagreement; Timeout naming the rank
        """
        require_moved(input, "dispatch: input")
        if weight is not None:
            require_moved(weight, "dispatch: weight")
        copy_out = None if copy_out is None else flag(copy_out, "dispatch: copy_out")
        weight = as_autocast(weight, self.ep_config.weight_dtype, self.device)
        if self.payload == "plain":
            input = as_autocast(input, self.ep_config.token_dtype, self.device)
        else:
            _refuse_gradients("dispatch", self.payload, input, weight, scales)
        differentiable = torch.is_grad_enabled() and self.payload == "plain"
        weight_needs = isinstance(weight, torch.Tensor) and weight.requires_grad
        if differentiable and (input.requires_grad or weight_needs):
            holder: list[Any] = []
            outputs = Dispatch.apply(
                self, input, weight, exp_indices, full_scatter_indices, layout_desc, copy_out,
                holder,
            )  # fmt: skip
            received, weights, token = outputs
            if weight_needs:
                self._need_slot_layer()
            layout = holder[0]
            layout._token = token
        else:
            received, weights, layout = self._dispatch(
                input, exp_indices, weight, full_scatter_indices, scales, layout_desc,
                copy_out=copy_out,
            )  # fmt: skip
        layout._weights = weights if weight is not None else None
        return received, layout._weights, layout

    @outside_graphs
    @on_rank
    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weighted: bool = False,
        biases: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Collective: [T, hidden], the sums of the tokens' rows, unweighted unless ``weighted``.

        They require gradients if the dispatch's input or weight did, or ``input`` does on the ranks
        that have rows: then on all ranks, also on one without tokens or rows, which so takes part
        in backward.

        :param input: [R, hidden], rows as dispatch returned them
        :param weighted: each row times the weight of its topk slot, as the dispatch brought it.
            Gradients of rows are weighted, too; that of a weight is the dot product of its row and
            the gradient of the sum, in float32
        :param biases: up to two, [T, hidden], added first
        """
        layout = checked_layout(ep_a2a_layout_desc, "combine: ep_a2a_layout_desc")
        weighted = flag(weighted, "combine: weighted")
        require_moved(input, "combine: input")
        dtype = self.ep_config.token_dtype
        input = as_autocast(input, dtype, self.device)
        biases = [as_autocast(bias, dtype, self.device) for bias in _checked_biases(biases)]
        recorded = torch.is_grad_enabled()
        if self.payload != "plain":
            _refuse_gradients("combine", self.payload, input, *biases)
            return self._combine(input, layout, weighted, biases)
        needs, token = self._will_have_backward(input, layout)
        if needs or (recorded and any(bias.requires_grad for bias in biases)):
            weights = layout._weights if weighted else None
            sums: torch.Tensor = Combine.apply(
                self, layout, needs, weighted, input, weights, token, *biases
            )
            return sums
        return self._combine(input, layout, weighted, biases)

    def _will_have_backward(
        self, input: torch.Tensor, layout: Any
    ) -> Tuple[bool, Optional[torch.Tensor]]:
        """Whether backward of a combine is a call, the same on all ranks; and what ties a rank to
        it whose own tensors need no gradients.
        """
        recorded = torch.is_grad_enabled()
        token = layout._token  # input or weights of the dispatch needed gradients, on all ranks
        if token is not None:
            return recorded, token if recorded else None
        mine = recorded and input.requires_grad
        stream = stream_of(self.device)
        needs = self._layer.combine_needs_gradients(layout._handle, mine, recorded, stream)
        if needs and not mine:
            token = torch.empty(0, dtype=torch.float32, device=self.device, requires_grad=True)
        return needs, token

    def extra_repr(self) -> str:
        """For print(model)."""
        config, names = self.ep_config, ("max_tokens", "hidden", "topk", "num_experts", "rank")
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in names)
        parts = [sizes, f"world_size={config.world_size}", f"dtype={config.token_dtype}"]
        parts += [f"num_sm={self.num_sm}", f"enable_local_combine={self.enable_local_combine}"]
        parts += [] if self.fixed_rows is None else [f"fixed_rows={self.fixed_rows}"]
        parts += [] if self.combine_way == "pull" else [f"combine={self.combine_way}"]
        return ", ".join(parts)

    def _need_slot_layer(self) -> None:
        """A layer of rows [topk] that takes the gradients of weights home. Collective."""
        if self._slot_layers:
            return
        # Ranks that do not agree on the dispatch before hear of it here, not at the deadline.
        self.await_calls()
        config = self.ep_config
        wide = config.weight_dtype == torch.float64
        layer = EPAll2AllLayer(
            self.world, config.max_tokens, config.topk, config.topk, config.rank,
            config.num_experts, config.local_world_size, config.world_size,
            torch.float64 if wide else torch.float32, num_sm=self.num_sm,
            fixed_rows=self.fixed_rows, combine=self.combine_way, **self._options,
        )  # fmt: skip
        self._slot_layers.append(layer)


def _checked_biases(biases: Any) -> Sequence[torch.Tensor]:
    if not isinstance(biases, (list, tuple)):  # rows of a tensor would be taken for biases
        raise InvalidArgument(
            f"combine: biases is a {type(biases).__name__}, expected a list of tensors"
        )
    return [require_moved(bias, "combine: biases") for bias in biases]


def _refuse_gradients(who: str, payload: str, *values: Any) -> None:
    """A float8 payload has none; who asks for them shall not train without noticing."""
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    ):
        raise InvalidArgument(
            f"{who}: got a tensor that requires gradients, and a layer of payload = {payload!r} has"
            ' none: use one of payload = "plain", or detach() it where none are meant'
        )
