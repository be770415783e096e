"""Random programs of layers of experts, and what goes wrong on some of the ranks.

``python expert_calls.py FIRST COUNT`` runs that many seeds. Expert e multiplies by e + 1 and by a
number that a rank chooses for each combine; all values are small whole numbers, so that sums are
exact in any order.
"""

import copy
import random

import numpy as np
import torch
from expert_differences import (
    diverge,
    draw_ids,
    random_counts,
    random_program,
    random_rule,
    random_sizes,
)  # fmt: skip
from said import Rank, judge, run_cases

from waybill.torch import run_threads
from waybill.torch.moe import EPAll2AllLayer

torch.set_num_threads(1)


class Held:
    """Of a step on one rank."""


class Runner:
    """One rank of a program."""

    def __init__(self, world, sizes, ops, seed, goes_on):
        self.world, self.sizes, self.ops, self.seed = world, sizes, ops, seed
        self.goes_on = goes_on
        self.says = Rank(world)
        self.layers, self.made, self.held = {}, 0, {}
        self.rng = random.Random(seed * 100 + world.rank)

    def run(self):
        for op in self.ops:
            before = len(self.says.errors)
            with torch.set_grad_enabled(not op.get("no_grad", False)):
                getattr(self, op["do"].removeprefix("raise") or "fail")(op)
            # A backward pass is several calls, of which some were made.
            if len(self.says.errors) > before and (not self.goes_on or op["do"] == "backward"):
                break

    def fail(self, op):
        raise KeyError("early")

    def attempt(self, what, act, key=None, meaning=None):
        return self.says.call(key, what, meaning, None, lambda: act() or (), waits=4)

    def make(self, op):
        self.made += 1
        key, s = self.made, self.sizes
        options = {**s["options"], **op["options"]}
        arguments = {
            "max_tokens": s["most"], "hidden": s["hidden"], "topk": s["topk"],
            "dtype": s["dtype"], "weight_dtype": s["dtype"],
        }  # fmt: skip
        arguments = {name: options.pop(name, value) for name, value in arguments.items()}

        def act():
            self.layers[op["on"]] = key, EPAll2AllLayer(
                self.world, arguments["max_tokens"], arguments["hidden"], arguments["topk"],
                self.world.rank, s["experts"], s["per_node"], s["world"], arguments["dtype"],
                arguments["weight_dtype"], num_sm=self.rng.choice((1, 4, None)), **options,
            )  # fmt: skip

        compared = {**options, **arguments, "copy_out": None}
        compared["dropped_id"] = compared["dropped_id"] or s["experts"]
        self.attempt("make", act, ("make", key), tuple(compared.items()))

    def barrier(self, op):
        if op["on"] in self.layers:
            key, layer = self.layers[op["on"]]
            self.attempt("ep_barrier_all", layer.ep_barrier_all, ("barrier", key))

    def finalize(self, op):
        if op["on"] in self.layers:
            self.attempt("finalize", self.layers[op["on"]][1].finalize)

    def wrong(self, op):
        """A call that this rank alone finds wrong, before anything moves."""
        if op["on"] not in self.layers:
            return
        layer, s = self.layers[op["on"]][1], self.sizes
        x, ids = torch.zeros(1, s["hidden"], dtype=s["dtype"]), torch.zeros(1, s["topk"]).long()
        acts = (
            lambda: layer.dispatch(x[:, :-1], ids) and None,
            lambda: layer.dispatch(x, ids + s["experts"] + 1) and None,
            lambda: layer.dispatch(x.half(), ids) and None,
            lambda: layer.combine(x, 5) and None,
            lambda: layer.dispatch(x, ids, torch.zeros(2, s["topk"], dtype=s["dtype"])) and None,
        )
        self.attempt("wrong", acts[op["how"]])

    def draw(self, *key):
        return np.random.default_rng((self.seed, self.world.rank, *key))

    def ids_of(self, draws, shared):
        """Of this rank; ``shared`` draws the same on all ranks."""
        s = self.sizes
        count = random_counts(shared, s["world"], s["most"])[self.world.rank]
        rule = random_rule(shared, s["experts"])
        ids = draw_ids(draws, rule, (count, s["topk"]), s["experts"], s["local"])
        dropped = s["experts"] if s["options"]["dropped_id"] is None else -1
        return ids, np.where(ids < 0, dropped, ids)

    def dispatch(self, op):
        if op["on"] not in self.layers:
            return
        key, layer = self.layers[op["on"]]
        s, held = self.sizes, Held()
        key_of_draws = op["on"], op["number"], int(op.get("own", False))
        draws = self.draw(*key_of_draws)
        plain, ids = self.ids_of(draws, random.Random(str((self.seed, *key_of_draws))))
        earlier = self.held.get((op["on"], op["repeats"]))
        if op["repeats"] is not None and earlier is None:
            return
        if earlier is not None:
            plain = earlier.plain
            ids = np.zeros_like(plain)  # not looked at
        x = draws.integers(-3, 4, (len(plain), s["hidden"]))
        w = draws.integers(1, 4, (len(plain), s["topk"]))
        held.x = torch.tensor(x, dtype=s["dtype"]).requires_grad_(op["needs"][0])
        held.w = torch.tensor(w, dtype=s["dtype"]).requires_grad_(op["needs"][1])
        held.plain, held.step = plain, op
        recorded = torch.is_grad_enabled()
        weights = held.w if op["has_weights"] else None
        held.has_weights = weights is not None
        positions = None
        if op.get("positions"):  # refused by this rank for some layers, else by all
            positions = torch.arange(s["world"] * s["most"] * s["topk"]).reshape(-1, s["topk"])
        held.needs = (
            recorded and op["needs"][0],
            recorded and op["needs"][1] and held.has_weights,
        )
        meaning = (
            "dispatch", None if earlier is None else earlier.number, held.has_weights,
            positions is not None and earlier is None, *held.needs,
        )  # fmt: skip

        def act():
            rows, weights_there, layout = layer.dispatch(
                held.x, torch.tensor(ids), weights, positions,
                layout_desc=None if earlier is None else earlier.layout, copy_out=True,
            )  # fmt: skip
            held.rows, held.weights, held.layout = rows, weights_there, layout
            held.number = layout._handle.number
            held.count = int(layout.recv_expert_offsets[-1])
            if s["options"]["rows"] == "compact":
                held.count = int(layout.num_recv_tokens_per_rank[self.world.rank])
            there = (rows, weights_there)
            return [None if t is None else t.detach().numpy()[: held.count].copy() for t in there]

        given = {"plain": plain, "x": x, "w": w if held.has_weights else None}
        if self.says.call(key, "dispatch", meaning, given, act, waits=4) is not None:
            held.given = given
            self.held[op["on"], op["number"]] = held

    def outputs(self, held, weighted, factor):
        """What this rank's experts make of the rows."""
        first, s = self.world.rank * self.sizes["local"], self.sizes
        scale = torch.zeros(len(held.rows), 1, dtype=s["dtype"])
        own = held.weights if held.has_weights and not weighted else None
        if s["options"]["rows"] == "compact":
            there = held.layout.recv_topk_indices[: held.count].long()
            live = (there >= 0) & (there < s["local"])
            each = torch.where(live, there + first + 1, 0).to(s["dtype"])
            if own is not None:
                each = torch.where(live, each * own[: held.count], 0)
            scale = torch.cat([each.sum(1, keepdim=True), scale[held.count :]])
        else:
            ends = held.layout.recv_expert_offsets.tolist()
            for e in range(s["local"]):
                scale[ends[e] : ends[e + 1]] = first + e + 1
            if own is not None:
                scale = torch.where(scale != 0, scale * own[:, None], 0)
        held.scale = scale
        return torch.where(scale != 0, held.rows, 0) * scale * factor

    def combine(self, op):
        number = op["number"] if "other" not in op else op["other"]
        held = self.held.get((op["on"], number))
        if op["on"] not in self.layers or held is None:
            return
        key, layer = self.layers[op["on"]]
        s = self.sizes
        weighted = op["weighted"]
        factor = self.rng.randint(1, 3)
        recorded = torch.is_grad_enabled()
        needs = recorded and any(held.needs)
        meaning = ("combine", held.number, weighted, needs)
        biases = []
        if self.rng.random() < 0.2 or op.get("own"):
            biases = [torch.full((len(held.plain), s["hidden"]), 2.0, dtype=s["dtype"])]

        def act():
            rows = self.outputs(held, weighted, factor)
            held.sums = layer.combine(rows, held.layout, weighted=weighted, biases=biases)
            held.factor = factor
            return [held.sums.detach().numpy().copy()]

        given = {"held": held, "factor": factor, "biases": len(biases)}
        self.says.call(key, "combine", meaning, given, act, waits=4)

    def backward(self, op):
        held = self.held.get((op["on"], op["number"]))
        if held is None or not hasattr(held, "sums") or not held.sums.requires_grad:
            return
        key, _ = self.layers[op["on"]]
        draws = self.draw(op["on"], op["number"], 5)
        gradient = draws.integers(-3, 4, (len(held.plain), self.sizes["hidden"]))
        sums, held.sums = held.sums, held.sums.detach()
        held.x.grad = held.w.grad = None

        def act():
            sums.backward(torch.tensor(gradient, dtype=self.sizes["dtype"]))
            return [None if t.grad is None else t.grad.numpy().copy() for t in (held.x, held.w)]

        given = {"held": held, "gradient": gradient, "factor": held.factor}
        self.says.call(key, "backward", ("backward", held.number), given, act, waits=6)


def rows_of(sizes, plains, rank):
    """(source, token, topk slots) of each row on a rank, None for padding."""
    first, rows = rank * sizes["local"], []
    if sizes["options"]["rows"] == "compact":
        for source, ids in enumerate(plains):
            for token, chosen in enumerate(ids):
                slots = [k for k, e in enumerate(chosen) if first <= e < first + sizes["local"]]
                rows += [(source, token, slots)] if slots else []
        return rows
    for expert in range(first, first + sizes["local"]):
        for source, ids in enumerate(plains):
            for token, chosen in enumerate(ids):
                rows += [(source, token, [k]) for k, e in enumerate(chosen) if e == expert]
        rows += [None] * (-len(rows) % sizes["options"]["expert_alignment"])
    return rows


class Reference:
    """What each rank should have, from what all gave."""

    def __init__(self, sizes):
        self.sizes, self.dtype = sizes, np.dtype(str(sizes["dtype"]).removeprefix("torch."))

    def __call__(self, saids):
        if saids[0].given is None:
            return [()] * len(saids)
        if saids[0].operation == "dispatch":
            return [self.dispatched(saids, said.rank) for said in saids]
        if saids[0].operation == "combine":
            return [self.combined(saids, said) for said in saids]
        return [self.gradients(saids, said) for said in saids]

    def dispatched(self, saids, rank):
        s, given = self.sizes, [said.given for said in saids]
        rows = rows_of(s, [g["plain"] for g in given], rank)
        x = np.zeros((len(rows), s["hidden"]), self.dtype)
        compact = s["options"]["rows"] == "compact"
        w = np.zeros((len(rows), s["topk"]) if compact else len(rows), self.dtype)
        for place, row in enumerate(rows):
            if row is None:
                continue
            source, token, slots = row
            x[place] = given[source]["x"][token]
            if given[source]["w"] is not None:
                own = given[source]["w"][token]
                if compact:
                    w[place, slots] = own[slots]
                else:
                    w[place] = own[slots[0]]
        return [x, None if given[0]["w"] is None else w]

    def scales(self, saids, said):
        """[T, topk]: by what each choice of a rank's tokens is multiplied, without weights."""
        ids = said.given["held"].plain
        factors = np.repeat([other.given["factor"] for other in saids], self.sizes["local"])
        return np.where(ids < 0, 0, (ids + 1) * factors[ids])

    def combined(self, saids, said):
        held = said.given["held"].given
        scales = self.scales(saids, said)
        if held["w"] is not None:
            scales = scales * held["w"]
        sums = held["x"] * scales.sum(1, keepdims=True)
        return [(sums + 2 * said.given["biases"]).astype(self.dtype)]

    def gradients(self, saids, said):
        held, gradient = said.given["held"], said.given["gradient"]
        scales = self.scales(saids, said)
        x, w = held.given["x"], held.given["w"]
        of_x = of_w = None
        if held.needs[0]:
            of_x = gradient * (scales * (1 if w is None else w)).sum(1, keepdims=True)
            of_x = of_x.astype(self.dtype)
        if held.needs[1]:
            of_w = ((x * gradient).sum(1, keepdims=True) * scales).astype(self.dtype)
        return [of_x, of_w]


def without_negative_zeros(said):
    if said.results is not None:
        said.results = [r if r is None else r + 0.0 for r in said.results]


def run_case(seed, timeout_s=1.0):
    """(what differed, complaints, errors of the ranks)."""
    rng = random.Random(seed)
    sizes = random_sizes(rng)
    program = random_program(rng, sizes)
    world_size = sizes["world"]
    programs = [copy.deepcopy(program) for _ in range(world_size)]
    what = "agreed"
    if rng.random() < 0.8:
        odd = rng.sample(range(world_size), rng.choice((1, 1, rng.randint(1, world_size - 1))))
        state = rng.getstate()
        for rank in odd:
            rng.setstate(state)
            what = diverge(rng, programs[rank], sizes)
        what += f" on {sorted(odd)}"
    goes_on = rng.random() < 0.3
    says = [None] * world_size

    def body(world):
        runner = Runner(world, sizes, programs[world.rank], seed, goes_on)
        says[world.rank] = runner.says
        runner.run()

    complaints = []
    alike = what == "agreed" or what.startswith("own ")
    try:
        run_threads(
            world_size, body, ranks_per_node=sizes["per_node"],
            timeout_s=30.0 if alike else timeout_s,
        )  # fmt: skip
    except KeyError as error:
        if "early" not in str(error):
            complaints.append(f"KeyError {error}")
    says = [s for s in says if s is not None]
    for rank in says:
        for calls in rank.calls.values():
            for said in calls:
                if said.operation in ("dispatch", "combine", "backward"):
                    without_negative_zeros(said)
    complaints += judge(says, Reference(sizes))
    errors = [(s.rank, *e) for s in says for e in s.errors]
    if alike and errors:
        complaints.append(f"errors without a difference: {errors[:3]}")
    return f"{what}, {world_size} ranks, {sizes['per_node']} a node", complaints, errors


if __name__ == "__main__":
    run_cases(run_case)
