"""The functions of ``waybill`` for torch tensors. See there for what each returns."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence, Tuple, Type, TypeVar, Union

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from .. import _core, routing, simulate
from .. import metadata as numpy_metadata
from .. import routing as generators
from .. import routing as index_ops
from .._arrays import flag, int64, sequence
from .._graphs import outside_graphs
from ..errors import InvalidArgument, ShapeMismatch
from ..metadata import AttnLayout, PackedSeqParams, QkvMetadata, RawQkvDispatch
from ..planner import AttentionPlan
from ..plans import QkvPlan
from ._tensors import (
    bits_of,
    device_of,
    dtype_name,
    host_array,
    on_host,
    payload,
    require_memory,
    require_tensor,
    say_no_gradients,
    tensor,
    tensors,
)
from ._tensors import tensor as as_tensor

__all__ = [
    "Metadata",
    "compute_attn_layout_seqlens",
    "compute_e2e_metadata",
    "compute_metadata",
    "compute_metadata_kv",
    "create_qkv_dispatch",
    "create_qkv_dispatch_with_custom_mapping",
    "create_raw_qkv_dispatch",
    "exclusive_cumsum",
    "gen_seq_lens",
    "index_put_with_neg_padding_1d",
    "mask_by_neg",
    "mlp_layout_packed_params",
    "orchestrate_simulate",
    "plan_metadata",
    "prepend_zero",
    "prepend_zero_fn",
    "simulate_communication",
    "sum_kv_copies",
]


_M = TypeVar("_M", bound="Metadata")
# torch writes pickles of tensors without a sign that it does not read: they travel as these.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclasses.dataclass(eq=False, repr=False)
class Metadata(numpy_metadata.Metadata):
    """``waybill.Metadata`` of torch tensors; results lie on the device of dst_rank."""

    @outside_graphs
    def get_slice(self: _M, rank: int) -> _M:
        """The lines of one rank, without those that move nothing."""
        return super().get_slice(rank)._placed(self.device)

    @outside_graphs
    def normalize_dtype(self: _M) -> _M:
        """The dtypes of device tables: int32 ranks, uint32 offsets and lengths, uint64 counts."""
        return super().normalize_dtype()._placed(self.device)

    def cuda(self: _M, device: Any = None) -> _M:
        """Every tensor on the current (or given) GPU, contiguous."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to(torch.device("cuda") if device is None else device)

    def cpu(self: _M) -> _M:
        """Every tensor in host memory, contiguous."""
        return self.to(torch.device("cpu"))

    def to(self: _M, device: Any) -> _M:
        """Every tensor on ``device``, contiguous."""
        return self._map(lambda t: t.to(device).contiguous())

    @outside_graphs
    def numpy(self) -> numpy_metadata.Metadata:
        """The same for numpy; tensors of the CPU share their memory."""
        return numpy_metadata.Metadata(*self._values())

    @classmethod
    def from_numpy(cls: Type[_M], metadata: numpy_metadata.Metadata) -> _M:
        """The same for torch; arrays share their memory."""
        return cls._from_fields(metadata._values())

    @property
    def device(self) -> Optional[torch.device]:
        """Where dst_rank lies."""
        return device_of(self.dst_rank)

    def __getstate__(self) -> dict[str, Any]:
        dtypes = {n: v.dtype for n, v in vars(self).items() if isinstance(v, torch.Tensor)}
        unsigned = {n: dtype for n, dtype in dtypes.items() if dtype in _SIGNED}
        bits = {n: getattr(self, n).view(_SIGNED[dtype]) for n, dtype in unsigned.items()}
        return {"fields": {**vars(self), **bits}, "unsigned": unsigned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["fields"])
        for name, dtype in state["unsigned"].items():
            setattr(self, name, getattr(self, name).view(dtype))

    def _placed(self: _M, device: Optional[torch.device]) -> _M:
        return self if device is None or device.type == "cpu" else self.to(device)

    def _map(self: _M, change: Any) -> _M:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self)(
            **{n: change(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        )

    @staticmethod
    def _host(value: Any) -> Any:
        return host_array(value)

    @classmethod
    def _from_fields(cls: Type[_M], fields: Tuple[Any, ...]) -> _M:
        return cls(*[tensor(f) if isinstance(f, np.ndarray) else f for f in fields])


def metadata_of(
    metadata: numpy_metadata.Metadata, device: Optional[torch.device] = None
) -> Metadata:
    """A function's result, whose fields are arrays already, on the device of its inputs."""
    return Metadata._from_fields(tuple(vars(metadata).values()))._placed(device)


def metadata_over(fields: Tuple[Any, ...], device: Optional[torch.device]) -> Metadata:
    """The same of fields whose seven tables are DLPack capsules, or None."""
    tables: list[Any] = [None if table is None else from_dlpack(table) for table in fields[:7]]
    return Metadata(*tables, *fields[7:])._placed(device)


@outside_graphs
def compute_metadata(
    seq_len: torch.Tensor,
    global_dispatch: torch.Tensor,
    return_intermediate: bool = False,
    *,
    undispatched: str = "reject",
) -> Any:
    """Routing of Q, or of any tensor whose shards go to one or several ranks.

    seq_len (W, S), global_dispatch (W, S) or (W, S, C), integers. The forward metadata holds these
    very tensors where they are int64.
    """
    device = device_of(global_dispatch, seq_len)
    own_lens, own_dispatch = _is_int64(seq_len), _is_int64(global_dispatch)
    fwd, rev, intermediates = routing._fields_of_both(
        host_array(seq_len, "compute_metadata: seq_len"),
        host_array(global_dispatch, "compute_metadata: global_dispatch"),
        return_intermediate, undispatched, True, own_lens, own_dispatch,
    )  # fmt: skip
    forward, reverse = metadata_over(fwd, device), metadata_over(rev, device)
    if own_lens:
        forward.seq_len = seq_len
        if reverse.seq_recv_mask is not None:
            reverse.recv_seq_lens = seq_len
    if own_dispatch:
        forward.dst_rank = global_dispatch
    if return_intermediate:
        return forward, reverse, tensors(intermediates, device)
    return forward, reverse


@outside_graphs
def compute_metadata_kv(
    kv_to_q_mapping: torch.Tensor,
    kv_to_q_rank: torch.Tensor,
    kv_context_size: torch.Tensor,
    q_to_num_kv_seq: torch.Tensor,
    q_to_num_kv_token: torch.Tensor,
    seq_len: torch.Tensor,
    num_seqs: torch.Tensor,
    q_dispatch: torch.Tensor,
    q_seq_to_dst: Any = None,
    max_num_local_seqs: Any = None,
    return_intermediate: bool = False,
) -> Any:
    """Routing of K and V when each query keeps a contiguous copy of its whole context."""
    device = device_of(kv_to_q_mapping, q_dispatch)
    tables = (
        kv_to_q_mapping, kv_to_q_rank, kv_context_size, q_to_num_kv_seq, q_to_num_kv_token,
        seq_len, num_seqs, q_dispatch,
    )  # fmt: skip
    fwd, rev, *rest = on_host(
        routing.compute_metadata_kv, *tables,
        q_seq_to_dst=q_seq_to_dst,
        max_num_local_seqs=max_num_local_seqs, return_intermediate=return_intermediate,
    )  # fmt: skip
    forward, reverse = metadata_of(fwd, device), metadata_of(rev, device)
    return (forward, reverse, *tensors(tuple(rest), device))


@outside_graphs
def compute_attn_layout_seqlens(
    seq_shard_len: torch.Tensor,
    seq_shard_cumsum: torch.Tensor,
    dispatch: torch.Tensor,
    prepend_zero: bool = True,
    shard_to_tuple: bool = False,
) -> AttnLayout:
    """Sequence lengths of Q and of its KV context in the attention layout of every rank."""
    who = "compute_attn_layout_seqlens"
    layout = routing.compute_attn_layout_seqlens(
        host_array(seq_shard_len, f"{who}: seq_shard_len"),
        host_array(seq_shard_cumsum, f"{who}: seq_shard_cumsum"),
        host_array(dispatch, f"{who}: dispatch"), prepend_zero, shard_to_tuple,
    )  # fmt: skip
    result: AttnLayout = tensors(layout, device_of(dispatch))
    return result


@outside_graphs
def mlp_layout_packed_params(seq_lens: torch.Tensor) -> PackedSeqParams:
    """Arguments of variable-length attention in the MLP layout of one rank; seq_lens (n,) rows."""
    params = routing.mlp_layout_packed_params(
        host_array(seq_lens, "mlp_layout_packed_params: seq_lens")
    )
    device = device_of(seq_lens)
    cu_seqlens = tensor(params.cu_seqlens_q, device)
    dtype = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else torch.int64
    longest = torch.tensor(int(params.max_seqlen_q), dtype=dtype, device=device)
    return PackedSeqParams(params.qkv_format, cu_seqlens, cu_seqlens, longest, longest)


@outside_graphs
def compute_e2e_metadata(
    mlp_seq_len: torch.Tensor,
    mlp_num_seqs: torch.Tensor,
    mlp_q_dispatch: torch.Tensor,
    kv_to_q_mapping: torch.Tensor,
    kv_to_q_rank: torch.Tensor,
    kv_context_size: torch.Tensor,
    q_to_num_kv_seq: torch.Tensor,
    q_to_num_kv_token: torch.Tensor,
    return_intermediate: bool = False,
) -> Tuple[Any, ...]:
    """compute_metadata, compute_metadata_kv and compute_attn_layout_seqlens in one call."""
    device = device_of(mlp_q_dispatch, mlp_seq_len)
    tables = (
        mlp_seq_len, mlp_num_seqs, mlp_q_dispatch, kv_to_q_mapping, kv_to_q_rank, kv_context_size,
        q_to_num_kv_seq, q_to_num_kv_token,
    )  # fmt: skip
    fwd_q, rev_q, fwd_kv, rev_kv, *rest = on_host(
        routing.compute_e2e_metadata, *tables, return_intermediate=return_intermediate
    )
    four = (metadata_of(m, device) for m in (fwd_q, rev_q, fwd_kv, rev_kv))
    return (*four, *tensors(tuple(rest), device))


@outside_graphs
def plan_metadata(plan: Union[QkvPlan, AttentionPlan], device: Any = None) -> QkvMetadata:
    """``plan.to_metadata()`` with tensors, on ``device``."""
    if not isinstance(plan, (QkvPlan, AttentionPlan)):
        raise InvalidArgument(
            f"plan_metadata: plan is a {type(plan).__name__}, expected a QkvPlan or AttentionPlan"
        )
    where = None if device is None else torch.device(device)
    *four, layout = plan.to_metadata()
    fwd_q, rev_q, fwd_kv, rev_kv = (metadata_of(m, where) for m in four)
    return QkvMetadata(fwd_q, rev_q, fwd_kv, rev_kv, tensors(layout, where))


def _is_int64(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64


@outside_graphs
def gen_seq_lens(
    world_size: int,
    num_seqs: int,
    total_len: int,
    seed: Optional[int] = None,
    uniforms: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Random sequence lengths: (world_size, num_seqs) int32, every row sums to total_len."""
    if seed is None and uniforms is None:
        world_size, num_seqs, total_len = (
            int64(value, f"gen_seq_lens: {name}")
            for name, value in (
                ("world_size", world_size), ("num_seqs", num_seqs), ("total_len", total_len)
            )
        )  # fmt: skip
        in_range = 1 <= world_size <= 2**20 and num_seqs >= 1 and 0 <= total_len < 2**31
        if not in_range or world_size * num_seqs >= 2**31:  # an error, before anything is drawn
            generators.gen_seq_lens(world_size, num_seqs, total_len)
        uniforms = torch.rand((world_size, num_seqs))
    draws = None if uniforms is None else host_array(uniforms, "gen_seq_lens: uniforms")
    result: torch.Tensor = tensor(
        generators.gen_seq_lens(world_size, num_seqs, total_len, seed, draws)
    )
    return result


@outside_graphs
def create_raw_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> RawQkvDispatch:
    """A random plan: each sequence is cut into a power of two of shards for different ranks."""
    who = "create_raw_qkv_dispatch"
    sizes = (world_size, total_seq_len, num_seqs, max_cp_degree)
    if seed is not None:
        raw = generators.create_raw_qkv_dispatch(*sizes, return_mlp_no_shard_seq_lens, seed)
    else:
        asked = flag(return_mlp_no_shard_seq_lens, f"{who}: return_mlp_no_shard_seq_lens")
        tables, seq_lens = _drawn(who, *sizes)
        raw = RawQkvDispatch._make((*tables, (seq_lens,) if asked else ()))
    result: RawQkvDispatch = tensors(raw)
    return result


@outside_graphs
def create_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> Tuple[Any, ...]:
    """A random plan with all its metadata: (fwd_q, rev_q, fwd_k, rev_k, attention layout, ...)."""
    who = "create_qkv_dispatch"
    sizes = (world_size, total_seq_len, num_seqs, max_cp_degree)
    asked = (return_intermediate, return_mlp_no_shard_seq_lens)
    if seed is not None:
        return _with_tensors(generators.create_qkv_dispatch(*sizes, *asked, seed))
    more = generators.asked_for(who, *asked)
    raw, seq_lens = _drawn(who, *sizes)
    result = generators.dispatch_of_raw(raw, more[0])
    return _with_tensors((*result, *((seq_lens,) if more[1] else ())))


@outside_graphs
def create_qkv_dispatch_with_custom_mapping(
    world_size: int,
    seq_lens: torch.Tensor,
    cp_num: torch.Tensor,
    cp_dst: torch.Tensor,
    seq_shard_lens: torch.Tensor,
    return_intermediate: bool = False,
    return_mlp_no_shard_seq_lens: bool = False,
    verbose: bool = False,
) -> Tuple[Any, ...]:
    """The same for given shards, which may be uneven and share destinations."""
    result = on_host(
        generators.create_qkv_dispatch_with_custom_mapping,
        world_size,
        seq_lens,
        cp_num,
        cp_dst,
        seq_shard_lens,
        return_intermediate=return_intermediate,
        return_mlp_no_shard_seq_lens=return_mlp_no_shard_seq_lens,
        verbose=verbose,
    )
    return _with_tensors(result)


def _with_tensors(result: Tuple[Any, ...]) -> Tuple[Any, ...]:
    return (*(metadata_of(m) for m in result[:4]), *tensors(result[4:]))


def _drawn(
    who: str, world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int
) -> Tuple[Any, Any]:
    """The eight tables and the lengths before sharding, drawn for the function ``who``."""
    names = ("world_size", "total_seq_len", "num_seqs", "max_cp_degree")
    world_size, total_seq_len, num_seqs, max_cp_degree = (
        int64(value, f"{who}: {name}")
        for name, value in zip(names, (world_size, total_seq_len, num_seqs, max_cp_degree))
    )
    in_range = (
        1 <= max_cp_degree <= world_size <= 2**20
        and 0 <= total_seq_len // max_cp_degree < 2**31
        and 1 <= num_seqs < 2**31 // world_size
    )
    if not in_range or total_seq_len % max_cp_degree:  # an error, before anything is drawn
        getattr(generators, who)(world_size, total_seq_len, num_seqs, max_cp_degree)
    seq_lens = gen_seq_lens(world_size, num_seqs, total_seq_len // max_cp_degree).long()
    seq_lens *= max_cp_degree
    log_degree = torch.randint(0, max_cp_degree.bit_length(), (world_size, num_seqs))
    order = torch.rand((world_size, num_seqs, world_size)).argsort(dim=2)
    raw, lens, _ = _core.create_raw_qkv_dispatch_from(
        seq_lens.numpy(), torch.pow(2, log_degree).numpy(),
        order[:, :, :max_cp_degree].contiguous().numpy(),
    )  # fmt: skip
    return raw, lens


@outside_graphs
def exclusive_cumsum(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Prefix sums along ``dim``, shifted by one: the first slice is 0, the last never enters.
    int64 of integers; floats keep their dtype.
    """
    value = require_tensor(tensor, "exclusive_cumsum: tensor")
    return _like(value, index_ops.exclusive_cumsum(_array(value, "exclusive_cumsum: tensor"), dim))


@outside_graphs
def prepend_zero(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """One slice of zeros in front along ``dim``; the dtype is kept."""
    value = require_tensor(tensor, "prepend_zero: tensor")
    return _like(value, index_ops.prepend_zero(_array(value, "prepend_zero: tensor"), dim))


prepend_zero_fn = prepend_zero


@outside_graphs
def mask_by_neg(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``tensor`` where ``mask`` is true (not 0), -1 elsewhere; broadcast, and of the dtype of
    ``tensor``, or int64 where that cannot hold -1.
    """
    value = require_tensor(tensor, "mask_by_neg: tensor")
    given = _array(value, "mask_by_neg: tensor"), _array(mask, "mask_by_neg: mask")
    return _like(value, index_ops.mask_by_neg(*given))


@outside_graphs
def index_put_with_neg_padding_1d(
    tensor: torch.Tensor, src: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """A copy of ``tensor`` with ``tensor[index[i]] = src[i]``, in order; index -1 is dropped."""
    who = "index_put_with_neg_padding_1d"
    value = require_tensor(tensor, f"{who}: tensor")
    given = (("tensor", value), ("src", src), ("index", index))
    arrays = (_array(one, f"{who}: {name}") for name, one in given)
    return _like(value, index_ops.index_put_with_neg_padding_1d(*arrays))


def _has_numpy(value: Any) -> bool:
    """Not bfloat16 nor the floats of 8 bits, of which float32 holds all values."""
    return not value.is_floating_point() or value.dtype in (
        torch.float16,
        torch.float32,
        torch.float64,
    )


def _array(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and not _has_numpy(value):
        value = value.float()
    return host_array(value, name)


def _like(value: torch.Tensor, result: Any) -> torch.Tensor:
    """The result on the device of the argument, in its dtype where numpy has none for it."""
    made: torch.Tensor = as_tensor(result, value.device)
    return made if _has_numpy(value) else made.to(value.dtype)


_WHO = "orchestrate_simulate"
_INSTEAD = "AttentionStep is known to autograd"


@outside_graphs
def orchestrate_simulate(
    tensor: torch.Tensor,
    output_tensor: torch.Tensor,
    metadata: numpy_metadata.Metadata,
    *,
    overlap: str = "last_wins",
    num_threads: int = 0,
) -> torch.Tensor:
    """Moves rows between ranks as ``metadata`` says; returns ``output_tensor``, written in place.

    tensor (W, n, H) and output_tensor (W, m, H) have one dtype, any of torch's, and lie on one
    device: in host memory the compiled part copies, on a GPU one gather and scatter does. As in the
    original no gradients flow through it; it warns where a tensor requires them.
    """
    overlap = simulate.checked_overlap(overlap, _WHO)
    say_no_gradients(_WHO, _INSTEAD, tensor, output_tensor)
    source = require_memory(tensor, f"{_WHO}: tensor")
    output = require_memory(output_tensor, f"{_WHO}: output_tensor")
    if source.device != output.device:
        raise ShapeMismatch(
            f"{_WHO}: output_tensor lies on {output.device}, expected {source.device}, that of"
            " tensor"
        )
    if source.device.type == "cpu":
        simulate.run_simulation(
            *payload(source, f"{_WHO}: tensor"), *payload(output, f"{_WHO}: output_tensor"),
            metadata, overlap, num_threads,
        )  # fmt: skip
    else:
        _on_device(source, output, metadata, overlap)
    return output_tensor


def _on_device(
    source: torch.Tensor,
    output: torch.Tensor,
    metadata: numpy_metadata.Metadata,
    overlap: str,
) -> None:
    """The plan becomes a gather on the host; the rows never leave the device."""
    if source.dtype != output.dtype:
        raise ShapeMismatch(
            f"{_WHO}: output_tensor has dtype {dtype_name(output.dtype)}, expected"
            f" {dtype_name(source.dtype)}, that of tensor"
        )
    rows = simulate.source_rows(source.shape, output.shape, metadata, overlap=overlap)
    if 0 in (source.numel(), output.numel()):
        return
    if source.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
        raise ShapeMismatch(
            f"{_WHO}: output_tensor shares memory with tensor, expected memory of its own"
        )
    flat = torch.from_numpy(rows.reshape(-1))
    moved = flat >= 0
    to = moved.nonzero().squeeze(1).to(source.device)
    from_ = flat[moved].to(source.device)
    n, m = source.shape[1], output.shape[1]
    bits_of(output, _WHO)[to // m, to % m] = bits_of(source, _WHO)[from_ // n, from_ % n]


@outside_graphs
def simulate_communication(
    tensors: Sequence[torch.Tensor],
    metadata: numpy_metadata.Metadata,
    *,
    overlap: str = "last_wins",
) -> list[torch.Tensor]:
    """orchestrate_simulate for ranks with different numbers of rows; new tensors (R_w, ...)."""
    overlap = simulate.checked_overlap(overlap, "simulate_communication")
    sequence(tensors, "simulate_communication: tensors", "one tensor for each rank")
    given = [
        require_memory(t, f"simulate_communication: tensors[{i}]") for i, t in enumerate(tensors)
    ]
    devices = {t.device for t in given}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ShapeMismatch(f"simulate_communication: tensors lie on {names}, expected one device")
    say_no_gradients("simulate_communication", _INSTEAD, *given)
    flat = [simulate.as_matrix(t.detach().cpu()) for t in given]
    received = simulate.run_communication(
        [payload(t, "simulate_communication: tensors")[0] for t in flat],
        [dtype_name(t.dtype) for t in given], metadata, overlap,
    )  # fmt: skip
    return [
        torch.from_numpy(rows).view(t.dtype).reshape(rows.shape[0], *t.shape[1:]).to(t.device)
        for rows, t in zip(received, given)
    ]


@outside_graphs
def sum_kv_copies(
    planes: torch.Tensor,
    metadata: numpy_metadata.Metadata,
    rank: int,
    output: Optional[torch.Tensor] = None,
    num_threads: int = 0,
) -> torch.Tensor:
    """Sums the gradients of the copies of a rank's K (or V) rows after the reverse dispatch."""
    source = require_memory(planes, "sum_kv_copies: planes")
    if source.device.type != "cpu":
        raise InvalidArgument(f"sum_kv_copies: planes lie on {source.device}, expected host memory")
    if output is None:
        rows = simulate.gradient_rows(source.shape, metadata, rank)
        output = torch.empty((rows, *source.shape[1:]), dtype=source.dtype)
    target = require_memory(output, "sum_kv_copies: output")
    if target.device.type != "cpu":
        raise InvalidArgument(
            f"sum_kv_copies: output lies on {target.device}, expected host memory"
        )
    simulate.run_sum(
        *payload(source, "sum_kv_copies: planes"), *payload(target, "sum_kv_copies: output"),
        metadata, rank, num_threads,
    )  # fmt: skip
    return output
