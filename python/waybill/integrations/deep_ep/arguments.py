"""Arguments of calls, checked before any communication; formats of rows; sizes of buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, List, NamedTuple, Optional, Tuple

import torch

from ... import _core
from ..._arrays import at_least, converted, flag, instance, int64
from ...errors import InvalidArgument, Unsupported
from ...moe.payloads import Payload, payload_of
from ...torch._tensors import require_known_ids
from ...torch.experts.layer import torch_name
from ...world import World

COUNTS = (torch.int32, torch.int64)
_PACK = torch.int32  #: holds four scales of a byte, the first in the lowest bits


class Rows(NamedTuple):
    """The rows of a dispatch, and the layer's payload for them."""

    x: torch.Tensor
    scales: Optional[torch.Tensor]
    payload: str
    held_dtype: Optional[torch.dtype] = None  #: dtype in which the layer takes the scales

    def held(self) -> Optional[torch.Tensor]:
        """Scales as the layer takes them. On the buffer's stream, as it may copy them."""
        if self.scales is None or self.held_dtype is None:
            return None
        return self.scales.contiguous().view(self.held_dtype)

    def shown(self, scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Scales that a layer has received, as the caller has them."""
        if scales is None or self.scales is None:
            return None
        return scales.view(self.scales.dtype)


def _formats_of(x: torch.Tensor) -> Iterator[Payload]:
    """Formats with elements of the dtype of ``x``, and scales of groups alone."""
    for name in _core.payload_formats:
        form = payload_of(f"scaled_{name}", "x", x.shape[1])
        if torch_name(form.element_name) == x.dtype and not form.has_row_scale:
            yield form


def _scales_of(form: Payload) -> Iterator[tuple[int, torch.dtype]]:
    """Columns and dtype of scales in which the format's are taken."""
    dtype = torch_name(form.scale_name)
    yield form.num_groups, dtype
    if dtype.itemsize == 1 and form.num_groups % _PACK.itemsize == 0:
        yield form.num_groups // _PACK.itemsize, _PACK


def scaled_rows(x: torch.Tensor, scales: torch.Tensor, who: str, rank: int) -> Rows:
    """Rows [tokens, hidden] with scales: the format is that with such elements and scales.

    :raises InvalidArgument: where no format has them
    """
    forms = list(_formats_of(x))
    if not forms:
        known = (payload_of(f"scaled_{name}", "x", 0) for name in _core.payload_formats)
        names = sorted({form.element_name for form in known if not form.has_row_scale})
        raise InvalidArgument(
            f"{who}: x of rank {rank} has dtype {x.dtype}, expected"
            f" {' or '.join(f'torch.{name}' for name in names)} with scales"
        )
    fitting = [form for form in forms if x.shape[1] % form.group == 0]
    if not fitting:
        raise InvalidArgument(
            f"{who}: x of rank {rank} has {x.shape[1]} columns, expected a multiple of"
            f" {min(form.group for form in forms)}"
        )
    for form in fitting:
        for columns, dtype in _scales_of(form):
            if (tuple(scales.shape), scales.dtype) == ((x.shape[0], columns), dtype):
                return Rows(x, scales, form.name, torch_name(form.scale_name))
    choices = [
        f"{(x.shape[0], columns)} of {dtype}"
        for form in fitting
        for columns, dtype in _scales_of(form)
    ]
    raise InvalidArgument(
        f"{who}: scales of rank {rank} is {tuple(scales.shape)} of {scales.dtype}, expected"
        f" {' or '.join(choices)}"
    )


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Scales of a byte, four in an int32. [..., a multiple of 4]"""
    return codes.view(_PACK)


def powers_of_two(codes: torch.Tensor) -> torch.Tensor:
    """float32 of UE8M0 scales. That of code 0, which is 2^-127, becomes 0; NaN infinity."""
    return (codes.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def columns_first(scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with the rows of a column side by side, each column aligned to 16 bytes."""
    step = 16 // scales.itemsize
    rows, columns = scales.shape
    out = scales.new_empty((columns, -(-rows // step) * step)).T[:rows]
    return out.copy_(scales)


class Call(NamedTuple):
    """A call on one rank. Its methods look at the arguments, and raise errors that name it."""

    who: str
    rank: int
    device: torch.device  #: where the buffer is

    def rows(self, x: Any) -> Rows:
        """Rows, which have scales unless they are bfloat16."""
        x, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
        place = f"{self.who}: x of rank {self.rank}"
        if not isinstance(x, torch.Tensor) or x.ndim != 2:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidArgument(f"{place} is {shape}, expected a tensor [num_tokens, hidden]")
        if scales is None and x.dtype != torch.bfloat16:
            raise InvalidArgument(
                f"{place} has dtype {x.dtype}, expected torch.bfloat16 without scales"
            )
        if x.shape[1] < 1:
            raise InvalidArgument(f"{place} has no columns, expected [num_tokens, hidden]")
        self._memory("x", x)
        if scales is None:
            return Rows(x, None, "plain")
        named = f"{self.who}: scales of rank {self.rank}"
        instance(scales, torch.Tensor, named, "a tensor [num_tokens, num_scales]")
        self._memory("scales", scales)
        return scaled_rows(x, scales, self.who, self.rank)

    def table(
        self, name: str, value: Any, shape: Tuple[Any, ...], *dtypes: torch.dtype
    ) -> torch.Tensor:
        """A tensor of that shape and one of the dtypes, where the buffer is."""
        named = f"{self.who}: {name} of rank {self.rank}"
        instance(value, torch.Tensor, named, f"a tensor {shape}")
        if tuple(value.shape) != shape or value.dtype not in dtypes:
            raise InvalidArgument(
                f"{named} is {tuple(value.shape)} of {value.dtype}, expected {shape} of"
                f" {' or '.join(map(str, dtypes))}"
            )
        self._memory(name, value)
        return value

    def _memory(self, name: str, value: torch.Tensor) -> None:
        """Raises where the tensor lies elsewhere than the buffer, or has no strides."""
        if value.device != self.device or value.layout is not torch.strided:
            raise InvalidArgument(
                f"{self.who}: {name} of rank {self.rank} lies on {value.device} ({value.layout}),"
                f" expected {self.device}, with strides"
            )

    def ids(
        self, topk_idx: Any, num_experts: int, num_tokens: Optional[int] = None
    ) -> torch.Tensor:
        """[num_tokens, num_topk], int64 or int32. In host memory each is -1 or an expert's."""
        name = f"{self.who}: topk_idx of rank {self.rank}"
        if not isinstance(topk_idx, torch.Tensor) or topk_idx.ndim != 2 or topk_idx.shape[1] < 1:
            shape = tuple(topk_idx.shape) if isinstance(topk_idx, torch.Tensor) else type(topk_idx)
            raise InvalidArgument(f"{name} is {shape}, expected a tensor [num_tokens, num_topk]")
        if topk_idx.dtype not in COUNTS:
            raise InvalidArgument(f"{name} has dtype {topk_idx.dtype}, expected int64 or int32")
        rows = topk_idx.shape[0] if num_tokens is None else num_tokens
        self.table("topk_idx", topk_idx, (rows, topk_idx.shape[1]), topk_idx.dtype)
        if self.device.type == "cpu":
            require_known_ids(topk_idx, num_experts, -1, f"{self.who}: topk_idx", self.rank)
        return topk_idx

    def not_too_many(self, topk_idx: torch.Tensor, num_experts: int, most: int) -> None:
        """Raises where tokens have chosen an expert twice, and so more often than rows have places.
        The host looks, for ranks in host memory alone.
        """
        if self.device.type != "cpu":
            return
        flat = topk_idx.reshape(-1).to(torch.int64)
        counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
        expert = int(counts.argmax())
        if int(counts[expert]) > most:
            raise InvalidArgument(
                f"{self.who}: topk_idx of rank {self.rank} has expert {expert}"
                f" {int(counts[expert])} times, expected at most {most}, as there are places for: a"
                " token's choices are different"
            )

    def weights(self, value: Any, num_rows: int, topk: Optional[int] = None) -> None:
        """Weights of topk slots, if there are some; None: of any number of slots."""
        if value is None:
            return
        columns: Any = topk
        if topk is None:
            known = isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] > 0
            columns = value.shape[1] if known else "num_topk"
        self.table("topk_weights", value, (num_rows, columns), torch.float32)

    def rows_and_biases(
        self, x: Any, bias: Any, shape: Tuple[int, int], num_tokens: int
    ) -> List[torch.Tensor]:
        """Looks at the rows of a combine; returns the biases: none, one or two."""
        self.table("x", x, shape, torch.bfloat16)
        if bias is None:
            return []
        biases = list(bias) if isinstance(bias, (list, tuple)) else [bias]
        if len(biases) > 2:
            raise InvalidArgument(
                f"{self.who}: bias of rank {self.rank} has {len(biases)} tensors, expected at most"
                " two"
            )
        return [self.table("bias", one, (num_tokens, shape[1]), torch.bfloat16) for one in biases]

    def stats(self, stats: Any, num_local: int) -> None:
        """Counts of this rank's experts, to which others are added."""
        if stats is not None:
            self.table("cumulative_local_expert_recv_stats", stats, (num_local,), *COUNTS)

    def experts(self, num_experts: int, num_ranks: int) -> int:
        """The number of experts, as many on each rank."""
        if num_experts < 1 or num_experts % num_ranks != 0:
            raise InvalidArgument(
                f"{self.who}: num_experts = {num_experts} on rank {self.rank}, expected a multiple"
                f" of {num_ranks} ranks"
            )
        return num_experts

    def same_tokens(self, x: torch.Tensor, num_tokens: int) -> None:
        """Rows for a routing that is used again."""
        if x.shape[0] != num_tokens:
            raise InvalidArgument(
                f"{self.who}: x of rank {self.rank} has {x.shape[0]} tokens, expected {num_tokens},"
                " as in the dispatch of the handle"
            )

    def own_handle(self, is_own: bool, giver: str = "dispatch") -> None:
        """Refuses handles of others."""
        if not is_own:
            raise InvalidArgument(
                f"{self.who}: handle of rank {self.rank} is of another buffer, or none, expected"
                f" one that {giver} of this buffer gave"
            )


def check_network(num_qps: Any, nvlink: Any, mnnvl: Any, fabric: Any) -> None:
    """Options of DeepEP's way between GPUs: on one host there are no queue pairs, and NVLink is
    what there is.
    """
    at_least(num_qps, 1, "Buffer: num_qps_per_rank")
    flag(mnnvl, "Buffer: allow_mnnvl")
    if not flag(nvlink, "Buffer: allow_nvlink_for_low_latency_mode"):
        raise Unsupported(
            "Buffer: allow_nvlink_for_low_latency_mode = False, expected True: ranks of one host"
            " have no other way"
        )
    if flag(fabric, "Buffer: use_fabric"):
        raise Unsupported("Buffer: use_fabric = True, expected False: memory is of one host")


def check_timeout(value: Any, name: str, world: World) -> None:
    """Waits end at the World's deadline: what allows more time holds, less does not."""
    if value is None:
        return
    seconds = at_least(value, 1, name)
    if seconds < world.timeout_s:
        raise Unsupported(
            f"{name} = {seconds}, expected at least {world.timeout_s:g}, the deadline of the World:"
            " give a World that was made with this timeout_s"
        )


#: Two windows that dispatches receive in by turns, and two that combines read.
WINDOWS = 4
_VARIABLE = "WAYBILL_DEEP_EP_MAX_TOKENS"
_DEFAULT_TOKENS = 4096
_set: list[int] = []


def set_max_tokens(num_tokens: int) -> None:
    """Tokens of a rank in one dispatch, for which ``Config.get_nvl_buffer_size_hint`` counts the
    bytes from now on; on all ranks alike. The variable WAYBILL_DEEP_EP_MAX_TOKENS does the same;
    without both it is 4096.
    """
    _set[:] = [at_least(num_tokens, 1, "set_max_tokens: num_tokens")]


def max_tokens() -> int:
    """Tokens of a rank in one dispatch that size hints count with."""
    if _set:
        return _set[0]
    text = os.environ.get(_VARIABLE)
    if text is None:
        return _DEFAULT_TOKENS
    if not text.isdecimal():
        raise InvalidArgument(f"{_VARIABLE} = {text!r}, expected a number of tokens")
    return at_least(int(text), 1, _VARIABLE)


class Config:
    """Settings of a dispatch or combine. Of these Waybill uses ``num_sms``; its kernels send rows
    as they come, so that there are no chunks to tune. They are those of a buffer's first call.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        given = locals()
        self.num_sms = at_least(num_sms, 1, "Config: num_sms")
        chunked = [name for name in given if name.endswith("_tokens")]
        vars(self).update(converted("Config", given, (int64, " ".join(chunked))))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for ``max_tokens()`` tokens of each rank, if all of them come to one rank."""
        who = "get_nvl_buffer_size_hint"
        ranks = at_least(num_ranks, 1, f"{who}: num_ranks")
        return WINDOWS * ranks * max_tokens() * at_least(hidden_bytes, 1, f"{who}: hidden_bytes")

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks of one host need none."""
        return 0


def ll_bytes(
    num_tokens: int, hidden: int, num_ranks: int, num_experts: int,
    who: str = "get_low_latency_rdma_size_hint",
) -> int:  # fmt: skip
    """Bytes of low-latency calls, where a token may go to each expert of a rank."""
    tokens = at_least(num_tokens, 1, f"{who}: num_max_dispatch_tokens_per_rank")
    ranks = at_least(num_ranks, 1, f"{who}: num_ranks")
    experts = at_least(num_experts, 1, f"{who}: num_experts")
    if experts % ranks != 0:
        raise InvalidArgument(
            f"{who}: num_experts = {experts}, expected a multiple of num_ranks = {ranks}"
        )
    return WINDOWS * 2 * at_least(hidden, 1, f"{who}: hidden") * tokens * experts


def elastic_bytes(num_ranks: int, num_tokens: Any, hidden: Any) -> int:
    """Bytes of an ElasticBuffer: a row for each token of all ranks."""
    who = "ElasticBuffer"
    tokens = at_least(num_tokens, 1, f"{who}: num_max_tokens_per_rank")
    columns = at_least(hidden, 1, f"{who}: hidden")
    return WINDOWS * 2 * columns * num_ranks * tokens


topk_idx_t = torch.int64  #: dtype of expert ids; int32 is taken too


def counts_of(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens for each rank, topk slots of each expert, and [num_tokens, num_ranks] whether a token
    goes to a rank. Ids out of range count as none.
    """
    num_tokens, device = topk_idx.shape[0], topk_idx.device
    none = (topk_idx < 0) | (topk_idx >= num_experts)
    ids = topk_idx.to(torch.int64).masked_fill(none, num_experts)
    ranks = ids // (num_experts // num_ranks)  # num_ranks: of none
    inside = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool, device=device)
    inside = inside.scatter_(1, ranks, True)[:, :num_ranks].contiguous()
    return inside.sum(0, dtype=torch.int32), occurrences(ids, num_experts), inside


def occurrences(places: torch.Tensor, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """[size]: how often each of 0..size - 1 is among the places; ``size`` stands for none."""
    flat = places.reshape(-1).to(torch.int64)
    counts = torch.zeros(size + 1, dtype=dtype, device=places.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=dtype))[:size]
