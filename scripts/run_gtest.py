#!/usr/bin/env python3
"""Runs the tests of a GoogleTest program, as many in a process as go: run_gtest.py PROGRAM.

A test of faults loses the device for all that follow in its process, and a process with a device
takes a second to start. So tests follow each other in one process until one fails, crashes or takes
longer than the limit. That one runs again in a process of its own, which gives its verdict; then a
new process goes on.

Prints one line per test that did not pass in its turn, and a summary. Exit status 1 when a test
failed, or when no test passed.
"""

import argparse
import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time

VERDICT = re.compile(r"^\[\s+(RUN|OK|FAILED|SKIPPED)\s+\] ([\w/]+\.[\w/]+)")


def list_tests(program, pattern):
    """The full names of the tests that the filter fits, in order."""
    text = subprocess.run(
        [program, "--gtest_list_tests", f"--gtest_filter={pattern}"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names, suite = [], ""
    for line in text.splitlines():
        if line.startswith("  "):
            names.append(suite + line.split()[0])
        elif re.match(r"[\w/]+\.(\s|$)", line):
            suite = line.split()[0]
    return names


def kill(process):
    """Ends the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_process(program, names, limit_s):
    """Runs tests in one process until one fails.

    :return: (verdicts of those that ran, in order, as {name: "OK" | "SKIPPED" | "FAILED ..."},
        what the process printed since the last verdict "OK")
    """
    process = subprocess.Popen(
        [program, "--gtest_fail_fast", "--gtest_color=no", "--gtest_filter=" + ":".join(names)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    verdicts, printed, running, rest = {}, [], None, b""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not ready.select(max(0, deadline - time.monotonic())):
                kill(process)
                verdicts[running or names[0]] = f"FAILED: not done after {limit_s} s"
                return verdicts, "\n".join(printed)
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in (line.decode(errors="replace") for line in lines):
                printed.append(line)
                verdict = VERDICT.match(line)
                if not verdict:
                    continue
                state, name = verdict.groups()
                if state == "RUN":
                    running, deadline = name, time.monotonic() + limit_s
                elif name == running:
                    verdicts[name], running = state, None
                    if state == "FAILED":  # what fail_fast leaves out is said to be skipped
                        kill(process)
                        return verdicts, "\n".join(printed)
                    printed.clear()
    status = process.wait()
    if running is not None or status != 0:  # whose fault the end of a process is, nobody knows
        for name in [running] if running else list(verdicts) or names[:1]:
            verdicts[name] = f"FAILED: the process ended with {status}"
    return verdicts, "\n".join(printed)


def run_all(program, names, limit_s):
    """Runs the tests; yields (name, verdict, output, seconds) when a test has its verdict."""
    left, alone = list(names), []
    while left or alone:
        start = time.monotonic()
        queue = alone or left
        group = queue[:1] if alone else list(queue)
        verdicts, output = run_process(program, group, limit_s)
        if not verdicts:
            raise SystemExit(f"run_gtest: {program} does not run {group[0]}")
        for name, verdict in verdicts.items():
            queue.remove(name)
            if verdict.startswith("FAILED") and len(group) > 1:
                alone.append(name)
            else:
                yield name, verdict, output, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    parser.add_argument("--filter", default="*", help="as of GoogleTest")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds that a test may take")
    given = parser.parse_args()
    names = list_tests(given.program, given.filter)
    counts, failed, start = {"OK": 0, "SKIPPED": 0}, [], time.monotonic()
    for name, verdict, output, seconds in run_all(given.program, names, given.limit_s):
        if verdict in counts:
            counts[verdict] += 1
        else:
            failed.append(name)
            print(output)
        if verdict != "OK":
            print(f"run_gtest: {name}: {verdict} ({seconds:.0f} s)", flush=True)
        done = counts["OK"] + counts["SKIPPED"] + len(failed)
        if sys.stderr.isatty():
            print(f"\r{done} of {len(names)} ", end="", file=sys.stderr, flush=True)
    print(
        f"run_gtest: {counts['OK']} passed, {counts['SKIPPED']} skipped, {len(failed)} failed of"
        f" {len(names)} in {time.monotonic() - start:.0f} s"
    )
    for name in failed:
        print(f"run_gtest: FAILED {name}")
    return 1 if failed or counts["OK"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
