"""Checks of plans and metadata that share no code with what computes them."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

from . import _core
from .errors import InvalidArgument
from .layouts import layout_fields
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
        return self.text


def validate(
    *tables: Any,
    q_capacity: Optional[int] = None,
    kv_capacity: Optional[int] = None,
    max_findings: int = 100,
) -> List[Finding]:
    """What is wrong; empty when all is right. Never raises for what it finds.

    Args:
        tables: one of: a plan; one Metadata; forward and reverse Metadata; the four metadata and
            the attention layout of Q and KV, as create_qkv_dispatch returns them (each pair is then
            checked); a plan and the QkvMetadata of its to_metadata().
        q_capacity, kv_capacity: most rows of a rank's buffer; None is any number.
        max_findings: stop after so many.
    """
    options = (
        -1 if q_capacity is None else q_capacity,
        -1 if kv_capacity is None else kv_capacity,
        max_findings,
    )
    return [Finding(*found) for found in _findings(tables, options)]


def _findings(tables: Any, options: Any) -> Any:
    kinds = [type(table) for table in tables]
    metadata = [table for table in tables if isinstance(table, Metadata)]
    if len(tables) == 1 and isinstance(tables[0], QkvPlan):
        return _core.validate_plan(tables[0]._plan, options)
    if len(tables) == 1 and len(metadata) == 1:
        return _core.validate_metadata(metadata[0]._fields(), options)
    if len(tables) == 2 and len(metadata) == 2:
        return _core.validate_pair(metadata[0]._fields(), metadata[1]._fields(), options)
    if len(tables) == 2 and isinstance(tables[0], QkvPlan) and isinstance(tables[1], tuple):
        *four, layout = tables[1]
        return _core.validate_all(
            tables[0]._plan, *(table._fields() for table in four), layout_fields(layout), options
        )
    if len(tables) in (4, 5) and len(metadata) == 4:
        q = _core.validate_pair(metadata[0]._fields(), metadata[1]._fields(), options)
        return q + _core.validate_pair(metadata[2]._fields(), metadata[3]._fields(), options)
    raise InvalidArgument(
        f"validate: got {[kind.__name__ for kind in kinds]}, expected a plan, one Metadata, forward"
        " and reverse Metadata, four Metadata, or a plan and its QkvMetadata"
    )
