"""Ctrl-C in a loop over calls that never really wait, as all data are there: it ends soon."""

import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

from endless_calls import CALLS
from rank_processes import run_programs
from test_interrupts import environment, latencies

pytestmark = pytest.mark.alone

HERE = str(pathlib.Path(__file__).parent)
LATENCY_S = 0.5
MARGIN_S = 0.5  # other programs may keep this one from running

PREAMBLE = """
    import gc, os, signal, sys, threading, time
    import torch
    import endless_calls
    import waybill
    import waybill.torch as wt

    def interrupt(times=1, apart_s=0.3):
        def send():
            for _ in range(times):
                time.sleep(0.05)
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(apart_s)
        sent.clear()
        threading.Thread(target=send, daemon=True).start()

    def latency():
        return time.monotonic() - sent[0]

    sent = []
"""


def program_of(code, *arguments, **variables):
    """As run_programs takes it."""
    return textwrap.dedent(PREAMBLE) + textwrap.dedent(code), arguments, environment(**variables)


THREADS = """
    for name in endless_calls.CALLS:
        for world_size in (1, 2, 3):
            try:
                wt.run_threads(world_size, lambda w: endless_calls.loop(name, interrupt, w))
            except KeyboardInterrupt:
                print(f"{name}_{world_size} ended after", latency(), "s", flush=True)
"""


def test_ranks_that_are_threads(tmp_path):
    ((_, output),) = run_programs(tmp_path, [program_of(THREADS)])
    seen = latencies(output)
    assert set(seen) == {f"{name}_{size}" for name in CALLS for size in (1, 2, 3)}, output
    assert max(seen.values()) < LATENCY_S + MARGIN_S, seen


# Rank 0 is interrupted, on its main thread or on another one; rank 1 is told, or finds it gone.
PROCESSES = """
    where, rank = sys.argv[1], int(os.environ["RANK"])

    def loop(case, begun):
        os.environ["WAYBILL_RENDEZVOUS"] = f"file://{where}/{case}"
        name = case.rpartition("_")[0]
        endless_calls.loop(name, begun, waybill.World.from_environment(timeout_s=60))

    def end(case, error):
        try:
            loop(case, interrupt)
        except error:
            print(case, "ended after", latency(), "s", flush=True)

    def end_on_thread(case):
        thread = threading.Thread(target=end, args=(case, waybill.Interrupted), daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                time.sleep(0.01)
        except KeyboardInterrupt:
            while thread.is_alive():
                time.sleep(0.01)

    for name in ("dispatch", "attention_and_backward", "gather", "experts", "deep_ep", "barrier"):
        for case in (f"{name}_main", f"{name}_thread"):
            if rank == 1:
                try:
                    loop(case, None)
                except waybill.TransportError:
                    pass
            elif case.endswith("_main"):
                end(case, KeyboardInterrupt)
            else:
                end_on_thread(case)
            gc.collect()  # rank 1 finds that this rank has left the world
"""


def test_ranks_that_are_processes(tmp_path):
    ranks = [
        program_of(PROCESSES, tmp_path, RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank,
                   LOCAL_WORLD_SIZE=2)
        for rank in range(2)
    ]  # fmt: skip
    statuses, outputs = zip(*run_programs(tmp_path, ranks))
    assert statuses == (0, 0), outputs
    seen = latencies(outputs[0])
    assert len(seen) == 12, outputs
    assert max(seen.values()) < LATENCY_S + MARGIN_S, seen


def test_a_second_interrupt_ends_ranks_that_never_call(tmp_path):
    """Threads in the middle of a call of torch would end the program by std::terminate. Once as
    users start it; a forked program ends as the interpreter does, but by a status.
    """
    code, _, variables = program_of("""
        def busy(world):
            if world.rank == 0:
                interrupt(times=2)
            rows = torch.ones(64, 64)
            while True:
                rows = rows @ rows

        begun = time.monotonic()
        try:
            wt.run_threads(2, busy)
        finally:
            print("run ended after", time.monotonic() - begun, "s", flush=True)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**variables, "PYTHONPATH": HERE}, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    ends = [(done.returncode, done.stdout)]
    ends += [run_programs(tmp_path, [(code, (), variables)])[0] for _ in range(3)]
    assert [status for status, _ in ends] == [-signal.SIGINT] + 3 * [128 + signal.SIGINT], ends
    for _, output in ends:
        assert "terminate called" not in output, output
        assert latencies(output)["run"] < 3, output
