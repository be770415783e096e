"""What a SequenceDispatcher is made with."""

from __future__ import annotations

from typing import Any, Tuple

from ._arrays import choice, flag, int64
from .errors import InvalidArgument

__all__ = ["checked_options"]

_MOST_BYTES = 2**63 - 1


def checked_options(
    who: str, num_sms: Any, chunk_bytes: Any, local_by_copy_engine: Any, max_window_bytes: Any,
    relay: Any,
) -> Tuple[Any, ...]:  # fmt: skip
    """The options, as the compiled part takes them."""
    sms = int64(num_sms, f"{who}: num_sms")
    if not 0 <= sms < 2**31:
        raise InvalidArgument(f"{who}: num_sms = {sms}, expected >= 0")
    chunk = int64(chunk_bytes, f"{who}: chunk_bytes")
    if not 16 <= chunk <= 2**30 or chunk % 16 != 0:
        raise InvalidArgument(
            f"{who}: chunk_bytes = {chunk}, expected a multiple of 16, up to 2^30"
        )
    most = _MOST_BYTES if max_window_bytes is None else max_window_bytes
    return (
        sms,
        chunk,
        flag(local_by_copy_engine, f"{who}: local_by_copy_engine"),
        int64(most, f"{who}: max_window_bytes"),
        choice(relay, f"{who}: relay", "automatic", "never", "always"),
    )
