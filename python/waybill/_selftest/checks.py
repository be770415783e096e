"""The checks that need numpy alone."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any, Tuple

import numpy as np

from .. import _core
from ..errors import ShapeMismatch, Timeout
from ..generators import create_qkv_dispatch, sample_documents
from ..moe import EPConfig, simulate_dispatch
from ..planner import plan
from ..plans import QkvPlan
from ..sequence_dispatcher import SequenceDispatcher
from ..simulate import orchestrate_simulate, test_qkv_dispatch
from ..timing import predict_step
from ..validation import validate
from ..world import World, run_threads
from .parts import (
    TIMEOUT_S,
    Check,
    Skipped,
    expect,
    planned_step,
)


def check_program() -> str:
    """The program beside the package is of the same version."""
    done = subprocess.run(
        [sys.executable, "-m", "waybill", "--version"], capture_output=True, text=True, check=False
    )
    if "not installed beside" in done.stderr:
        raise Skipped("the program is not installed")
    expect(done.returncode == 0, f"waybill --version: {done.stderr.strip()}")
    expect(_core.version in done.stdout, f"it says {done.stdout.strip()}, expected {_core.version}")
    return done.stdout.strip()


def check_planner() -> str:
    """Even work, a plan and metadata without findings, a prediction, and JSON there and back."""
    lengths = sample_documents("wlbllm", 8 * 16384, 1).tolist()
    made = plan(lengths, 8, 16384)
    expect(made.imbalance <= 1.02, f"imbalance {made.imbalance:.3f}, expected at most 1.02")
    findings = validate(made.to_qkv_plan(), made.to_metadata())
    expect(not findings, f"{len(findings)} findings, the first: {findings[:1]}")
    expect(predict_step(made).seconds > 0, "a step takes no time")
    plain = made.to_qkv_plan()
    expect(QkvPlan.from_json(plain.to_json()) == plain, "JSON gives another plan")
    return f"{len(lengths)} documents on 8 ranks, imbalance {made.imbalance:.3f}"


def check_validator() -> str:
    """Damaged tables are found, and refused before the first byte."""
    forward, reverse, *_ = create_qkv_dispatch(4, 64, 3, 4, seed=2)
    expect(validate(forward, reverse) == [], "findings in tables without damage")
    forward.dst_offset[1, 0] += 1
    expect(len(validate(forward, reverse)) > 0, "no finding in damaged tables")
    output = np.zeros((4, max(forward.num_total_recv_tokens) - 1, 2), np.float32)
    try:
        orchestrate_simulate(np.ones((4, 64, 2), np.float32), output, forward)
    except ShapeMismatch:
        expect(not output.any(), "rows were written before the error")
        return "one offset changed: found by both"
    raise AssertionError("the simulation took damaged tables")


def check_simulation() -> str:
    """Random plans there and back; every element, and the sums of the copies."""
    for world, seed in ((1, 0), (2, 1), (8, 2)):
        test_qkv_dispatch(
            world_size=world, num_seqs=5, max_seq_shard=min(world, 4), num_tokens=512,
            hidden_size=16, seed=seed,
        )  # fmt: skip
    return "3 random plans, forward and back"


def check_threads() -> str:
    """Ranks that are threads against the simulation: Q, K, V, the way back, gradients of K and V,
    on one node and on two.
    """
    for per_node in (4, 2):
        _dispatch_on_threads(4, per_node)
    return "4 ranks on 1 and on 2 nodes: equal to the simulation"


def _dispatch_on_threads(world_size: int, per_node: int) -> None:
    routing, q, k, want_q, want_k, want_sums = planned_step(world_size)

    def body(world: World) -> Tuple[Any, ...]:
        mine_q, mine_k = q[world.rank], k[world.rank]
        with SequenceDispatcher(world) as dispatcher:
            there = dispatcher.plan_dispatch((routing.fwd_q, mine_q), (routing.fwd_kv, mine_k))
            back = dispatcher.plan_dispatch((routing.rev_q, mine_q))
            gradient = dispatcher.plan_kv_gradient((routing.fwd_kv, mine_k))
            got = [view.copy() for view in dispatcher.dispatch(there, mine_q, mine_k)]
            (home,) = dispatcher.dispatch(back, got[0])
            home = home.copy()
            (sums,) = dispatcher.kv_gradient(gradient, got[1])
            return (*got, home, sums.copy())

    results = run_threads(world_size, body, ranks_per_node=per_node, timeout_s=TIMEOUT_S)
    for rank, result in enumerate(results):
        wanted = (want_q[rank], want_k[rank], q[rank], want_sums[rank])
        for name, got, want in zip(("Q", "K", "Q home", "gradient of K"), result, wanted):
            same = got.shape == want.shape and (got == want).all()
            expect(same, f"rank {rank} of {world_size}, {per_node} a node: {name} differs")


def check_deadline() -> str:
    """A rank that does not come is named within the deadline."""
    deadline = 0.4

    def body(world: World) -> float:
        begin = time.monotonic()
        if world.rank == 1:
            time.sleep(2.5 * deadline)
            return 0.0
        try:
            world.barrier()
        except Timeout as error:
            expect(error.peer == 1, f"it names rank {error.peer}, expected 1")
            return time.monotonic() - begin
        raise AssertionError("the barrier did not miss a rank")

    waited, _ = run_threads(2, body, timeout_s=deadline)
    return f"told after {waited:.2f} s"


def check_experts() -> str:
    """Tokens to experts and back: rows, their order, and sums, worked out by hand."""
    config = EPConfig(3, 2, 2, 4, 0, 2, 2, token_dtype="float32")
    tokens = [np.array([[1, 1], [2, 2], [3, 3]], np.float32), np.array([[4, 4]], np.float32)]
    ids = [np.array([[0, 2], [1, 0], [3, 2]]), np.array([[2, 0]])]
    there = simulate_dispatch(config, tokens, ids)
    got = [rows[:, 0].tolist() for rows in there.recv_tokens]
    expect(got == [[1, 2, 4, 2], [1, 3, 4, 3]], f"rows {got}")
    expect(there.recv_origin[0].tolist() == [[0, 0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]], "origins")
    home = there.combine([rows * 10 for rows in there.recv_tokens])
    sums = [rows[:, 0].tolist() for rows in home]
    expect(sums == [[20, 40, 60], [80]], f"sums {sums}")
    return "2 ranks, 4 experts: rows, order, sums"


CHECKS: list[Tuple[str, Check]] = [
    ("the program", check_program),
    ("planner", check_planner),
    ("validator", check_validator),
    ("simulation", check_simulation),
    ("ranks that are threads", check_threads),
    ("deadlines", check_deadline),
    ("experts", check_experts),
]
