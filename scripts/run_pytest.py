#!/usr/bin/env python3
"""Runs files of Python tests side by side, each in a process of its own: run_pytest.py [FILE ...].

For machines with GPUs, where a fault takes the device from all tests that follow in a process. A
file that fails beside others runs again when they are done, and that run gives the verdict; it
prints at once what its tests print, which a process that is aborted would lose. The default are the
files that have a test for GPUs (``-m gpu``). Exit status 1 when a file failed.
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
NO_TEST = 5  # pytest's status where no test fits


def files_with(options):
    """The files of tests/python that have a test which the options choose."""
    command = [*PYTEST, "--collect-only", *options, "tests/python"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return sorted(set(re.findall(r"^(tests/python/\w+\.py)::", text, re.M)))


def run_file(file, options, limit_s):
    """Runs one file. :return: (whether it passed, its last line or what went wrong, output)"""
    process = subprocess.Popen(
        [*PYTEST, *options, file], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return False, f"not done after {limit_s:g} s", output
    last = (output.strip().splitlines() or ["no output"])[-1]
    return process.returncode in (0, NO_TEST), last, output


def say(file, passed, last, start):
    verdict = "ok" if passed else "FAILED"
    print(f"run_pytest: {file}: {verdict} ({time.monotonic() - start:.0f} s): {last}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="default: those with tests that -m chooses")
    parser.add_argument("-m", default="gpu", help="marks of tests, as of pytest; '' for all")
    parser.add_argument("-k", help="names of tests, as of pytest")
    parser.add_argument("--jobs", type=int, default=min(6, os.cpu_count() or 1))
    parser.add_argument("--limit-s", type=float, default=300, help="seconds that a file may take")
    given = parser.parse_args()
    options = (["-m", given.m] if given.m else []) + (["-k", given.k] if given.k else [])
    files, failed, start = given.files or files_with(options), [], time.monotonic()
    if not files:
        raise SystemExit(f"run_pytest: no test fits {' '.join(options)}")
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        futures = {pool.submit(run_file, file, options, given.limit_s): file for file in files}
        for future in concurrent.futures.as_completed(futures):
            passed, last, _ = future.result()
            say(futures[future], passed, last, start)
            failed += [] if passed else [futures[future]]
    still = []
    for file in failed:
        passed, last, output = run_file(file, [*options, "-s"], given.limit_s)
        say(f"{file}, alone", passed, last, start)
        if not passed:
            print(output)
            still.append(file)
    print(f"run_pytest: {len(files) - len(still)} of {len(files)} files passed", *still, sep="\n  ")
    return 1 if still else 0


if __name__ == "__main__":
    sys.exit(main())
