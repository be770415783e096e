"""Several microbatches in flight, checkpoints, autocast: each uses its forward's plan."""

import pytest
from packed import close, leaves_of, module, pieces_in_order, pieces_zigzag, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

BATCHES = [
    pieces_in_order([70, 9, 33], 2),
    [[(0, 0, 12)], [(1, 0, 80)]],
    pieces_zigzag([64, 30], 2),
    [[(0, 0, 20)], [(1, 0, 20)]],  # nothing moves
    [[(0, 0, 50)], []],
]


def in_flight(order, wrap=None):
    """Runs forward (f) and backward (b) of microbatches in an order; their gradients."""
    tensors = [tensors_of(pieces, 2, 1, 8, 8, i) for i, pieces in enumerate(BATCHES)]

    def body(world):
        attend = module(world)
        inputs = [leaves_of(batch[world.rank]) for batch in tensors]
        waiting, done = {}, {}
        for step in order:
            i = int(step[1])
            if step[0] == "f":
                plan = attend.plan(attend.gather(BATCHES[i][world.rank]))
                call = attend if wrap is None else wrap(attend)
                out = call(plan, *inputs[i])
                waiting[i] = (out * tensors[i][world.rank][3]).sum()
                done[i] = out.detach()
            else:
                waiting.pop(i).backward()
        return [(done[i], *(t.grad for t in inputs[i])) for i in range(len(BATCHES))]

    for rank, got in enumerate(wt.run_threads(2, body)):
        for i, pieces in enumerate(BATCHES):
            close(got[i], whole(pieces, tensors[i])[rank][:4])


@pytest.mark.parametrize(
    "order",
    [
        "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4",
        "f0 f1 f2 f3 f4 b0 b1 b2 b3 b4",
        "f0 f1 f2 f3 f4 b4 b3 b2 b1 b0",
        "f0 f1 b0 f2 b1 f3 b2 f4 b3 b4",  # 1F1B
    ],
)
def test_orders(order):
    in_flight(order.split())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "order", ["f0 b0 f1 b1 f2 b2 f3 b3 f4 b4", "f0 f1 b0 f2 b1 f3 b2 f4 b3 b4"]
)
def test_checkpoints(order, reentrant):
    def wrap(attend):
        return lambda plan, *qkv: checkpoint(attend, plan, *qkv, use_reentrant=reentrant)

    in_flight(order.split(), wrap)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_of_one_plan_under_checkpoints(reentrant):
    """A block is computed again where backward comes to it; the other layer's calls lie between."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def block(attend, plan, q, k, v):
        out = attend(plan, q.sin(), k * 2, v)
        return out + q

    def layers(world, with_checkpoint):
        attend = module(world)
        plan = attend.plan(pieces)
        q, k, v = leaves_of(tensors[world.rank])
        hidden = q
        for _ in range(3):
            if with_checkpoint:
                hidden = checkpoint(block, attend, plan, hidden, k, v, use_reentrant=reentrant)
            else:
                hidden = block(attend, plan, hidden, k, v)
        hidden.square().sum().backward()
        return hidden.detach(), q.grad, k.grad, v.grad

    for got, expected in zip(
        wt.run_threads(2, lambda w: layers(w, True)), wt.run_threads(2, lambda w: layers(w, False))
    ):
        close(got, expected)


def test_two_modules_share_plans():
    """Layers with and without a window: one world, a plan each."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        causal, windowed = module(world), module(world, window=5)
        plans = causal.plan(pieces), windowed.plan(pieces)
        q, k, v = leaves_of(tensors[world.rank])
        first, second = causal(plans[0], q, k, v), windowed(plans[1], q, k, v)
        ((first - second) * tensors[world.rank][3]).sum().backward()
        return first.detach() - second.detach(), q.grad, k.grad, v.grad

    full, short = whole(pieces, tensors), whole(pieces, tensors, window=5)
    for rank, got in enumerate(wt.run_threads(2, body)):
        close(got, [a - b for a, b in zip(full[rank][:4], short[rank])])


def test_autocast_casts_to_the_modules_dtype():
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8, dtype=torch.float32)

    def body(world):
        attend = module(world, dtype=torch.bfloat16)
        q, k, v = leaves_of(tensors[world.rank])
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(attend.plan(pieces), q, k, v)
        assert out.dtype == torch.bfloat16
        (out.float() * tensors[world.rank][3]).sum().backward()
        assert q.grad.dtype == torch.float32
        return out.detach().double(), q.grad.double(), k.grad.double(), v.grad.double()

    wide = [[t.double() for t in mine] for mine in tensors]
    for rank, got in enumerate(wt.run_threads(2, body)):
        close(got, whole(pieces, wide)[rank][:4], 0.06)


@pytest.mark.parametrize("way", ["plan", "ticket", "fixed"])
def test_backward_twice(way):
    """Of one forward: what it kept is there, and is not written to."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend, mine = module(world), tensors[world.rank]
        plan, rows = attend.plan(pieces), len(mine[0])
        given, inputs = plan, leaves_of(mine)
        rows_of = list(inputs)
        if way == "ticket":
            given = attend.ticket(plan)
        elif way == "fixed":
            given = attend.fixed_plan(plan, wt.Capacities.of(plan))
            rows_of = [given.padded(t) for t in inputs]
        out = attend(given, *rows_of)[:rows]
        loss = (out * mine[3]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return out.detach(), *(t.grad / 2 for t in inputs)

    for got, expected in zip(wt.run_threads(2, body), whole(pieces, tensors)):
        close(got, expected[:4])


@pytest.mark.parametrize("way", ["plan", "ticket"])
def test_there_are_no_second_derivatives(way):
    """A penalty of gradients would lose its part silently: the loss is linear in the output."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend, mine = module(world), tensors[world.rank]
        plan = attend.plan(pieces)
        q, k, v = leaves_of(mine)
        out = attend(plan if way == "plan" else attend.ticket(plan), q, k, v)
        loss = (out * mine[3]).sum()
        (of_q,) = torch.autograd.grad(loss, q, create_graph=True)
        with pytest.raises(waybill.Unsupported, match="first derivatives alone"):
            (loss + of_q.square().sum()).backward()

    wt.run_threads(2, body)


@pytest.mark.parametrize("in_place", [True, False])
def test_lazily_negated_rows(in_place):
    """What travels is read as bytes, which such a view has with the other sign."""
    pieces = pieces_in_order([150, 13], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend = module(world, in_place=in_place)
        q, k, v = leaves_of(tensors[world.rank])
        out = attend(attend.plan(pieces), *(torch._neg_view(-t) for t in (q, k, v)))
        (out * tensors[world.rank][3]).sum().backward()
        return out.detach(), q.grad, k.grad, v.grad

    for got, expected in zip(wt.run_threads(2, body), whole(pieces, tensors)):
        close(got, expected[:4])


class Negated(wt.kernels.AttentionKernel):
    """Gives lazily negated tensors, and log-sum-exps that it needs."""

    needs_lse = True

    def __init__(self, kernel):
        self.kernel = kernel

    def forward(self, q, k, v, sequences, shape, want_lse):
        found = self.kernel.forward(q, k, v, sequences, shape, True)
        return tuple(torch._neg_view(-t) for t in found)

    def backward(self, grad, q, k, v, out, lse, sequences, shape):
        assert not any(t.is_neg() for t in (grad, q, k, v, out, lse))
        found = self.kernel.backward(grad, q, k, v, out, lse, sequences, shape)
        return tuple(torch._neg_view(-t) for t in found)


@pytest.mark.parametrize("in_place", [True, False])
def test_lazily_negated_results_and_gradients(in_place):
    pieces = pieces_in_order([150, 13], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend = module(world, in_place=in_place)
        attend = module(world, in_place=in_place, kernel=Negated(attend.kernel))
        inputs = leaves_of(tensors[world.rank])
        out, lse = attend(attend.plan(pieces), *inputs, return_lse=True)
        assert not out.is_neg() and not lse.is_neg()
        out.backward(torch._neg_view(-tensors[world.rank][3]))
        return out.detach(), *(t.grad for t in inputs)

    for got, expected in zip(wt.run_threads(2, body), whole(pieces, tensors)):
        close(got, expected[:4])


@pytest.mark.parametrize("way", ["plan", "ticket", "fixed"])
def test_backward_under_autocast(way):
    """What is computed again there has the dtype that forward had."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8, dtype=torch.float32)

    def body(world):
        attend, mine = module(world, dtype=torch.float32), tensors[world.rank]
        plan, inputs = attend.plan(pieces), leaves_of(mine)
        given, rows_of = plan, inputs
        if way == "ticket":
            given = attend.ticket(plan)
        elif way == "fixed":
            given = attend.fixed_plan(plan, wt.Capacities.of(plan))
            rows_of = [given.padded(t) for t in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(given, *rows_of)[: len(mine[0])]
            (out * mine[3]).sum().backward()
        return [t.double() for t in (out.detach(), *(t.grad for t in inputs))]

    wide = [[t.double() for t in mine] for mine in tensors]
    for got, expected in zip(wt.run_threads(2, body), whole(pieces, wide)):
        close(got, expected[:4], 1e-5)
