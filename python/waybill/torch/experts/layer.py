"""EPAll2AllLayer: tokens to their experts on all ranks, and back, for autograd."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

from ..._arrays import choice, flag, instance
from ..._errors import known_keywords, on_rank
from ..._graphs import outside_graphs
from ...errors import InvalidArgument
from ...moe import EPAllToAllLayoutDesc
from ...moe.layer import ExpertLayer, RankLayout, checked_layout
from ...moe.payloads import Payload, in_tiles, kept_scales, packed_scales, tile_padding
from ...world import World
from .._tensors import (
    as_autocast,
    given,
    require_moved,
    shown_memory,
    stream_given,
    stream_of,
    torch_dtype,
    view_of,
    wants_gradients,
)
from ..world import group_of_layer, world_of
from .autograd import Combine, Dispatch

PRESETS = ("training", "decoding")
_HOST_SMS = 20  # ranks in host memory ignore it
_FEW_TOKENS = 128  # tokens of a rank: a call is then bound by latency, not by links


def suggested_sms(world: World, max_tokens: int) -> int:
    """Multiprocessors for a call: of many tokens as many as fill the links, a quarter of the device
    (three eighths where rows go on to other nodes); of few tokens half, which shortens the call.
    """
    if world.device == "cpu":
        return _HOST_SMS
    count = torch.cuda.get_device_properties(world.device).multi_processor_count
    if max_tokens <= _FEW_TOKENS:
        return max(1, min(64, count // 2))
    one_node = world.topology.ranks_per_node == world.world_size
    return max(1, min(32, count // 4) if one_node else min(48, 3 * count // 8))


def preset_options(
    name: Optional[str], world: World, *, max_tokens: int, num_experts: int, topk: int
) -> Dict[str, Any]:
    """Keyword arguments of ``EPAll2AllLayer``. On one node rows of a token are summed on each rank
    before they travel. "decoding" has room for any routing in which a token chooses different
    experts, so that no host waits, and results are views.
    """
    name = PRESETS[0] if name is None else choice(name, "ExpertParallel: preset", *PRESETS)
    ranks = world.world_size
    options: Dict[str, Any] = {
        "num_sm": suggested_sms(world, max_tokens),
        "enable_local_combine": world.topology.ranks_per_node == ranks,
    }
    if name == "decoding":
        options["fixed_rows"] = 1.0
        options["copy_out"] = False
    return options


class EPAll2AllLayer(ExpertLayer, torch.nn.Module):
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
    :param payload: "plain"; "quantized": rows travel as float8 e4m3 with scales; "scaled": given
        so; or another format of docs/moe.md#payloads
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
    :param spare_experts: slots per rank for copies of other ranks' experts. Each dispatch plans
        copies with ``even_experts``; a rank's rows lie in its slots: home experts, then copies.
        ``layout.slot_experts`` says which expert each slot holds
    :param limit, min_rows: as in ``even_experts``; its alignment is ``expert_alignment``
    :param combine: deprecated, goes in 0.3, as does the attribute ``combine_way``: "pull", all that
        is left
    :param scale_layout: of scales that arrive: "rows"; "128x4": ``tile_scales`` of them, a copy,
        which Blackwell's block-scaled GEMMs read. The payload's scales are of a byte, and
        ``expert_alignment`` a multiple of 128, so that the rows of each expert begin at a tile
    :param device: of ranks from a process group: "cpu", "cuda" for torch's current device,
        "cuda:1"; None is "cuda" where the group's backend is NCCL, else "cpu"
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    _replaced = False  #: whether ``ExpertParallel.resize`` has made another in its place

    @known_keywords()
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
        scale_layout: str = "rows",
        device: Any = None,
    ) -> None:
        super().__init__()
        self._set_up(
            lambda: world_of(ep_group, local_world_size, device, "EPAll2AllLayer", "ep_group"),
            locals(),
        )
        self._group = group_of_layer(ep_group)
        self.device = torch.device(self.world.device)
        self._read_table = functools.partial(_table, self.device)
        #: Views of windows that autograd may keep: (number of dispatch, view, whether of weights,
        #: the ``_lost`` of its layout)
        self._views: List[Tuple[int, torch.Tensor, bool, List[int]]] = []
        self._slot_layers: list[EPAll2AllLayer] = []  # one at most; no submodule: a part of this

    @property
    def ep_group(self) -> Any:
        """The World or process group that it was made from; None when the group is gone."""
        return self.world if self._group is None else self._group()

    if TYPE_CHECKING:

        def combine_input(self, rows: int) -> torch.Tensor: ...

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
        :param scales: of a payload that is given, "scaled": [T, hidden / 128] float32; what arrives
            is ``layout_desc.recv_scales``
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
        if self._payload.is_plain:
            input = as_autocast(input, self.ep_config.token_dtype, self.device)
        else:
            _refuse_gradients("dispatch", self.payload, input, weight, scales)
        differentiable = torch.is_grad_enabled() and self._payload.is_plain
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
        if not self._payload.is_plain:
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
        return self._described()

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
            fixed_rows=self.fixed_rows, **self._options,
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
    def finalize(self) -> None:
        if not self._unwinding():
            for layer in self._slot_layers:
                layer.finalize()
            self._views.clear()
        super().finalize()

    @property
    @outside_graphs
    def memory_bytes(self) -> int:
        """Symmetric memory of this rank for rows: windows, and what lies between nodes; that for
        gradients of weights, too.
        """
        parts = [layer.memory_bytes for layer in self._slot_layers]
        return sum(parts, int(self._layer.memory_bytes))

    # This face's arrays.

    _known_dtype = staticmethod(torch_dtype)

    def _suggested_sms(self) -> int:
        return suggested_sms(self.world, self.max_tokens)

    def _stream(self) -> int:
        return stream_of(self.device)

    def _stream_given(self, stream: Any, name: str) -> int:
        return stream_given(stream, self.device, name)

    def _given(self, value: Any, name: str, kind: str) -> Tuple[Any, Any]:
        if kind == "tokens" and self._payload.is_given:
            value = given_rows(self._payload, value, name)
        elif kind == "scales" and self._payload.is_given:
            value = given_scales(self._payload, value, name)
        return given(value, name, self.device)

    def _shown(self, bits: Any, kind: str) -> Any:
        if kind == "weights":
            return view_of(bits, self.weight_dtype)
        if kind == "scales":
            return shown_scales(self._payload, bits)
        in_format = kind == "rows" and not self._payload.is_plain
        dtype = torch_name(self._payload.element_name) if in_format else self.dtype
        return view_of(bits, dtype)

    def _dispatch(
        self, tokens: Any, ids: Any, weight: Any, positions: Any, scales: Any, layout: Any,
        needs_gradients: bool = False, weights_need_gradients: bool = False, origin: int = 0,
        present: Any = None, copy_out: Optional[bool] = None,
    ) -> Tuple[Any, Any, RankLayout]:  # fmt: skip
        with self._lock:  # another thread's dispatch waits until the rows are copied out
            rows, weights, scales, made = self._arrive(
                tokens, ids, weight, positions, scales, layout,
                needs_gradients, weights_need_gradients, origin, present=present,
            )  # fmt: skip
            lost: List[int] = []
            made._lost = lost
            keeps = torch.is_grad_enabled() or needs_gradients or weights_need_gradients
            copies = self.copy_out if copy_out is None else copy_out
            if copies:
                rows = self._copied(rows, made)
            elif keeps:
                self._views.append((made._handle.number, rows.detach(), False, lost))
            if copies or self.copy_out:  # they are small: a layer that copies does so in any call
                weights = None if weights is None else weights.clone()
            elif keeps and weights is not None:
                self._views.append((made._handle.number, weights.detach(), True, lost))
            made.recv_scales = kept_scales(
                scales, tile_scales if self.scale_layout == "128x4" else None,
                torch.Tensor.clone if copies or self.copy_out else None,
            )  # fmt: skip
        return rows, weights, made

    def _dispatched(self, number: int, brings_weights: bool) -> None:
        """Notes what dispatch ``number`` overwrites: autograd refuses a backward that needs it."""
        if not self._views:
            return
        kept = []
        for one in self._views:
            since, view, is_weights, lost = one
            if since + 2 > number or (is_weights and not brings_weights):
                kept.append(one)
            else:
                torch.autograd.graph.increment_version(view)
                lost.append(number)
        self._views = kept

    def _copied(self, view: torch.Tensor, layout: RankLayout) -> torch.Tensor:
        """A copy that the caller owns. Rows after those that have come are not copied."""
        if self.fixed_rows is None or not self._payload.is_plain:
            return view.clone()
        copy = torch.empty_like(view)
        (from_given, _), (to_given, _) = (given(one, "rows", self.device) for one in (view, copy))
        self._layer.copy_rows(from_given, to_given, layout._handle, stream_of(self.device))
        return copy

    def _rows_gradients(
        self, gradient: torch.Tensor, layout: RankLayout, weights: Optional[torch.Tensor],
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


def _table(device: torch.device, handle: Any, name: str, is_map: bool) -> Optional[torch.Tensor]:
    table = view_of(handle.table(name, stream_of(device)), torch.int32)
    return table.to(torch.int64) if is_map and table is not None else table


def _refuse_gradients(who: str, payload: str, *values: Any) -> None:
    """Only a plain payload has them; who asks for them shall not train without noticing."""
    if wants_gradients(*values):
        raise InvalidArgument(
            f"{who}: got a tensor that requires gradients, and a layer of payload = {payload!r} has"
            ' none: use one of payload = "plain", or detach() it where none are meant'
        )


def torch_name(name: str) -> torch.dtype:
    """torch's dtype; uint8 where torch is too old to have it."""
    return getattr(torch, name, torch.uint8)


def given_rows(payload: Payload, value: Any, name: str) -> torch.Tensor:
    """Rows that are given in the format."""
    return _as_given(payload, value, payload.element_name, payload.dtype, name)


def given_scales(payload: Payload, value: Any, name: str) -> Optional[torch.Tensor]:
    """Scales as they travel, from scales as a caller has them; None stays None."""
    if value is None:
        return None
    if not payload.has_row_scale:
        return _as_given(payload, value, payload.scale_name, payload.scale_dtype, name)
    return packed_scales(
        payload, value, name,
        lambda one, name: _as_given(payload, one, payload.scale_name, "uint8", name),
        lambda one, name: require_moved(one, name).detach(),
        lambda groups, columns: groups.new_zeros(len(groups), columns), torch.float32,
    )  # fmt: skip


def _as_given(payload: Payload, value: Any, element: str, dtype: str, name: str) -> torch.Tensor:
    """A tensor of the dtype that the compiled part knows; codes may come as uint8, too."""
    tensor = require_moved(value, name)
    if payload.is_bytes:
        return tensor.detach().contiguous().view(torch.uint8)
    named = torch_name(element)
    if tensor.dtype != named and (tensor.dtype != torch.uint8 or named.itemsize > 1):
        raise InvalidArgument(f"{name} is {tensor.dtype}, expected {named}")
    return tensor.detach().view(torch_name(dtype))


def shown_scales(payload: Payload, bits: Any) -> Any:
    """Scales as a caller has them, views of scales as they travel; None stays None."""
    if bits is None:
        return None
    if not payload.has_row_scale:
        return shown_memory(bits, torch_name(payload.scale_name))
    packed = shown_memory(bits, torch.uint8)
    groups = packed[:, : payload.num_groups].view(torch_name(payload.scale_name))
    return groups, packed[:, -4:].view(torch.float32)[:, 0]


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """``waybill.moe.tile_scales`` of a tensor, on its device: one copy where the shape is one of
    whole tiles, else two.

    :param scales: [rows, groups] of one byte each
    """
    require_moved(scales, "tile_scales: scales")
    more_rows, more_columns = tile_padding(scales, scales.itemsize, "tile_scales: scales")
    codes = scales.detach().view(torch.uint8)
    if more_rows or more_columns:
        codes = torch.nn.functional.pad(codes, (0, more_columns, 0, more_rows))
    wide = codes.shape[1] // 4
    if codes.stride(0) % 4 == 0 and codes.stride(1) == 1 and codes.storage_offset() % 4 == 0:
        codes = codes.view(torch.int32)  # four neighbours stay together
    return in_tiles(codes, wide).view(scales.dtype)
