"""What EPAll2AllLayer asks of the compiled layer, without autograd."""

from __future__ import annotations

import threading
from typing import Any, List, Optional, Sequence, Tuple

import torch

from ..._arrays import flag, int64
from ..._graphs import outside_graphs
from ..._unwinding import Unwinding
from ...errors import InvalidArgument
from .._tensors import stream_given, stream_of
from .layout import LayerLayout
from .tensors import given, shown


class LayerCalls(torch.nn.Module):
    """The part of EPAll2AllLayer that moves rows."""

    _layer: Any
    _lock: threading.RLock
    _unwinding: Unwinding
    ep_config: Any
    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    payload: str
    rows: str
    copy_out: bool
    is_intra_node: bool
    fixed_rows: Optional[int]
    _slot_layers: List[Any]
    #: Views of windows that autograd may keep: (number of the dispatch, view, whether of weights)
    _lent: List[Tuple[int, torch.Tensor, bool]]
    _replaced = False  #: whether ``ExpertParallel.resize`` has made another in its place

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
        return self._layer.take_overflow()  # type: ignore[no-any-return]

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
        self._layer.synchronize(stream_given(stream, self.device, "synchronize: stream"))

    @outside_graphs
    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Collective: work on the stream (None: the current one) behind this begins when all ranks,
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
        self._lent.clear()
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
        copy_out: Optional[bool] = None,
    ) -> Tuple[Any, Any, LayerLayout]:  # fmt: skip
        with self._lock:  # another thread's dispatch waits until the rows are copied out
            rows, weights, scales, made = self._arrive(
                tokens, ids, weight, positions, scales, layout,
                needs_gradients, weights_need_gradients, origin,
            )  # fmt: skip
            lends = torch.is_grad_enabled() or needs_gradients or weights_need_gradients
            copies = self.copy_out if copy_out is None else copy_out
            if copies:
                rows = self._copied(rows, made)
            elif lends:
                self._lent.append((made._handle.number, rows.detach(), False))
            if copies or self.copy_out:  # they are small: a layer that copies does so in any call
                weights, scales = (None if v is None else v.clone() for v in (weights, scales))
            elif lends and weights is not None:
                self._lent.append((made._handle.number, weights.detach(), True))
        made.recv_scales = scales
        return rows, weights, made

    def _arrive(
        self, tokens: Any, ids: Any, weight: Any, positions: Any, scales: Any, layout: Any,
        needs_gradients: bool = False, weights_need_gradients: bool = False, origin: int = 0,
        of_backward: bool = False,
    ) -> Tuple[Any, Any, Any, LayerLayout]:  # fmt: skip
        """(rows, weights, scales, descriptor): views of the window."""
        who = "dispatch"
        tokens_given, kept = given(tokens, f"{who}: input", self.device)
        others = []
        for value, name in (
            (None if layout is not None else ids, "exp_indices"),
            (weight, "weight"),
            (scales, "scales"),
            (positions, "full_scatter_indices"),
        ):
            others.append(
                (None, None) if value is None else given(value, f"{who}: {name}", self.device)
            )
        if layout is None and ids is None:
            raise InvalidArgument(f"{who}: exp_indices is None, expected [num_tokens, topk]")
        handle = None if layout is None else checked_layout(layout, f"{who}: layout_desc")._handle
        payload_dtype = self.dtype if self.payload == "plain" else torch.float8_e4m3fn
        bits, weights, scale_bits, made = self._layer.dispatch(
            tokens_given, *(view for view, _ in others), handle, stream_of(self.device),
            needs_gradients, weights_need_gradients, of_backward, origin,
        )  # fmt: skip
        del kept
        self._end_loans(made.number, weight is not None)
        views = (
            shown(bits, payload_dtype),
            shown(weights, self.weight_dtype),
            shown(scale_bits, torch.float32),
        )
        layout = LayerLayout(
            made, self.is_intra_node, self.rows == "grouped", self.device, self._layer.output_rows
        )
        return (*views, layout)

    def _end_loans(self, number: int, brings_weights: bool) -> None:
        """What dispatch ``number`` overwrites: autograd then refuses a backward that needs it."""
        if not self._lent:
            return
        kept = []
        for since, view, is_weights in self._lent:
            if since + 2 > number or (is_weights and not brings_weights):
                kept.append((since, view, is_weights))
            else:
                torch.autograd.graph.increment_version(view)
        self._lent = kept

    def _copied(self, view: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
        """Memory of the caller's. What lies behind the rows that have come is not copied."""
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
            to_rows = torch.empty_like(view) if needs_rows else None
            wide = self.weight_dtype == torch.float64
            of_weights = None
            if rows is not None:
                rows = rows[: view.shape[0]]
                of_weights = torch.empty(
                    rows.shape[0], dtype=torch.float64 if wide else torch.float32,
                    device=self.device,
                )  # fmt: skip
                view = view[: rows.shape[0]]
            tensors = [(weights[: view.shape[0]], "weights"), (rows, "rows")]
            if to_rows is not None:
                to_rows = to_rows[: view.shape[0]]
            tensors += [(to_rows, "row gradients"), (of_weights, "weight gradients")]
            held = [
                (None, None) if tensor is None else given(tensor, name, self.device)
                for tensor, name in tensors
            ]
            of_weights_given, of_rows, to_rows_given, to_weights_given = (one for one, _ in held)
            self._layer.weigh_gradients(
                given(view, "gradients", self.device)[0], of_weights_given, of_rows, layout._handle,
                to_rows_given, to_weights_given, stream_of(self.device),
            )  # fmt: skip
        return to_rows, of_weights

    def _combine(
        self, rows: Any, layout: Any, weighted: bool, biases: Sequence[Any],
        needs_gradients: bool = False, of_backward: bool = False, of_companion: bool = False,
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
            of_backward, of_companion,
        )  # fmt: skip
        del kept
        return output


def checked_layout(layout: Any, name: str) -> Any:
    if not isinstance(layout, LayerLayout):
        raise InvalidArgument(
            f"{name}: the descriptor is a {type(layout).__name__}, expected one that dispatch gave"
        )
    return layout
