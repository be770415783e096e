#!/usr/bin/env python3
"""Compares the speed of two folders of bench programs: runs both in turn, five times, and compares
the medians of a fixed list of figures.

    bench_ab.py [--host] [--rounds N] OLD NEW

A figure of NEW that is more than 2 % and more than 0.5 us away from that of OLD is measured again,
so many rounds; it counts if it is so again, in the same direction. Prints all figures, and exits 1
if one that counts is slower. --host: only figures that need no GPU. scripts/bench_ab.sh builds the
programs.
"""

import argparse
import collections
import json
import pathlib
import re
import statistics
import subprocess
import sys

SHARE, LEAST_US = 0.02, 0.5

# What is run, and which figures it gives: (workload, call or "", SMs, column).
MOE = {
    ("waybill_bench_gpu_moe", "--quick"): [
        ("1 x 7168", "counting and placing alone", 16, "graph us"),
        ("1 x 7168", "dispatch bf16, grouped, with counting", 16, "graph us"),
        ("1 x 7168", "combine bf16 of grouped rows", 16, "graph us"),
        ("128 x 7168", "dispatch bf16, grouped, with counting", 16, "graph us"),
        ("128 x 7168", "dispatch bf16, compact, cached", 16, "graph us"),
        ("128 x 7168", "combine bf16, a row per token and rank", 16, "graph us"),
        ("128 x 7168", "dispatch fp8 + scales, compact, cached", 16, "graph us"),
        ("128 x 7168", "combine bf16, local combine", 64, "graph us"),
        ("4096 x 7168", "dispatch bf16, grouped, with counting", 16, "us"),
        ("4096 x 7168", "dispatch bf16, compact, cached", 16, "us"),
        ("4096 x 7168", "combine bf16, a row per token and rank", 16, "us"),
        ("4096 x 7168", "the same, rows copied to the window", 16, "us"),
        ("4096 x 7168", "pair: dispatch with counting, combine", 16, "us"),
    ],
    ("waybill_bench_gpu_moe", "--few"): [
        ("128 x 7168", "counting and placing alone", 16, "graph us"),
    ],
}
SEQUENCE = {
    ("waybill_bench_gpu_sequence", "--quick"): [
        ("empty plan", "", 16, "graph us"),
        ("uniform 1 MiB", "", 16, "graph us"),
        ("uniform 8 MiB", "", 16, "graph us"),
        ("uniform 64 MiB", "", 16, "us"),
    ],
}
HOST = {
    (
        "waybill_bench",
        "--benchmark_format=json",
        "--benchmark_min_time=0.1",
        "--benchmark_filter=^(compile_spread_plan/1000|compile_documents/wlbllm/4)$",
    ): [
        ("compile_spread_plan/1000", "", 0, "us"),
        ("compile_documents/wlbllm/4", "", 0, "us"),
    ],
}

NUMBER = r"\s+([\d.]+)"
# "call  SMs  us  graph us  wire MB  copies MB  wire GB/s  of link"
MOE_LINE = re.compile(rf"^(\S.*?)\s+(\d+){NUMBER}{NUMBER}{NUMBER}{NUMBER}{NUMBER}{NUMBER}%$")
MOE_HEAD = re.compile(r"^(.*); \d+ ranks, \d+ on a node$")
# "workload  SMs  wire MiB  us  graph us  limit us  GB/s  of link  of best  compile us"
SEQUENCE_LINE = re.compile(
    rf"^(\S.*?)\s+(\d+){NUMBER}{NUMBER}{NUMBER}{NUMBER}{NUMBER}{NUMBER}%{NUMBER}%"
)
US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def parse_moe(text):
    """{(workload, call, SMs, column): us}; a call follows the title of its table."""
    found, workload, title = {}, "", ""
    for line in text.splitlines():
        if line.startswith("-- "):
            title = line[3:].strip() + ": "
        elif head := MOE_HEAD.match(line):
            workload = head[1]
        elif row := MOE_LINE.match(line):
            for column, value in (("us", row[3]), ("graph us", row[4])):
                found.setdefault((workload, title + row[1], int(row[2]), column), float(value))
    return found


def parse_sequence(text):
    found = {}
    for line in text.splitlines():
        if row := SEQUENCE_LINE.match(line):
            for column, value in (("us", row[4]), ("graph us", row[5])):
                found.setdefault((row[1], "", int(row[2]), column), float(value))
    return found


def parse_host(text):
    """google-benchmark's JSON."""
    return {
        (item["name"], "", 0, "us"): item["real_time"] * US[item["time_unit"]]
        for item in json.loads(text)["benchmarks"]
        if item.get("run_type", "iteration") == "iteration"
    }


PARSERS = {
    "waybill_bench": parse_host,
    "waybill_bench_gpu_moe": parse_moe,
    "waybill_bench_gpu_sequence": parse_sequence,
}


def figure_in(found, wanted):
    """The figure of a run; a workload's name may go on after the text that is wanted."""
    workload, *rest = wanted
    for (name, *others), value in found.items():
        if others == rest and (name == workload or re.match(rf"{re.escape(workload)}\W", name)):
            return value
    raise SystemExit(f"bench_ab: no figure {text_of(wanted)}; there are {sorted(found)[:5]}, ...")


def text_of(figure):
    workload, call, sms, column = figure
    parts = [workload, call, f"{sms} SMs" if sms else "", column]
    return ", ".join(part for part in parts if part)


def run(folder, command, figures):
    """{figure: us} of one run of a program."""
    program = [str(pathlib.Path(folder).resolve() / command[0]), *command[1:]]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bench_ab: {' '.join(program)} exited with {done.returncode}")
    found = PARSERS[command[0]](done.stdout)
    return {figure: figure_in(found, figure) for figure in figures}


def medians(folders, commands, rounds):
    """{figure: (of the first folder, of the second)}; which one begins changes by round."""
    times = collections.defaultdict(lambda: ([], []))
    for number in range(rounds):
        for command, figures in commands.items():
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                for figure, us in run(folders[side], command, figures).items():
                    times[command, figure][side].append(us)
    return {key: tuple(map(statistics.median, sides)) for key, sides in times.items()}


def direction(old, new):
    """1: slower, -1: faster, 0: neither."""
    if abs(new - old) <= max(SHARE * old, LEAST_US):
        return 0
    return 1 if new > old else -1


def compare(folders, commands, rounds):
    """Lines to print, and how many figures are slower."""
    first = medians(folders, commands, rounds)
    far = {key: direction(*value) for key, value in first.items() if direction(*value) != 0}
    again = {}
    for command, figure in far:
        again.setdefault(command, []).append(figure)
    second = medians(folders, again, rounds) if again else {}
    slower, lines = 0, []
    for key, (old, new) in first.items():
        line = f"{text_of(key[1]):70} {old:10.1f} {new:10.1f} {100 * (new / old - 1):+6.1f} %"
        if key in far:
            old, new = second[key]
            counts = direction(old, new) == far[key]
            word = ("SLOWER" if far[key] > 0 else "faster") if counts else "not again"
            line += f"   again {old:.1f} {new:.1f}: {word}"
            slower += counts and far[key] > 0
        lines.append(line)
    return lines, slower


def num_ranks():
    """One per GPU, and at least two, which then share one; programs of 0.1 made one of one GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True)
    except OSError:
        return 2
    return max(2, len(done.stdout.splitlines()))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    given = parser.parse_args(arguments)
    ranks = ("--ranks", str(num_ranks()))
    sequence = {(*command, *ranks): figures for command, figures in SEQUENCE.items()}
    commands = HOST if given.host else MOE | sequence | HOST
    folders = (given.old, given.new)
    if not given.host and not all((folder / "waybill_bench").is_file() for folder in folders):
        print("bench_ab: no waybill_bench in both folders: no figures of the host")
        commands = MOE | sequence
    lines, slower = compare(folders, commands, given.rounds)
    print(f"{'figure, us':70} {'old':>10} {'new':>10}")
    print("\n".join(lines))
    print(f"bench_ab: {slower} of {len(lines)} figures slower, by more than 2 % and 0.5 us, twice")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
