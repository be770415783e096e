"""EPAll2AllLayer: tokens to their experts on all ranks, and back, for autograd."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch

from ... import _core
from ..._arrays import int64
from ..._copies import OfThisProcess
from ...errors import InvalidArgument
from ...moe import EPAllToAllLayoutDesc, EPConfig
from .._graphs import outside_graphs
from .._tensors import require_tensor, say_no_gradients
from .autograd import Combine, Dispatch
from .layout import LayerLayout
from .tensors import as_autocast, given, shown, stream_of, torch_dtype, world_of


class EPAll2AllLayer(OfThisProcess):
    """Takes tokens to their experts on all ranks, and what the experts made of them back.

    All calls are collective: every rank makes the same calls in the same order, forward and
    backward, and a rank without tokens calls too. Several dispatches may come before their
    combines. What arrives is that of ``waybill.moe.simulate_dispatch``, bit for bit.

    Autograd knows dispatch and combine. Whether input, and whether weight, need gradients is the
    same on all ranks, also on one without tokens. Ranks compare that, and what else a call means:
    a difference is a ``Disagreement`` on all of them, and the layer is unusable afterwards.

    Under autocast input, weight and biases may be floats of any dtype; else they have the layer's.

    :param ep_group: a ``waybill.World``, or a process group of torch.distributed (None: the default
        one); all ranks of it are the layer's
    :param rank, local_world_size, world_size: those of the group
    :param num_sm: multiprocessors that a call may use; ranks in host memory ignore it
    :param enable_local_combine: one node: a rank's rows of a token are summed there, rounded,
        before they travel
    :param use_aot: accepted; kernels are always compiled ahead of time
    :param dropped_id: the id of a choice that goes nowhere: num_tot_experts, or -1
    :param rows: "grouped", a row a choice; "compact", a row a token and rank
    :param expert_alignment: rows of each local expert padded to a multiple, with zeros
    :param payload: "plain"; "quantized": rows travel as float8 e4m3 with scales; "scaled": given so
    :param capacity: the first buffers have max_tokens * topk * capacity rows
    :param fixed_rows: rows of the buffers, for ever: nothing waits for counts on the host, results
        have this many rows, and ``check_overflow`` reports what did not fit; combine gives NaN for
        its tokens
    :param copy_out: False: dispatch returns views of the symmetric buffer, which hold until this
        rank begins the second dispatch after
    :param device: of ranks from a process group: "cpu", "cuda"
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
        num_sm: int = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        dropped_id: Optional[int] = None,
        rows: str = "grouped",
        expert_alignment: int = 1,
        payload: str = "plain",
        capacity: int = 2,
        fixed_rows: Optional[int] = None,
        copy_out: bool = True,
        device: Any = None,
    ) -> None:
        who = "EPAll2AllLayer"
        self.ep_config = EPConfig(
            max_tokens, hidden, topk, num_tot_experts, rank, world_size, local_world_size,
            torch_dtype(dtype, f"{who}: dtype"),
            torch_dtype(weight_dtype, f"{who}: weight_dtype"),
            torch.int32,
        )  # fmt: skip
        compiled = self.ep_config._compiled()
        self._options: dict[str, Any] = {
            "dropped_id": dropped_id,
            "rows": rows,
            "expert_alignment": expert_alignment,
        }
        options = _core.ep_dispatch_options(
            compiled,
            None if dropped_id is None else int64(dropped_id, f"{who}: dropped_id"),
            rows,
            int64(expert_alignment, f"{who}: expert_alignment"),
            payload,
        )
        sms = int64(num_sm, f"{who}: num_sm")
        fixed = 0 if fixed_rows is None else int64(fixed_rows, f"{who}: fixed_rows")
        if not 1 <= sms < 2**31:
            raise InvalidArgument(f"{who}: num_sm = {sms}, expected >= 1")
        if fixed_rows is not None and fixed < 1:
            raise InvalidArgument(f"{who}: fixed_rows = {fixed}, expected >= 1")
        self.world = world_of(ep_group, local_world_size, device, who)
        self.device = torch.device(self.world.device)
        self.payload, self.rows, self.copy_out = payload, rows, bool(copy_out)
        self.enable_local_combine, self.use_aot = bool(enable_local_combine), bool(use_aot)
        self._layer: Any = _core.ExpertLayer(
            self.world._world, compiled, options, sms, self.enable_local_combine,
            int64(capacity, f"{who}: capacity"), fixed,
        )  # fmt: skip
        self._choice_layer: Optional[EPAll2AllLayer] = None

    @outside_graphs
    def dispatch(
        self,
        input: torch.Tensor,
        exp_indices: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        full_scatter_indices: Optional[torch.Tensor] = None,
        *,
        scales: Optional[torch.Tensor] = None,
        layout_desc: Optional[EPAllToAllLayoutDesc] = None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EPAllToAllLayoutDesc]:
        """Collective: (rows [R, hidden], weights [R] or None, descriptor).

        :param input: [T, hidden], T at most max_tokens, also 0
        :param exp_indices: [T, topk], int32 or int64
        :param weight: [T, topk]: each travels with its choice; of compact rows [R, topk] arrive
        :param full_scatter_indices: [sum of T over all ranks, topk], the same on all ranks:
            positions in the outputs of all ranks, one after the other
        :param scales: of a "scaled" payload: [T, hidden / 128] float32; what arrives is
            ``layout_desc.recv_scales``
        :param layout_desc: of an earlier dispatch of the same ``exp_indices``, on all ranks:
            nothing is counted
        :raises InvalidArgument: before any communication; Disagreement; Timeout naming the rank
        """
        require_tensor(input, "dispatch: input")
        weight = as_autocast(weight, self.ep_config.weight_dtype, self.device)
        if self.payload == "plain":
            input = as_autocast(input, self.ep_config.token_dtype, self.device)
        else:
            instead = 'a layer of payload = "plain" has them'
            say_no_gradients("dispatch", instead, input, weight, scales)
        differentiable = torch.is_grad_enabled() and self.payload == "plain"
        weight_needs = isinstance(weight, torch.Tensor) and weight.requires_grad
        if differentiable and (input.requires_grad or weight_needs):
            holder: list[Any] = []
            outputs = Dispatch.apply(
                self, input, weight, exp_indices, full_scatter_indices, layout_desc, holder
            )
            received, weights, token = outputs
            if weight_needs:
                self._need_choice_layer()
            layout = holder[0]
            layout._token = token
            return received, weights if weight is not None else None, layout
        made = self._dispatch(input, exp_indices, weight, full_scatter_indices, scales, layout_desc)
        if torch.is_grad_enabled():  # combine has a backward on all ranks, or on none
            made[2]._token = torch.empty(0, dtype=torch.float32, requires_grad=True)
        return made

    @outside_graphs
    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weighted: bool = False,
        biases: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Collective: [T, hidden], the sums of the tokens' rows, unweighted unless ``weighted``.

        :param input: [R, hidden], rows as dispatch returned them
        :param weighted: each row times the weight of its choice; without gradients
        :param biases: up to two, [T, hidden], added first
        """
        _checked(ep_a2a_layout_desc, "combine")
        require_tensor(input, "combine: input")
        dtype = self.ep_config.token_dtype
        input = as_autocast(input, dtype, self.device)
        biases = [as_autocast(bias, dtype, self.device) for bias in biases]
        token = getattr(ep_a2a_layout_desc, "_token", None)
        needs = torch.is_grad_enabled() and (input.requires_grad or token is not None)
        if weighted and input.requires_grad and needs:
            raise InvalidArgument(
                "combine: weighted = True has no gradients: multiply by the weights before, or"
                " detach the input"
            )
        if needs and not weighted:
            sums: torch.Tensor = Combine.apply(self, ep_a2a_layout_desc, input, token, *biases)
            return sums
        return self._combine(input, ep_a2a_layout_desc, weighted, biases)

    @outside_graphs
    def combine_input(self, rows: int) -> torch.Tensor:
        """[rows, hidden]: where the next combine reads. Experts that write their rows there, with
        ``out=``, and pass this tensor to it save a copy. It holds until that combine, without
        gradients. Called again before that, it gives the place of the combine after it, where no
        other rank may still read there.
        """
        bits = self._layer.combine_input(int64(rows, "combine_input: rows"), stream_of(self.device))
        view = shown(bits, self.ep_config.token_dtype)
        assert view is not None
        return view

    @outside_graphs
    def synchronize(self, stream: Any = None) -> None:
        """Returns when this rank's calls on the stream (None: the current one) are done, and raises
        what they have met, with the number of the call: what only the device could check, and as
        ``check_overflow``. Calls of ranks in host memory are done when they return.
        """
        handle = stream_of(self.device) if stream is None else int(stream.cuda_stream)
        self._layer.synchronize(handle)

    @outside_graphs
    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """All ranks, or those of this node, have come here and their work on the stream is done."""
        handle = stream_of(self.device) if stream is None else int(stream.cuda_stream)
        self._layer.barrier(handle, bool(intra_node_only))

    @outside_graphs
    def finalize(self) -> None:
        """Collective: gives all symmetric memory back. Twice does nothing."""
        if self._choice_layer is not None:
            self._choice_layer.finalize()
        self._layer.finalize()

    @property
    @outside_graphs
    def output_rows(self) -> int:
        """Rows that the buffers have."""
        return self._layer.output_rows  # type: ignore[no-any-return]

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
    ) -> Tuple[Any, Any, LayerLayout]:  # fmt: skip
        who = "dispatch"
        tokens_given, kept = given(tokens, f"{who}: input", self.device)
        others = []
        for value, name in (
            (None if layout is not None else ids, "exp_indices"),
            (weight, "weight"),
            (scales, "scales"),
            (positions, "full_scatter_indices"),
        ):
            others.append((None, None) if value is None else given(value, name, self.device))
        if layout is None and ids is None:
            raise InvalidArgument(f"{who}: exp_indices is None, expected [num_tokens, topk]")
        handle = None if layout is None else _checked(layout, who)._handle
        bits, weights, scale_bits, made = self._layer.dispatch(
            tokens_given, *(view for view, _ in others), handle, stream_of(self.device),
            needs_gradients, weights_need_gradients, origin,
        )  # fmt: skip
        del kept
        payload_dtype = (
            self.ep_config.token_dtype if self.payload == "plain" else torch.float8_e4m3fn
        )
        received = self._out(shown(bits, payload_dtype))
        received_weights = self._out(shown(weights, self.ep_config.weight_dtype))
        layout = LayerLayout(
            made, self.ep_config.is_intra_node, self.rows == "grouped", self.device
        )
        layout.recv_scales = self._out(shown(scale_bits, torch.float32))
        return received, received_weights, layout

    def _out(self, view: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        return view.clone() if view is not None and self.copy_out else view

    def _combine(
        self, rows: Any, layout: Any, weighted: bool, biases: Sequence[Any],
        needs_gradients: bool = False,
    ) -> Any:  # fmt: skip
        rows_given, kept = given(rows, "combine: input", self.device)
        bias_given = [given(bias, "combine: biases", self.device) for bias in biases]
        output = torch.empty(
            layout.num_dispatch_token_cur_rank,
            self.ep_config.hidden,
            dtype=self.ep_config.token_dtype,
            device=self.device,
        )
        output_given, _ = given(output, "combine: output", self.device)
        self._layer.combine(
            rows_given, layout._handle, output_given, bool(weighted),
            [view for view, _ in bias_given], stream_of(self.device), needs_gradients,
        )  # fmt: skip
        del kept
        return output

    def _need_choice_layer(self) -> None:
        """A layer of rows [topk] that takes the gradients of weights home. Collective."""
        if self._choice_layer is not None:
            return
        # Ranks that do not agree on the dispatch before hear of it here, not at the deadline.
        self._layer.await_calls(stream_of(self.device))
        config = self.ep_config
        wide = config.weight_dtype == torch.float64
        self._choice_layer = EPAll2AllLayer(
            self.world, config.max_tokens, config.topk, config.topk, config.rank,
            config.num_experts, config.local_world_size, config.world_size,
            torch.float64 if wide else torch.float32, **self._options,
        )  # fmt: skip


def _checked(layout: Any, who: str) -> Any:
    if not isinstance(layout, LayerLayout):
        raise InvalidArgument(
            f"{who}: the descriptor is a {type(layout).__name__}, expected one that dispatch gave"
        )
    return layout
