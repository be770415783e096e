"""Settings of calls, and how many bytes a buffer needs."""

from __future__ import annotations

import os
from typing import Any

from ..._arrays import int64
from ...errors import InvalidArgument

__all__ = ["Config", "elastic_bytes", "ll_bytes", "max_tokens", "rows_that_fit", "set_max_tokens"]

#: Two windows that dispatches receive in by turns, and two that combines read.
_WINDOWS = 4
_VARIABLE = "WAYBILL_DEEP_EP_MAX_TOKENS"
_DEFAULT_TOKENS = 4096
_set: list[int] = []


def set_max_tokens(num_tokens: int) -> None:
    """Tokens of a rank in one dispatch, for which ``Config.get_nvl_buffer_size_hint`` counts the
    bytes from now on; on all ranks alike. The variable WAYBILL_DEEP_EP_MAX_TOKENS does the same;
    without both it is 4096.
    """
    _set[:] = [_positive(num_tokens, "set_max_tokens: num_tokens")]


def max_tokens() -> int:
    """Tokens of a rank in one dispatch that size hints count with."""
    if _set:
        return _set[0]
    text = os.environ.get(_VARIABLE)
    if text is None:
        return _DEFAULT_TOKENS
    if not text.isdecimal():
        raise InvalidArgument(f"{_VARIABLE} = {text!r}, expected a number of tokens")
    return _positive(int(text), _VARIABLE)


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
        self.num_sms = _positive(num_sms, "Config: num_sms")
        for name, value in (
            ("num_max_nvl_chunked_send_tokens", num_max_nvl_chunked_send_tokens),
            ("num_max_nvl_chunked_recv_tokens", num_max_nvl_chunked_recv_tokens),
            ("num_max_rdma_chunked_send_tokens", num_max_rdma_chunked_send_tokens),
            ("num_max_rdma_chunked_recv_tokens", num_max_rdma_chunked_recv_tokens),
        ):
            setattr(self, name, int64(value, f"Config: {name}"))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for ``max_tokens()`` tokens of each rank, if all of them come to one rank."""
        who = "get_nvl_buffer_size_hint"
        ranks = _positive(num_ranks, f"{who}: num_ranks")
        return _WINDOWS * ranks * max_tokens() * _positive(hidden_bytes, f"{who}: hidden_bytes")

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks of one host need none."""
        del hidden_bytes, num_ranks
        return 0


def rows_that_fit(num_bytes: int, hidden: int) -> int:
    """Rows of bfloat16 in each of the windows."""
    return min(num_bytes // (_WINDOWS * 2 * hidden), 2**31 - 1)


def ll_bytes(
    num_tokens: int, hidden: int, num_ranks: int, num_experts: int,
    who: str = "get_low_latency_rdma_size_hint",
) -> int:  # fmt: skip
    """Bytes of low-latency calls, where a token may go to each expert of a rank."""
    tokens = _positive(num_tokens, f"{who}: num_max_dispatch_tokens_per_rank")
    ranks = _positive(num_ranks, f"{who}: num_ranks")
    experts = _positive(num_experts, f"{who}: num_experts")
    if experts % ranks != 0:
        raise InvalidArgument(
            f"{who}: num_experts = {experts}, expected a multiple of num_ranks = {ranks}"
        )
    return _WINDOWS * 2 * _positive(hidden, f"{who}: hidden") * tokens * experts


def elastic_bytes(num_ranks: int, num_tokens: Any, hidden: Any) -> int:
    """Bytes of an ElasticBuffer: a row for each token of all ranks."""
    who = "ElasticBuffer"
    tokens = _positive(num_tokens, f"{who}: num_max_tokens_per_rank")
    columns = _positive(hidden, f"{who}: hidden")
    return _WINDOWS * 2 * columns * num_ranks * tokens


def _positive(value: Any, name: str) -> int:
    number = int64(value, name)
    if number < 1:
        raise InvalidArgument(f"{name} = {number}, expected >= 1")
    return number
