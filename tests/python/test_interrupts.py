"""Ctrl-C in every wait: it ends soon, what was interrupted says so afterwards, others are told."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest
from rank_processes import run_programs

pytestmark = pytest.mark.alone

LAUNCHERS = ("OMPI_", "SLURM_", "PMI_", "MPI_", "MASTER_", "WAYBILL_", "RANK", "WORLD_SIZE")
LATENCY_S = 0.2
MARGIN_S = 0.3  # other programs may keep this one from running

PREAMBLE = """
    import os, signal, sys, threading, time
    import numpy as np
    import waybill

    def interrupt_later(after=0.2):
        def send():
            time.sleep(after)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        sent.clear()
        threading.Thread(target=send, daemon=True).start()

    def latency():
        return time.monotonic() - sent[0]

    sent = []
    metadata = waybill.QkvPlan(2, [0, 1, 2], [2, 2], [1, 1], [0, 1, 2], [1, 0]).to_metadata()
    rows = np.ones((2, 4), np.float32)
"""


def environment(**variables):
    base = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return base | {k: str(v) for k, v in variables.items()}


def start(program, *arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(program), *arguments],
        env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process):
    return finish_all([process])[0]


def finish_all(processes):
    """What they wrote; those that do not end are killed."""
    alarm = threading.Timer(120, lambda: [process.kill() for process in processes])
    alarm.start()
    try:
        return [process.communicate()[0] for process in processes]
    finally:
        alarm.cancel()


def latencies(output):
    found = re.findall(r"^(\S+) ended after (\S+) s", output, re.MULTILINE)
    return {name: float(seconds) for name, seconds in found}


# Rank 0 is interrupted in each wait, rank 1 comes later and is told.
EVERY_WAIT = """
    where, rank = sys.argv[1], int(sys.argv[2])

    def world_for(case):
        os.environ["WAYBILL_RENDEZVOUS"] = f"file://{where}/{case}"
        return waybill.World.from_environment(timeout_s=60)

    def barrier(world):
        return world.barrier, "the world is"

    def dispatch(world):
        dispatcher = waybill.SequenceDispatcher(world)
        plan = dispatcher.plan_dispatch((metadata.fwd_kv, rows))
        dispatcher.reserve(plan)
        return lambda: dispatcher.dispatch(plan, rows), "the dispatcher is"

    def kv_gradient(world):
        dispatcher = waybill.SequenceDispatcher(world)
        plan = dispatcher.plan_kv_gradient((metadata.fwd_kv, rows))
        dispatcher.reserve(plan)
        gradient = np.ones((plan.window_rows[0], 4), np.float32)
        return lambda: dispatcher.kv_gradient(plan, gradient), "the dispatcher is"

    def growth(world):
        dispatcher = waybill.SequenceDispatcher(world)
        return lambda: dispatcher.reserve(1 << 22), "the dispatcher is"

    def close(world):
        return waybill.SequenceDispatcher(world).close, "the dispatcher is"

    def on_main_thread(call):
        interrupt_later()
        try:
            call()
        except KeyboardInterrupt as error:
            assert type(error) is KeyboardInterrupt, error
            return latency()

    def on_another_thread(call):
        seen = []
        def run():
            try:
                call()
            except waybill.Interrupted as error:
                seen.append(latency())
            ended.set()
        ended = threading.Event()  # Thread.join may be wrong once it was interrupted
        threading.Thread(target=run).start()
        interrupt_later()
        try:
            ended.wait()
        except KeyboardInterrupt:
            ended.wait()
        return seen[0]

    for prepare in (barrier, dispatch, kv_gradient, growth, close):
        for run in (on_main_thread, on_another_thread):
            name = f"{prepare.__name__}_{run.__name__}"
            call, which = prepare(world_for(name))
            if rank == 0:
                print(name, "ended after", run(call), "s", flush=True)
                try:
                    call()
                except waybill.TransportError as error:
                    assert f"{which} unusable after an interrupt: " in str(error), error
                else:
                    raise AssertionError("not unusable")
            else:
                time.sleep(0.3)
                try:
                    call()  # for which rank 0 may have done its part before it was interrupted
                    call()
                except waybill.PeerFailed as error:
                    assert "rank 0 failed: interrupted by " in str(error), error
                else:
                    raise AssertionError("not told")
    print("all well")
"""


def test_every_wait_of_a_process_rank(tmp_path):
    ranks = [
        start(EVERY_WAIT, str(tmp_path), str(rank), RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank,
              LOCAL_WORLD_SIZE=2)
        for rank in range(2)
    ]  # fmt: skip
    outputs = finish_all(ranks)
    for output in outputs:
        assert output.endswith("all well\n"), output
    seen = latencies(outputs[0])
    assert len(seen) == 10
    assert max(seen.values()) < LATENCY_S + MARGIN_S, seen


@pytest.mark.parametrize("place", ["file", "tcp of rank 0", "tcp of rank 1"])
def test_a_rendezvous_that_nobody_comes_to(tmp_path, place):
    if place == "file":
        where = f"file://{tmp_path}/meet"
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    rank = int(place == "tcp of rank 1")
    program = """
        interrupt_later()
        try:
            waybill.World.from_environment(timeout_s=60)
        except KeyboardInterrupt:
            print("rendezvous ended after", latency(), "s")
    """
    output = finish(
        start(program, RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2,
              WAYBILL_RENDEZVOUS=where)
    )  # fmt: skip
    assert latencies(output)["rendezvous"] < LATENCY_S + MARGIN_S, output


GROUP = """
    import datetime
    import torch.distributed as distributed

    rank, where = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"file://{where}/group", rank=rank,
                                   world_size=2, timeout=datetime.timedelta(seconds=120))
"""


def run_group(tmp_path, program):
    code = "".join(map(textwrap.dedent, (PREAMBLE, GROUP, program)))
    variables = environment(GLOO_SOCKET_IFNAME="lo")
    ranks = [(code, (rank, tmp_path), variables) for rank in range(2)]
    return [output for _, output in run_programs(tmp_path, ranks)]


def test_a_process_group_has_the_deadline_of_the_world(tmp_path):
    """And interrupts, and worlds that follow each other in one group or in another."""
    pytest.importorskip("torch")
    outputs = run_group(
        tmp_path,
        """
        begin = time.monotonic()
        if rank == 0:
            try:
                waybill.World.from_process_group(timeout_s=0.5)
            except waybill.Timeout as error:
                assert (error.rank, error.peer, error.seen) == (0, 1, 0), error
                assert 0.5 <= time.monotonic() - begin < 2, time.monotonic() - begin
            interrupt_later()
            try:
                waybill.World.from_process_group(timeout_s=60)
            except KeyboardInterrupt:
                print("group ended after", latency(), "s")
        distributed.barrier()
        if rank == 1:
            for _ in range(2):  # what rank 0 has given up is not waited for
                try:
                    waybill.World.from_process_group(timeout_s=60)
                except waybill.PeerFailed as error:
                    assert "rank 0 failed: " in str(error), error
                else:
                    raise AssertionError("rank 0 has given up")
        for count in range(2):
            world = waybill.World.from_process_group(timeout_s=60)
            for _ in range(4):
                world.barrier()
        group = distributed.new_group([0, 1])
        world = waybill.World.from_process_group(group, timeout_s=60)
        world.barrier()
        del group
        distributed.destroy_process_group()
        try:
            world.barrier()
        except waybill.Error as error:
            assert "the group was destroyed" in str(error), error
        print("well")
        """,
    )
    for output in outputs:
        assert output.endswith("well\n"), output
    assert latencies(outputs[0])["group"] < LATENCY_S + MARGIN_S, outputs


def test_run_threads_ends_with_keyboard_interrupt_and_never_aborts():
    program = """
        def stay(world):
            dispatcher = waybill.SequenceDispatcher(world)
            plan = dispatcher.plan_dispatch((metadata.fwd_kv, rows))
            dispatcher.dispatch(plan, rows)
            if world.rank == 0:
                interrupt_later(0.05)
            if world.rank == 1:
                world.barrier()
            dispatcher.dispatch(plan, rows)

        for _ in range(12):
            try:
                waybill.run_threads(2, stay)
            except KeyboardInterrupt:
                print("run ended after", latency(), "s", flush=True)
        waybill.run_threads(2, stay)
    """
    process = start(program)
    output = finish(process)
    seen = [float(s) for s in re.findall(r"ended after (\S+) s", output)]
    assert len(seen) == 12 and max(seen) < LATENCY_S + MARGIN_S, output
    assert process.returncode == -signal.SIGINT and "terminate called" not in output, output


def test_a_second_interrupt_leaves_ranks_that_do_not_end(tmp_path):
    program = """
        def busy(world):
            if world.rank == 0:
                interrupt_later(0.2)
                time.sleep(0.4)
                interrupt_later(0)
                time.sleep(60)
            try:
                world.barrier()
            except waybill.Interrupted:
                waybill.run_threads(2, lambda w: w.rank == 0 and w.barrier(), timeout_s=30)

        waybill.run_threads(2, busy)
    """
    for _ in range(3):
        process = start(program)
        output = finish(process)
        assert process.returncode == -signal.SIGINT, (process.returncode, output)
        assert "KeyboardInterrupt" in output and "terminate called" not in output, output


def test_a_handler_that_does_not_raise_lets_waits_go_on(tmp_path):
    program = """
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))

        def late(world):
            if world.rank == 0:
                interrupt_later(0.1)
                time.sleep(0.4)
            world.barrier()

        waybill.run_threads(2, late)
        assert seen == [1]
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(ValueError("alarm")))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
                          WAYBILL_RENDEZVOUS=f"file://{sys.argv[1]}/meet")
        try:
            waybill.World.from_environment()
        except ValueError as error:
            print(error)
    """
    assert finish(start(program, str(tmp_path))) == "alarm\n"
