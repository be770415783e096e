"""Reads a plan that the caller made, and checks that it fits the module's mask."""

from __future__ import annotations

from typing import Optional

import numpy as np

from ..._arrays import IntArray
from ...errors import InvalidArgument
from ...plans import QkvPlan


def own_tables(
    plan: QkvPlan, mask: str, window: Optional[int], chunk: Optional[int], who: str
) -> list[IntArray]:
    """The pieces of each rank in a plan of a caller's own: runs of its shards. Raises where a shard
    does not get all keys that its queries see, or some after them, which kernels would take in.
    """
    length, shards = plan.shard_len, plan.doc_shards
    counts = np.diff(plan.doc_shard_offsets)
    document, offset = np.zeros((2, len(length)), np.int64)
    document[shards] = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(length[shards])
    before = np.concatenate([[0], ends])[plan.doc_shard_offsets[:-1]]
    offset[shards] = ends - length[shards] - np.repeat(before, counts)
    after = np.zeros(len(length), np.int64)
    after[shards] = np.arange(len(shards)) - np.repeat(plan.doc_shard_offsets[:-1], counts) + 1
    prefix = _own_prefixes(plan, mask, document, after, who)
    first = np.zeros(len(length), np.int64)
    if len(plan.kv_begin):
        first = offset[shards[plan.doc_shard_offsets[document] + plan.kv_begin]]
    start = 0 * offset if chunk is None else offset // chunk * chunk
    seen = np.maximum(start, offset - (window or 2**62) + 1)
    for n in np.flatnonzero((first > seen) & (length > 0)).tolist():
        raise InvalidArgument(
            f"{who}: the plan's shard {n} gets keys from token {first[n]} of its document on,"
            f" expected {seen[n]} or fewer: window = {window}, chunk = {chunk}"
        )
    if chunk is not None:
        last = wanted = offset + length
        if mask == "full":
            ends_with = shards[plan.doc_shard_offsets[document] + plan.kv_end - 1]
            last = (offset + length)[ends_with]
            tokens = np.bincount(document, length, len(counts)).astype(np.int64)
            wanted = np.minimum(start + chunk, tokens[document])
        one = (first >= start) & (last == wanted) & (offset + length <= start + chunk)
        for n in np.flatnonzero(~one & (length > 0)).tolist():
            raise InvalidArgument(
                f"{who}: the plan's shard {n}, tokens {offset[n]}..{offset[n] + length[n] - 1} of"
                f" its document, gets keys {first[n]}..{last[n] - 1}, expected those of one chunk:"
                f" chunk = {chunk}"
            )
    tables = []
    for begin, end in zip(plan.rank_shard_offsets[:-1], plan.rank_shard_offsets[1:]):
        table = np.stack([document, offset, length, prefix[document]], 1)[begin:end]
        table = table[table[:, 2] > 0]
        adjoins = (table[1:, 0] == table[:-1, 0]) & (table[1:, 1] == table[:-1, 1:3].sum(1))
        starts: IntArray = np.flatnonzero(np.concatenate([[len(table) > 0], ~adjoins]))
        merged = table[starts]
        if len(merged):
            merged[:, 2] = np.add.reduceat(table[:, 2], starts)
        tables.append(merged)
    return tables


def _own_prefixes(
    plan: QkvPlan, mask: str, document: IntArray, after: IntArray, who: str
) -> IntArray:
    """Returns the prefix of each document. Raises where queries of a shard meet keys after
    themselves that the mask hides.

    :param after: [shards] the position after the shard in its document
    """
    length, num, ends = plan.shard_len, plan.num_documents, plan.kv_end
    prefix: IntArray = np.zeros(num, np.int64)
    if not len(ends):
        return prefix
    if mask == "prefix":
        whole = ends > 0
        leading = np.bincount(document[whole], minlength=num)[document]
        expected = np.where(after <= leading, leading, 0)
        prefix += np.bincount(document[whole], length[whole], num).astype(np.int64)
    elif mask == "full":  # kinds are not mixed, also not where ranges are the same
        expected = np.maximum(ends, after) if ends.any() else ends
    else:
        expected = np.minimum(ends, after if ends.all() else 0)
    for n in np.flatnonzero((ends != expected) & (length > 0)).tolist():
        raise InvalidArgument(
            f"{who}: the plan's shard {n} has kv_end = {ends[n]}, expected {expected[n]}: mask ="
            f" {mask}"
        )
    return prefix
