"""Random programs of layers of experts as plain data, and what is different on some ranks."""

import torch


def random_sizes(rng):
    world = rng.choice((2, 2, 3, 4, 4, 6, 8))
    local = rng.choice((1, 2, 3))
    rows = rng.choice(("grouped", "grouped", "compact"))
    most, topk = rng.choice((1, 6, 11)), rng.choice((1, 2, 5))
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
