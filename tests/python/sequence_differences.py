"""Random programs of SequenceDispatchers as plain data, and what is different on some ranks."""

from ways import PLAN_EDGES, edge_plan, random_plan, rows_of

import waybill

WHICH = ("fwd_q", "fwd_kv", "rev_q")
DTYPES = ("float32", "int32", "float16", "float64", "uint8")
GRADIENT_DTYPES = ("float32", "float64")


class Plans:
    """Plans of documents by name, the same on all ranks."""

    def __init__(self):
        self.made = {}

    def get(self, name):
        """(rows of each rank, metadata, routing); name is (kind, world size, ...)."""
        if name not in self.made:
            self.made[name] = self._make(*name)
        return self.made[name]

    def _make(self, kind, world_size, *rest):
        if kind == "random":
            plan = random_plan(world_size, *rest)
        elif kind == "edge":
            plan = edge_plan(world_size, *rest)
        elif kind == "lengths":
            lengths, layout = rest
            plan = waybill.plan(list(lengths), world_size, 0, block_tokens=4, kv_layout=layout)
        else:
            (length,) = rest
            plan = waybill.plan([length], world_size, -(-length // world_size), block_tokens=4)
        return rows_of(plan), plan.to_metadata(), plan.to_routing()


PLANS = Plans()


def random_name(rng, world_size):
    kind = rng.choice(("random", "lengths", "lengths", "long", "edge", "edge", "edge"))
    if kind == "edge":
        layout = rng.choice(("per_rank", "per_query"))
        return kind, world_size, rng.choice(PLAN_EDGES), rng.randrange(40), layout
    if kind == "random":
        return kind, world_size, rng.randrange(40), rng.choice(("per_rank", "per_query"))
    if kind == "long":
        return kind, world_size, world_size * rng.choice((16, 24)) + rng.randrange(3)
    lengths = [rng.randint(1, 24) for _ in range(rng.randint(2, 3 * world_size))]
    return kind, world_size, tuple(lengths), rng.choice(("per_rank", "per_query"))


def neighbour(rng, name):
    """Other documents: one token more in one, and perhaps one less in another."""
    kind, world_size, *rest = name
    if kind in ("random", "edge"):
        return kind, world_size, *rest[:-2], rest[-2] + 40, rest[-1]
    if kind == "long":
        return kind, world_size, rest[0] + 1
    lengths = list(rest[0])
    at = rng.randrange(len(lengths))
    lengths[at] += 1
    if rng.random() < 0.5 and lengths[at - 1] > 1:
        lengths[at - 1] -= 1
    elif rng.random() < 0.3:
        lengths = list(rest[0])
        rng.shuffle(lengths)
    return kind, world_size, tuple(lengths), rest[1]


def random_spec(rng, world_size, operation=None):
    """(operation, plan's name, parts); a part is (table, room, ((dtype, hidden), ...))."""
    operation = operation or rng.choice(("dispatch", "dispatch", "kv_gradient"))
    name = random_name(rng, world_size)
    if operation == "kv_gradient":
        dtype = rng.choice(GRADIENT_DTYPES)
        formats = tuple((dtype, rng.choice((1, 4))) for _ in range(rng.choice((1, 2))))
        return operation, name, (("fwd_kv", None, formats),)
    parts = []
    for which in rng.sample(WHICH, rng.choice((1, 2))):
        formats = tuple(
            (rng.choice(DTYPES), rng.choice((1, 3, 8))) for _ in range(rng.choice((1, 1, 2)))
        )
        parts.append((which, rng.choice((None, None, None, 200)), formats))
    return operation, name, tuple(parts)


def part_of(part, routing):
    which, room, formats = part
    table = getattr(routing, which)
    if room is not None:
        table = table.with_room(room)
    return (table, *(waybill.TensorFormat(dtype, (hidden,)) for dtype, hidden in formats))


def options_of(rng):
    """What ranks must have the same."""
    return {
        "relay": rng.choice(("automatic", "never", "always")),
        "max_window_bytes": rng.choice((None, None, 1 << 20)),
    }


def own_options(rng):
    """What each may choose."""
    return {
        "num_sms": rng.choice((0, 1, 16)),
        "chunk_bytes": rng.choice((16, 512, 8192)),
        "local_by_copy_engine": rng.random() < 0.5,
    }


def random_program(rng, world_size):
    """What each rank does, as long as they agree: a list of dicts."""
    number = rng.choice((1, 1, 2))
    ops = []
    for d in range(number):
        ops.append({"do": "make", "on": d, "options": options_of(rng)})
        if rng.random() < 0.6:
            ops.append({"do": "reserve", "on": d, "bytes": 1 << 19})
    handles = [
        [random_spec(rng, world_size) for _ in range(rng.randint(1, 3))] for _ in range(number)
    ]
    dispatches = [[] for _ in range(number)]
    for _ in range(rng.randint(1, 8)):
        d = rng.randrange(number)
        h = rng.randrange(len(handles[d]))
        spec = handles[d][h]
        kind = rng.random()
        if kind < 0.1:
            other = (spec[0], neighbour(rng, spec[1]), spec[2])
            ops.append({"do": "replace", "on": d, "handle": h, "spec": other})
        elif kind < 0.17:
            ops.append({"do": "barrier", "on": d})
        elif kind < 0.22:
            ops.append({"do": "reserve", "on": d, "bytes": 1 << rng.randint(15, 20)})
        else:
            of = rng.choice([None, *dispatches[d]])
            ops.append({"do": "call", "on": d, "handle": h, "seed": len(ops), "of": of})
            if spec[0] == "dispatch":
                dispatches[d].append(ops[-1]["seed"])
    if rng.random() < 0.5:
        ops += [{"do": "close", "on": d} for d in range(number)]
    return {"handles": handles, "ops": ops}


def calls_of(program, *kinds):
    return [i for i, op in enumerate(program["ops"]) if op["do"] in (kinds or ("call",))]


def change_format(rng, spec):
    operation, name, parts = spec
    parts = [list(part) for part in parts]
    part = rng.choice(parts)
    formats = [list(f) for f in part[2]]
    kind = rng.choice(("dtype", "hidden", "join", "room", "order", "more"))
    if kind == "dtype":
        dtypes = GRADIENT_DTYPES if operation == "kv_gradient" else DTYPES
        formats[0][0] = rng.choice([t for t in dtypes if t != formats[0][0]])
    elif kind == "hidden":
        formats[0][1] += 1
    elif kind == "join" and len(formats) == 2:
        formats = [[formats[0][0], formats[0][1] + formats[1][1]]]
    elif kind == "room":
        part[1] = 333
    elif kind == "order":
        formats.reverse()
        parts.reverse()
    else:
        formats.append(list(formats[0]))
    part[2] = tuple(tuple(f) for f in formats)
    return operation, name, tuple(tuple(part) for part in parts)


def change_spec(rng, spec, kind, world_size):
    """A handle's spec with one difference."""
    if kind == "plan":
        return (spec[0], neighbour(rng, spec[1]), spec[2])
    if kind == "other_plan":
        return random_spec(rng, world_size)
    if kind == "format":
        return change_format(rng, spec)
    if spec[0] == "dispatch":
        return ("kv_gradient", spec[1], (("fwd_kv", None, (("float32", 4),)),))
    return ("dispatch", *spec[1:])


def diverge(rng, program, world_size):
    """One difference; its name."""
    ops, handles = program["ops"], program["handles"]
    calls = calls_of(program)
    kind = rng.choice((
        "omit", "repeat", "swap", "plan", "other_plan", "format", "operation", "of", "replace",
        "reserve", "options", "barrier", "raise", "insert", "swap_any", "makes", "wrong",
    ))  # fmt: skip
    at = rng.choice(calls) if calls else 0
    op = ops[at]
    d = op["on"]
    if kind == "omit":
        del ops[rng.randrange(len(ops))]
    elif kind == "repeat":
        ops.insert(at, dict(ops[at]))
    elif kind == "swap" and len(calls) > 1:
        i, j = rng.sample(calls, 2)
        ops[i], ops[j] = ops[j], ops[i]
    elif kind == "swap_any":
        i = rng.randrange(len(ops) - 1) if len(ops) > 1 else 0
        ops[i : i + 2] = reversed(ops[i : i + 2])
    elif kind in ("plan", "other_plan", "format", "operation"):
        h = op.get("handle", 0)
        spec = change_spec(rng, handles[d][h], kind, world_size)
        if rng.random() < 0.5:
            handles[d][h] = spec
        else:  # from here on
            handles[d].append(spec)
            op["handle"] = len(handles[d]) - 1
    elif kind == "of":
        op["of"] = rng.choice([o["seed"] for o in ops if o["do"] == "call"] + [None, -1])
    elif kind == "replace":
        h = op.get("handle", 0)
        spec = handles[d][h]
        other = (spec[0], neighbour(rng, spec[1]), spec[2])
        ops.insert(at, {"do": "replace", "on": d, "handle": h, "spec": other})
    elif kind == "reserve":
        ops.insert(at, {"do": "reserve", "on": d, "bytes": rng.choice((1 << 14, 1 << 21))})
    elif kind == "barrier":
        ops.insert(at, {"do": "barrier", "on": d})
    elif kind == "options":
        make = rng.choice(calls_of(program, "make"))
        ops[make]["options"] = options_of(rng)
    elif kind == "makes":
        ops.insert(rng.randrange(len(ops)), {"do": "make", "on": 9, "options": options_of(rng)})
    elif kind == "raise":
        ops.insert(rng.randrange(len(ops) + 1), {"do": "raise", "on": d})
    elif kind == "wrong":
        ops.insert(at, {"do": "wrong", "on": d, "how": rng.randrange(4)})
    elif kind == "insert":
        ops.insert(at, {"do": "call", "on": d, "handle": rng.randrange(len(handles[d])),
                        "seed": 99, "of": None})  # fmt: skip
    return kind
