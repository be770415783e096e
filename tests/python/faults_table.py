"""A rank of three processes in host memory is killed, stopped or slowed around each call: whom the
others name, after how long, and whether the next job starts.

    python tests/python/faults_table.py [TABLE.md]    # prints the table, or writes its page
    python tests/python/faults_table.py --pairs       # a third of it, in which all pairs meet
"""

import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import pathlib
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback

import torch

import waybill
import waybill.torch as wt
from waybill.torch.moe import EPAll2AllLayer

WORLD, VICTIM, LATE = 3, 1, 2
ROWS, HIDDEN, TOPK = 4, 16, 2
DEADLINE_S, SLOW_S, LATE_S, INSIDE_S, MARGIN_S = 3.0, 0.6, 0.8, 0.3, 3.0
JOB_S = 30.0  # the deadline of the next job
PHASES = ("before", "inside", "after")
FAULTS = ("killed", "stopped", "slowed")


def metadata():
    """Each rank's document goes to the next rank."""
    ranks = list(range(WORLD))
    next_rank = [(rank + 1) % WORLD for rank in ranks]
    return waybill.QkvPlan(
        WORLD, [*ranks, WORLD], [ROWS] * WORLD, next_rank, [*ranks, WORLD], ranks
    ).to_metadata()


def dispatch(world):
    rows = torch.ones(ROWS, HIDDEN)
    dispatcher = wt.SequenceDispatcher(world)
    plan = dispatcher.plan_dispatch((metadata().fwd_kv, rows))
    dispatcher.reserve(plan)
    return lambda: dispatcher.dispatch(plan, rows)


def kv_gradient(world):
    dispatcher = wt.SequenceDispatcher(world)
    plan = dispatcher.plan_kv_gradient((metadata().fwd_kv, torch.ones(ROWS, HIDDEN)))
    dispatcher.reserve(plan)
    gradient = torch.ones(plan.window_rows[0], HIDDEN)
    return lambda: dispatcher.kv_gradient(plan, gradient)


def make_layer(world):
    return EPAll2AllLayer(
        world, ROWS, HIDDEN, TOPK, world.rank, 2 * WORLD, WORLD, WORLD, torch.float32
    )


def ids():
    return torch.arange(ROWS * TOPK, dtype=torch.int32).view(ROWS, TOPK) % (2 * WORLD)


def expert_dispatch(world):
    layer = make_layer(world)
    return lambda: layer.dispatch(torch.ones(ROWS, HIDDEN), ids())


def combine(world):
    layer = make_layer(world)
    rows, _, layout = layer.dispatch(torch.ones(ROWS, HIDDEN), ids())
    return lambda: layer.combine(rows, layout)


def barrier(world):
    return world.barrier


def making(world):
    return lambda: make_layer(world)


def closing(world):
    """The second call is of another layer."""
    layers = [make_layer(world) for _ in range(2)]
    return lambda: layers.pop().finalize()


CALLS = {
    "dispatch": dispatch, "kv_gradient": kv_gradient, "dispatch of experts": expert_dispatch,
    "combine of experts": combine, "barrier": barrier, "making a layer": making,
    "closing a layer": closing,
}  # fmt: skip


def fall(fault, note):
    """Ends here for those that are killed."""
    note({"fell": time.monotonic()})
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


def run_calls(rank, call, phase, fault, note):
    """Two calls; the fault is around the first."""
    falls = rank == VICTIM
    if falls and phase == "before":
        fall(fault, note)
    if falls and phase == "inside":
        threading.Timer(INSIDE_S, fall, (fault, note)).start()
    if rank == LATE and phase == "inside":
        time.sleep(LATE_S)
    call()
    if falls and phase == "after":
        fall(fault, note)
    call()


def named(error):
    """The rank that an error is about in the end, as other ranks may have told it."""
    told = re.findall(r"rank (\d+) (?:is gone|left)", str(error))
    if told:
        return int(told[-1])
    return getattr(error, "peer", None)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_rank(rank, folder, port, case, timeout_s):
    """In a process of its own."""

    def note(what):
        with open(folder / f"rank{rank}.jsonl", "a") as file:
            file.write(json.dumps({"rank": rank, **what}) + "\n")

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD),
        WAYBILL_RENDEZVOUS=f"tcp://127.0.0.1:{port}",
    )  # fmt: skip
    world = waybill.World.from_environment(timeout_s=timeout_s)
    if case is None:
        call = dispatch(world)
        call()
        world.barrier()
        return
    call = CALLS[case[0]](world)
    world.barrier()
    try:
        run_calls(rank, call, *case[1:], note)
    except (waybill.TransportError, waybill.Timeout) as error:
        kind = type(error).__name__
        note({"error": kind, "named": named(error), "at": time.monotonic(), "text": str(error)})
        raise


def start_rank(*given):
    child = os.fork()
    if child:
        return child
    status = 1
    with contextlib.suppress(BaseException):
        try:
            run_rank(*given)
            status = 0
        except (waybill.TransportError, waybill.Timeout):
            status = 3
        except BaseException:
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def start_ranks(*given):
    return [start_rank(rank, *given) for rank in range(WORLD)]


def await_ranks(children, slowed=False):
    """Exit statuses of the children by process, without that of one that stays stopped."""
    ended, until = {}, time.monotonic() + 60
    while len(ended) < len(children):
        for child in set(children) - set(ended):
            found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if not found:
                continue
            if not os.WIFSTOPPED(status):
                ended[child] = status
            elif slowed:
                time.sleep(SLOW_S)
                os.kill(child, signal.SIGCONT)
            else:
                ended[child] = None
        if time.monotonic() > until:
            for child in set(children) - set(ended):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return ended


def run_case(case):
    """What came of a (call, phase, fault)."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="waybill_faults_"))
    port = free_port()
    try:
        children = start_ranks(folder, port, case, DEADLINE_S)
        ended = await_ranks(children, slowed=case[2] == "slowed")
        notes = [
            json.loads(line)
            for file in folder.glob("rank*.jsonl")
            for line in file.read_text().splitlines()
        ]
        # At the same port, while a stopped rank is still there.
        job = await_ranks(start_ranks(folder, port, None, JOB_S))
        for child, status in ended.items():
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    fell = next((one["fell"] for one in notes if "fell" in one), None)
    errors = {one["rank"]: one for one in notes if "error" in one}
    return {
        "case": case, "fell": fell is not None, "errors": errors,
        "seconds": {r: one["at"] - fell for r, one in errors.items()} if fell is not None else {},
        "statuses": [ended[child] for child in children],
        "next_job": all(status == 0 for status in job.values()),
    }  # fmt: skip


def wrong(result):
    """What is not as it must be; empty: nothing."""
    call, phase, fault = result["case"]
    found, errors = [], result["errors"]
    if not result["fell"]:
        found.append("the rank did not fall")
    if not result["next_job"]:
        found.append("the next job did not start")
    if fault == "slowed":
        if errors or any(result["statuses"]):
            found.append(f"a slow rank ended the job: {errors} {result['statuses']}")
    else:
        survivors = [rank for rank in range(WORLD) if rank != VICTIM]
        if sorted(errors) != survivors:
            found.append(f"ranks {sorted(errors)} ended, expected {survivors}")
        if any(one["named"] != VICTIM for one in errors.values()):
            found.append(f"another rank was named: {[one['text'] for one in errors.values()]}")
        expected = DEADLINE_S if fault == "stopped" else 0.0
        if any(s > expected + LATE_S + MARGIN_S for s in result["seconds"].values()):
            found.append(f"it took {result['seconds']}")
    return [f"{call}, {phase}, {fault}: {text}" for text in found]


def in_pairs(cases):
    """A third of them: any two of a call, a phase and a fault meet once."""
    lists = [list(one) for one in (CALLS, PHASES, FAULTS)]
    return [case for case in cases if sum(one.index(c) for one, c in zip(lists, case)) % 3 == 0]


def run_all(pairs):
    torch.set_num_threads(1)  # also: no threads of torch where ranks are forked
    cases = list(itertools.product(CALLS, PHASES, FAULTS))
    if pairs:
        cases = in_pairs(cases)
    with multiprocessing.get_context("fork").Pool(6) as pool:
        return pool.map(run_case, cases, chunksize=1)


def row_of(result):
    call, phase, fault = result["case"]
    errors = result["errors"].values()
    kinds = " and ".join(sorted({one["error"] for one in errors})) or "none"
    ranks = ", ".join(str(rank) for rank in sorted({one["named"] for one in errors}, key=str))
    seconds = max(result["seconds"].values(), default=None)
    cells = [
        call, phase, fault, kinds, ranks or "nobody", "" if seconds is None else f"{seconds:.1f}",
        "yes" if result["next_job"] else "no",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(results):
    machine = f"{platform.system()}, {os.cpu_count()} cores ({platform.machine()})"
    head = f"""# What ends when a rank ends

Rank {VICTIM} of {WORLD} is killed (SIGKILL), stopped (SIGSTOP) or slowed (stopped for {SLOW_S:g} s)
around a collective call, which each rank makes twice. Ranks are processes of one host, in host
memory; every wait has a deadline of {DEADLINE_S:g} s (`timeout_s`, 60 s unless set).

- Before: the rank falls before its first call.
- Inside: it falls in its first call, after it has sent its part, while it waits for rank {LATE},
  which comes {LATE_S:g} s late.
- After: it falls between its calls.

Seconds are from the fall until the last of the other ranks has its error. The next job meets at the
same port, while a stopped rank is still there. Measured on {datetime.date.today()},
{machine}, beside other programs, by
`tests/python/faults_table.py`; its test runs a third of it in CI, in which any two of a call, a
time and a fault meet.

| call | when | rank {VICTIM} is | error of the others | names rank | seconds | next job starts |
|---|---|---|---|---|---|---|
"""
    return head + "\n".join(row_of(result) for result in results) + "\n"


def main():
    arguments = sys.argv[1:]
    pairs = "--pairs" in arguments
    results = run_all(pairs)
    if arguments and not pairs:
        pathlib.Path(arguments[0]).write_text(page(results))
    else:
        print(page(results))
    found = [text for result in results for text in wrong(result)]
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
