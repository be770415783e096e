"""Random programs of EPAll2AllLayer, with dispatches in flight and combines and backward passes in
any order, against loops over tokens.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from expert_differences import draw_ids, random_counts, random_rule  # noqa: E402

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}


def random_sizes(rng):
    world = rng.choice((1, 2, 3, 4))
    local = rng.choice((1, 2, 3))
    rows = rng.choice(("grouped", "grouped", "compact"))
    return SimpleNamespace(
        world=world, per_node=rng.choice([n for n in (1, 2, 3, 4) if world % n == 0]),
        local=local, experts=world * local, topk=rng.choice((1, 2, 5, 32)),
        hidden=rng.choice((1, 7, 16)), rows=rows, most=rng.choice((1, 6, 11)),
        dtype=rng.choice((torch.float64, torch.float32)),
        align=rng.choice((1, 8)) if rows == "grouped" else 1,
    )  # fmt: skip


def random_step(rng, sizes, earlier):
    """Tokens of all ranks; perhaps by the routing of an earlier step."""
    rule, draws = random_rule(rng, sizes.experts), np.random.default_rng(rng.randrange(2**32))
    ids = [
        torch.tensor(draw_ids(draws, rule, (n, sizes.topk), sizes.experts, sizes.local))
        for n in random_counts(rng, sizes.world, sizes.most)
    ]
    repeats = rng.choice(earlier) if earlier and rng.random() < 0.3 else None
    if repeats is not None:
        ids = repeats.ids
    has_weights = rng.random() < 0.8
    of_x, of_weights = rng.choice(((True, True), (True, False), (False, True), (False, False)))
    needs = (of_x, of_weights and has_weights)

    def draw(width):
        draws = torch.Generator().manual_seed(rng.randrange(2**31))
        return [torch.randn(len(i), width, generator=draws, dtype=sizes.dtype) for i in ids]

    return SimpleNamespace(
        ids=ids, repeats=repeats, has_weights=has_weights, needs=needs,
        weighted=has_weights and sizes.rows == "grouped" and rng.random() < 0.5,
        x=draw(sizes.hidden), weights=draw(sizes.topk), gradients=draw(sizes.hidden),
        copy=True if any(needs) else rng.choice((True, None)),
    )  # fmt: skip


def random_order(rng, number):
    """(call, step): dispatch, combine and backward of each, in this order, the steps mixed."""
    waiting, order = [(step, iter("dcb")) for step in range(number)], []
    dispatched = 0
    while waiting:
        step, calls = rng.choice([one for one in waiting if one[0] <= dispatched])
        call = next(calls, None)
        if call is None:
            waiting = [one for one in waiting if one[0] != step]
        else:
            dispatched += call == "d"
            order.append((call, step))
    return order


def rows_of(sizes, step, rank):
    """(source, token, its topk slots here) of each row, None for padding."""
    first, rows = rank * sizes.local, []
    here = [(i >= first) & (i < first + sizes.local) for i in step.ids]
    if sizes.rows == "compact":
        tokens = [(s, t) for s, mask in enumerate(here) for t in range(len(mask))]
        slots = [(s, t, here[s][t].nonzero().flatten().tolist()) for s, t in tokens]
        return [row for row in slots if row[2]]
    for expert in range(first, first + sizes.local):
        for source, ids in enumerate(step.ids):
            rows += [(source, token, [slot]) for token, slot in (ids == expert).nonzero().tolist()]
        rows += [None] * (-len(rows) % sizes.align)
    return rows


def expected(sizes, step):
    """Sums and gradients of tokens and weights, where expert e multiplies by e + 1."""
    x, weights = ([t.clone().requires_grad_() for t in v] for v in (step.x, step.weights))
    factors = torch.arange(sizes.experts + 1, dtype=sizes.dtype) + 1
    factors[-1] = 0  # of id -1
    sums = []
    for tokens, own, ids in zip(x, weights, step.ids):
        scaled = factors[ids] * (own if step.has_weights else 1)
        sums.append(tokens * scaled.sum(1, keepdim=True))
    torch.autograd.backward(sums, step.gradients)
    return [(s.detach(), t.grad, w.grad) for s, t, w in zip(sums, x, weights)]


def check_arrived(sizes, step, rank, received, weights):
    rows = rows_of(sizes, step, rank)
    for place, row in enumerate(rows):
        if row is None:
            assert not received[place].any()
            continue
        source, token, slots = row
        assert torch.equal(received[place], step.x[source][token])
        if weights is not None:
            own = weights[place] if sizes.rows == "grouped" else weights[place, slots]
            assert (own == step.weights[source][token, slots]).all()
    return rows


def outputs_of(sizes, step, rank, held):
    """What the experts make of the rows; behind those that have come lies anything."""
    rows = check_arrived(sizes, step, rank, held.rows.detach(), held.weights)
    scale = held.rows.new_zeros(len(held.rows), sizes.topk if sizes.rows == "compact" else 1)
    for place, row in enumerate(rows):
        if row is not None:
            source, token, slots = row
            columns = slots if sizes.rows == "compact" else [0]
            scale[place, columns] = (step.ids[source][token, slots] + 1).to(sizes.dtype)
    if step.has_weights and not step.weighted:
        own = held.weights if sizes.rows == "compact" else held.weights[:, None]
        scale = scale * torch.where(scale != 0, own, 0)
    live = (scale != 0).any(1, keepdim=True)
    return torch.where(live, held.rows, 0) * scale.sum(1, keepdim=True)


def run_program(world, sizes, steps, order, options):
    """(sums, gradients of tokens and of weights) of each step on one rank."""
    rank, flight, done = world.rank, {}, {}
    layer = EPAll2AllLayer(
        world, sizes.most, sizes.hidden, sizes.topk, rank, sizes.experts, sizes.per_node,
        sizes.world, sizes.dtype, sizes.dtype, rows=sizes.rows, expert_alignment=sizes.align,
        dropped_id=-1, **options,
    )  # fmt: skip
    layouts = {}
    for call, number in order:
        step = steps[number]
        if call == "d":
            held = flight[number] = SimpleNamespace()
            held.x = step.x[rank].clone().requires_grad_(step.needs[0])
            held.w = step.weights[rank].clone().requires_grad_(step.needs[1])
            again = None if step.repeats is None else layouts[id(step.repeats)]
            held.rows, held.weights, held.layout = layer.dispatch(
                held.x, step.ids[rank], held.w if step.has_weights else None, layout_desc=again,
                copy_out=step.copy,
            )  # fmt: skip
            layouts[id(step)] = held.layout
            if not layer.copy_out and step.copy is None:  # views, until the second dispatch after
                held.rows = held.rows.clone()
                held.weights = None if held.weights is None else held.weights.clone()
        elif call == "c":
            held = flight[number]
            outputs = outputs_of(sizes, step, rank, held)
            held.sums = layer.combine(outputs, held.layout, weighted=step.weighted)
        else:
            held = flight.pop(number)
            assert held.sums.requires_grad == any(step.needs)
            if any(step.needs):
                held.sums.backward(step.gradients[rank])
            done[number] = held.sums.detach(), held.x.grad, held.w.grad
    if layer.fixed_rows is not None:
        layer.check_overflow()
    layer.finalize()
    return done


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    rng = random.Random(seed)
    sizes, steps = random_sizes(rng), []
    for _ in range(rng.randint(1, 6)):
        steps.append(random_step(rng, sizes, steps))
    order = random_order(rng, len(steps))
    needed = max(len(rows_of(sizes, s, r)) for s in steps for r in range(sizes.world))
    options = {
        "fixed_rows": rng.choice((None, None, max(1, needed), needed + 5)),
        "copy_out": rng.random() < 0.6, "capacity": rng.choice((1, 2)),
        "enable_local_combine": rng.random() < 0.4,
    }  # fmt: skip
    if options["fixed_rows"] is not None:
        del options["capacity"]
    ranks = run_threads(
        sizes.world, lambda world: run_program(world, sizes, steps, order, options),
        ranks_per_node=sizes.per_node,
    )  # fmt: skip
    near = {"rtol": CLOSE[sizes.dtype], "atol": 10 * CLOSE[sizes.dtype]}
    for number, step in enumerate(steps):
        for rank, want in enumerate(expected(sizes, step)):
            sums, of_x, of_weights = ranks[rank][number]
            torch.testing.assert_close(sums, want[0], **near)
            for got, wanted, needs in zip((of_x, of_weights), want[1:], step.needs):
                assert (got is not None) == needs
                if needs:
                    torch.testing.assert_close(got, wanted, **near)
