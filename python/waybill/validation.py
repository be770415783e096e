"""Checks of plans and metadata that share no code with what computes them."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

from . import _core
from ._arrays import index_array, int64
from .errors import InvalidArgument
from .layouts import AttnLayout, RankKvLayout, layout_fields
from .metadata import Metadata
from .plans import QkvPlan

__all__ = ["Finding", "validate"]


class Finding(NamedTuple):
    """One thing that is wrong. Numbers that do not apply are -1."""

    kind: str  #: "shape", "overlap", "count", ...
    table: str  #: "plan", "fwd_q", "rev_q", "fwd_kv", "rev_kv", "attention", ...
    field: str  #: "dst_offset", ...
    rank: int
    shard: int
    copy: int
    got: str
    expected: str
    text: str  #: all of it in one line

    def __str__(self) -> str:
        return str(self.text)


def validate(
    *tables: Any,
    q_capacity: Optional[int] = None,
    kv_capacity: Optional[int] = None,
    max_findings: int = 100,
) -> List[Finding]:
    """What is wrong; empty when all is right. Never raises for what it finds.

    Args:
        tables: one of: a QkvPlan or AttentionPlan; one Metadata; forward and reverse Metadata; the
            four metadata of Q and KV, as create_qkv_dispatch returns them, where each pair is
            checked (an attention layout may follow and is not looked at: only a plan says what
            belongs in it); a QkvPlan or AttentionPlan and the QkvMetadata of its to_metadata(),
            where everything is.
        q_capacity, kv_capacity: most rows of a rank's buffer; None is any number.
        max_findings: stop after so many.
    """
    options = (
        -1 if q_capacity is None else int64(q_capacity, "validate: q_capacity"),
        -1 if kv_capacity is None else int64(kv_capacity, "validate: kv_capacity"),
        int64(max_findings, "validate: max_findings"),
    )
    return [Finding(*found) for found in _findings(tables, options)]


def _findings(tables: Any, options: Any) -> Any:
    kinds = [type(table) for table in tables]
    metadata = [table for table in tables if isinstance(table, Metadata)]
    if len(tables) == 1 and isinstance(tables[0], QkvPlan):
        return _core.validate_plan(tables[0]._plan, options)
    if len(tables) == 1 and _is_plan(tables[0]):
        return tables[0]._validate(options[2])
    if len(tables) == 1 and len(metadata) == 1:
        return _core.validate_metadata(metadata[0]._fields(), options)
    if len(tables) == 2 and len(metadata) == 2:
        return _core.validate_pair(metadata[0]._fields(), metadata[1]._fields(), options)
    if len(tables) == 2 and _is_plan(tables[0]) and _is_qkv_metadata(tables[1]):
        plan = tables[0] if isinstance(tables[0], QkvPlan) else tables[0].to_qkv_plan()
        fwd_q, rev_q, fwd_kv, rev_kv, layout = tables[1]
        return _core.validate_all(
            plan._plan, fwd_q._fields(), rev_q._fields(), fwd_kv._fields(), rev_kv._fields(),
            _layout_arrays(layout, fwd_q._host), options,
        )  # fmt: skip
    if len(tables) in (4, 5) and len(metadata) == 4:
        q = _core.validate_pair(metadata[0]._fields(), metadata[1]._fields(), options)
        kv = _core.validate_pair(metadata[2]._fields(), metadata[3]._fields(), options)
        return [_of_pair(found, "_q") for found in q] + [_of_pair(found, "_kv") for found in kv]
    raise InvalidArgument(
        f"validate: got {[kind.__name__ for kind in kinds]}, expected a plan, one Metadata, forward"
        " and reverse Metadata, four Metadata, or a plan and its QkvMetadata"
    )


def _layout_arrays(layout: Any, host: Any) -> Any:
    """Its fields as numpy arrays and lists of them; ``host`` takes them there."""

    def array(value: Any) -> Any:
        return index_array(host(value), "validate: attention layout")

    cu_q, cu_kv, max_q, max_kv, num_recv, kv_begin, kv_len = layout_fields(layout)
    return (
        [array(value) for value in cu_q], [array(value) for value in cu_kv], array(max_q),
        array(max_kv), array(num_recv), [array(value) for value in kv_begin],
        [array(value) for value in kv_len],
    )  # fmt: skip


def _is_plan(value: Any) -> bool:
    """A QkvPlan, or an AttentionPlan, whose module imports this one."""
    return isinstance(value, QkvPlan) or hasattr(type(value), "_validate")


def _is_qkv_metadata(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 5
        and all(isinstance(table, Metadata) for table in value[:4])
        and isinstance(value[4], (AttnLayout, RankKvLayout))
    )


def _of_pair(found: Any, suffix: str) -> Any:
    """A finding about "fwd" or "rev" under the name of the table that the caller gave."""
    kind, table, *rest, text = found
    named = table + suffix
    return (kind, named, *rest, named + text.removeprefix(table))
