"""Runs the programs of examples/python: with ranks as threads, and as two processes.

Programs are forked from a process that has torch, as importing it takes seconds of a core in each
process; one runs as users start it, by torchrun. Without torch each is a process of its own.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77  # exit status of a program that lacks a package
LIMIT_S = 60
BY_TORCHRUN = "distributed_attention.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment(**more):
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **more}


def as_command(command, folder):
    """(exit status, what it printed)"""
    done = subprocess.run(
        command, cwd=folder, env=environment(), timeout=LIMIT_S, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def forked(program, folder, ranks):
    """(exit status, what it printed) of the first of the processes that failed, or of the first.

    :param ranks: how many, as torchrun starts them; 0: one that is none
    """
    from rank_processes import launched, run_file

    ranks = launched(ranks) if ranks else [environment()]
    ends = run_file(folder, program, (), ranks, LIMIT_S, filters="error")
    return next((end for end in ends if end[0] != 0), ends[0])


def ways_to_run(program, has_torch):
    """(how, function of a folder): with ranks as threads, and as two processes."""
    if not has_torch:
        yield "", lambda folder: as_command([sys.executable, "-W", "error", program], folder)
        return
    yield "", lambda folder: forked(program, folder, 0)
    if program.name == BY_TORCHRUN:
        yield " by torchrun", lambda folder: as_command([*TORCHRUN, program], folder)
    else:
        yield " as processes", lambda folder: forked(program, folder, 2)


def run_examples(missing):
    """(problems, number run, number skipped); as many at a time as there are cores, 8 at most

    :param missing: packages that are not installed; without torch none runs as processes
    """
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    programs = sorted((ROOT / "examples" / "python").glob("*.py"))
    problems = [] if programs else ["examples/python: no program"]
    has_torch = "torch" not in missing
    wanted = [(p, *way) for p in programs for way in ways_to_run(p, has_torch)]
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        ends = list(pool.map(lambda one: run_program(*one, missing), wanted))
    problems += [problem for problem, _ in ends if problem is not None]
    num_skipped = sum(skipped for _, skipped in ends)
    num_run = len(wanted) - num_skipped - sum(problem is not None for problem, _ in ends)
    return problems, num_run, num_skipped + 2 * len(programs) - len(wanted)


def run_program(program, how, run, missing):
    """(problem or None, whether it was skipped)"""
    name = program.relative_to(ROOT)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            status, text = run(folder)
        except (subprocess.TimeoutExpired, TimeoutError):
            return f"{name}:1: ran longer than {LIMIT_S} s{how}", False
    if status == SKIPPED and missing:
        print(f"SKIPPED {name}: {text.strip()}")
        return None, True
    if status != 0:
        return f"{name}:1: exit status {status}{how}\n{text}", False
    print(f"{name}{how}: {time.monotonic() - begin:.1f} s")
    return None, False
