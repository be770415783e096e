#!/usr/bin/env python3
"""Runs the tests of a GoogleTest program, as many in a process as go: run_gtest.py PROGRAM.

A test of faults loses the device for all that follow in its process, and a process with a device
takes a second to start. So tests follow each other in a process until one fails, crashes, takes
longer than the limit, or has lost the device (the program then ends with a status of its own:
tests/cuda/lost_device.cpp); then a new process goes on. Some processes run side by side (--jobs).
What failed runs again when they are done, in a process of its own and with the machine for itself:
that run gives the verdict.

Prints one line per test that was skipped or failed, the slowest tests, and a summary. A signal to
end (Ctrl-C, SIGTERM) ends the tests that run; the summary then names those without a verdict. Exit
status 1 when a test failed, was ended or did not run, or when no test passed.
"""

import argparse
import concurrent.futures
import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time

VERDICT = re.compile(r"^\[\s+(RUN|OK|FAILED|SKIPPED)\s+\] ([\w/]+\.[\w/]+)(?:.*\((\d+) ms\))?")

NUM_SLOWEST = 10
LOST_DEVICE = 76  # the program's status after a test that passed and lost the device


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


class Run:
    """The verdicts of the tests of a program."""

    def __init__(self, program, names, limit_s, verbose):
        self.program, self.names, self.limit_s = program, names, limit_s
        self.verbose = verbose
        self.start = time.monotonic()
        self.passed, self.skipped, self.failed, self.again = [], [], [], []
        self.seconds = {}
        self.processes, self.ended = set(), False

    def end(self, *_):
        """Ends all tests, as a handler of signals."""
        self.ended = True
        for process in list(self.processes):
            if process.poll() is None:  # else its number may be that of another one by now
                kill(process)

    def one_process(self, names):
        """Runs tests in one process until one fails. One that a signal ends has no verdict.

        :return: (verdicts of those that ran, in order, as {name: "OK" | "SKIPPED" | "FAILED ..."},
            what the process printed since the last verdict "OK")
        """
        process = subprocess.Popen(
            [self.program, "--gtest_fail_fast", "--gtest_color=no",
             "--gtest_filter=" + ":".join(names)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.processes.add(process)
        try:
            if self.ended:  # while it was started
                kill(process)
            verdicts, printed = self.listen(process, names)
        finally:
            self.processes.remove(process)
            if process.poll() is None:
                kill(process)
            process.wait()
            process.stdout.close()
        if self.ended:
            verdicts = {n: v for n, v in verdicts.items() if not v.startswith("FAILED")}
        return verdicts, "\n".join(printed)

    def listen(self, process, names):
        """Reads what a process prints. :return: as ``one_process``, in lines"""
        verdicts, printed, running, rest = {}, [], None, b""
        deadline = time.monotonic() + self.limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not ready.select(max(0, deadline - time.monotonic())):
                    verdicts[running or names[0]] = f"FAILED: not done after {self.limit_s} s"
                    return verdicts, printed
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in (line.decode(errors="replace") for line in lines):
                    printed.append(line)
                    verdict = VERDICT.match(line)
                    if not verdict:
                        continue
                    state, name, ms = verdict.groups()
                    if state == "RUN":
                        running, deadline = name, time.monotonic() + self.limit_s
                    elif name == running:
                        verdicts[name], running = state, None
                        self.tell(name, state, int(ms or 0) / 1000)
                        if state == "FAILED":  # what fail_fast leaves out is said to be skipped
                            return verdicts, printed
                        printed.clear()
        status = process.wait()
        if running is None and status in (0, LOST_DEVICE):
            return verdicts, printed
        # Whose fault the end of a process is, nobody knows.
        for name in [running] if running else list(verdicts) or names[:1]:
            verdicts[name] = f"FAILED: the process ended with {status}"
        return verdicts, printed

    def tell(self, name, state, seconds):
        """A test has ended."""
        self.seconds[name] = seconds
        if self.verbose:
            at = time.monotonic() - self.start
            print(f"run_gtest: {at:.1f} s: {name}: {state} ({seconds:.1f} s)", flush=True)

    def shard(self, names):
        """Runs tests one after another; those that fail are to run again, alone."""
        left = list(names)
        while left and not self.ended:
            verdicts, _ = self.one_process(left)
            if not verdicts and not self.ended:
                raise SystemExit(f"run_gtest: {self.program} does not run {left[0]}")
            for name, verdict in verdicts.items():
                left.remove(name)
                if verdict.startswith("FAILED"):
                    self.again.append(name)
                else:
                    self.keep(name, verdict, "")

    def alone(self):
        """Runs what failed again, each test in a process of its own."""
        for name in sorted(self.again, key=self.names.index):
            if self.ended:
                return
            verdicts, output = self.one_process([name])
            if not self.ended:
                self.keep(name, verdicts.get(name, "FAILED: it did not run"), output)

    def keep(self, name, verdict, output):
        """Writes down a verdict, and prints one that is not OK."""
        lists = {"OK": self.passed, "SKIPPED": self.skipped}
        lists.get(verdict, self.failed).append(name)
        if verdict not in lists:
            print(output)
        if verdict != "OK":
            print(f"run_gtest: {name}: {verdict}", flush=True)
        if sys.stderr.isatty():
            done = len(self.passed) + len(self.skipped) + len(self.failed)
            print(f"\r{done} of {len(self.names)} ", end="", file=sys.stderr, flush=True)

    def summary(self):
        """Prints what came of all tests. :return: the exit status"""
        slowest = sorted(self.seconds, key=self.seconds.get)[: -NUM_SLOWEST - 1 : -1]
        times = ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in slowest)
        print(f"run_gtest: slowest: {times}")
        known = {*self.passed, *self.skipped, *self.failed}
        missing = [name for name in self.names if name not in known]
        print(
            f"run_gtest: {len(self.passed)} passed, {len(self.skipped)} skipped,"
            f" {len(self.failed)} failed of {len(self.names)}"
            f" in {time.monotonic() - self.start:.0f} s"
        )
        for name in self.failed:
            print(f"run_gtest: FAILED {name}")
        for name in missing:
            print(f"run_gtest: NO VERDICT {name}")
        return 1 if self.failed or missing or not self.passed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    parser.add_argument("--filter", default="*", help="as of GoogleTest")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds that a test may take")
    parser.add_argument("--jobs", type=int, default=min(6, os.cpu_count() or 1))
    parser.add_argument("--verbose", action="store_true", help="a line for each test that ends")
    given = parser.parse_args()
    names = list_tests(given.program, given.filter)
    run = Run(given.program, names, given.limit_s, given.verbose)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.end)
    shards = [names[i :: given.jobs] for i in range(min(given.jobs, len(names)))]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(shards))) as pool:
        list(pool.map(run.shard, shards))
    run.alone()
    return run.summary()


if __name__ == "__main__":
    sys.exit(main())
