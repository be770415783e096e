"""ContextParallelAttention in whole graphs of torch.compile: plans as tensors, one graph for all
batches.
"""

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")

from compiling import MARKS  # noqa: E402
from packed import (  # noqa: E402
    close,
    leaves_of,
    module,
    pieces_in_order,
    random_pieces,
    rng_of,
    tensors_of,
    whole,
)

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402
from waybill.torch.attention import operations as ops  # noqa: E402

pytestmark = [*MARKS, pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="old torch")]


def batches(count, world_size=2):
    """Of which no rank has fewer than two rows: those sizes are facts of a graph."""
    found = []
    for seed in range(1000):
        pieces = random_pieces(rng_of(seed), world_size)
        if min(sum(n for _, _, n in held) for held in pieces) > 1:
            found.append(pieces)
        if len(found) == count:
            return found
    raise AssertionError("too few")


def program(attend, plan, q, k, v):
    """Two layers, the second of which needs the first."""
    hidden = attend(plan, q.sin(), k, v)
    return attend(plan, hidden + q, k * 2, v).tanh() * 2


@pytest.mark.parametrize(("in_place", "count"), [(True, 20), (False, 5)])
def test_no_compilation_after_the_second_batch(in_place, count):
    given = batches(count)
    given.insert(3, [[(0, 0, 20)], [(1, 0, 20)]])  # nothing moves
    given.insert(4, [[(0, 0, 20)], [(1, 0, 19), (0, 20, 1)]])  # a single row

    def body(world):
        attend = module(world, in_place=in_place)
        counter = testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(program, backend=counter, fullgraph=True)
        counts = []
        for i, pieces in enumerate(given):
            mine = tensors_of(pieces, 2, 1, 8, 8, i)[world.rank]
            plan, ours, theirs = attend.plan(pieces), leaves_of(mine), leaves_of(mine)
            out = compiled(attend, attend.ticket(plan), *ours)
            expected = program(attend, plan, *theirs)
            (out * mine[3]).sum().backward()
            (expected * mine[3]).sum().backward()
            close([out, *(t.grad for t in ours)], [expected, *(t.grad for t in theirs)])
            counts.append(counter.frame_count)
        return counts

    for counts in wt.run_threads(2, body, timeout_s=120):
        assert counts[-1] == counts[1] <= 2


def test_a_ticket_without_a_compiler():
    """The same operation, with the log-sum-exp; also where gradients are not wanted."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend, mine = module(world), tensors[world.rank]
        ticket = attend.ticket(attend.plan(pieces))
        with torch.no_grad():
            once = attend(ticket, *mine[:3])
        q, k, v = leaves_of(mine)
        out, lse = attend(ticket, q, k, v, return_lse=True)
        (out * mine[3]).sum().backward()
        assert torch.equal(once, out) and not lse.requires_grad
        return out.detach(), q.grad, k.grad, v.grad, lse.double()

    for got, expected in zip(wt.run_threads(2, body), whole(pieces, tensors)):
        close(got[:4], expected[:4])
        close(got[4:], expected[4:], 1e-5)


def test_calls_that_do_not_need_each_other_in_order():
    """A token ties them: in the graph, and backward in the reverse order, on all ranks alike."""
    first, second = pieces_in_order([70, 9, 33], 2), pieces_in_order([40, 50], 2)
    tensors = tensors_of(first, 2, 1, 8, 8), tensors_of(second, 2, 1, 8, 8)

    def both(attend, tickets, token, one, two):
        a, token = attend(tickets[0], *one, token=token)
        b, token = attend(tickets[1], *two, token=token)
        return a, b

    def body(world):
        attend = module(world)
        tickets = [attend.ticket(attend.plan(pieces)) for pieces in (first, second)]
        inputs = [leaves_of(batch[world.rank]) for batch in tensors]
        token = torch.zeros(0, requires_grad=True)
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        outs = compiled(attend, tickets, token, *inputs)
        loss = sum((out * b[world.rank][3]).sum() for out, b in zip(outs, tensors))
        loss.backward()
        return [(o.detach(), *(t.grad for t in mine)) for o, mine in zip(outs, inputs)]

    for rank, got in enumerate(wt.run_threads(2, body, timeout_s=120)):
        for i, pieces in enumerate((first, second)):
            close(got[i], whole(pieces, tensors[i])[rank][:4])


def test_the_operation_is_what_it_says():
    """torch's own checks of schemas, fake results and gradients."""
    pieces = [[(0, 0, 30), (1, 0, 12)]]
    mine = tensors_of(pieces, 2, 1, 8, 8)[0]

    def body(world):
        for options in ({}, {"in_place": False}):
            attend = module(world, **options)
            ticket = attend.ticket(attend.plan(pieces))
            q, k, v = leaves_of(mine)
            arguments = (*ticket, torch.zeros(0), q, k, v, attend._number, False, True)
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(ops.attend, arguments, test_utils=checks)

    wt.run_threads(1, body)


def test_what_is_wrong_with_a_ticket():
    pieces = [[(0, 0, 30)]]
    q, k, v, _ = tensors_of(pieces, 2, 1, 8, 8)[0]

    def body(world):
        attend = module(world)
        plan = attend.plan(pieces)
        ticket = attend.ticket(attend.plan(pieces))
        with pytest.raises(waybill.InvalidArgument, match=r"q has shape.*expected \[30, 2, 8\]"):
            attend(ticket, q[1:], k, v)
        with pytest.raises(waybill.InvalidArgument, match="token with a BatchPlan"):
            attend(plan, q, k, v, token=torch.zeros(0))
        for _ in range(ops._KEPT):
            attend.ticket(plan)
        with pytest.raises(waybill.InvalidArgument, match="is of no plan, or 256 others"):
            attend(ticket, q, k, v)

    wt.run_threads(1, body)
