"""How long a step takes, which rank and document make it slow, and what would help: predictions."""

from __future__ import annotations

import os
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Protocol, Sequence, Union

from . import _core
from ._arrays import (
    IntArray,
    choice,
    converted,
    flat_list,
    instance,
    int64,
    kept,
    library_dtype_of,
    number,
    within,
)
from ._errors import flat_names, said_by
from ._lifetime import Made, OfThisProcess, forwarded
from .costs import AttentionCosts, LinkSpeeds, check_speed, planned
from .errors import InvalidArgument
from .planner import AttentionPlan, _world, compiled_options, in_words
from .plans import QkvPlan
from .simulate import progress

__all__ = [
    "Comparison",
    "PhasePrediction",
    "Remedy",
    "StepCause",
    "StepPrediction",
    "compare",
    "explain",
    "per_document_plan",
    "predict_step",
    "zigzag_plan",
]


class TimedBatch(Protocol):
    """A BatchPlan of waybill.torch, whose step can be predicted too."""

    qkv_plan: QkvPlan

    def tables(self) -> Any:
        """The compiled part's tables of the batch."""


AnyPlan = Union[AttentionPlan, QkvPlan, TimedBatch]


class StepCause(NamedTuple):
    """The cause of a phase's time: a rank, its busy resource, and the document that it works on."""

    phase: str
    rank: int
    resource: str  #: "compute", "NVLink in", "NVLink out", "network in", "network out", "nothing"
    seconds: float
    amount: int  #: bytes, or (query, key) pairs
    document: int  #: -1: none
    document_amount: int  #: its part of amount


class PhasePrediction(NamedTuple):
    """One phase of all ranks; arrays have one entry per rank, seconds from the step's beginning."""

    phase: str
    begin: Any  #: (W,) float64
    end: Any  #: (W,) float64
    seconds: Any  #: (W,) float64: what the rank takes if it waits for nobody
    waits_for: IntArray  #: (W,) rank that decides end; itself: nobody
    nvlink_in: IntArray  #: (W,) wire bytes; 0 in kernels
    nvlink_out: IntArray
    network_in: IntArray
    network_out: IntArray
    slowest: StepCause


class Remedy(NamedTuple):
    """One change, and the step with it."""

    kind: str  #: "relay", "once_per_node", "even_work", "double_nvlink", "double_network", ...
    seconds: float


class StepPrediction(OfThisProcess, Made):
    """One attention layer, forward and backward, as it would run. From ``predict_step``."""

    __slots__ = ("_degree", "_name", "_num_shards", "_plan", "_step")
    _why_not_copied = "compiled tables: predict_step makes it again from the plan, which can be"
    _degree: int
    _name: str
    _num_shards: int
    _plan: Any
    _step: Any
    _made_by = "waybill.predict_step(...)"

    @classmethod
    def _wrap(
        cls, step: Any, name: str, num_shards: int, plan: Any = None, degree: int = 0
    ) -> StepPrediction:
        return cls._with(_step=step, _name=name, _num_shards=num_shards, _plan=plan, _degree=degree)

    seconds: float = forwarded("_step.seconds", "When the last rank has ended.")
    forward_seconds: float = forwarded(
        "_step.forward_seconds", "When the last rank has the output of its queries."
    )
    world_size: int = forwarded("_step.world_size", "Number of ranks, W.")
    transfer: str = forwarded(
        "_step.transfer", 'How K and V travel: "direct", "once_per_node" or "relay".'
    )
    work: IntArray = forwarded("_step.work", "(W,): (query, key) pairs.")

    @property
    def phases(self) -> list[PhasePrediction]:
        """The seven phases in their order."""
        return [PhasePrediction._make((*p[:-1], StepCause(*p[-1]))) for p in self._step.phases()]

    @property
    def path(self) -> list[StepCause]:
        """The causes for which the last rank waited, by phase; their seconds add up to the step."""
        return [StepCause(*cause) for cause in self._step.path()]

    @property
    def bottleneck(self) -> StepCause:
        """The longest piece of ``path``."""
        return StepCause(*self._step.bottleneck())

    def remedies(self) -> list[Remedy]:
        """The step with one change at a time, shortest first; only of ``predict_step``."""
        return [Remedy(*r) for r in _core.step_remedies(self._needed_plan("remedies"), self._step)]

    def explain(self) -> list[str]:
        """Which rank, document and link make it slow, and what would help: sentences."""
        return _core.explain_step(self._needed_plan("explain"), self._step)

    def rank_table(self, rank: int) -> str:
        """The phases of one rank, a line each."""
        return self._step.rank_table(int64(rank, "rank_table: rank"))

    def to_trace(self, path: Union[str, os.PathLike[str], None] = None) -> str:
        """Timelines for ui.perfetto.dev and chrome://tracing; also written to ``path``."""
        return kept(_core.chrome_trace([self._named()]), path)

    def _named(self) -> Any:
        return _core.NamedStep.make(self._name, self._num_shards, self._step, self._degree)

    def _needed_plan(self, who: str) -> Any:
        if self._plan is None:
            raise InvalidArgument(
                f"{who}: the prediction has no plan, expected one of waybill.predict_step(...)"
            )
        return self._plan

    def __eq__(self, other: object) -> bool:
        return self._step == other._step if isinstance(other, StepPrediction) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self._step.phase_table()

    def __repr__(self) -> str:
        return (
            f"StepPrediction(world_size={self.world_size}, transfer={self.transfer!r},"
            f" seconds={self.seconds:.3g}, forward_seconds={self.forward_seconds:.3g})"
        )


class Comparison(Mapping[str, StepPrediction]):
    """Predictions by name, as ``compare`` gives them; prints as a table."""

    __slots__ = ("_steps",)
    _steps: dict[str, StepPrediction]

    def __init__(self, steps: Mapping[str, StepPrediction]) -> None:
        self._steps = dict(steps)

    def __getitem__(self, name: str) -> StepPrediction:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def to_trace(self, path: Union[str, os.PathLike[str], None] = None) -> str:
        """All timelines for ui.perfetto.dev and chrome://tracing; also written to ``path``."""
        return kept(_core.chrome_trace([s._named() for s in self._steps.values()]), path)

    def __str__(self) -> str:
        return _core.step_table([step._named() for step in self._steps.values()])

    def __repr__(self) -> str:
        steps = ", ".join(f"{name!r}: {step.seconds:.3g} s" for name, step in self.items())
        return f"Comparison({steps})"


def predict_step(
    plan: AnyPlan,
    transfer: str = "auto",
    *,
    q_hidden: Optional[int] = None,
    kv_hidden: Optional[int] = None,
    dtype: Optional[str] = None,
    window: Optional[int] = None,
    chunk: Optional[int] = None,
    ranks_per_node: Optional[int] = None,
    nvlink_bytes_per_second: Optional[float] = None,
    network_bytes_per_second: Optional[float] = None,
    message_seconds: Optional[float] = None,
    pairs_per_second: Optional[float] = None,
    costs: Optional[AttentionCosts] = None,
    phase_seconds: float = 11e-6,
    pull_share: float = 325 / 345,
    forward_share: float = 0.72,
    network_message_seconds: float = 3e-6,
    forward_chunk_bytes: int = 0,
    forward_flops_per_second: float = 350e12,
    backward_flops_per_second: float = 320e12,
) -> StepPrediction:
    """Predicts the time of each phase of a step of the plan. Nothing runs.

    Args:
        plan: an AttentionPlan brings rows, mask, hardware and relay with it; what is given here
            takes their place. So does a BatchPlan, whose rows that stay are attended to while the
            others travel. For a QkvPlan the defaults are those of ``waybill.plan``.
        transfer: how K and V travel: "direct", "once_per_node", "relay"; "auto" is relay where the
            plan has a schedule, else direct.
        nvlink_bytes_per_second, network_bytes_per_second: of a rank, each way; message_seconds,
            network_message_seconds: cost of each peer besides them.
        pairs_per_second: (query, key) pairs a rank attends to, forward; takes the place of the
            operations a second.
        costs: of the kernel, as measured; pairs_per_second goes before its own.
        phase_seconds: a phase in which nothing moves.
        pull_share: speed of a pull over that of a push, NVLink.
        forward_share: NVLink speed of a rank that forwards rows over it, over that of a push.
        forward_chunk_bytes: pieces in which rows are forwarded; 0: as SequenceDispatcher cuts them.

    Raises:
        InvalidArgument: naming the option, got and expected.
    """
    who = "predict_step"
    given = {name: value for name, value in locals().items() if value is not None}
    said = converted(
        who, given, (library_dtype_of, "dtype"),
        (number, "phase_seconds pull_share forward_share message_seconds network_message_seconds"),
        (number, "pairs_per_second forward_flops_per_second backward_flops_per_second"),
        (int64, "q_hidden kv_hidden window chunk ranks_per_node forward_chunk_bytes"),
        (check_speed, "nvlink_bytes_per_second network_bytes_per_second"),
    )  # fmt: skip
    if costs is not None:
        said = {**planned(costs, who), **said}
        ratio = 2.5 / costs.backward_ratio  # backward has 2.5 times the operations of forward
        said["backward_flops_per_second"] = said["forward_flops_per_second"] * ratio
    compiled, num_shards = _of_plan(plan)
    with said_by(who, words=flat_names):
        options = _core.step_options(compiled, transfer, **said)
        step = _core.predict_step(compiled, options)
    return StepPrediction._wrap(step, step.transfer, num_shards, compiled)


def _of_plan(plan: Any) -> tuple[Any, int]:
    """Returns the object that the compiled part predicts, and its number of shards."""
    if hasattr(plan, "qkv_plan") and hasattr(plan, "tables"):
        return plan.tables(), plan.qkv_plan.num_shards
    expected = "an AttentionPlan, a QkvPlan or a BatchPlan"
    instance(plan, (AttentionPlan, QkvPlan), "predict_step: plan", expected)
    sparse = plan.to_qkv_plan() if isinstance(plan, AttentionPlan) else plan
    return plan._plan, sparse.num_shards


def explain(plan: AnyPlan, transfer: str = "auto", **hardware: Any) -> list[str]:
    """``predict_step(plan, transfer, **hardware).explain()``: sentences with numbers."""
    return predict_step(plan, transfer, **hardware).explain()


def compare(
    doc_lengths: Sequence[int],
    world_size: int,
    tokens_per_rank: int = 65536,
    q_hidden: int = 4096,
    kv_hidden: int = 1024,
    dtype: str = "bfloat16",
    window: Optional[int] = None,
    relay: bool = True,
    *,
    mask: str = "causal",
    degree: Optional[int] = None,
    head_dim: int = 128,
    imbalance_target: float = 1.01,
    ranks_per_node: int = 8,
    nvlink_bytes_per_second: float = LinkSpeeds.nvlink_bytes_per_second,
    network_bytes_per_second: float = LinkSpeeds.network_bytes_per_second,
    message_seconds: float = 0.4e-6,
    pairs_per_second: float = 0.0,
    chunk: Optional[int] = None,
    prefix: Optional[Union[int, Sequence[int]]] = None,
) -> Comparison:
    """The same documents by static zigzag ("zigzag"), by sharding each document ("per document"),
    by heads ("Ulysses", where they divide) and by ContextParallelAttention ("planner"), as
    predicted steps.

    Args:
        doc_lengths: tokens, packed in order into the ranks.
        mask, chunk, prefix, q_hidden, ranks_per_node and the others that are not below: as of
            ``plan``.
        degree: ranks of a static context-parallel group, a divisor of world_size; None: the largest
            within a node, and for Ulysses the one that makes its step shortest.
        relay: whether ranks of "planner" may forward K and V, where that is predicted to pay.
        head_dim: elements of a head of Q, K and V.
    """
    planner = compiled_options("compare", locals())
    lengths = flat_list(doc_lengths, "compare: doc_lengths")
    group = 0 if degree is None else _degree(degree, "compare")
    elements = within(head_dim, 1, 2**20, "compare: head_dim", "2^20")
    with said_by("compare", words=in_words), progress(f"compare of {len(lengths)} documents"):
        steps = _core.compare_plans(lengths, _core.planner_options(**planner), group, elements)
    wrap = StepPrediction._wrap
    return Comparison({s.name: wrap(s.step, s.name, s.num_shards, degree=s.degree) for s in steps})


def zigzag_plan(
    doc_lengths: Sequence[int],
    world_size: int,
    tokens_per_rank: int = 65536,
    degree: Optional[int] = None,
    mask: str = "causal",
) -> QkvPlan:
    """Static context parallelism over packed sequences: groups of ``degree`` ranks (None: as many
    as divide the world, at most 8), each sequence in 2 * degree chunks, rank i has the i-th and the
    i-th from the end.
    """
    return _static("zigzag_plan", doc_lengths, world_size, tokens_per_rank, degree, mask)


def per_document_plan(
    doc_lengths: Sequence[int],
    world_size: int,
    tokens_per_rank: int = 65536,
    degree: Optional[int] = None,
    mask: str = "causal",
) -> QkvPlan:
    """Static context parallelism as in zigzag_plan, with 2 * degree chunks of every document."""
    return _static("per_document_plan", doc_lengths, world_size, tokens_per_rank, degree, mask)


def _static(
    who: str, doc_lengths: Any, world_size: Any, tokens_per_rank: Any, degree: Any, mask: str
) -> QkvPlan:
    world = _world(world_size, f"{who}: world_size")
    group = _core.static_degree(world, 8) if degree is None else _degree(degree, who)
    lengths = flat_list(doc_lengths, f"{who}: doc_lengths")
    rows = int64(tokens_per_rank, f"{who}: tokens_per_rank")
    kind = choice(mask, f"{who}: mask", "causal", "full")
    return QkvPlan._wrap(getattr(_core, who)(lengths, world, rows, group, kind))


def _degree(value: Any, who: str) -> int:
    return within(value, 1, 2**20, f"{who}: degree", "2^20")
