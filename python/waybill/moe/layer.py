"""EPAll2AllLayer for numpy: tokens to their experts on ranks in host memory, and back. The base is
that of ``waybill.torch.EPAll2AllLayer``, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence, Tuple, Union

import numpy as np

from .. import _core
from .._arrays import (
    BITS,
    AnyArray,
    ArrayLike,
    at_least,
    choice,
    flag,
    instance,
    int64,
    library_dtype_of,
)
from .._errors import known_keywords, on_rank, said_by
from .._graphs import outside_graphs
from .._lifetime import OfThisProcess, unwinding
from ..errors import InvalidArgument, Unsupported, WrongType
from ..world import World, agreed_world
from .config import EPConfig
from .even_experts import spare_options
from .payloads import (
    Payload,
    as_items,
    kept_scales,
    payload_of,
    row_bits,
    scale_bits,
    scale_layout_of,
    shown_scales,
    tile_scales,
)
from .simulate import EPAllToAllLayoutDesc, as_float, id_array, payload_bits

_ONE_NODE = ("skipped_token_mapping_indices", "skipped_token_topk_mapping_indices")
_SLOTS = ("all_slot_experts", "all_slot_quotas")
_COMPACT = ("recv_topk_indices", "compact_to_grouped", "grouped_to_compact")
_TABLES = (
    "num_input_tokens_per_rank", "send_reqs_recv_tensor", "topk_indices_tensor",
    "token_dst_scatter_idx", *_ONE_NODE, "recv_expert_counts", "recv_expert_offsets", *_COMPACT,
    "recv_tags", "num_recv_tokens_per_rank", "required_rows", "all_slot_experts", "all_slot_quotas",
)  # fmt: skip


#: Makes an array of a table of a compiled descriptor: (descriptor, name, whether as int64).
ReadTable = Callable[[Any, str, bool], Any]


class RankLayout(OfThisProcess, EPAllToAllLayoutDesc):
    """Its tables become arrays, or tensors on the device, when they are asked for: views of memory
    that it keeps, but for the two maps, which are copies. A call of a few tokens takes less time
    than all of them.

    It never changes: dispatches by it give descriptors of their own. On GPUs its memory is used
    again when it and its tensors are gone, after work on the stream that was current when the first
    of them was asked for.
    """

    _why_not_copied = "tables of one rank's layer: each dispatch gives one; its arrays can be"
    required_rows: Any  #: [1] int32: rows of the fullest rank
    capacity_rows: int  #: rows of the windows

    # Tensors alone have these: what ties a combine to the dispatch, and weights of the rows.
    _token: Any = None
    _weights: Any = None
    _lost: Sequence[int] = ()  #: dispatches that took the place of views which autograd may need

    def __init__(
        self, handle: Any, read: ReadTable, one_node: bool, grouped: bool, capacity_rows: int,
        rank: Optional[int],
    ) -> None:  # fmt: skip
        self._handle, self._read = handle, read
        self._one_node, self._grouped = one_node, grouped
        self._rank = rank  #: with spare experts: whose slots are this rank's
        self._tables: Dict[str, Any] = {}
        self.num_dispatch_token_cur_rank = handle.num_tokens
        self.capacity_rows = capacity_rows

    def __copy__(self) -> RankLayout:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def overflow(self) -> Any:
        """[1] bool, the same on all ranks: whether the windows had no room for all rows of
        one of them.
        """
        return self._table("required_rows") > self.capacity_rows

    @property
    def slot_experts(self) -> Any:  # type: ignore[override]
        """[P] int32: the expert of each slot of this rank, -1: it is empty. None
        without spare experts.
        """
        slots = self._table("all_slot_experts")
        return None if slots is None or self._rank is None else slots[self._rank]

    @outside_graphs
    def _table(self, name: str) -> Any:
        if name not in self._tables:
            self._tables[name] = self._make(name)
        return self._tables[name]

    def _make(self, name: str) -> Any:
        maps = name in _ONE_NODE
        if (self._one_node and name == "send_reqs_recv_tensor") or (
            self._grouped and name in _COMPACT
        ):
            return None
        if maps and not (self._one_node and self._grouped):
            return None
        if self._rank is None and name in _SLOTS:
            return None
        return self._read(self._handle, name, maps)


def _reader(name: str) -> property:
    return property(lambda layout: layout._table(name))


for _name in _TABLES:
    setattr(RankLayout, _name, _reader(_name))


def checked_layout(layout: Any, name: str) -> Any:
    if not isinstance(layout, RankLayout):
        instance(layout, RankLayout, f"{name}: the descriptor", "one that dispatch gave")
    return layout


class ExpertLayer(OfThisProcess):
    """The shared part of waybill.EPAll2AllLayer and waybill.torch.EPAll2AllLayer."""

    _why_not_copied = "buffers that other ranks write to: make one on each rank's world or group"
    ep_config: Any
    dtype: Any
    weight_dtype: Any
    is_intra_node: bool
    payload: str
    rows: str
    scale_layout: str
    fixed_rows: Optional[int]

    def _set_up(self, make_world: Callable[[], World], given: Mapping[str, Any]) -> None:
        """Checks the arguments of a face's constructor, agrees on them with the other ranks, and
        makes the compiled layer.
        """
        who, arg = "EPAll2AllLayer", SimpleNamespace(**given)
        compiled: Any = None
        options: Any = None
        most, factor = 0, 2

        def check() -> dict[str, Any]:
            """All arguments but those of the world, which the compiled part compares."""
            nonlocal most, factor, compiled, options
            known = [
                self._known_dtype(value, f"{who}: {name}")
                for name, value in (
                    ("dtype", arg.dtype), ("weight_dtype", arg.weight_dtype),
                    ("offset_dtype", "int32"),
                )
            ]  # fmt: skip
            called = {"num_experts": "num_tot_experts", "token_dtype": "dtype"}
            self.ep_config, compiled = EPConfig._of_words(
                who, called, arg.max_tokens, arg.hidden, arg.topk, arg.num_tot_experts, arg.rank,
                arg.world_size, arg.local_world_size, *known,
            )  # fmt: skip
            id_ = arg.dropped_id
            self._options: dict[str, Any] = {
                "dropped_id": None if id_ is None else int64(id_, f"{who}: dropped_id"),
                "rows": choice(arg.rows, f"{who}: rows", *_core.ep_row_names),
                "expert_alignment": int64(arg.expert_alignment, f"{who}: expert_alignment"),
                **spare_options(arg.spare_experts, arg.limit, arg.min_rows, who, (1.0, 0)),
            }  # those that the layer of the weights' gradients has, too
            self._take_sizes(self.ep_config)
            self.payload, self.rows = arg.payload, arg.rows
            self._payload: Payload = payload_of(arg.payload, f"{who}: payload", self.hidden)
            with said_by(who, words=called):
                options = _core.ep_dispatch_options(compiled, **self._options, payload=arg.payload)
            self.scale_layout = scale_layout_of(
                arg.scale_layout, self._payload, arg.rows, arg.expert_alignment, who
            )
            self.fixed_rows = self._number_of_rows(arg.fixed_rows, f"{who}: fixed_rows")
            self.num_sm = (
                1 if arg.num_sm is None else at_least(arg.num_sm, 1, f"{who}: num_sm", 2**31)
            )
            names = ("copy_out", "enable_local_combine", "use_aot")
            self.copy_out, self.enable_local_combine, self.use_aot = (
                flag(given[name], f"{who}: {name}") for name in names
            )
            gone = "combines pull since 0.2, and the argument goes in 0.3"
            self.combine_way = choice(arg.combine, f"{who}: {gone}: combine", "pull")
            factor = 2 if arg.capacity is None else self._capacity(arg.capacity, who)
            if arg.max_per_expert is not None:
                most = at_least(arg.max_per_expert, 1, f"{who}: max_per_expert")
            return {}

        self.world = agreed_world(make_world, who, check)
        if arg.num_sm is None:
            self.num_sm = self._suggested_sms()
        layer_options = _core.layer_options(
            options, self.num_sm, self.enable_local_combine, factor, self.fixed_rows or 0, most
        )
        self._layer: Any = _core.ExpertLayer(self.world._world, compiled, layer_options)
        self._lock, self._unwinding = threading.RLock(), unwinding()

    def _capacity(self, capacity: Any, who: str) -> int:
        factor = int64(capacity, f"{who}: capacity")
        if self.fixed_rows is not None:
            raise InvalidArgument(
                f"{who}: capacity = {factor}, expected none: fixed_rows = {self.fixed_rows} says"
                " how many rows the buffers have"
            )
        return factor

    def _number_of_rows(self, fixed_rows: Union[int, float, None], name: str) -> Optional[int]:
        """``fixed_rows`` as a number: a float is a share of what a rank gets at worst, when all
        tokens of all ranks choose its experts, each as many different ones as there are.
        """
        if fixed_rows is None:
            return None
        if isinstance(fixed_rows, bool):  # which would be one row
            raise WrongType(f"{name} = {fixed_rows}, expected a number of rows")
        if not isinstance(fixed_rows, float):
            return at_least(fixed_rows, 1, name)
        if not 0 < fixed_rows <= 1:
            raise InvalidArgument(
                f"{name} = {fixed_rows}, expected a number of rows, or a share of the worst case,"
                " > 0.0 and <= 1.0"
            )
        tokens = fixed_rows * self.world_size * self.max_tokens
        if self.rows == "compact":
            return max(1, math.ceil(tokens))
        share = max(1, math.ceil(tokens * min(self.topk, self.experts_per_rank)))
        return share + self.slots_per_rank * (self._options["expert_alignment"] - 1)

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
        self.offset_dtype: Any = config.offset_dtype
        given_id = self._options["dropped_id"]
        self.dropped_id: int = config.num_experts if given_id is None else given_id
        self.spare_experts: int = self._options["spare_experts"]
        self.limit: float = self._options["limit"]
        self.min_rows: int = self._options["min_rows"]
        self.slots_per_rank = config.num_experts_per_rank + self.spare_experts

    def _described(self) -> str:
        """Its sizes and options."""
        config, names = self.ep_config, ("max_tokens", "hidden", "topk", "num_experts", "rank")
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in names)
        parts = [sizes, f"world_size={config.world_size}", f"dtype={config.token_dtype}"]
        parts += [f"num_sm={self.num_sm}", f"enable_local_combine={self.enable_local_combine}"]
        parts += [] if self.fixed_rows is None else [f"fixed_rows={self.fixed_rows}"]
        parts += [f"spare_experts={self.spare_experts}"] if self.spare_experts else []
        parts += [] if self.scale_layout == "rows" else [f"scale_layout={self.scale_layout}"]
        return ", ".join(parts)

    @outside_graphs
    def await_calls(self) -> None:
        """Returns when this rank's calls on the current stream are done."""
        self._layer.await_calls(self._stream())

    @outside_graphs
    def take_overflow(self) -> int:
        """Rows that ``fixed_rows`` should have been for a dispatch since the last call of this or
        of ``check_overflow``, the same on all ranks; 0: all did fit. On GPUs when they are done.
        """
        return self._layer.take_overflow()

    @outside_graphs
    def combine_input(self, rows: int) -> Any:
        """[rows, hidden]: where the next combine reads. Experts that write their rows there, with
        ``out=``, and pass it to the combine save a copy. It holds until that combine, without
        gradients. Called again before that, it gives the place of the combine after it, where no
        other rank may still read there.
        """
        bits = self._layer.combine_input(int64(rows, "combine_input: rows"), self._stream())
        return self._shown(bits, "outputs")

    @outside_graphs
    def synchronize(self, stream: Any = None) -> None:
        """Returns when this rank's calls on the stream (None: the current one) are done, and raises
        what they have met, with the number of the call: what only the device could check, and as
        ``check_overflow``. Calls of ranks in host memory are done when they return.
        """
        self._layer.synchronize(self._stream_given(stream, "synchronize: stream"))

    @outside_graphs
    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Collective: work on the stream (None: the current one) after this begins when all ranks,
        or those of this node, have come here on theirs.

        On GPUs it is queued, the host goes on, and it may be captured. The host waits in host
        memory, and between nodes over NVSHMEM or NCCL.
        """
        handle = self._stream_given(stream, "ep_barrier_all: stream")
        self._layer.barrier(handle, flag(intra_node_only, "ep_barrier_all: intra_node_only"))

    @outside_graphs
    def finalize(self) -> None:
        """Collective: gives all symmetric memory back. Twice does nothing. When an error of this
        rank is in flight, nobody is waited for, and the memory goes with the world.
        """
        if self._unwinding():
            return
        self._layer.finalize()

    @property
    @outside_graphs
    def memory_bytes(self) -> int:
        """Symmetric memory of this rank for rows: windows, and what lies between nodes."""
        return int(self._layer.memory_bytes)

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

    def _arrive(
        self, tokens: Any, ids: Any, weight: Any, positions: Any, scales: Any, layout: Any,
        needs_gradients: bool = False, weights_need_gradients: bool = False, origin: int = 0,
        of_backward: bool = False, present: Any = None,
    ) -> Tuple[Any, Any, Any, Any]:  # fmt: skip
        """(rows, weights, scales, descriptor): views of the window."""
        if tokens is None:
            raise InvalidArgument("dispatch: input is None, expected [num_tokens, hidden]")
        tokens_given, kept = self._given(tokens, "dispatch: input", "tokens")
        others = [
            self._given(value, name, kind)
            for value, name, kind in (
                (None if layout is not None else ids, "dispatch: exp_indices", "ids"),
                (weight, "dispatch: weight", "weights"), (scales, "dispatch: scales", "scales"),
                (positions, "dispatch: full_scatter_indices", "positions"),
            )
        ]  # fmt: skip
        if layout is not None and present is not None:
            raise InvalidArgument("dispatch: present is given, expected none with layout_desc")
        if layout is None and ids is None:
            raise InvalidArgument("dispatch: exp_indices is None, expected [num_tokens, topk]")
        handle = None if layout is None else checked_layout(layout, "dispatch: layout_desc")._handle
        copies = None if present is None else checked_layout(present, "dispatch: present")._handle
        bits, weights, scale_bits, made = self._layer.dispatch(
            tokens_given, *(view for view, _ in others), handle, self._stream(),
            needs_gradients, weights_need_gradients, of_backward, origin, copies,
        )  # fmt: skip
        del kept, others
        self._dispatched(made.number, weight is not None)
        shown = zip((bits, weights, scale_bits), ("rows", "weights", "scales"))
        rows, weights, scales = (self._shown(view, kind) for view, kind in shown)
        layout = RankLayout(
            made, self._read_table, self.is_intra_node, self.rows == "grouped",
            self._layer.output_rows, self.rank if self.spare_experts > 0 else None,
        )  # fmt: skip
        return rows, weights, scales, layout

    if TYPE_CHECKING:  # a face says this about its arrays
        _read_table: ReadTable

        @staticmethod
        def _known_dtype(value: Any, name: str) -> Any: ...
        def _suggested_sms(self) -> int: ...
        def _stream(self) -> int: ...

        # The handle of a stream of the caller's; None is the current one.
        def _stream_given(self, stream: Any, name: str) -> int: ...

        # Memory of "tokens", "ids", "weights", "scales", "positions" or "outputs" (of experts), and
        # what must live while it is used; None stays None.
        def _given(self, value: Any, name: str, kind: str) -> Tuple[Any, Any]: ...

        # An array over "rows", "weights", "scales" or "outputs" in a window; None stays None.
        def _shown(self, bits: Any, kind: str) -> Any: ...

    def _dispatched(self, number: int, brings_weights: bool) -> None:
        """Notes that dispatch ``number`` has begun."""


class EPAll2AllLayer(ExpertLayer):
    """Takes tokens to their experts on all ranks, and what the experts made of them back: the layer
    of Triton-distributed for numpy arrays. ``waybill.torch.EPAll2AllLayer`` is the same for tensors
    on the device of the world, with autograd.

    All calls are collective: every rank makes the same calls in the same order, and a rank without
    tokens calls too. Rows that arrive are those of ``waybill.moe.simulate_dispatch``, bit for bit.

    Arrays of tokens and weights are of the layer's dtype, bfloat16 as ``ml_dtypes.bfloat16``, or
    float32, rounded where it cannot hold them; what comes back is of the same kind. Other numbers
    are made float32 first, which rounds them (1e300 is infinite there).

    :param ep_group: a ``waybill.World`` in host memory
    :param dtype, weight_dtype: of tokens and of weights: "bfloat16", "float16", "float32" or
        "float64"

    The other arguments are those of ``waybill.torch.EPAll2AllLayer``.
    """

    @known_keywords()
    @outside_graphs
    def __init__(
        self,
        ep_group: World,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: Any = "bfloat16",
        weight_dtype: Any = "float32",
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
    ) -> None:
        self._set_up(lambda: _in_host_memory(ep_group), locals())
        self._native = {"rows": True, "weights": True}

    @property
    def ep_group(self) -> World:
        """The World that it was made from."""
        return self.world

    if TYPE_CHECKING:

        def combine_input(self, rows: int) -> AnyArray: ...

    @outside_graphs
    @on_rank
    def dispatch(
        self,
        input: ArrayLike,
        exp_indices: ArrayLike,
        weight: Optional[ArrayLike] = None,
        full_scatter_indices: Optional[ArrayLike] = None,
        *,
        scales: Optional[ArrayLike] = None,
        layout_desc: Optional[EPAllToAllLayoutDesc] = None,
        present: Optional[EPAllToAllLayoutDesc] = None,
        copy_out: Optional[bool] = None,
    ) -> Tuple[AnyArray, Optional[AnyArray], EPAllToAllLayoutDesc]:
        """Collective: (rows [R, hidden], weights [R] or None, descriptor). The arguments are those
        of ``waybill.torch.EPAll2AllLayer.dispatch``.

        :raises InvalidArgument: before any communication; Disagreement; Timeout naming the rank
        """
        copies = self.copy_out if copy_out is None else flag(copy_out, "dispatch: copy_out")
        with self._lock:  # another thread's dispatch waits until the rows are copied out
            received, weights, recv_scales, layout = self._arrive(
                input, exp_indices, weight, full_scatter_indices, scales, layout_desc,
                present=present,
            )  # fmt: skip
            if copies:
                received, weights = (None if v is None else v.copy() for v in (received, weights))
            tile = tile_scales if self.scale_layout == "128x4" else None
            layout.recv_scales = kept_scales(recv_scales, tile, np.copy if copies else None)
        return received, weights if weight is not None else None, layout

    @outside_graphs
    @on_rank
    def combine(
        self,
        input: ArrayLike,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weighted: bool = False,
        biases: Sequence[ArrayLike] = (),
    ) -> AnyArray:
        """Collective: [T, hidden], the sums of the tokens' rows, unweighted unless ``weighted``.

        :param input: [R, hidden], rows as dispatch returned them
        :param weighted: each row times the weight of its topk slot, as the dispatch brought it
        :param biases: up to two, [T, hidden], added first
        """
        layout = checked_layout(ep_a2a_layout_desc, "combine: ep_a2a_layout_desc")
        weighted = flag(weighted, "combine: weighted")
        instance(biases, (list, tuple), "combine: biases", "a list of arrays")
        if input is None:
            raise InvalidArgument("combine: input is None, expected [rows, hidden]")
        with self._lock:
            added = [self._given(bias, "combine: biases", "outputs") for bias in biases]
            rows, kept = self._given(input, "combine: input", "outputs")
            native = self._native["rows"]
        config, dtype = self.ep_config, self.dtype
        size = _SIZES[dtype]
        sums = np.empty((layout.num_dispatch_token_cur_rank, config.hidden), BITS[size])
        self._layer.combine(
            rows, layout._handle, _memory(sums, dtype), weighted, [view for view, _ in added],
            0, False, False, False,
        )  # fmt: skip
        del kept, added
        return as_float(sums, dtype, native)

    def __repr__(self) -> str:
        return f"EPAll2AllLayer({self._described()})"

    _known_dtype = staticmethod(library_dtype_of)

    def _suggested_sms(self) -> int:
        return _HOST_SMS

    def _stream(self) -> int:
        return 0

    def _stream_given(self, stream: Any, name: str) -> int:
        if stream is not None:
            raise InvalidArgument(f"{name} is given, expected None: ranks are in host memory")
        return 0

    def _given(self, value: Any, name: str, kind: str) -> Tuple[Any, Any]:
        if value is None:
            return None, None
        config = self.ep_config
        if kind in ("ids", "positions"):
            dtype, bits = "int64", id_array(value, config.topk, name)
        elif kind == "tokens" and self._payload.is_given:
            dtype, bits = self._payload.dtype, row_bits(self._payload, value, name)
        elif kind == "scales":
            dtype, bits = self._payload.scale_dtype, scale_bits(self._payload, value, name)
        else:
            of_weights = kind == "weights"
            dtype = self.weight_dtype if of_weights else self.dtype
            columns = config.topk if of_weights else config.hidden
            bits, native = payload_bits(value, dtype, columns, name)
            self._native["weights" if kind == "weights" else "rows"] = native
        if bits.ndim == 0:  # which the compiled part would take for none
            raise InvalidArgument(f"{name} has no axes, expected a row for each token")
        return _memory(bits, dtype), bits

    def _shown(self, bits: Any, kind: str) -> Any:
        if bits is None or kind == "scales":
            return None if bits is None else shown_scales(self._payload, bits)
        if kind == "rows" and not self._payload.is_plain:
            return as_items(bits, self._payload.element_name)
        if kind == "outputs":  # experts write there, so it must not be a copy
            return as_float(bits, self.dtype, True)
        dtype = self.weight_dtype if kind == "weights" else self.dtype
        return as_float(bits, dtype, self._native["weights" if kind == "weights" else "rows"])

    @staticmethod
    def _read_table(handle: Any, name: str, is_map: bool) -> Any:
        table = handle.table(name, 0)
        return table.astype(np.int64) if is_map and table is not None else table


_HOST_SMS = 20  # ranks in host memory ignore it
_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def _memory(array: AnyArray, dtype: str) -> Tuple[int, str, Tuple[int, ...]]:
    """A contiguous array for the compiled part."""
    return array.__array_interface__["data"][0], dtype, array.shape


def _in_host_memory(world: Any) -> World:
    who = "EPAll2AllLayer: ep_group"
    expected = "a waybill.World; waybill.torch.EPAll2AllLayer takes process groups"
    instance(world, World, who, expected)
    if world.device != "cpu":
        raise Unsupported(
            f"{who} lies on {world.device}, and numpy has host memory only: use"
            " waybill.torch.EPAll2AllLayer"
        )
    return world
