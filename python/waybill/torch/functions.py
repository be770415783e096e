"""The functions of ``waybill`` for torch tensors. See there for what each returns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Optional,
    ParamSpec,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    overload,
)

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from .. import _core, routing, simulate
from .. import metadata as numpy_metadata
from .._arrays import flag, instance, int64, sequence
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
    payload,
    require_memory,
    require_tensor,
    say_no_gradients,
    tensor,
    tensors,
)

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
_P = ParamSpec("_P")
_R = TypeVar("_R")
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
        """The metadata for numpy; tensors of the CPU share their memory."""
        return numpy_metadata.Metadata(*self._values())

    @classmethod
    def from_numpy(cls: Type[_M], metadata: numpy_metadata.Metadata) -> _M:
        """Metadata of numpy for torch; arrays share their memory."""
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
    """Metadata of fields whose seven tables are DLPack capsules, or None."""
    tables: list[Any] = [None if table is None else from_dlpack(table) for table in fields[:7]]
    return Metadata(*tables, *fields[7:])._placed(device)


def as_torch(function: Callable[_P, _R], *places: str) -> Callable[_P, _R]:
    """A function of ``waybill`` that takes tensors where it takes arrays, and returns tensors.

    :param places: arguments; results lie where the first tensor among them lies, or on the host
    """
    return _adapted(
        function, host_array, lambda made, given: _placed(made, device_of(*map(given.get, places)))
    )


def _like_its_tensor(function: Callable[_P, Any]) -> Callable[_P, torch.Tensor]:
    """as_torch for a function whose result has the dtype and the device of its first argument."""

    def like_first(made: Any, given: dict[str, Any]) -> torch.Tensor:
        name, value = next(iter(given.items()))
        first = require_tensor(value, f"{function.__name__}: {name}")
        result: torch.Tensor = tensor(made, first.device)
        return result if _has_numpy(first) else result.to(first.dtype)

    return _adapted(function, _array, like_first)


def _adapted(function: Callable[..., Any], to_host: Any, from_host: Any) -> Callable[..., Any]:
    signature, who = inspect.signature(function), function.__name__

    @outside_graphs
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        given = dict(bound.arguments)
        for name, value in given.items():
            bound.arguments[name] = to_host(value, f"{who}: {name}")
        return from_host(function(*bound.args, **bound.kwargs), given)

    return call


def _placed(made: Any, device: Optional[torch.device]) -> Any:
    """Results of numpy's face as those of torch's."""
    if isinstance(made, numpy_metadata.Metadata):
        return metadata_of(made, device)
    if type(made) is tuple:
        return tuple(_placed(one, device) for one in made)
    return tensors(made, device)


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


if TYPE_CHECKING:  # the functions below as tensors see them
    _Sums = Tuple[Tuple[torch.Tensor, ...], Tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]

    @overload
    def compute_metadata_kv(
        kv_to_q_mapping: torch.Tensor, kv_to_q_rank: torch.Tensor, kv_context_size: torch.Tensor,
        q_to_num_kv_seq: torch.Tensor, q_to_num_kv_token: torch.Tensor, seq_len: torch.Tensor,
        num_seqs: torch.Tensor, q_dispatch: torch.Tensor,
        q_seq_to_dst: Optional[torch.Tensor] = ..., max_num_local_seqs: Optional[int] = ...,
        return_intermediate: Literal[False] = ...,
    ) -> Tuple[Metadata, Metadata]: ...  # fmt: skip
    @overload
    def compute_metadata_kv(
        kv_to_q_mapping: torch.Tensor, kv_to_q_rank: torch.Tensor, kv_context_size: torch.Tensor,
        q_to_num_kv_seq: torch.Tensor, q_to_num_kv_token: torch.Tensor, seq_len: torch.Tensor,
        num_seqs: torch.Tensor, q_dispatch: torch.Tensor,
        q_seq_to_dst: Optional[torch.Tensor] = ..., max_num_local_seqs: Optional[int] = ...,
        return_intermediate: bool = ...,
    ) -> Tuple[Any, ...]: ...  # fmt: skip
    def compute_metadata_kv(*args: Any, **options: Any) -> Any: ...

    @overload
    def compute_e2e_metadata(
        mlp_seq_len: torch.Tensor, mlp_num_seqs: torch.Tensor, mlp_q_dispatch: torch.Tensor,
        kv_to_q_mapping: torch.Tensor, kv_to_q_rank: torch.Tensor, kv_context_size: torch.Tensor,
        q_to_num_kv_seq: torch.Tensor, q_to_num_kv_token: torch.Tensor,
        return_intermediate: Literal[False] = ...,
    ) -> Tuple[Metadata, Metadata, Metadata, Metadata, _Sums]: ...  # fmt: skip
    @overload
    def compute_e2e_metadata(
        mlp_seq_len: torch.Tensor, mlp_num_seqs: torch.Tensor, mlp_q_dispatch: torch.Tensor,
        kv_to_q_mapping: torch.Tensor, kv_to_q_rank: torch.Tensor, kv_context_size: torch.Tensor,
        q_to_num_kv_seq: torch.Tensor, q_to_num_kv_token: torch.Tensor,
        return_intermediate: bool = ...,
    ) -> Tuple[Any, ...]: ...  # fmt: skip
    def compute_e2e_metadata(*args: Any, **options: Any) -> Any: ...
else:
    compute_metadata_kv = as_torch(routing.compute_metadata_kv, "kv_to_q_mapping", "q_dispatch")
    compute_e2e_metadata = as_torch(routing.compute_e2e_metadata, "mlp_q_dispatch", "mlp_seq_len")
compute_attn_layout_seqlens = as_torch(routing.compute_attn_layout_seqlens, "dispatch")
create_qkv_dispatch_with_custom_mapping = as_torch(routing.create_qkv_dispatch_with_custom_mapping)
exclusive_cumsum = _like_its_tensor(routing.exclusive_cumsum)
prepend_zero = _like_its_tensor(routing.prepend_zero)
prepend_zero_fn = prepend_zero
mask_by_neg = _like_its_tensor(routing.mask_by_neg)
index_put_with_neg_padding_1d = _like_its_tensor(routing.index_put_with_neg_padding_1d)


@overload
def compute_metadata(
    seq_len: torch.Tensor, global_dispatch: torch.Tensor, return_intermediate: Literal[False] = ...,
    *, undispatched: str = ...,
) -> Tuple[Metadata, Metadata]: ...  # fmt: skip
@overload
def compute_metadata(
    seq_len: torch.Tensor, global_dispatch: torch.Tensor, return_intermediate: Literal[True], *,
    undispatched: str = ...,
) -> Tuple[Metadata, Metadata, Tuple[torch.Tensor, torch.Tensor, torch.Tensor]]: ...  # fmt: skip
@overload
def compute_metadata(
    seq_len: torch.Tensor, global_dispatch: torch.Tensor, return_intermediate: bool, *,
    undispatched: str = ...,
) -> Tuple[Any, ...]: ...  # fmt: skip
@outside_graphs
def compute_metadata(
    seq_len: torch.Tensor,
    global_dispatch: torch.Tensor,
    return_intermediate: bool = False,
    *,
    undispatched: str = "reject",
) -> Tuple[Any, ...]:
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
def plan_metadata(plan: Union[QkvPlan, AttentionPlan], device: Any = None) -> QkvMetadata:
    """``plan.to_metadata()`` with tensors, on ``device``."""
    instance(plan, (QkvPlan, AttentionPlan), "plan_metadata: plan", "a QkvPlan or AttentionPlan")
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
            routing.gen_seq_lens(world_size, num_seqs, total_len)
        uniforms = torch.rand((world_size, num_seqs))
    draws = None if uniforms is None else host_array(uniforms, "gen_seq_lens: uniforms")
    return tensor(routing.gen_seq_lens(world_size, num_seqs, total_len, seed, draws))


@outside_graphs
def create_raw_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_mlp_no_shard_seq_lens: bool = False, seed: Optional[int] = None,
) -> RawQkvDispatch:  # fmt: skip
    """A random plan: each sequence is cut into a power of two of shards for different ranks."""
    who = "create_raw_qkv_dispatch"
    sizes = (world_size, total_seq_len, num_seqs, max_cp_degree)
    if seed is not None:
        raw = routing.create_raw_qkv_dispatch(*sizes, return_mlp_no_shard_seq_lens, seed)
    else:
        asked = flag(return_mlp_no_shard_seq_lens, f"{who}: return_mlp_no_shard_seq_lens")
        tables, seq_lens = _drawn(who, *sizes)
        raw = RawQkvDispatch._make((*tables, (seq_lens,) if asked else ()))
    return tensors(raw)


@overload
def create_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_intermediate: Literal[False] = ..., return_mlp_no_shard_seq_lens: Literal[False] = ...,
    seed: Optional[int] = ...,
) -> Tuple[Metadata, Metadata, Metadata, Metadata, AttnLayout]: ...  # fmt: skip
@overload
def create_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_intermediate: bool = ..., return_mlp_no_shard_seq_lens: bool = ...,
    seed: Optional[int] = ...,
) -> Tuple[Any, ...]: ...  # fmt: skip
@outside_graphs
def create_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int,
    return_intermediate: bool = False, return_mlp_no_shard_seq_lens: bool = False,
    seed: Optional[int] = None,
) -> Tuple[Any, ...]:  # fmt: skip
    """A random plan with all its metadata: (fwd_q, rev_q, fwd_k, rev_k, attention layout, ...)."""
    who = "create_qkv_dispatch"
    sizes = (world_size, total_seq_len, num_seqs, max_cp_degree)
    asked = (return_intermediate, return_mlp_no_shard_seq_lens)
    if seed is not None:
        return _placed(routing.create_qkv_dispatch(*sizes, *asked, seed), None)
    more = routing.asked_for(who, *asked)
    raw, seq_lens = _drawn(who, *sizes)
    result = routing.dispatch_of_raw(raw, more[0])
    return _placed((*result, *((seq_lens,) if more[1] else ())), None)


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
        getattr(routing, who)(world_size, total_seq_len, num_seqs, max_cp_degree)
    seq_lens = gen_seq_lens(world_size, num_seqs, total_seq_len // max_cp_degree).long()
    seq_lens *= max_cp_degree
    log_degree = torch.randint(0, max_cp_degree.bit_length(), (world_size, num_seqs))
    order = torch.rand((world_size, num_seqs, world_size)).argsort(dim=2)
    raw, lens, _ = _core.create_raw_qkv_dispatch_from(
        seq_lens.numpy(), torch.pow(2, log_degree).numpy(),
        order[:, :, :max_cp_degree].contiguous().numpy(),
    )  # fmt: skip
    return raw, lens


_WHO = "orchestrate_simulate"
_INSTEAD = "ContextParallelAttention is known to autograd"


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
    source: torch.Tensor, output: torch.Tensor, metadata: numpy_metadata.Metadata, overlap: str
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
