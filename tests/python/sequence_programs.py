"""Random programs of SequenceDispatchers, and what goes wrong on some of the ranks.

``python sequence_programs.py FIRST COUNT`` runs that many seeds.
"""

import copy
import random

import numpy as np
from said import Rank, judge, run_cases
from sequence_differences import PLANS, diverge, own_options, part_of, random_program
from ways import simulated, simulated_sums

import waybill


class Runner:
    """One rank of a program."""

    def __init__(self, world, program, mine, seed, goes_on):
        self.world, self.program, self.seed = world, program, seed
        self.goes_on = goes_on
        self.says = Rank(world)
        self.options = mine
        self.dispatchers, self.handles, self.numbers, self.made = {}, {}, {}, 0
        self.rng = random.Random(seed * 100 + world.rank)

    def run(self):
        for op in self.program["ops"]:
            before = len(self.says.errors)
            getattr(self, op["do"].removeprefix("raise") or "fail")(op)
            if len(self.says.errors) > before and not self.goes_on:
                break

    def fail(self, op):
        raise KeyError("early")

    def attempt(self, what, act, key=None, meaning=None):
        """Without results; with a key all ranks must mean the same by it."""
        return self.says.call(key, what, meaning, None, lambda: act() or (), waits=3)

    def make(self, op):
        self.made += 1
        key = self.made

        def act():
            self.dispatchers[op["on"]] = (
                key,
                waybill.SequenceDispatcher(self.world, **op["options"], **self.options),
            )

        self.attempt("make", act, ("make", key), tuple(op["options"].items()))

    def of(self, op):
        return self.dispatchers.get(op["on"])

    def reserve(self, op):
        if self.of(op):
            self.attempt("reserve", lambda: self.of(op)[1].reserve(op["bytes"]))

    def barrier(self, op):
        self.attempt("barrier", self.world.barrier, "barrier")

    def close(self, op):
        if self.of(op):
            self.attempt("close", self.of(op)[1].close)

    def wrong(self, op):
        """A call that this rank alone finds wrong, before anything moves."""
        if not self.of(op):
            return
        _, dispatcher = self.of(op)
        acts = (
            lambda: dispatcher.dispatch("plan"),
            lambda: dispatcher.dispatch(self.handle(op | {"handle": 0}), "text"),
            lambda: dispatcher.reserve(-1),
            lambda: dispatcher.plan_dispatch(5),
        )
        self.attempt("wrong", acts[op["how"]])

    def handle(self, op):
        _, dispatcher = self.of(op)
        index = op["on"], op["handle"]
        if index not in self.handles:
            spec = self.program["handles"][op["on"]][op["handle"]]
            plan = getattr(dispatcher, f"plan_{spec[0]}")(*self.parts(spec))
            self.handles[index] = [plan, spec]
        return self.handles[index][0]

    def parts(self, spec):
        routing = PLANS.get(spec[1])[2]
        return [part_of(part, routing) for part in spec[2]]

    def replace(self, op):
        if not self.of(op):
            return

        def act():
            plan = self.handle(op)
            self.of(op)[1].replace_plan(plan, *self.parts(op["spec"]))
            self.handles[op["on"], op["handle"]][1] = op["spec"]

        self.attempt("replace", act)

    def call(self, op):
        if not self.of(op):
            return
        key, dispatcher = self.of(op)
        if self.attempt("plan", lambda: self.handle(op) and None) is None:
            return
        plan, spec = self.handles[op["on"], op["handle"]]
        of = 7 if op["of"] == -1 else self.numbers.get((op["on"], op["of"]), 0)
        operation = spec[0]
        given = self.inputs(plan, spec, op["seed"])

        def act():
            views = getattr(dispatcher, operation)(plan, *given, of_dispatch=of)
            return [np.array(view) for view in views]

        meaning = meaning_of(spec, of)
        done = self.says.call(key, operation, meaning, (spec, given), act, waits=3) is not None
        if done and operation == "dispatch":
            self.numbers[op["on"], op["seed"]] = dispatcher.last_dispatch

    def inputs(self, plan, spec, seed):
        rows = plan.own_rows if spec[0] == "dispatch" else plan.window_rows
        formats = [f for part in spec[2] for f in part[2]]
        tensors = []
        for i, (count, (dtype, hidden)) in enumerate(zip(rows, formats)):
            draws = np.random.default_rng((self.seed, seed, self.world.rank, i))
            more, wide = self.rng.choice((0, 0, 3)), self.rng.choice((0, 0, 2))
            if spec[0] == "kv_gradient":
                whole = draws.integers(-4, 5, (count + more, hidden + wide)).astype(dtype)
            else:
                shape = (count + more, (hidden + wide) * np.dtype(dtype).itemsize)
                whole = draws.integers(0, 256, shape).astype(np.uint8).view(dtype)
            tensors.append(whole[:, :hidden])
        return tensors


def meaning_of(spec, of):
    """What ranks compare. A plan is what its tables say, not what it was made from."""
    operation, name, parts = spec
    routing = PLANS.get(name)[2]
    tables = tuple(_Table(getattr(routing, which), routing) for which, _, _ in parts)
    return operation, of, tuple((room, formats) for _, room, formats in parts), tables


class _Table:
    """Of one part; equal where the tables are."""

    def __init__(self, table, routing):
        self.table, self.hops = table, routing

    def __eq__(self, other):
        return self.table is other.table or self.table == other.table

    def __repr__(self):
        return "table"


def reference(saids):
    """Results of each rank from what all gave."""
    spec = saids[0].given[0]
    operation, name, parts = spec
    rows, metadata, _ = PLANS.get(name)
    columns = []
    index = 0
    for which, _, formats in parts:
        for dtype, _ in formats:
            table = getattr(metadata, which)
            given = [np.ascontiguousarray(said.given[1][index]) for said in saids]
            if operation == "kv_gradient":
                received = [int(n) for n in table.num_total_recv_tokens]
                given = [g[:n] for g, n in zip(given, received)]
                columns.append(simulated_sums(given, metadata, rows))
                columns[-1] = [np.asarray(c).astype(dtype) for c in columns[-1]]
            else:
                own = [int(n) for n in _own_rows(saids, index)]
                bits = [g[:n].view(np.uint8) for g, n in zip(given, own)]
                moved = simulated(bits, table)
                columns.append([np.ascontiguousarray(m).view(dtype) for m in moved])
            index += 1
    return [[column[rank] for column in columns] for rank in range(len(saids))]


def _own_rows(saids, index):
    spec = saids[0].given[0]
    rows, metadata, _ = PLANS.get(spec[1])
    which = [part[0] for part in spec[2] for _ in part[2]][index]
    if which == "rev_q":
        return metadata.fwd_q.num_total_recv_tokens
    return rows


def trimmed(results, wanted):
    return [
        r[: len(w)] if r.ndim == w.ndim and len(r) >= len(w) else r for r, w in zip(results, wanted)
    ]


def run_case(seed, timeout_s=1.0, kind=None):
    """(what differed, complaints, errors of the ranks)."""
    rng = random.Random(seed)
    world_size = rng.choice((2, 2, 3, 4, 4, 5, 8))
    nodes = [n for n in (1, 2, 3, 4) if world_size % n == 0]
    per_node = world_size // rng.choice(nodes)
    program = random_program(rng, world_size)
    programs = [copy.deepcopy(program) for _ in range(world_size)]
    what = "agreed"
    if rng.random() < 0.8:
        odd = rng.sample(range(world_size), rng.choice((1, 1, rng.randint(1, world_size - 1))))
        state = rng.getstate()
        for rank in odd:
            rng.setstate(state)  # the same difference on all of them
            what = diverge(rng, programs[rank], world_size)
        what += f" on {sorted(odd)}"
    own = [own_options(rng) for _ in range(world_size)]
    goes_on = rng.random() < 0.3
    says = [None] * world_size

    def body(world):
        runner = Runner(world, programs[world.rank], own[world.rank], seed, goes_on)
        says[world.rank] = runner.says
        runner.run()

    complaints = []
    deadline = 30.0 if what == "agreed" else timeout_s
    try:
        waybill.run_threads(world_size, body, ranks_per_node=per_node, timeout_s=deadline)
    except KeyError as error:
        if "early" not in str(error):
            complaints.append(f"KeyError {error}")
    says = [s for s in says if s is not None]
    if len(says) != world_size:
        return what, ["ranks are missing"], []

    def wanted(saids):
        if saids[0].given is None:
            return [()] * world_size
        results = reference(saids)
        for said, columns in zip(saids, results):
            if said.results is not None:
                said.results = trimmed(said.results, columns)
        return results

    complaints += judge(says, wanted)
    errors = [(s.rank, *e) for s in says for e in s.errors]
    own_words = {tuple(s.errors) for s in says}
    if what == "agreed" and (len(own_words) > 1 or {k for _, k, _ in errors} - {"InvalidArgument"}):
        complaints.append(f"errors without a difference: {errors[:3]}")
    return f"{what}, {world_size} ranks, {per_node} a node", complaints, errors


if __name__ == "__main__":
    run_cases(run_case)
