"""Where experts lie: copies of hot experts for one microbatch, and a placement for many."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Optional, Tuple

import numpy as np

from .. import _core
from .._arrays import (
    AnyArray,
    ArrayLike,
    IntArray,
    as_numpy,
    converted,
    index_array,
    int64,
    number,
    whole_numbers,
)
from .._errors import shown
from ..errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class EvenExperts:
    """Which expert lies in which slot, and how many rows each slot takes.

    Tables are ``[num_ranks, experts per rank + spare_experts]``: home experts first, in order of
    expert, then the spare slots. An expert's rows go to its slots *local first*: each slot takes
    ``local_rows`` of its own rank, the first in token order. What is left of all ranks, ordered by
    source rank, then token, is cut: a slot takes the rows from ``first_row`` on.
    """

    slots: IntArray  #: int32, the expert of each slot; -1: the slot is empty
    quotas: IntArray  #: int64, rows that a slot takes
    local_rows: IntArray  #: int64, how many of them are of the slot's own rank
    first_row: IntArray  #: int64, where the others begin
    max_rows: int  #: rows of the fullest rank
    mean_rows: float  #: rows per rank
    #: No choice of copies has a fullest rank with fewer rows; at least the mean, rounded up.
    bound: int
    weights_out: IntArray  #: int32 ``[num_ranks]``, experts whose weights a rank sends, per copy
    weights_in: IntArray  #: int32 ``[num_ranks]``, experts whose weights a rank receives

    @property
    def rank_rows(self) -> IntArray:
        """int64 ``[num_ranks]``, rows that each rank computes."""
        return self.quotas.sum(axis=1)


def even_experts(
    rows: ArrayLike,
    *,
    spare_experts: int,
    present: Optional[ArrayLike] = None,
    min_rows: int = 0,
    limit: Optional[float] = None,
    alignment: int = 1,
    num_nodes: int = 1,
) -> EvenExperts:
    """Plans copies of hot experts: at most ``spare_experts`` per rank.

    The aims, in this order: few rows on the fullest rank; few weights from the fullest sender; few
    copies that were not there before. The rule is in ``waybill.moe.even_experts_rule``, in plain
    Python. Equal inputs give equal plans on all ranks.

    Args:
        rows: integers ``[num_ranks, num_experts]``, rows of each source rank for each expert in one
            microbatch, >= 0. Expert ``e`` has its home on rank ``e // (num_experts / num_ranks)``.
        spare_experts: slots per rank for copies.
        present: int32 ``[num_ranks, spare_experts]``, experts that lie in the spare slots already,
            -1 for an empty slot; the ``slots`` of the plan before, without the home experts.
        min_rows: a copy takes at least so many rows. This comes before evenness.
        limit: the fullest rank may have so many times the lower bound; None is 1.0. With 1.02 a
            plan has about half of the copies.
        alignment: a new copy takes a multiple of so many rows, or all that its expert's home has
            left.
        num_nodes: nodes of ``num_ranks / num_nodes`` ranks each, in order. A copy lies on a node
            that has the expert where a rank there has room for seven eighths of what the emptiest
            rank would take.

    Raises:
        InvalidArgument: rows that are negative, no integers or more than 2^53 together; experts
            that the ranks do not divide; ``present`` that names a home expert of its rank or an
            expert twice; an option out of range.
    """
    counts = _counts(rows, "even_experts")
    numbers = {"spare_experts": spare_experts, "num_nodes": num_nodes}
    _check_integers("even_experts", numbers, 2**31 - 1, "2^31 - 1")
    numbers = {"min_rows": min_rows, "alignment": alignment}
    _check_integers("even_experts", numbers, 2**53, "2^53")
    factor = number(1.0 if limit is None else limit, "even_experts: limit")
    lying = present_copies(present, counts.shape[0], spare_experts, "even_experts: present")
    plan = _core.even_experts(counts, spare_experts, lying, min_rows, factor, alignment, num_nodes)
    made = {field.name: getattr(plan, field.name) for field in fields(EvenExperts)}
    for name in ("slots", "quotas", "local_rows", "first_row"):
        made[name] = made[name].reshape([counts.shape[0], -1])
    return EvenExperts(**made)


def present_copies(present: Any, num_ranks: int, spare_experts: int, name: str) -> list[int]:
    """The experts in the spare slots of all ranks, one rank after another; [] for None."""
    if present is None:
        return []
    table = index_array(present, name)
    shape = [num_ranks, spare_experts]
    if list(table.shape) != shape:
        raise InvalidArgument(f"{name} has shape {list(table.shape)}, expected {shape}")
    if table.size and not -1 <= int(table.min()) <= int(table.max()) < 2**31:
        raise InvalidArgument(f"{name} has no experts, expected -1 or an expert")
    return table.ravel().tolist()


def spare_options(
    spare_experts: Any, limit: Any, min_rows: Any, who: str,
    defaults: Optional[Tuple[float, int]] = None,
) -> dict[str, Any]:  # fmt: skip
    """The options of a dispatch with spare experts, as numbers; the compiled part checks them.

    :param defaults: of limit and min_rows, where no others are taken without spare experts
    """
    given = {"spare_experts": spare_experts, "limit": limit, "min_rows": min_rows}
    made = converted(who, given, (int64, "spare_experts min_rows"), (number, "limit"))
    if defaults is not None:
        pairs = {"limit": (limit, defaults[0]), "min_rows": (min_rows, defaults[1])}
        refuse_without_copies(spare_experts, who, **pairs)
    return made


def refuse_without_copies(spare_experts: Any, who: str, **given: Tuple[Any, Any]) -> None:
    """Without copies, options of theirs have no effect: others than the defaults are refused.

    :param given: what each option is, and its default
    """
    for name, (value, default) in given.items():
        if spare_experts == 0 and value != default:
            raise InvalidArgument(
                f"{who}: {name} = {shown(value)}, expected spare_experts > 0 with it, or {default}"
            )


def slot_ids(plan: EvenExperts, rows: ArrayLike, ids: ArrayLike, *, rank: int) -> IntArray:
    """Sends a rank's tokens to the slots of a plan: its expert ids with copies in place of experts.

    A layer of ``plan.slots.size`` experts takes the result as its ids: slot ``s`` of rank ``r`` is
    expert ``r * plan.slots.shape[1] + s`` there. Empty slots get no rows. A combine gives what it
    gives without copies, as sums go by topk slot.

    Args:
        plan: of ``even_experts``, the same on all ranks.
        rows: integers ``[num_ranks, num_experts]`` that the plan was made from.
        ids: integers ``[T, topk]`` (or any shape, in token order) of this rank; ``num_experts`` or
            -1 is a dropped topk slot.
        rank: the rank whose ids these are.

    Returns:
        int32, of the shape of ``ids``. A dropped topk slot is ``plan.slots.size``, or stays -1.

    Raises:
        InvalidArgument: the plan is not one of ``rows``; ``ids`` have other numbers of an expert
            than ``rows[rank]``; an id or the rank is out of range.
    """
    _check_integers("slot_ids", {"rank": rank}, 2**31 - 1, "2^31 - 1")
    tables = (plan.slots, plan.quotas, plan.local_rows, plan.first_row)
    return _core.slot_ids(
        *tables, _counts(rows, "slot_ids"), index_array(ids, "slot_ids: ids"), int(rank)
    )


def _counts(rows: Any, who: str) -> IntArray:
    """Integers [num_ranks, num_experts]; floats are taken where they are whole."""
    table = whole_numbers(rows, f"{who}: rows", floats=True)
    if table.ndim != 2:
        raise InvalidArgument(
            f"{who}: rows has shape {list(table.shape)}, expected [num_ranks, num_experts]"
        )
    return table


def _check_integers(who: str, numbers: dict[str, Any], largest: int, shown: str) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InvalidArgument(f"{who}: {name} = {value!r}, expected an integer")
        if abs(int(value)) > largest:
            raise InvalidArgument(f"{who}: {name} = {value}, expected at most {shown}")


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Which expert lies where, per layer; an expert's rows are split evenly among its copies."""

    slots: IntArray  #: int32 ``[layers, num_ranks, slots_per_rank]``; -1: the slot is empty
    copies: IntArray  #: int32 ``[layers, num_experts]``, slots of each expert, >= 1
    rank_loads: AnyArray  #: float64 ``[layers, num_ranks]``
    moves: IntArray  #: int32 ``[layers]``, experts that come to a rank that did not hold them

    @property
    def imbalance(self) -> AnyArray:
        """float64 ``[layers]``, the fullest rank's load over the mean; 1 without load."""
        means = self.rank_loads.mean(axis=1)
        fullest = self.rank_loads.max(axis=1)
        return np.divide(fullest, means, out=np.ones_like(means), where=means > 0)


def plan_expert_placement(
    loads: Any,
    num_ranks: int,
    *,
    slots_per_rank: Optional[int] = None,
    num_nodes: int = 1,
    num_groups: Optional[int] = None,
    present: Optional[ArrayLike] = None,
    max_moves: Optional[int] = None,
) -> ExpertPlacement:
    """Places experts, some with copies, so that the fullest rank has little load.

    For loads that were counted over many microbatches; ``even_experts`` is for one. The problem is
    EPLB's: copies are used evenly. No rank holds an expert twice.

    Args:
        loads: ``[layers, num_experts]``, rows that each expert got, >= 0; integers or floats.
        num_ranks: ranks that hold experts.
        slots_per_rank: experts that a rank holds; None is ``num_experts / num_ranks``.
        num_nodes: nodes of ``num_ranks / num_nodes`` ranks each.
        num_groups: the experts of a group, ``num_experts / num_groups`` in order, lie on one node,
            and all nodes hold as many groups. None: experts lie anywhere.
        present: int32 ``[layers, num_ranks, slots_per_rank]``, what lies where now, -1 for an empty
            slot. Ranks and slots of the result are named so that few experts move.
        max_moves: experts that may come to a rank, per layer. The result then is ``present`` with
            so many changes, those that lower the fullest rank's load most first.

    Raises:
        InvalidArgument: an option out of range, or a load that is negative or not finite.
    """
    who = "plan_expert_placement"
    table = np.ascontiguousarray(as_numpy(loads, f"{who}: loads"))
    if table.ndim != 2 or table.dtype.kind not in "iuf":
        raise InvalidArgument(
            f"{who}: loads has shape {list(table.shape)} and dtype {table.dtype}, expected numbers"
            " [layers, num_experts]"
        )
    options = {
        "num_ranks": num_ranks,
        "slots_per_rank": 0 if slots_per_rank is None else slots_per_rank,
        "num_nodes": num_nodes,
        "num_groups": 0 if num_groups is None else num_groups,
        "max_moves": -1 if max_moves is None else max_moves,
    }
    _check_integers(who, options, 2**31 - 1, "2^31 - 1")
    for name, given in (("slots_per_rank", slots_per_rank), ("num_groups", num_groups)):
        if given is not None and given < 1:
            raise InvalidArgument(f"{who}: {name} = {given}, expected >= 1")
    if max_moves is not None and max_moves < 0:
        raise InvalidArgument(f"{who}: max_moves = {max_moves}, expected >= 0")
    lying = [] if present is None else index_array(present, f"{who}: present").ravel().tolist()
    made = _core.plan_expert_placement(table.astype(np.float64), lying, **options)
    shape = [table.shape[0], num_ranks, -1]
    slots = made["slots"].reshape(shape) if len(table) else np.zeros((0, num_ranks, 0), int)
    loads = np.array(made["rank_loads"]).reshape(shape[:2])
    return ExpertPlacement(slots, made["copies"].reshape(table.shape), loads, made["moves"])
