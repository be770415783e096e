"""Dispatch and combine of all ranks in one process, and copies of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from .. import _core
from .._arrays import (
    BITS,
    AnyArray,
    ArrayLike,
    IntArray,
    as_numpy,
    flag,
    index_array,
    instance,
    sequence,
)
from .._errors import said_by
from .._lifetime import Made, OfThisProcess
from ..errors import InvalidArgument
from .config import EPConfig
from .even_experts import present_copies, spare_options
from .payloads import Payload, as_items, payload_of, row_bits, scale_bits, shown_scales

_NUMPY = {"float32": np.float32, "float16": np.float16, "float64": np.float64}


def _bfloat16_bits(array: AnyArray) -> AnyArray:
    """float32 to the bits of bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet, rounded).astype(np.uint16).view(np.int16)


def payload_bits(value: Any, dtype: str, columns: int, name: str) -> Tuple[AnyArray, bool]:
    """Integers of the dtype's size, and whether the caller's array was of that dtype already.

    float32 values are rounded to nearest even where the dtype cannot hold them.
    """
    array = as_numpy(value, name)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise InvalidArgument(f"{name} has dtype {array.dtype}, expected floating-point numbers")
    if array.ndim == 1 and array.size == 0:
        array = array.reshape(0, columns)
    if array.dtype.name == dtype and array.dtype.isnative:
        native = np.ascontiguousarray(array)
        return native.view(BITS[native.dtype.itemsize]), True
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return _bfloat16_bits(array.astype(np.float32)), False
        if dtype not in _NUMPY:
            raise InvalidArgument(f"{name} has dtype {array.dtype}, expected {dtype}")
        if dtype != "float64":
            array = array.astype(np.float32)
        plain = np.ascontiguousarray(array.astype(_NUMPY[dtype]))
    return plain.view(BITS[plain.dtype.itemsize]), False


def payloads(
    values: Any, dtype: str, columns: int, name: str, world_size: int
) -> Tuple[List[AnyArray], bool]:
    """One payload per rank, and whether all were of the dtype already."""
    entries = per_rank(values, name, world_size)
    made = [payload_bits(v, dtype, columns, f"{name}[{r}]") for r, v in enumerate(entries)]
    return [array for array, _ in made], all(same for _, same in made)


def per_rank(values: Any, name: str, world_size: int) -> Sequence[Any]:
    """The entries of an argument that has one for each rank."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise InvalidArgument(
            f"{name} is a {type(values).__name__}, expected one array for each of {world_size}"
            " ranks"
        )
    if len(values) != world_size:
        raise InvalidArgument(
            f"{name} has {len(values)} entries, expected one for each of {world_size} ranks"
        )
    return list(values)


def ids_of_ranks(values: Any, columns: int, name: str, world_size: int) -> List[AnyArray]:
    """Expert ids of each rank."""
    entries = per_rank(values, name, world_size)
    return [id_array(v, columns, f"{name}[{r}]") for r, v in enumerate(entries)]


def id_array(value: Any, columns: int, name: str) -> AnyArray:
    """Expert ids, or positions, as int64."""
    array = as_numpy(value, name)
    if array.size == 0 and array.ndim <= 1:
        array = np.zeros((0, columns), np.int64)
    checked = index_array(array, name)
    if checked.dtype not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise InvalidArgument(f"{name} has dtype {checked.dtype}, expected int32 or int64")
    return checked.astype(np.int64, copy=False)


def as_float(bits: AnyArray, dtype: str, native: bool) -> AnyArray:
    """Elements under their dtype, or as float32 for callers who gave float32."""
    if dtype in ("float32", "float64"):
        return bits.view(_NUMPY[dtype])
    if dtype == "float16":
        half = bits.view(np.float16)
        return half if native else half.astype(np.float32)
    if native:
        import ml_dtypes  # the caller's array came from it

        return bits.view(ml_dtypes.bfloat16)
    widened = bits.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return widened.view(np.float32)


@dataclass
class EPAllToAllLayoutDesc:
    """A rank combines by this table of a dispatch: int32 but for the two maps, which are int64.

    N nodes, M = max_tokens, K = topk, R rows, P experts per rank; -1 where an entry has no meaning.
    """

    num_dispatch_token_cur_rank: int  #: tokens of this rank
    num_input_tokens_per_rank: Any  #: [W] tokens of each rank
    #: [N, 2, M] runs of tokens from the ranks of the same local index; None on one node
    send_reqs_recv_tensor: Optional[Any]
    topk_indices_tensor: Any  #: [T, K] ids; several nodes [N, M, K]
    token_dst_scatter_idx: Any  #: [N, M, K] row of each topk slot on its expert's rank
    skipped_token_mapping_indices: Optional[Any]  #: [R] row to the token's first row; one node
    #: [R, K] of a first row, the rows of the token's topk slots that are here; one node
    skipped_token_topk_mapping_indices: Optional[Any]
    # Beyond the seven of Triton-distributed:
    recv_expert_counts: Any = None  #: [P] rows of each local expert, without padding
    recv_expert_offsets: Any = None  #: [P + 1] first rows, with padding
    recv_topk_indices: Optional[Any] = None  #: compact rows: [R, K] local experts, -1
    compact_to_grouped: Optional[Any] = None  #: compact rows: [R, K] places in the grouped order
    grouped_to_compact: Optional[Any] = None  #: compact rows: [grouped rows] compact row, -1
    #: layers only: [R, 4] source rank, token, topk slot and first row of the token; -1 for padding
    recv_tags: Optional[Any] = None
    num_recv_tokens_per_rank: Optional[Any] = None  #: layers only: [W] rows that each rank received
    recv_scales: Optional[Any] = None  #: layers whose payload has scales: those of R rows
    #: With spare experts alone. Experts in the other tables are then slots: P counts this rank's,
    #: and slot s of rank r is r * P + s where ids of all ranks stand.
    slot_experts: Optional[Any] = None  #: [P] the expert of each slot; -1: it is empty
    all_slot_experts: Optional[Any] = None  #: [W, P] the same of all ranks
    all_slot_quotas: Optional[Any] = None  #: [W, P] rows that each slot takes, without padding


class ExpertDispatch(OfThisProcess, Made):
    """The result of ``simulate_dispatch``: one entry per rank in every list."""

    _why_not_copied = "compiled tables: simulate_dispatch makes it again; its arrays can be"
    config: EPConfig
    recv_tokens: List[AnyArray]  #: [R, hidden], or as the payload's rows are
    recv_weights: Optional[List[AnyArray]]  #: [R]; of compact rows [R, topk]
    recv_scales: Optional[List[Any]]  #: [R, ...], in the form of the payload's scales
    recv_origin: List[IntArray]  #: [R, 3]: source rank, token, topk slot; -1 for padding
    layout: List[EPAllToAllLayoutDesc]
    splits: IntArray  #: [W, E + 1] topk slots of each expert by source; the last column is dropped
    num_input_tokens_per_rank: IntArray  #: [W]
    num_recv_tokens_per_rank: IntArray  #: [W] rows of each output
    recv_buf_offset_per_expert: IntArray  #: [W, P, W source] first rows
    traffic: Dict[str, IntArray]  #: payloads that cross links
    _compiled: Any
    _made_by = "simulate_dispatch"

    def combine(
        self,
        expert_outputs: Sequence[Any],
        local_combine: bool = False,
        *,
        weighted: bool = False,
        biases: Sequence[Sequence[Any]] = (),
    ) -> List[AnyArray]:
        """Sums the experts' outputs of each token, where it came from: [T, hidden] a rank.

        Unweighted, unless ``weighted``: then each row times its weight. Sums are float32, in the
        order and with the rounding that docs/functions/expert_layout.md says. float32
        outputs are rounded to token_dtype first where it cannot hold them.

        :param expert_outputs: [R, hidden] a rank, rows as in ``recv_tokens``
        :param local_combine: one node: a rank's rows of a token are summed and rounded first
        :param biases: up to two, of one [T, hidden] a rank each, added first
        """
        dtype = self.config.token_dtype_name
        world = self.config.world_size
        hidden = self.config.hidden
        who = "combine"
        outputs, native = payloads(expert_outputs, dtype, hidden, f"{who}: expert_outputs", world)
        biases = sequence(biases, f"{who}: biases", "up to two, of an array for each rank")
        bias_bits = [payloads(bias, dtype, hidden, f"{who}: biases", world)[0] for bias in biases]
        sums = self._compiled.combine(
            outputs, bias_bits, flag(local_combine, f"{who}: local_combine"),
            flag(weighted, f"{who}: weighted"),
        )  # fmt: skip
        return [as_float(bits, dtype, native) for bits in sums]


def simulate_dispatch(
    config: EPConfig,
    tokens: Sequence[Any],
    exp_indices: Sequence[Any],
    weights: Optional[Sequence[Any]] = None,
    full_scatter_indices: Optional[Any] = None,
    *,
    scales: Optional[Sequence[Any]] = None,
    dropped_id: Optional[int] = None,
    rows: str = "grouped",
    expert_alignment: int = 1,
    payload: str = "plain",
    spare_experts: int = 0,
    limit: float = 1.0,
    min_rows: int = 0,
    present: Optional[ArrayLike] = None,
) -> ExpertDispatch:
    """Dispatches the tokens of all ranks. Rows and their order are always the same.

    :param tokens: [T, hidden] a rank: token_dtype (bfloat16 as ml_dtypes.bfloat16), or float32
        arrays, which are rounded where it cannot hold them; what comes back is of the same kind
    :param exp_indices: [T, topk] a rank, int32 or int64
    :param weights: [T, topk] a rank; each travels with its topk slot
    :param full_scatter_indices: [sum of T, topk] positions in the outputs of all ranks, one after
        the other; without it the order is local expert, source rank, token, topk slot
    :param scales: of a payload that is given, a rank: "scaled": [T, hidden / 128] float32
    :param dropped_id: the id of a topk slot that goes nowhere: num_experts, or -1
    :param rows: "grouped", a row per topk slot; "compact", a row per token and rank
    :param expert_alignment: rows of each local expert padded to a multiple, with zeros
    :param payload: "plain"; "quantized": sent as float8 e4m3 with scales; "scaled": given so; or
        another format of docs/moe.md#payloads
    :param spare_experts: slots per rank for copies of other ranks' experts, which ``even_experts``
        plans from the rows of all ranks; rows then lie in slots, see ``layout[r].slot_experts``
    :param limit, min_rows: as in ``even_experts``; its alignment is ``expert_alignment``
    :param present: [W, spare_experts] experts in the spare slots already, -1: the slot is empty
    :raises InvalidArgument: naming argument and rank, before anything is moved
    """
    who = "simulate_dispatch"
    instance(config, EPConfig, f"{who}: config", "an EPConfig")
    config, compiled = config._for_use()
    world, hidden, topk = config.world_size, config.hidden, config.topk
    with said_by(who):
        spare = spare_options(spare_experts, limit, min_rows, who)
        options = _core.ep_dispatch_options(
            compiled, dropped_id, rows, expert_alignment, payload, **spare
        )
    form = payload_of(payload, f"{who}: payload", hidden)
    if form.is_given:
        entries = per_rank(tokens, f"{who}: tokens", world)
        bits = [row_bits(form, v, f"{who}: tokens[{r}]") for r, v in enumerate(entries)]
        token_dtype, native = form.dtype, False
    else:
        token_dtype = config.token_dtype_name
        bits, native = payloads(tokens, token_dtype, hidden, f"{who}: tokens", world)
    id_arrays = ids_of_ranks(exp_indices, topk, f"{who}: exp_indices", world)
    weight_bits, weights_native = (
        ([], False)
        if weights is None
        else payloads(weights, config.weight_dtype_name, topk, f"{who}: weights", world)
    )
    given_scales = [
        scale_bits(form, v, f"{who}: scales[{r}]")
        for r, v in enumerate([] if scales is None else per_rank(scales, f"{who}: scales", world))
    ]
    positions = None
    if full_scatter_indices is not None:
        positions = id_array(full_scatter_indices, topk, f"{who}: full_scatter_indices")
    copies = present_copies(present, world, spare["spare_experts"], f"{who}: present")
    made = _core.simulate_expert_dispatch(
        compiled,
        options,
        bits,
        token_dtype,
        id_arrays,
        weight_bits,
        given_scales,
        positions,
        copies,
    )
    return _result(config, form, made, native, weights_native, weights is not None)


def _result(
    config: EPConfig, form: Payload, made: Any, native: bool, weights_native: bool,
    has_weights: bool,
) -> ExpertDispatch:  # fmt: skip
    compiled, tokens, scales, weights, origins, layouts, tables = made
    dtype, weight_dtype = config.token_dtype_name, config.weight_dtype_name
    floats = [
        as_float(t, dtype, native) if form.is_plain else as_items(t, form.element_name)
        for t in tokens
    ]
    recv_weights = [as_float(w, weight_dtype, weights_native) for w in weights]
    return ExpertDispatch._with(
        _compiled=compiled,
        config=config,
        recv_tokens=floats,
        recv_scales=[shown_scales(form, bits) for bits in scales] if scales else None,
        recv_weights=recv_weights if has_weights else None,
        recv_origin=list(origins),
        layout=[EPAllToAllLayoutDesc(**layout) for layout in layouts],
        **tables,
    )


def simulate_expert_copies(slots: ArrayLike, weights: Sequence[Any]) -> List[AnyArray]:
    """The weights in all slots once copies have theirs from their homes.

    :param slots: integers ``[num_ranks, slots per rank]``, the expert of each slot, -1: empty;
        ``slots`` of ``even_experts``
    :param weights: ``[experts per rank, ...]`` per rank, of any dtype
    :returns: ``[slots per rank, ...]`` per rank: home experts as given, copies as their homes,
        zeros where a slot is empty
    :raises InvalidArgument: naming argument and rank
    """
    who = "simulate_expert_copies"
    table = _table(slots, who)
    home = _alike(weights, f"{who}: weights", len(table))
    first, num_slots = home[0], table.shape[1]
    row_bytes = first.nbytes // len(first) if len(first) else 0
    bits = [one.reshape(-1).view(np.uint8) for one in home]
    made = _core.simulate_expert_copies(table, len(first) * len(home), bits, row_bytes)
    shape = (num_slots, *first.shape[1:])
    return [one.view(np.uint8).view(first.dtype).reshape(shape) for one in made]


def simulate_expert_copy_gradients(
    slots: ArrayLike, gradients: Sequence[Any], copy_gradients: Sequence[Any]
) -> List[AnyArray]:
    """The gradients of the home experts once those of copies have come home.

    The sum of an expert begins with home's gradient; those of copies follow by rank. Sums are
    float32 (float64 for float64) and rounded once. An expert without copies stays as it is.

    :param slots: as in ``simulate_expert_copies``; leave out, as -1, copies without rows
    :param gradients: ``[experts per rank, ...]`` per rank: float32, float16, bfloat16 (as
        ``ml_dtypes.bfloat16``) or float64
    :param copy_gradients: ``[spare slots, ...]`` per rank: float32; float64 where gradients are.
        Empty slots are not read
    :returns: ``[experts per rank, ...]`` per rank, of the dtype of ``gradients``
    :raises InvalidArgument: naming argument and rank
    """
    who = "simulate_expert_copy_gradients"
    table = _table(slots, who)
    home = _alike(gradients, f"{who}: gradients", len(table))
    copies = _alike(copy_gradients, f"{who}: copy_gradients", len(table))
    dtypes = [home[0].dtype.name, copies[0].dtype.name]
    views: list[Any] = []
    for name, arrays in (("gradients", home), ("copy_gradients", copies)):
        dtype = arrays[0].dtype
        if dtype.name not in ("float32", "float16", "bfloat16", "float64"):
            raise InvalidArgument(f"{who}: {name} is {dtype}, expected floats")
        shape = (len(arrays[0]), math.prod(arrays[0].shape[1:]))
        views.append([one.reshape(shape).view(BITS[dtype.itemsize]) for one in arrays])
    num_experts = len(home[0]) * len(home)
    made = _core.simulate_expert_copy_gradients(table, num_experts, *views, *dtypes)
    return [one.view(home[0].dtype).reshape(home[0].shape) for one in made]


def _table(slots: Any, who: str) -> IntArray:
    table = index_array(slots, f"{who}: slots")
    if table.ndim != 2 or len(table) == 0:
        raise InvalidArgument(
            f"{who}: slots has shape {list(table.shape)}, expected [num_ranks, slots per rank]"
        )
    return table


def _alike(values: Any, name: str, world_size: int) -> List[AnyArray]:
    """An array per rank, of one shape and dtype, contiguous."""
    entries = per_rank(values, name, world_size)
    arrays = [np.ascontiguousarray(as_numpy(one, f"{name}[{r}]")) for r, one in enumerate(entries)]
    first = arrays[0]
    for r, one in enumerate(arrays):
        if one.ndim == 0 or one.shape != first.shape or one.dtype != first.dtype:
            raise InvalidArgument(
                f"{name}[{r}] is {one.dtype} of shape {list(one.shape)}, expected {first.dtype} of"
                f" shape {list(first.shape)}, as on rank 0, with an axis of experts"
            )
    return arrays
