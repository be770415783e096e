"""``python -m waybill selftest``: what is installed here checks itself, in seconds.

Small recorded cases, the program, simulations, and ranks that are threads against the simulation;
where torch is there, its face too, and where there are GPUs, ranks on them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, Tuple

import numpy as np

from .. import _core
from .._arrays import AnyArray
from ..errors import Error, ShapeMismatch, Timeout
from ..metadata import QkvMetadata
from ..moe import EPConfig, simulate_dispatch
from ..planner import AttentionPlan, plan
from ..plans import QkvPlan, QkvRouting, validate
from ..routing import create_qkv_dispatch, sample_documents
from ..sequence_dispatcher import SequenceDispatcher
from ..simulate import (
    orchestrate_simulate,
    simulate_communication,
    sum_kv_copies,
    test_qkv_dispatch,
)
from ..timing import predict_step
from ..world import World, run_threads

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the checks; 0 when none failed, 1 when some did, 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    repeats = options.repeat is not None
    stray = [name for name in _OF_REPEAT if getattr(options, name) is not None]
    if stray and not repeats:
        parser.error(f"--{stray[0]} needs --repeat")
    if repeats and importlib.util.find_spec("torch") is None:
        parser.error("--repeat needs torch, which is not installed")
    if repeats:  # before CUDA starts: what a rank queues or loads must not wait for another rank
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    print(describe(), flush=True)
    try:
        return (
            _repeat(options) if repeats else _run(_checks(not options.no_gpus), options.traceback)
        )
    except KeyboardInterrupt:
        print("\nselftest: interrupted", flush=True)
        return 130


#: Options that say how --repeat repeats.
_OF_REPEAT = ("device", "ranks", "tokens", "hidden", "only")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m waybill selftest",
        description="Checks this installation of Waybill: recorded cases, simulations, ranks that"
        " move rows, and torch and GPUs where they are there.",
    )
    parser.add_argument("--no-gpus", action="store_true", help="leave the GPUs alone")
    parser.add_argument("--traceback", action="store_true", help="show where a check failed")
    repeat = parser.add_argument_group(
        "the same bits",
        "With --repeat, instead of the checks: calls of each kind (dispatch, combine, sequences,"
        " gradients of K and V) again and again with the same inputs. The first results must be"
        " those of the simulation, all later ones have the same bits; they are compared on the"
        " device. On GPUs a tenth of the calls is eager, the rest is in CUDA graphs.",
    )
    repeat.add_argument(
        "--repeat", type=_count(10**9), metavar="N", help="calls of each kind; needs torch"
    )
    repeat.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda where there is a GPU, which ranks may share"
    )
    repeat.add_argument(
        "--ranks", type=_count(64), help="threads; as many as there are GPUs, and at least 2"
    )
    repeat.add_argument("--tokens", type=_count(2**20), help="tokens of each rank in a call; 128")
    repeat.add_argument(
        "--hidden", type=_count(2**16), help="elements of a row, a multiple of 128; 1024"
    )
    repeat.add_argument("--only", metavar="TEXT", help="kinds of call with this in their name")
    return parser


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not (text.isdecimal() and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text}, expected 1 to {most}")
        return int(text)

    return count


def _repeat(options: argparse.Namespace) -> int:
    found = importlib.import_module("waybill.torch._repeat")
    device = options.device or ("cpu" if _why_no_gpus(not options.no_gpus) else "cuda")
    try:
        return found.run(  # type: ignore[no-any-return]
            options.repeat, options.ranks, options.tokens or 128, options.hidden or 1024, device,
            options.only,
        )  # fmt: skip
    except Error as error:
        print(f"selftest: {error}", file=sys.stderr)
        return 2


def _checks(with_gpus: bool) -> list[Tuple[str, Check]]:
    """(what is checked, the check), those that need nothing first."""
    found: list[Tuple[str, Check]] = [("recorded cases", run_golden), *CHECKS]
    if importlib.util.find_spec("torch") is None:
        found.append(("torch", _skip("torch is not installed")))
        return found
    # By name: no file of the numpy face imports torch's.
    torch_checks = importlib.import_module("waybill.torch._selftest")
    found += [("recorded cases, tensors", torch_checks.golden), *torch_checks.CHECKS]
    why = _why_no_gpus(with_gpus)
    if why is not None:
        found.append(("GPUs", _skip(why)))
    else:
        found += torch_checks.GPU_CHECKS
    return found


def _why_no_gpus(wanted: bool) -> Optional[str]:
    if not wanted:
        return "--no-gpus"
    if not _core.has_cuda:
        return "built without CUDA"
    if _core.num_gpus() == 0:
        return _core.driver_trouble() or "there is none"
    torch = importlib.import_module("torch")
    return None if torch.cuda.is_available() else "torch finds none"


def _skip(reason: str) -> Callable[[], str]:
    def check() -> str:
        raise Skipped(reason)

    return check


def _run(found: list[Tuple[str, Check]], with_traceback: bool) -> int:
    """Runs them in order, a line each, and prints the verdict."""
    start, failed, skipped = time.monotonic(), [], []
    width = max(len(name) for name, _ in found)
    for number, (name, check) in enumerate(found, start=1):
        print(f"{number:2}/{len(found)}  {name:{width}}  ", end="", flush=True)
        begin = time.monotonic()
        try:
            detail, verdict = check(), "ok"
        except Skipped as reason:
            detail, verdict = str(reason), "skipped"
            skipped.append(f"{name}: {reason}")
        except Exception as error:  # a check that fails must not end the others
            text = f"{type(error).__name__}: {error}"
            detail, verdict = text.splitlines()[0], "FAILED"
            failed.append(name)
            if with_traceback:
                detail += "\n" + traceback.format_exc().rstrip()
        elapsed = time.monotonic() - begin
        print(f"{verdict:8}{elapsed:6.2f} s  {detail}", flush=True)
    seconds = time.monotonic() - start
    if failed:
        print(f"selftest: FAILED: {', '.join(failed)} ({len(found)} checks, {seconds:.1f} s)")
        if not with_traceback:
            print("selftest: --traceback shows where")
        return 1
    aside = f"; skipped {', '.join(skipped)}" if skipped else ""
    print(f"selftest: passed: {len(found) - len(skipped)} checks in {seconds:.1f} s{aside}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


#: A check returns what it did, in a few words, or raises.
Check = Callable[[], str]

LENGTHS = (300, 180, 97, 64, 33, 20, 11, 3)
HIDDEN = 32
TIMEOUT_S = 30.0


class Skipped(Exception):
    """A check that does not apply here; the text says why."""


def describe() -> str:
    """One line: versions, and where the package lies."""
    folder = Path(__file__).resolve().parent.parent
    parts = [f"waybill {_core.version} in {folder}", f"Python {platform.python_version()}"]
    for name in ("numpy", "torch"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    parts.append(f"{_core.num_gpus()} GPUs" if _core.has_cuda else "built without CUDA")
    return ", ".join(parts)


def expect(holds: Any, what: str) -> None:
    """An assertion that `python -O` does not leave out."""
    if not holds:
        raise AssertionError(what)


def planned(world_size: int) -> AttentionPlan:
    """Documents of uneven lengths, cut and spread over the ranks."""
    return plan(list(LENGTHS), world_size, 0)


def rows_of(made: AttentionPlan, rank: int) -> int:
    """Rows of a rank in the MLP layout."""
    begin, end = made.to_qkv_plan().rank_shard_offsets[rank : rank + 2]
    return int(made.to_qkv_plan().shard_len[begin:end].sum())


def payload(rank: int, rows: int, kind: int) -> AnyArray:
    """Small whole numbers: every sum of them is exact, in any order."""
    numbers = np.random.default_rng(100 * kind + rank).integers(1, 9, (rows, HIDDEN))
    return numbers.astype(np.float32)


def payloads(made: AttentionPlan, world_size: int, kind: int) -> list[AnyArray]:
    """One array per rank."""
    return [payload(rank, rows_of(made, rank), kind) for rank in range(world_size)]


def expected_rows(tensors: list[AnyArray], metadata: Any) -> list[AnyArray]:
    """The rows that each rank receives, by the simulation."""
    return [np.asarray(rows) for rows in simulate_communication(tensors, metadata)]


def expected_gradients(received: list[AnyArray], metadata: QkvMetadata, rows: list[int]) -> Any:
    """The sums of the copies of each rank's rows, when every rank returns what it received."""
    reverse = metadata.rev_kv
    assert reverse.seq_recv_mask is not None
    copies = reverse.seq_recv_mask.shape[2]
    world, most = len(received), max(len(r) for r in received)
    hidden = received[0].shape[1]
    given = np.zeros((world, most, hidden), np.float32)
    for rank, values in enumerate(received):
        given[rank, : len(values)] = values
    planes = np.zeros((world, copies * max(rows), hidden), np.float32)
    orchestrate_simulate(given, planes, reverse)
    return [
        sum_kv_copies(planes[rank, : copies * rows[rank]], reverse, rank) for rank in range(world)
    ]


def planned_step(world_size: int) -> Tuple[QkvRouting, Any, Any, Any, Any, Any]:
    """A step of attention: its routing; Q and K of each rank; Q, K and gradients of K that it gets,
    as the simulation says, when every rank returns what it received.
    """
    made = planned(world_size)
    metadata = made.to_metadata()
    q, k = (payloads(made, world_size, kind) for kind in (0, 1))
    want_q, want_k = expected_rows(q, metadata.fwd_q), expected_rows(k, metadata.fwd_kv)
    rows = [rows_of(made, rank) for rank in range(world_size)]
    want_sums = expected_gradients(want_k, metadata, rows)
    return made.to_routing(), q, k, want_q, want_k, want_sums


Face = Any
_FILE = Path(__file__).with_name("golden.jsonl")


def records() -> list[dict[str, Any]]:
    """One case per line: function, inputs, outputs."""
    return [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]


def run_golden(face: Face = None, make: Callable[[Any], Any] = lambda array: array) -> str:
    """Every record; ``make`` turns an array into what the face takes."""
    face = sys.modules["waybill"] if face is None else face
    every = records()
    for record in every:
        name = f"{record['fn']} ({record['case']})"
        given = {key: _made(entry, face, make) for key, entry in record["inputs"].items()}
        results = _results(face, record["fn"], given)
        for got, want in zip(results, record["outputs"].values(), strict=True):
            expect(_same(got, want), f"{name}: got {got!r}, expected {want!r}")
    return f"{len(every)} cases of {len({record['fn'] for record in every})} functions"


def _results(face: Face, name: str, given: dict[str, Any]) -> Any:
    """The outputs of a record in their order."""
    if name == "Metadata.get_slice":
        return [[given["metadata"].get_slice(rank) for rank in given["ranks"]]]
    if name == "Metadata.normalize_dtype":
        return [given["metadata"].normalize_dtype()]
    made = getattr(face, name)(**given)
    if name == "compute_metadata_kv":
        fwd, rev, intermediates = made
        return [fwd, rev, *intermediates]
    return made if isinstance(made, tuple) else [made]


def _made(entry: Any, face: Face, make: Callable[[Any], Any]) -> Any:
    """An input of a record, as a caller has it."""
    if not isinstance(entry, dict):
        return entry
    if "ragged" in entry:
        return [_made(one, face, make) for one in entry["ragged"]]
    if "dst_rank" in entry:
        return face.Metadata(**{key: _made(value, face, make) for key, value in entry.items()})
    return make(_array(entry))


def _array(entry: dict[str, Any]) -> Any:
    return np.array(entry["data"], dtype=entry["dtype"]).reshape(entry["shape"])


def _same(got: Any, want: Any) -> bool:
    """Arrays, metadata, lists of them, and plain values, against a record's entry."""
    if isinstance(want, dict) and "ragged" in want:
        want = want["ragged"]
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_same, got, want))
    if isinstance(want, dict) and "dst_rank" in want:
        return all(_same(getattr(got, name), value) for name, value in want.items())
    if not isinstance(want, dict):
        return bool(got == want)
    array, expected = np.asarray(got), _array(want)
    return array.dtype == expected.dtype and np.array_equal(array, expected)


def check_program() -> str:
    """The program that came with the package is of the same version."""
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
    return f"raised after {waited:.2f} s"


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
