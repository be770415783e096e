"""Dispatch and combine of all ranks in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from .. import _core
from .._arrays import AnyArray, IntArray, flag, sequence
from .._copies import OfThisProcess
from .._errors import said_by
from ..errors import InvalidArgument
from . import arrays
from .arrays import as_float, as_float8, ids, payloads, per_rank
from .config import EPConfig


@dataclass
class EPAllToAllLayoutDesc:
    """What a rank must know of a dispatch to combine: int32 but for the two maps, which are int64.

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
    recv_expert_counts: Optional[Any] = None  #: [P] rows of each local expert, without padding
    recv_expert_offsets: Optional[Any] = None  #: [P + 1] first rows, with padding
    recv_topk_indices: Optional[Any] = None  #: compact rows: [R, K] local experts, -1
    compact_to_grouped: Optional[Any] = None  #: compact rows: [R, K] places in the grouped order
    grouped_to_compact: Optional[Any] = None  #: compact rows: [grouped rows] compact row, -1
    #: of layers: [R, 4] source rank, token, topk slot and first row of the token; -1 for padding
    recv_tags: Optional[Any] = None
    num_recv_tokens_per_rank: Optional[Any] = None  #: of layers: [W] rows that each rank received
    recv_scales: Optional[Any] = None  #: of layers with a float8 payload: [R, hidden / 128]


class ExpertDispatch(OfThisProcess):
    """What ``simulate_dispatch`` gives: one entry per rank in every list."""

    _why_not_copied = "compiled tables: simulate_dispatch makes it again; its arrays can be"
    config: EPConfig
    recv_tokens: List[AnyArray]  #: [R, hidden]
    recv_weights: Optional[List[AnyArray]]  #: [R]; of compact rows [R, topk]
    recv_scales: Optional[List[AnyArray]]  #: [R, hidden / 128] float32, of a float8 payload
    recv_origin: List[IntArray]  #: [R, 3]: source rank, token, topk slot; -1 for padding
    layout: List[EPAllToAllLayoutDesc]
    splits: IntArray  #: [W, E + 1] topk slots of each expert by source; the last column is dropped
    num_input_tokens_per_rank: IntArray  #: [W]
    num_recv_tokens_per_rank: IntArray  #: [W] rows of each output
    recv_buf_offset_per_expert: IntArray  #: [W, P, W source] first rows
    traffic: Dict[str, IntArray]  #: payloads that cross links

    def __init__(self) -> None:
        raise InvalidArgument("ExpertDispatch: got a constructor call, expected simulate_dispatch")

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

    _compiled: Any


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
) -> ExpertDispatch:
    """Dispatches the tokens of all ranks. Rows and their order are always the same.

    :param tokens: [T, hidden] a rank: token_dtype (bfloat16 as ml_dtypes.bfloat16), or float32
        arrays, which are rounded where it cannot hold them; what comes back is of the same kind
    :param exp_indices: [T, topk] a rank, int32 or int64
    :param weights: [T, topk] a rank; each travels with its topk slot
    :param full_scatter_indices: [sum of T, topk] positions in the outputs of all ranks, one after
        the other; without it the order is local expert, source rank, token, topk slot
    :param scales: with "scaled": [T, hidden / 128] float32 a rank
    :param dropped_id: the id of a topk slot that goes nowhere: num_experts, or -1
    :param rows: "grouped", a row per topk slot; "compact", a row per token and rank
    :param expert_alignment: rows of each local expert padded to a multiple, with zeros
    :param payload: "plain"; "quantized": sent as float8 e4m3 with scales; "scaled": given so
    :raises InvalidArgument: naming argument and rank, before anything is moved
    """
    who = "simulate_dispatch"
    if not isinstance(config, EPConfig):
        raise InvalidArgument(f"{who}: config is a {type(config).__name__}, expected an EPConfig")
    config, compiled = config._for_use()
    world, hidden, topk = config.world_size, config.hidden, config.topk
    with said_by(who):
        options = _core.ep_dispatch_options(compiled, dropped_id, rows, expert_alignment, payload)
    scaled = payload == "scaled"
    token_dtype = "float8_e4m3fn" if scaled else config.token_dtype_name
    if scaled:
        entries = per_rank(tokens, f"{who}: tokens", world)
        bits = [arrays.float8_bits(v, hidden, f"{who}: tokens[{r}]") for r, v in enumerate(entries)]
        native = False
    else:
        bits, native = payloads(tokens, token_dtype, hidden, f"{who}: tokens", world)
    id_arrays = [
        ids(v, topk, f"{who}: exp_indices[{r}]")
        for r, v in enumerate(per_rank(exp_indices, f"{who}: exp_indices", world))
    ]
    weight_bits, weights_native = (
        ([], False)
        if weights is None
        else payloads(weights, config.weight_dtype_name, topk, f"{who}: weights", world)
    )
    scale_bits = [
        arrays.payload(v, "float32", hidden // 128, f"{who}: scales[{r}]")[0]
        for r, v in enumerate([] if scales is None else per_rank(scales, f"{who}: scales", world))
    ]
    positions = None
    if full_scatter_indices is not None:
        positions = ids(full_scatter_indices, topk, f"{who}: full_scatter_indices")
    made = _core.simulate_expert_dispatch(
        compiled, options, bits, token_dtype, id_arrays, weight_bits, scale_bits, positions
    )
    return _result(config, made, native, weights_native, weights is not None)


def _result(
    config: EPConfig, made: Any, native: bool, weights_native: bool, has_weights: bool
) -> ExpertDispatch:
    compiled, tokens, scales, weights, origins, layouts, tables = made
    self = ExpertDispatch.__new__(ExpertDispatch)
    self._compiled = compiled
    self.config = config
    if scales:
        self.recv_tokens = [as_float8(bits) for bits in tokens]
        self.recv_scales = [bits.view(np.float32) for bits in scales]
    else:
        self.recv_tokens = [as_float(bits, config.token_dtype_name, native) for bits in tokens]
        self.recv_scales = None
    self.recv_weights = None
    if has_weights:
        name = config.weight_dtype_name
        self.recv_weights = [as_float(bits, name, weights_native) for bits in weights]
    self.recv_origin = list(origins)
    self.layout = [EPAllToAllLayoutDesc(**layout) for layout in layouts]
    for name, table in tables.items():
        setattr(self, name, table)
    return self
