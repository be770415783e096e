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


# Each loop never calls Waybill; ``ended`` has how it ended on each rank.
ALONE = """
    ended, nested = [], []

    def in_torch():
        rows = torch.ones(64, 64)
        while True:
            rows = rows @ rows

    def in_python():
        count = 0
        while True:
            count += 1

    def in_a_slow_call():
        while True:
            time.sleep(0.5)

    def in_a_run_of_its_own():
        wt.run_threads(2, lambda _: in_python())

    def stay(loop, world):
        torch.set_num_threads(1)
        try:
            if world.rank == 0:
                interrupt()
            loop()
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    def run(name):
        try:
            wt.run_threads(2, lambda world: stay(globals()[name], world))
        except KeyboardInterrupt as error:
            print(name, "ended after", latency(), "s", flush=True)
            print(name, sorted(ended), type(error).__name__, flush=True)

    for name in ("in_torch", "in_python", "in_a_slow_call", "in_a_run_of_its_own"):
        ended.clear()
        run(name)

    ended.clear()
    thread = threading.Thread(target=run, args=("in_python",))
    thread.start()
    try:
        while thread.is_alive():
            time.sleep(0.01)
    except KeyboardInterrupt:
        name = "in_python"
        while thread.is_alive():
            time.sleep(0.01)
    print("all threads:", threading.active_count() - 1, flush=True)
"""
PATIENCE_S = 1.0


def test_ranks_that_never_call_end_on_the_first_interrupt(tmp_path):
    ((status, output),) = run_programs(tmp_path, [program_of(ALONE)])
    assert status == 0, output
    limits = {"in_torch": 0, "in_python": 0, "in_a_slow_call": 0.5, "in_a_run_of_its_own": 0.3}
    seen = latencies(output)
    assert seen.keys() == limits.keys(), output
    for name, more in limits.items():
        assert PATIENCE_S < seen[name] < PATIENCE_S + more + LATENCY_S + MARGIN_S, output
    told = "['Interrupted', 'Interrupted'] KeyboardInterrupt"
    for name in ("in_torch", "in_python", "in_a_slow_call"):
        assert f"{name} ['KeyboardInterrupt', 'KeyboardInterrupt'] KeyboardInterrupt" in output
    assert f"in_a_run_of_its_own {told}" in output, output
    # From another thread: that thread's wait for its ranks is one of the library.
    assert "in_python ['KeyboardInterrupt', 'KeyboardInterrupt'] Interrupted\n" in output, output
    assert "all threads: 0\n" in output, output


def test_ranks_in_the_middle_of_an_import(tmp_path):
    """One imports and the others wait for it, by locks that an exception would leave taken."""
    (tmp_path / "slow_to_import.py").write_text("""
import time
for _ in range(400):
    time.sleep(0.01)
""")
    program = """
        sys.path.insert(0, sys.argv[1])

        def body(world):
            if world.rank == 0:
                interrupt()
            import slow_to_import

        try:
            wt.run_threads(4, body)
        except KeyboardInterrupt:
            print("ended after", latency(), "s", threading.active_count(), "threads", flush=True)
    """
    ((_, output),) = run_programs(tmp_path, [program_of(program, tmp_path)], timeout=30)
    assert "1 threads" in output, output
    assert latencies("import " + output)["import"] < PATIENCE_S + LATENCY_S + MARGIN_S, output


def test_a_rank_that_has_heard_of_the_interrupt_is_left_alone(tmp_path):
    """It may have caught it to save its work, for longer than other ranks are waited for."""
    program = """
        saved = []

        def train(world):
            if world.rank == 0:
                interrupt()
            try:
                while True:
                    world.barrier()
                    time.sleep(0.01)
            except KeyboardInterrupt:
                pass
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                pass
            saved.append(world.rank)

        try:
            wt.run_threads(2, train)
        except KeyboardInterrupt:
            print("saved by", sorted(saved), flush=True)
    """
    ((_, output),) = run_programs(tmp_path, [program_of(program)])
    assert output == "saved by [0, 1]\n"


def test_what_ranks_had_raised_is_told(tmp_path):
    """One rank fails, and one loops in what it does after an error of its own."""
    program = """
        def body(world):
            if world.rank == 0:
                interrupt()
                raise ValueError("no such file")
            if world.rank == 1:
                world.barrier()
            try:
                raise LookupError("no such key")
            finally:
                while True:
                    pass

        try:
            wt.run_threads(3, body)
        except KeyboardInterrupt as error:
            said = "\\n".join([str(error), *getattr(error, "__notes__", ())])
            print(said.strip(), flush=True)
    """
    ((_, output),) = run_programs(tmp_path, [program_of(program)])
    wanted = ["rank 0: ValueError: no such file", "rank 2: LookupError: no such key"]
    assert output.splitlines() == wanted


def test_nobody_but_ranks_in_their_body_is_interrupted(tmp_path):
    """Ranks end at any time around the interrupt, others begin with a number that one had."""
    program = """
        import random
        from waybill import _rank_threads

        _rank_threads._PATIENCE_S = 0.0
        hit, stop, runs = [], [], {"interrupted": 0, "ended": 0}

        def other():
            try:
                for _ in range(100):
                    pass
            except BaseException as error:
                hit.append(error)

        def others():
            while not stop:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()

        def body(world):
            until = time.monotonic() + random.uniform(0, 0.008)
            while time.monotonic() < until:
                pass

        def alarm(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, alarm)
        crowd = threading.Thread(target=others)
        crowd.start()
        begun = time.monotonic()
        for _ in range(20):
            wt.run_threads(3, body)
        longest = 2 * (time.monotonic() - begun) / 20  # half of the runs end before
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, longest))
                wt.run_threads(3, body)
                signal.setitimer(signal.ITIMER_REAL, 0)
                runs["ended"] += 1
            except KeyboardInterrupt:
                runs["interrupted"] += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
        stop.append(True)
        crowd.join()
        print(hit, min(runs.values()) > 20, threading.active_count(), runs, flush=True)
    """
    ((status, output),) = run_programs(tmp_path, [program_of(program)], timeout=120)
    last = output.splitlines()[-1]  # Python writes of an alarm in the middle of its own cleaning up
    assert status == 0 and last.startswith("[] True 1 "), output
