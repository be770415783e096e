"""EPAll2AllLayer: tokens to their experts on all ranks, and back, for autograd."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple, TypeVar, Union

import torch

from ... import _core
from ..._arrays import at_least, choice, flag, instance, int64
from ..._errors import on_rank, said_by
from ..._graphs import outside_graphs
from ..._lifetime import OfThisProcess, Unwinding
from ...errors import InvalidArgument
from ...moe import EPAllToAllLayoutDesc, EPConfig
from ...moe.even_experts import spare_options
from ...world import agreed_world
from .._tensors import (
    as_autocast,
    given,
    require_moved,
    stream_given,
    stream_of,
    torch_dtype,
    view_of,
    wants_gradients,
)
from ..world import group_of_layer, world_of
from .autograd import Combine, Dispatch
from .presets import number_of_rows, room_of, suggested_sms

_L = TypeVar("_L", bound="LayerLayout")
_ONE_NODE = ("skipped_token_mapping_indices", "skipped_token_topk_mapping_indices")
_SLOTS = ("all_slot_experts", "all_slot_quotas")
_COMPACT = ("recv_topk_indices", "compact_to_grouped", "grouped_to_compact")
_TABLES = (
    "num_input_tokens_per_rank", "send_reqs_recv_tensor", "topk_indices_tensor",
    "token_dst_scatter_idx", *_ONE_NODE, "recv_expert_counts", "recv_expert_offsets", *_COMPACT,
    "recv_tags", "num_recv_tokens_per_rank", "required_rows", "all_slot_experts", "all_slot_quotas",
)  # fmt: skip


class LayerLayout(OfThisProcess, EPAllToAllLayoutDesc):
    """Its tables become tensors when they are asked for: views of memory that it keeps, but for
    the two maps, which are copies. A call of a few tokens takes less time than all of them.

    It never changes: dispatches by it give descriptors of their own. On GPUs its memory is used
    again when it and its tensors are gone, after work on the stream that was current when the
    first of them was asked for.
    """

    _why_not_copied = "tables of one rank's layer: each dispatch gives one; its tensors can be"
    recv_scales: Optional[torch.Tensor]
    required_rows: torch.Tensor  #: [1] int32 on the device: rows of the fullest rank
    capacity_rows: int  #: rows of the windows

    def __init__(
        self, handle: Any, one_node: bool, grouped: bool, device: torch.device, capacity_rows: int,
        rank: Optional[int],
    ) -> None:  # fmt: skip
        self._handle = handle
        self._device = device
        self._one_node, self._grouped = one_node, grouped
        self._rank = rank  #: with spare experts: whose slots are this rank's
        self._tensors: Dict[str, Optional[torch.Tensor]] = {}
        self._token: Optional[torch.Tensor] = None
        self._weights: Optional[torch.Tensor] = (
            None  #: weights of the rows, as the dispatch gave them
        )
        self.num_dispatch_token_cur_rank = handle.num_tokens
        self.capacity_rows = capacity_rows

    def __copy__(self: _L) -> _L:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def overflow(self) -> torch.Tensor:
        """[1] on the device, the same on all ranks: whether the windows had no room for all rows of
        one of them.
        """
        required = self._table("required_rows")
        assert required is not None
        return required > self.capacity_rows

    @property
    def slot_experts(self) -> Optional[torch.Tensor]:  # type: ignore[override]
        """[P] int32 on the device: the expert of each slot of this rank, -1: it is empty. None
        without spare experts.
        """
        slots = self._table("all_slot_experts")
        return None if slots is None or self._rank is None else slots[self._rank]

    @outside_graphs
    def _table(self, name: str) -> Optional[torch.Tensor]:
        if name not in self._tensors:
            self._tensors[name] = self._make(name)
        return self._tensors[name]

    def _make(self, name: str) -> Optional[torch.Tensor]:
        nodes_only = name == "send_reqs_recv_tensor"
        maps = name in _ONE_NODE
        if (self._one_node and nodes_only) or (self._grouped and name in _COMPACT):
            return None
        if maps and not (self._one_node and self._grouped):
            return None
        if self._rank is None and name in _SLOTS:
            return None
        table = view_of(self._handle.table(name, stream_of(self._device)), torch.int32)
        return table.to(torch.int64) if maps and table is not None else table


def _reader(name: str) -> property:
    return property(lambda layout: layout._table(name))


for _name in _TABLES:
    setattr(LayerLayout, _name, _reader(_name))


def checked_layout(layout: Any, name: str) -> Any:
    if not isinstance(layout, LayerLayout):
        instance(layout, LayerLayout, f"{name}: the descriptor", "one that dispatch gave")
    return layout


class EPAll2AllLayer(OfThisProcess, torch.nn.Module):
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
    :param use_aot: accepted; kernels are always compiled before
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
    :param spare_experts: slots per rank for copies of other ranks' experts, on CPU ranks. Each
        dispatch plans copies with ``even_experts``; a rank's rows lie in its slots: home experts,
        then copies. ``layout.slot_experts`` says which expert each slot holds
    :param limit, min_rows: as in ``even_experts``; its alignment is ``expert_alignment``
    :param combine: provisional, until both have been timed over links: "pull": ranks fetch expert
        outputs from where they are; "push": they send them to the ranks of the tokens, which takes
        more memory. The same on all ranks; results are the same bits. Over several nodes they pull.
        The attribute is ``combine_way``
    :param device: of ranks from a process group: "cpu", "cuda" for torch's current device,
        "cuda:1"; None is "cuda" where the group's backend is NCCL, else "cpu"
    """

    _why_not_copied = "buffers that other ranks write to: make one on each rank's world or group"
    ep_config: Any
    dtype: torch.dtype
    weight_dtype: torch.dtype
    is_intra_node: bool
    payload: str
    rows: str
    fixed_rows: Optional[int]
    _replaced = False  #: whether ``ExpertParallel.resize`` has made another in its place

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
        spare_experts: int = 0,
        limit: float = 1.0,
        min_rows: int = 0,
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
            self._options: dict[str, Any] = {
                "dropped_id": (
                    None if dropped_id is None else int64(dropped_id, f"{who}: dropped_id")
                ),
                "rows": choice(rows, f"{who}: rows", *_core.ep_row_names),
                "expert_alignment": int64(expert_alignment, f"{who}: expert_alignment"),
                **spare_options(spare_experts, limit, min_rows, who),
            }  # those that the layer of the weights' gradients has, too
            self._take_sizes(self.ep_config)
            choice(payload, f"{who}: payload", *_core.ep_payload_names)
            with said_by(who, words=called):
                options = _core.ep_dispatch_options(compiled, **self._options, payload=payload)
            fixed = number_of_rows(
                fixed_rows, who, world_size=self.world_size, max_tokens=self.max_tokens, rows=rows,
                topk=self.topk, num_experts=self.num_tot_experts, expert_alignment=expert_alignment,
                spare_experts=spare_experts,
            )  # fmt: skip
            self.num_sm = 1 if num_sm is None else at_least(num_sm, 1, f"{who}: num_sm", 2**31)
            self.copy_out = flag(copy_out, f"{who}: copy_out")
            self.enable_local_combine = flag(enable_local_combine, f"{who}: enable_local_combine")
            self.use_aot = flag(use_aot, f"{who}: use_aot")
            self.combine_way = choice(combine, f"{who}: combine", "pull", "push")
            factor, most = room_of(capacity, fixed, max_per_expert, who)
            return {}

        self.world = agreed_world(
            lambda: world_of(ep_group, local_world_size, device, who, "ep_group"), who, check
        )
        if num_sm is None:
            self.num_sm = suggested_sms(self.world, self.max_tokens)
        self._group = group_of_layer(ep_group)
        self.device = torch.device(self.world.device)
        self.payload, self.rows, self.fixed_rows = payload, rows, fixed
        layer_options = _core.layer_options(
            options, self.num_sm, self.enable_local_combine, factor, fixed or 0, most,
            self.combine_way == "push",
        )  # fmt: skip
        self._layer: Any = _core.ExpertLayer(self.world._world, compiled, layer_options)
        self._lock, self._unwinding = threading.RLock(), Unwinding()
        #: Views of windows that autograd may keep: (number of dispatch, view, whether of weights)
        self._views: List[Tuple[int, torch.Tensor, bool]] = []
        self._slot_layers: list[EPAll2AllLayer] = []  # one at most; no submodule: a part of this

    def _take_sizes(self, config: EPConfig) -> None:
        """The attributes of Triton-distributed's layer, and of slots."""
        self.max_tokens, self.hidden, self.topk = config.max_tokens, config.hidden, config.topk
        self.rank, self.world_size = config.rank, config.world_size
        self.local_world_size, self.nnodes = config.local_world_size, config.num_nodes
        self.node_id = config.rank // config.local_world_size
        self.is_intra_node = config.is_intra_node
        self.num_tot_experts = config.num_experts
        self.experts_per_rank = config.num_experts_per_rank
        self.dtype = config.token_dtype
        self.weight_dtype = config.weight_dtype
        self.offset_dtype: torch.dtype = config.offset_dtype
        given_id = self._options["dropped_id"]
        self.dropped_id: int = config.num_experts if given_id is None else given_id
        self.spare_experts: int = self._options["spare_experts"]
        self.limit: float = self._options["limit"]
        self.min_rows: int = self._options["min_rows"]
        self.slots_per_rank = config.num_experts_per_rank + self.spare_experts

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
        present: Optional[EPAllToAllLayoutDesc] = None,
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
        :param present: with spare experts: the descriptor of an earlier dispatch, on all ranks,
            whose copies are there already and used again at no cost
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
                self, input, weight, exp_indices, full_scatter_indices, layout_desc, present,
                copy_out, holder,
            )  # fmt: skip
            received, weights, token = outputs
            if weight_needs:
                self._need_slot_layer()
            layout = holder[0]
            layout._token = token
        else:
            received, weights, layout = self._dispatch(
                input, exp_indices, weight, full_scatter_indices, scales, layout_desc,
                present=present, copy_out=copy_out,
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
        # Rows of a tensor would be taken for biases.
        instance(biases, (list, tuple), "combine: biases", "a list of tensors")
        biases = [
            as_autocast(require_moved(bias, "combine: biases"), dtype, self.device)
            for bias in biases
        ]
        recorded = torch.is_grad_enabled()
        if self.payload != "plain":
            _refuse_gradients("combine", self.payload, input, *biases)
            return self._combine(input, layout, weighted, biases)
        needs, token = self._will_have_backward(input, layout)
        if needs or (recorded and any(bias.requires_grad for bias in biases)):
            weights = layout._weights if weighted else None
            return Combine.apply(self, layout, needs, weighted, input, weights, token, *biases)
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
        parts += [f"spare_experts={self.spare_experts}"] if self.spare_experts else []
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

    def _check_not_replaced(self) -> None:
        """Before a backward: the rows of its forward went with the layer."""
        if self._replaced:
            raise InvalidArgument(
                "the layer was resized since its forward, expected no backward outstanding at a"
                " resize: repeat the step"
            )

    @outside_graphs
    def await_calls(self) -> None:
        """Returns when this rank's calls on the current stream are done."""
        self._layer.await_calls(stream_of(self.device))

    @outside_graphs
    def take_overflow(self) -> int:
        """Rows that ``fixed_rows`` should have been for a dispatch since the last call of this or
        of ``check_overflow``, the same on all ranks; 0: all did fit. On GPUs when they are done.
        """
        return self._layer.take_overflow()

    @outside_graphs
    def combine_input(self, rows: int) -> torch.Tensor:
        """[rows, hidden]: where the next combine reads. Experts that write their rows there, with
        ``out=``, and pass this tensor to it save a copy. It holds until that combine, without
        gradients. Called again before that, it gives the place of the combine after it, where no
        other rank may still read there.
        """
        bits = self._layer.combine_input(int64(rows, "combine_input: rows"), stream_of(self.device))
        view = view_of(bits, self.ep_config.token_dtype)
        assert view is not None
        return view

    @outside_graphs
    def synchronize(self, stream: Any = None) -> None:
        """Returns when this rank's calls on the stream (None: the current one) are done, and raises
        what they have met, with the number of the call: what only the device could check, and as
        ``check_overflow``. Calls of ranks in host memory are done when they return.
        """
        self._layer.synchronize(stream_given(stream, self.device, "synchronize: stream"))

    @outside_graphs
    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Collective: work on the stream (None: the current one) after this begins when all ranks,
        or those of this node, have come here on theirs.

        On GPUs it is queued, the host goes on, and it may be captured. The host waits in host
        memory, and between nodes over NVSHMEM or NCCL.
        """
        handle = stream_given(stream, self.device, "ep_barrier_all: stream")
        self._layer.barrier(handle, flag(intra_node_only, "ep_barrier_all: intra_node_only"))

    @outside_graphs
    def finalize(self) -> None:
        """Collective: gives all symmetric memory back. Twice does nothing. When an error of this
        rank is in flight, nobody is waited for, and the memory goes with the world.
        """
        if self._unwinding:
            return
        for layer in self._slot_layers:
            layer.finalize()
        self._views.clear()
        self._layer.finalize()

    @property
    @outside_graphs
    def memory_bytes(self) -> int:
        """Symmetric memory of this rank for rows: windows, receive slabs, and what lies between
        nodes; that for gradients of weights, too.
        """
        parts = [layer.memory_bytes for layer in self._slot_layers]
        return sum(parts, int(self._layer.memory_bytes))

    @property
    @outside_graphs
    def output_rows(self) -> int:
        """Rows that the buffers have."""
        return self._layer.output_rows

    @outside_graphs
    def check_overflow(self) -> None:
        """Raises InvalidArgument, on all ranks alike, when ``fixed_rows`` were too few for a
        dispatch since the last call of this: naming it, and how many it needed. The sums of its
        tokens whose rows did not fit are NaN.
        """
        self._layer.check_overflow()

    def _dispatch(
        self, tokens: Any, ids: Any, weight: Any, positions: Any, scales: Any, layout: Any,
        needs_gradients: bool = False, weights_need_gradients: bool = False, origin: int = 0,
        present: Any = None, copy_out: Optional[bool] = None,
    ) -> Tuple[Any, Any, LayerLayout]:  # fmt: skip
        with self._lock:  # another thread's dispatch waits until the rows are copied out
            rows, weights, scales, made = self._arrive(
                tokens, ids, weight, positions, scales, layout,
                needs_gradients, weights_need_gradients, origin, present=present,
            )  # fmt: skip
            keeps = torch.is_grad_enabled() or needs_gradients or weights_need_gradients
            copies = self.copy_out if copy_out is None else copy_out
            if copies:
                rows = self._copied(rows, made)
            elif keeps:
                self._views.append((made._handle.number, rows.detach(), False))
            if copies or self.copy_out:  # they are small: a layer that copies does so in any call
                weights, scales = (None if v is None else v.clone() for v in (weights, scales))
            elif keeps and weights is not None:
                self._views.append((made._handle.number, weights.detach(), True))
        made.recv_scales = scales
        return rows, weights, made

    def _arrive(
        self, tokens: Any, ids: Any, weight: Any, positions: Any, scales: Any, layout: Any,
        needs_gradients: bool = False, weights_need_gradients: bool = False, origin: int = 0,
        of_backward: bool = False, present: Any = None,
    ) -> Tuple[Any, Any, Any, LayerLayout]:  # fmt: skip
        """(rows, weights, scales, descriptor): views of the window."""
        tokens_given, kept = given(tokens, "dispatch: input", self.device)
        others = [
            given(value, name, self.device)
            for value, name in (
                (None if layout is not None else ids, "dispatch: exp_indices"),
                (weight, "dispatch: weight"), (scales, "dispatch: scales"),
                (positions, "dispatch: full_scatter_indices"),
            )
        ]  # fmt: skip
        if layout is not None and present is not None:
            raise InvalidArgument("dispatch: present is given, expected none with layout_desc")
        if layout is None and ids is None:
            raise InvalidArgument("dispatch: exp_indices is None, expected [num_tokens, topk]")
        handle = None if layout is None else checked_layout(layout, "dispatch: layout_desc")._handle
        copies = None if present is None else checked_layout(present, "dispatch: present")._handle
        payload_dtype = self.dtype if self.payload == "plain" else torch.float8_e4m3fn
        bits, weights, scale_bits, made = self._layer.dispatch(
            tokens_given, *(view for view, _ in others), handle, stream_of(self.device),
            needs_gradients, weights_need_gradients, of_backward, origin, copies,
        )  # fmt: skip
        del kept
        self._end_views(made.number, weight is not None)
        views = (
            view_of(bits, payload_dtype),
            view_of(weights, self.weight_dtype),
            view_of(scale_bits, torch.float32),
        )
        layout = LayerLayout(
            made, self.is_intra_node, self.rows == "grouped", self.device, self._layer.output_rows,
            self.rank if self.spare_experts > 0 else None,
        )  # fmt: skip
        return (*views, layout)

    def _end_views(self, number: int, brings_weights: bool) -> None:
        """Notes what dispatch ``number`` overwrites: autograd refuses a backward that needs it."""
        if not self._views:
            return
        kept = []
        for since, view, is_weights in self._views:
            if since + 2 > number or (is_weights and not brings_weights):
                kept.append((since, view, is_weights))
            else:
                torch.autograd.graph.increment_version(view)
        self._views = kept

    def _copied(self, view: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
        """A copy that the caller owns. Rows after those that have come are not copied."""
        if self.fixed_rows is None or self.payload != "plain":
            return view.clone()
        copy = torch.empty_like(view)
        (from_given, _), (to_given, _) = (given(one, "rows", self.device) for one in (view, copy))
        self._layer.copy_rows(from_given, to_given, layout._handle, stream_of(self.device))
        return copy

    def _rows_gradients(
        self, gradient: torch.Tensor, layout: LayerLayout, weights: Optional[torch.Tensor],
        rows: Optional[torch.Tensor], needs_rows: bool,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:  # fmt: skip
        """Backward of a combine: gradients of its rows, if they need them, and of their weights, if
        ``rows`` are given.
        """
        with self._lock:
            view, _, _, _ = self._arrive(gradient, None, None, None, None, layout, of_backward=True)
            if weights is None:
                return self._copied(view, layout), None
            of_weights = None
            if rows is not None:
                view = view[: rows.shape[0]]
                rows = rows[: view.shape[0]]
                wide = self.weight_dtype == torch.float64
                of_weights = torch.empty(
                    view.shape[0], dtype=torch.float64 if wide else torch.float32,
                    device=self.device,
                )  # fmt: skip
            to_rows = torch.empty_like(view) if needs_rows else None
            tensors = (
                (view, "gradients"), (weights[: view.shape[0]], "weights"), (rows, "rows"),
                (to_rows, "row gradients"), (of_weights, "weight gradients"),
            )  # fmt: skip
            held = [given(tensor, name, self.device) for tensor, name in tensors]
            views = [one for one, _ in held]
            self._layer.weigh_gradients(
                *views[:3], layout._handle, *views[3:], stream_of(self.device)
            )
        return to_rows, of_weights

    def _combine(
        self, rows: Any, layout: Any, weighted: bool, biases: Sequence[Any],
        needs_gradients: bool = False, of_backward: bool = False, of_companion: bool = False,
    ) -> Any:  # fmt: skip
        rows_given, kept = given(rows, "combine: input", self.device)
        bias_given = [given(bias, "combine: biases", self.device) for bias in biases]
        config, tokens = self.ep_config, layout.num_dispatch_token_cur_rank
        output = torch.empty(tokens, config.hidden, dtype=config.token_dtype, device=self.device)
        output_given, _ = given(output, "combine: output", self.device)
        self._layer.combine(
            rows_given, layout._handle, output_given, bool(weighted),
            [view for view, _ in bias_given], stream_of(self.device), needs_gradients,
            of_backward, of_companion,
        )  # fmt: skip
        del kept
        return output


def _refuse_gradients(who: str, payload: str, *values: Any) -> None:
    """A float8 payload has none; who asks for them shall not train without noticing."""
    if wants_gradients(*values):
        raise InvalidArgument(
            f"{who}: got a tensor that requires gradients, and a layer of payload = {payload!r} has"
            ' none: use one of payload = "plain", or detach() it where none are meant'
        )
