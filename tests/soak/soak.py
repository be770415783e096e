"""A soak: a small model is trained on documents of random sizes, and nothing may grow.

    python tests/soak/soak.py --minutes 30 --ranks 2
    python tests/soak/soak.py --minutes 10 --ranks 2 --device cuda --processes

Ranks are threads, or with --processes processes. Ranks that share a GPU are processes: a thread for
which torch allocates would wait for the kernels of the others, which wait for it.

A step is ContextParallelAttention and ExpertParallel, forward and backward. The documents of a rank
grow and shrink; now and then ranks have none. Layers are made and closed every 5 to 25 steps with
other options, worlds every --world-seconds. Between two worlds, when no rank has anything, memory,
descriptors, threads, shared memory files and GPU memory are noted.

The verdict looks at what was noted after the first third of the time. The growth of a figure is the
larger of two, both of which a quarter of the notes as outliers does not change: the median of the
slopes between all pairs of notes (Theil and Sen) times the time between first and last, which sees
what grows all the time; and the median of the second half less that of the first, which sees what
grew once. More than the figure's allowance fails: of resident memory 2 % or 8 MiB, whichever is
more, as it has the holes that freed blocks of random sizes leave; of the heap in use, what malloc
has given and not got back, 1 MiB; of GPU memory 2 % or 32 MiB; of what is counted nothing, that is
half a piece. A Markdown table of the minutes' medians is printed in any case.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

# cuBLASLt remembers what it chose for each shape, and a soak draws new shapes all the time: 300 KiB
# of heap in 1200 products and their gradients of plain torch, 6 KiB without this memory.
os.environ.setdefault("CUBLASLT_HEURISTICS_CACHE_CAPACITY", "0")

import torch

import waybill.torch as waybill
from waybill.torch.moe import ExpertParallel, SwiGLUExperts

TIMEOUT_S = 120.0
HEADS, KV_HEADS, TOPK, EXPERTS_PER_RANK = 4, 2, 2, 4
MIB = 1 << 20
FIGURES = {  # name: (unit of the table, allowed growth as a share, and at least)
    "memory": (MIB, 0.02, 8 * MIB),
    "heap in use": (MIB, 0.0, MIB),
    "descriptors": (1, 0.0, 0.5),
    "threads": (1, 0.0, 0.5),
    "shared memory files": (1, 0.0, 0.5),
    "GPU memory": (MIB, 0.02, 32 * MIB),
}


class Model(torch.nn.Module):
    """One block of attention and experts; its layers of Waybill are given with each call."""

    def __init__(self, device, ranks, seed):
        super().__init__()
        torch.manual_seed(seed)
        on_gpu = device != "cpu"
        self.head = 64 if on_gpu else 16
        self.max_tokens = 4096 if on_gpu else 512
        self.hidden = HEADS * self.head
        made = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
        self.dtype = made["dtype"]
        self.qkv = torch.nn.Linear(self.hidden, (HEADS + 2 * KV_HEADS) * self.head, **made)
        self.out = torch.nn.Linear(self.hidden, self.hidden, **made)
        self.gate = torch.nn.Linear(self.hidden, EXPERTS_PER_RANK * ranks, **made)
        self.experts = SwiGLUExperts(
            EXPERTS_PER_RANK, self.hidden, 2 * self.hidden, made["dtype"], device
        )
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)

    def _product(self, linear, rows):
        """Of a quarter, a half, three quarters or all of ``max_tokens``: the driver keeps 30 KiB of
        heap for each kernel that cuBLASLt launches for the first time, and other numbers of rows
        have other kernels.
        """
        padding = -len(rows) % (self.max_tokens // 4)
        return linear(torch.nn.functional.pad(rows, (0, 0, 0, padding)))[: len(rows)]

    def step(self, attention, experts, plan, x):
        """Forward, backward, and a step of SGD towards x turned around; the loss on the device."""
        qkv = self._product(self.qkv, x).view(-1, HEADS + 2 * KV_HEADS, self.head)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        h = x + self._product(self.out, attention(plan, q, k, v).flatten(1))
        scores, ids = self._product(self.gate, h).float().softmax(-1).topk(TOPK)
        h = h + experts(h, scores, ids)
        loss = (h - x.flip(1)).float().square().sum() / self.max_tokens
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def make_layers(world, model, draw):
    """Attention and experts with options that are drawn, the same on all ranks."""
    attention = waybill.ContextParallelAttention(
        world, HEADS, KV_HEADS, model.head, dtype=model.dtype,
        mask=draw.choice(["causal", "full"]), in_place=draw.choice(["auto", True, False]),
        block_tokens=draw.choice([16, 64, 128]),
    )  # fmt: skip
    options = draw.choice(
        [
            {},
            {"weights": "experts"},
            {"windows": "own"},
            {"chunks": 2},
            {"enable_local_combine": False},
            {"fixed_rows": 1.0},
        ]
    )
    experts = ExpertParallel(
        model.experts, num_experts=EXPERTS_PER_RANK * world.world_size, topk=TOPK,
        hidden=model.hidden, max_tokens=model.max_tokens, group=world, dtype=model.dtype,
        gradients="sum", **options,
    )  # fmt: skip
    return attention, experts


def documents_of(step, rank, ranks, most, seed):
    """Lengths: few rows and many, in waves; sometimes none on one rank, on all but one, on all."""
    everyone = random.Random(f"{seed} {step}")
    who_has = everyone.choice(["all"] * 12 + ["all but one"] * 2 + ["one"])
    chosen = everyone.randrange(ranks)
    if (who_has == "all but one" and rank == chosen) or (who_has == "one" and rank != chosen):
        return []
    mine = random.Random(f"{seed} {step} {rank}")
    wave = 0.55 + 0.45 * math.sin(step / 40)
    room, lengths = int(most * wave * mine.uniform(0.3, 1.0)), []
    while room > 0:
        lengths.append(min(room, 1 + int(most * mine.paretovariate(1.2) / 40)))
        room -= lengths[-1]
    return lengths


class Rank:
    """What one rank does in all its worlds."""

    def __init__(self, rank, options, device):
        self.model = Model(device, options.ranks, 100 + rank)
        self.options, self.steps = options, 0

    def train(self, world, until):
        """Steps until rank 0's clock says that it is time; whether that was seen by all."""
        if world.device != "cpu":  # ranks that share a GPU would share autograd's thread for it
            torch.autograd.set_multithreading_enabled(False)
        while True:
            draw = random.Random(f"{self.options.seed} layers {self.steps}")
            attention, experts = make_layers(world, self.model, draw)
            for _ in range(draw.randint(5, 25)):
                loss = self.one_step(world, attention, experts)
            if world.device != "cpu":
                torch.cuda.current_stream().synchronize()
            assert math.isfinite(float(loss)), f"rank {world.rank}: the loss is {float(loss)}"
            told = attention.gather([2 if time.monotonic() >= until else 1])
            experts.finalize()
            attention.close()
            if told[0][0, 2] == 2:
                return

    def one_step(self, world, attention, experts):
        model = self.model
        lengths = documents_of(
            self.steps, world.rank, world.world_size, model.max_tokens, self.options.seed
        )
        plan = attention.plan(attention.gather(lengths))
        rows = plan.home_tokens[world.rank]
        x = torch.randn(rows, model.hidden, device=world.device, dtype=model.dtype)
        self.steps += 1
        return model.step(attention, experts, plan, x)


class Mallinfo(ctypes.Structure):
    """glibc's mallinfo2, of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_in_use():
    """Bytes that malloc has given and not got back; None where the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def threads_now():
    """Threads of this process. Linux lists one that was joined a moment longer: the least of some
    looks counts.
    """
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.005)
    return min(counts)


def note(device, steps):
    """What this process has now, when none of its ranks has anything."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    with open("/proc/self/maps") as file:
        mapped = {line.split()[-1] for line in file if "/dev/shm/" in line}
    left = [name for name in os.listdir("/dev/shm") if name.startswith(f"waybill-{os.getpid()}-")]
    found = {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads_now(),
        "shared memory files": len(mapped) + len(left),
        "steps": steps,
    }
    heap = heap_in_use()
    if heap is not None:
        found["heap in use"] = heap
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, all_memory = torch.cuda.mem_get_info()
        found["GPU memory"] = all_memory - free
    return found


def soak_threads(options, noted):
    """Worlds of threads one after another; notes go to the list, with their time."""
    device = options.device
    ranks = [Rank(rank, options, device) for rank in range(options.ranks)]
    begin = time.monotonic()
    while not noted or time.monotonic() - begin < 60 * options.minutes:
        until = time.monotonic() + options.world_seconds
        gc.collect()
        gc.disable()  # memory of a GPU is given back when no other rank has work there
        try:
            waybill.run_threads(
                options.ranks, lambda world, u=until: ranks[world.rank].train(world, u),
                device=device, timeout_s=TIMEOUT_S,
            )  # fmt: skip
        finally:
            gc.enable()
        noted.append((time.monotonic() - begin, note(device, ranks[0].steps)))


def soak_process(options):
    """One rank of processes: a line of JSON for each note."""
    rank, folder = int(os.environ["RANK"]), os.environ["SOAK_FOLDER"]
    device = "cpu" if options.device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"
    if device != "cpu":
        torch.cuda.set_device(device)
    mine = Rank(rank, options, device)
    for number in itertools.count():
        os.environ["WAYBILL_RENDEZVOUS"] = f"file://{folder}/world{number}"
        world = waybill.World.from_environment(device=device, timeout_s=TIMEOUT_S)
        mine.train(world, time.monotonic() + options.world_seconds)
        world.barrier()
        del world
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
        # The launcher answers when it has heard all ranks.
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(note(options.device, mine.steps)), flush=True)
        if sys.stdin.readline() != "go on\n":
            return


def soak_processes(options, noted):
    """Starts a process for each rank and adds up what they note. GPU memory is the device's."""
    command = [sys.executable, __file__, *options.given, "--as-rank"]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(options.ranks):
            variables = {
                "RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": options.ranks, "SOAK_FOLDER": folder,
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **{k: str(v) for k, v in variables.items()}},
                )
            )
        try:
            _gather_notes(options, processes, noted)
        finally:
            for process in processes:
                process.stdin.close()
                process.wait(TIMEOUT_S)
                process.stdout.close()
    failed = [r for r, process in enumerate(processes) if process.returncode != 0]
    if failed:
        raise SystemExit(f"soak: rank {failed[0]} ended with {processes[failed[0]].returncode}")


def _gather_notes(options, processes, noted):
    def heard():
        return [process.stdout.readline() for process in processes]

    def say(text):
        for process in processes:
            process.stdin.write(text + "\n")
            process.stdin.flush()

    begin = None
    while all(heard()):  # what the device has is noted when no rank has anything
        say("note")
        lines = heard()
        if not all(lines):
            return
        if begin is None:  # the first world is over: what it took to start does not count
            begin = time.monotonic() - options.world_seconds
        each = [json.loads(line) for line in lines]
        total = {name: sum(one[name] for one in each) for name in each[0]}
        for name in ("GPU memory", "steps"):
            if name in total:
                total[name] = max(one[name] for one in each)
        now = time.monotonic() - begin
        noted.append((now, total))
        over = now >= 60 * options.minutes
        say("end" if over else "go on")
        if over:
            return


class Notes(list):
    """(seconds since the begin, what was found) of each world. The first of a minute goes to stderr
    at once: a long run may be cut off.
    """

    minute = -1

    def append(self, one):
        super().append(one)
        if one[0] // 60 > self.minute:
            self.minute = one[0] // 60
            print(table([one]).splitlines()[-1], file=sys.stderr, flush=True)


def growth(times, values):
    """The median slope of all pairs over the whole time; or from half to half, if that is more."""
    if len(values) < 2:
        return 0.0
    half = len(values) // 2
    from_half_to_half = statistics.median(values[half:]) - statistics.median(values[:half])
    slopes = [
        (b - a) / (t - s)
        for (s, a), (t, b) in itertools.combinations(zip(times, values), 2)
        if t > s
    ]
    return max(statistics.median(slopes) * (times[-1] - times[0]), from_half_to_half)


def verdict(noted, allow_mib=0.0):
    """Sentences about what grew; none is good. Memory may grow by allow_mib in any case."""
    last = noted[-1][0]
    watched = [(at, found) for at, found in noted if at >= last / 3]
    wrong = []
    for name, (unit, share, least) in FIGURES.items():
        if name not in watched[0][1]:
            continue
        values = [found[name] for _, found in watched]
        grown = growth([at for at, _ in watched], values)
        allowed = max(share * statistics.median(values), least)
        allowed = max(allowed, allow_mib * MIB) if unit == MIB else allowed
        if grown > allowed:
            wrong.append(
                f"{name} grew by {grown / unit:.1f} after the first third, more than"
                f" {allowed / unit:.1f}"
            )
    return wrong


def table(noted):
    """Markdown: a line for each minute, medians of its notes."""
    names = [name for name in FIGURES if name in noted[0][1]]
    heads = [f"{name}, MiB" if FIGURES[name][0] == MIB else name for name in names]
    lines = ["| minute | steps | " + " | ".join(heads) + " |", "|---" * (2 + len(names)) + "|"]
    for minute, group in itertools.groupby(noted, lambda one: int(one[0] // 60)):
        notes = [found for _, found in group]
        cells = [str(minute + 1), str(notes[-1]["steps"])]
        for name in names:
            unit = FIGURES[name][0]
            middle = statistics.median([found[name] for found in notes]) / unit
            cells.append(f"{middle:.1f}" if unit == MIB else f"{middle:g}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parsed(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", action="store_true", help="ranks are processes")
    parser.add_argument("--world-seconds", type=float, default=10.0, help="life of a world")
    parser.add_argument(
        "--allow-mib", type=float, default=0.0,
        help="memory may grow by so much; a run of seconds is all warm-up",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count() if options.device == "cuda" else options.ranks
    if options.ranks > gpus and not options.processes and not options.as_rank:
        parser.error(f"--ranks {options.ranks} on {gpus} GPUs needs --processes")
    options.given = [one for one in arguments if one != "--as-rank"]
    return options


def soak(options):
    """Runs it, prints the table and the verdict; the exit status."""
    torch.set_num_threads(1)
    noted = Notes()
    try:
        (soak_processes if options.processes else soak_threads)(options, noted)
    except KeyboardInterrupt:
        print("soak: interrupted")
    if not noted:
        print("soak: nothing was noted")
        return 1
    print(table(noted))
    wrong = verdict(noted, options.allow_mib)
    for sentence in wrong:
        print(f"soak: {sentence}")
    kinds = "processes" if options.processes else "threads"
    print(
        f"soak: {'FAILED' if wrong else 'passed'}: {noted[-1][1]['steps']} steps of"
        f" {options.ranks} ranks ({kinds}, {options.device}) in {noted[-1][0] / 60:.1f} minutes,"
        f" {len(noted)} worlds"
    )
    return 1 if wrong else 0


def main(arguments):
    options = parsed(arguments)
    if options.as_rank:
        torch.set_num_threads(1)
        soak_process(options)
        return 0
    return soak(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
