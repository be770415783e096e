"""ExpertParallel with experts that make no product of no rows: what backward asks of which rank."""

import pytest

torch = pytest.importorskip("torch")

import waybill  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel  # noqa: E402

WORLD, HIDDEN, EXPERTS, TOPK, MOST = 2, 4, 4, 2, 5
LOCAL = EXPERTS // WORLD
ROOM = WORLD * MOST * TOPK
NEEDS_OPERATIONS = pytest.mark.skipif(
    not hasattr(torch.library, "custom_op"), reason="this torch has no custom_op"
)
WAYS = [
    pytest.param({}, id="counted"),
    pytest.param({"chunks": 2}, id="chunks"),
    pytest.param({"weights": "experts"}, id="weights inside"),
    pytest.param({"fixed_rows": ROOM}, id="fixed"),
    pytest.param({"fixed_rows": ROOM, "operations": True}, id="operations", marks=NEEDS_OPERATIONS),
    pytest.param(
        {"fixed_rows": ROOM, "operations": True, "weights": "experts"},
        id="operations, weights inside",
        marks=NEEDS_OPERATIONS,
    ),
]


class Loop(torch.nn.Module):
    """One expert after another, as many models have it; of no rows comes nothing."""

    def __init__(self, rank, rest):
        super().__init__()
        draws = torch.Generator().manual_seed(rank)
        self.matrices = torch.nn.ParameterList(
            torch.randn(HIDDEN, HIDDEN, generator=draws) for _ in range(LOCAL)
        )
        self.rest = rest

    def forward(self, rows, ends, weights=None):
        out, begin = [], 0
        for matrix, end in zip(self.matrices, ends.tolist()):
            if end > begin:
                product = rows[begin:end] @ matrix
                out.append(product if weights is None else product * weights[begin:end, None])
            begin = end
        rest = rows[begin:] if self.rest == "rows" else torch.zeros_like(rows[begin:])
        return torch.cat([*out, rest])


def inputs(rank, receiver, needs):
    """Tokens, scores and ids: all tokens of all ranks go to the first expert of one rank."""
    draws = torch.Generator().manual_seed(7 + rank)
    x, scores = torch.randn(MOST, HIDDEN, generator=draws), torch.rand(MOST, TOPK, generator=draws)
    ids = torch.full((MOST, TOPK), receiver * LOCAL)
    return x.requires_grad_("x" in needs), scores.requires_grad_("scores" in needs), ids


def alone(receiver):
    """Gradients of tokens and scores by rank, and of the receiver's first expert."""
    matrix = Loop(receiver, "zeros").matrices[0]
    given = [inputs(rank, receiver, ("x", "scores")) for rank in range(WORLD)]
    sum(((x @ matrix * s.sum(1, keepdim=True)) ** 2).sum() for x, s, _ in given).backward()
    return [(x.grad, scores.grad) for x, scores, _ in given], matrix.grad


def on_ranks(body):
    return waybill.run_threads(WORLD, body, timeout_s=20.0)


def module_on(world, rest, options):
    return ExpertParallel(
        Loop(world.rank, rest), group=world, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
        max_tokens=MOST, dtype=torch.float32, gradients="sum", **options,
    )  # fmt: skip


@pytest.mark.parametrize("receiver", [0, 1])
@pytest.mark.parametrize("needs", [("x", "scores"), ("x",), ("scores",), ()], ids="+".join)
@pytest.mark.parametrize("rest", ["zeros", "rows"])
@pytest.mark.parametrize("options", WAYS)
def test_gradients_are_those_of_one_process(options, rest, needs, receiver):
    """In one backward, of the experts' parameters alone, and of the inputs alone."""
    of_inputs, of_matrix = alone(receiver)

    def body(world):
        module = module_on(world, rest, options)
        x, scores, ids = inputs(world.rank, receiver, needs)
        own = list(module.experts.parameters())
        asked = [one for one in (x, scores) if one.requires_grad]
        loss = lambda: module(x, scores, ids).square().sum()
        found = {
            "parameters": torch.autograd.grad(loss(), own, allow_unused=True),
            "first": torch.autograd.grad(loss(), own[:1]),
        }
        if asked:
            found["inputs"] = torch.autograd.grad(loss(), asked)
        loss().backward(inputs=own)
        found["backward of inputs"] = [weight.grad for weight in own]
        for weight in own:
            weight.grad = None
        loss().backward()
        found["backward"] = [weight.grad for weight in own]
        found["backward, inputs"] = [one.grad for one in asked]
        module.finalize()
        return found

    for rank, found in enumerate(on_ranks(body)):
        want = of_matrix if rank == receiver else torch.zeros_like(of_matrix)
        for name in ("parameters", "first", "backward of inputs", "backward"):
            torch.testing.assert_close(found[name][0], want, msg=lambda m, n=name: f"{n}: {m}")
        expected = [
            gradient
            for name, gradient in zip(("x", "scores"), of_inputs[rank])
            if name in needs
        ]  # fmt: skip
        for name in ("inputs", "backward, inputs"):
            for got, wanted in zip(found.get(name, ()), expected):
                torch.testing.assert_close(got, wanted, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", WAYS)
def test_backward_in_two_parts(options):
    """As schedules without bubbles have it: gradients of inputs first, those of weights later."""
    parts = pytest.importorskip("torch.distributed.pipelining._backward")
    of_inputs, of_matrix = alone(1)

    def body(world):
        module = module_on(world, "zeros", options)
        x, scores, ids = inputs(world.rank, 1, ("x", "scores"))
        own = list(module.experts.parameters())
        loss = module(x, scores, ids).square().sum()
        given, groups = parts.stage_backward_input([loss], None, [x, scores], iter(own))
        world.barrier()  # what is left is this rank's alone
        if world.rank == 0:
            world.barrier()
        parts.stage_backward_weight(iter(own), groups)
        if world.rank == 1:
            world.barrier()
        module.finalize()
        return given, own[0].grad

    for rank, (given, got) in enumerate(on_ranks(body)):
        torch.testing.assert_close(tuple(given), of_inputs[rank])
        torch.testing.assert_close(got, of_matrix if rank == 1 else torch.zeros_like(of_matrix))


def test_hooks_of_parameters_get_tensors():
    """A rank without rows has gradients of zeros, as those that make products of no rows have."""

    def body(world):
        module = module_on(world, "zeros", {})
        for weight in module.experts.parameters():
            weight.register_hook(lambda gradient: gradient.mul_(2.0))
        module(*inputs(world.rank, 1, ("x",))).sum().backward()
        module.finalize()
        return [weight.grad for weight in module.experts.parameters()]

    assert all(torch.equal(one, torch.zeros(HIDDEN, HIDDEN)) for one in on_ranks(body)[0])


def test_a_layer_alone_says_what_outputs_must_depend_on():
    def body(world):
        layer = EPAll2AllLayer(
            world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD, dtype=torch.float32
        )
        x, scores, ids = inputs(world.rank, 1, ("x",))
        matrix = torch.eye(HIDDEN, requires_grad=True)
        rows, _, layout = layer.dispatch(x, ids, scores)
        sums = layer.combine(rows @ matrix if len(rows) else rows, layout)
        with pytest.raises(waybill.Disagreement) as caught:
            torch.autograd.grad(sums.sum(), matrix, allow_unused=True)
            layer.dispatch(x, ids, scores)
        return str(caught.value)

    texts = on_ranks(body)
    assert "the outputs of all ranks must depend on what torch.autograd.grad asks of" in texts[1]
