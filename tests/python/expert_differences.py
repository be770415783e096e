"""Random programs of layers of experts as plain data, and what is different on some ranks."""

import numpy as np
import torch

#: What choices of experts break at; every second step has one of each.
COUNT_EDGES = (
    "rank without tokens", "one rank has all", "one token", "exactly the maximum", "no tokens",
)  # fmt: skip
ID_EDGES = (
    "all dropped", "none dropped", "one expert", "unused expert", "idle rank", "same expert",
)  # fmt: skip


def random_counts(rng, world, most):
    """Tokens of each rank."""
    edge, chosen = rng.choice((*COUNT_EDGES, *[None] * len(COUNT_EDGES))), rng.randrange(world)
    counts = []
    for rank in range(world):
        some = rng.choice((0, 1, rng.randint(0, most)))
        holds = {
            "rank without tokens": rank != chosen, "one rank has all": rank == chosen,
            "one token": rank == chosen, "no tokens": False,
        }.get(edge)  # fmt: skip
        if holds is not None:
            some = max(1, some) if holds else 0
        if edge in ("one token", "exactly the maximum"):
            some = min(1, some) if edge == "one token" else most
        counts.append(some)
    return counts


def random_rule(rng, experts):
    """How the experts of all ranks' tokens are drawn: an edge or None, and an expert."""
    return rng.choice((*ID_EDGES, *[None] * len(ID_EDGES))), rng.randrange(experts)


def draw_ids(draws, rule, shape, experts, local):
    """[T, topk] int64 of one rank, -1 dropped; ``draws`` is numpy's generator."""
    edge, chosen = rule
    ids = draws.integers(0 if edge == "none dropped" else -1, experts, shape)
    if edge == "all dropped":
        ids[...] = -1
    elif edge == "one expert":
        ids[...] = chosen
    elif edge == "unused expert":
        ids = np.where(ids == chosen, -1, ids)
    elif edge == "idle rank":
        ids = np.where(ids // local == chosen // local, -1, ids)
    elif edge == "same expert":
        ids[...] = ids[:, :1]
    return ids


def random_sizes(rng):
    world = rng.choice((2, 2, 3, 4, 4, 6, 8))
    local = rng.choice((1, 2, 3))
    rows = rng.choice(("grouped", "grouped", "compact"))
    most, topk = rng.choice((1, 6, 11)), rng.choice((1, 2, 5, 32))
    per_node = world // rng.choice([n for n in (1, 1, 2, 3, 4) if world % n == 0])
    options = {
        "rows": rows,
        "expert_alignment": rng.choice((1, 8)) if rows == "grouped" else 1,
        "capacity": rng.choice((1, 2, 8)),
        "fixed_rows": rng.choice((None, None, world * most * topk + 8 * local)),
        "enable_local_combine": rng.random() < 0.3,
        "dropped_id": rng.choice((None, -1)),
        "copy_out": rng.random() < 0.7,
    }
    if options["fixed_rows"] is not None:
        options["capacity"] = None
    return {
        "world": world, "per_node": per_node, "local": local, "experts": world * local,
        "topk": topk, "hidden": rng.choice((1, 7, 16)), "most": most,
        "dtype": rng.choice((torch.float32, torch.float64)), "options": options,
    }  # fmt: skip


def random_step(rng, sizes, number, steps):
    """What all ranks do alike; their tokens are drawn by each."""
    repeats = None
    if steps and rng.random() < 0.3:
        repeats = rng.choice(steps)["number"]
    has_weights = rng.random() < 0.8
    needs = rng.choice(((True, True), (True, False), (False, True), (False, False)))
    return {
        "number": number, "repeats": repeats, "has_weights": has_weights,
        "needs": (needs[0], needs[1] and has_weights),
        "weighted": has_weights and sizes["options"]["rows"] == "grouped" and rng.random() < 0.5,
    }  # fmt: skip


def random_program(rng, sizes):
    number = rng.choice((1, 1, 1, 2))
    ops = [{"do": "make", "on": d, "options": {}} for d in range(number)]
    for d in range(number):
        steps = []
        for n in range(rng.randint(1, 4)):
            steps.append(random_step(rng, sizes, n, steps))
        waiting = [[dict(step, do=call, on=d) for call in ("dispatch", "combine", "backward")]
                   for step in steps]  # fmt: skip
        mine, dispatched = [], 0
        while any(waiting):
            choices = [w for i, w in enumerate(waiting) if w and i <= dispatched]
            op = rng.choice(choices).pop(0)
            dispatched += op["do"] == "dispatch"
            mine.append(op)
            if rng.random() < 0.05:
                mine.append({"do": "barrier", "on": d})
        if d == 0 or rng.random() < 0.5:
            ops += mine
        else:  # mixed
            calls = iter(mine)
            mixed = []
            for op in ops:
                mixed.append(op)
                if op["do"] != "make" and rng.random() < 0.6:
                    mixed += [next(calls)] if mine and len(mixed) else []
                    mine = mine[1:]
                    if not mine:
                        break
            ops = mixed + ops[len([o for o in mixed if o["on"] == 0 or o["do"] == "make"]) :] + mine
    if rng.random() < 0.5:
        ops += [{"do": "finalize", "on": d} for d in range(number)]
    return ops


def diverge(rng, ops, sizes):
    """One difference; its name."""
    calls = [i for i, op in enumerate(ops) if op["do"] in ("dispatch", "combine", "backward")]
    kind = rng.choice((
        "omit", "repeat", "swap", "swap_any", "weights", "weighted", "needs", "routing", "layout",
        "no_grad", "options", "barrier", "raise", "wrong", "makes", "finalize", "own", "positions",
    ))  # fmt: skip
    at = rng.choice(calls)
    of = {name: [i for i in calls if ops[i]["do"] == name] for name in ("dispatch", "combine")}
    if kind == "omit":
        del ops[rng.randrange(len(ops))]
    elif kind == "repeat":
        ops.insert(at, dict(ops[at]))
    elif kind == "swap":
        i, j = rng.choice(calls), rng.choice(calls)
        ops[i], ops[j] = ops[j], ops[i]
    elif kind == "swap_any":
        i = rng.randrange(len(ops) - 1)
        ops[i : i + 2] = reversed(ops[i : i + 2])
    elif kind in ("weights", "needs", "routing", "positions"):
        op = ops[rng.choice(of["dispatch"])]
        if kind == "weights":
            op["has_weights"] = not op["has_weights"]
        elif kind == "needs":
            op["needs"] = rng.choice(((True, True), (True, False), (False, True), (False, False)))
        elif kind == "positions":
            op["positions"] = True
        else:
            op["repeats"] = rng.choice((None, 0, 1)) if op["repeats"] is None else None
    elif kind in ("weighted", "layout"):
        op = ops[rng.choice(of["combine"])]
        if kind == "weighted":
            op["weighted"] = not op["weighted"]
        else:
            op["other"] = rng.randrange(4)
    elif kind == "no_grad":
        ops[at]["no_grad"] = True
    elif kind == "options":
        make = rng.choice([op for op in ops if op["do"] == "make"])
        name, value = rng.choice((
            ("expert_alignment", 4), ("capacity", 3), ("fixed_rows", 999), ("dropped_id", -1),
            ("rows", "compact"), ("enable_local_combine", True), ("max_per_expert", 99),
            ("topk", 3), ("hidden", 5), ("max_tokens", 12), ("weight_dtype", torch.bfloat16),
            ("dtype", torch.bfloat16), ("payload", "quantized"), ("fixed_rows", 0), ("copy_out", 3),
        ))  # fmt: skip
        make["options"] = {name: value}
    elif kind == "barrier":
        ops.insert(at, {"do": "barrier", "on": ops[at]["on"]})
    elif kind == "finalize":
        ops.insert(at, {"do": "finalize", "on": ops[at]["on"]})
    elif kind == "raise":
        ops.insert(at, {"do": "raise", "on": 0})
    elif kind == "wrong":
        ops.insert(at, {"do": "wrong", "on": ops[at]["on"], "how": rng.randrange(5)})
    elif kind == "makes":
        ops.insert(rng.randrange(len(ops)), {"do": "make", "on": 9, "options": {}})
    else:
        ops[at]["own"] = True  # what a rank may choose
    return kind
