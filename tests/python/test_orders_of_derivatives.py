"""First derivatives backward are what calls have. Forward mode and second derivatives are refused
by all of them in the same words: none is lost in silence.
"""

import functools

import pytest

torch = pytest.importorskip("torch")

import torch.autograd.forward_ad as forward_ad  # noqa: E402

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel  # noqa: E402

# torch compiles what it needs for forward mode in a way that it deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
HIDDEN, ROWS = 8, 6
DOCUMENTS = [4, 2]
SIZES = {"num_experts": 2, "topk": 2, "hidden": HIDDEN, "max_tokens": ROWS}
TANGENT = r"has a tangent, expected none: calls of Waybill have no derivatives in forward mode"
SECOND = r"got a gradient of a gradient \(create_graph=True\) of a Waybill call"


class Scale(torch.nn.Module):
    """Experts of one parameter."""

    def __init__(self, scale):
        super().__init__()
        self.scale = torch.nn.Parameter(scale)

    def forward(self, rows, ends, weights=None):
        return rows * self.scale if weights is None else rows * self.scale * weights[:, None]


def attention_on(world, way):
    attend = wt.ContextParallelAttention(
        world, heads=2, kv_heads=1, head_dim=HIDDEN, dtype=torch.float32
    )
    plan = attend.plan(attend.gather(DOCUMENTS))
    if way == "ticket":
        plan = attend.ticket(plan)
    elif way == "fixed":
        plan = attend.fixed_plan(plan, wt.Capacities.of(plan))
    inputs = [torch.ones(ROWS, heads, HIDDEN) for heads in (2, 1, 1)]
    return (lambda q, k, v: attend(plan, q, k, v)), inputs


def layer_on(world, part):
    layer = EPAll2AllLayer(world, ROWS, HIDDEN, 2, 0, 2, 1, 1, torch.float32)
    tokens, ids = torch.ones(ROWS, HIDDEN), torch.tensor([[0, 1]] * ROWS)
    weights = torch.ones(ROWS, 2)
    if part == "dispatch":

        def dispatch(tokens, weights):
            rows, arrived, _ = layer.dispatch(tokens, ids, weights)
            return rows * arrived[:, None]

        return dispatch, [tokens, weights]
    rows, _, layout = layer.dispatch(tokens, ids, weights)
    combine = lambda rows, bias: layer.combine(rows, layout, biases=[bias])
    return combine, [rows, tokens]


def module_on(world, part, **options):
    module = ExpertParallel(
        Scale(torch.ones(HIDDEN)), group=world, dtype=torch.float32, gradients="sum", **SIZES,
        **options,
    )  # fmt: skip
    ids = torch.tensor([[0, 1]] * ROWS)
    inputs = [torch.ones(ROWS, HIDDEN), torch.ones(ROWS, 2)]
    if part == "inputs":
        return (lambda tokens, scores: module(tokens, scores, ids)), inputs

    def of_parameters(scale):
        return torch.func.functional_call(module, {"experts.scale": scale}, (*inputs, ids))

    return of_parameters, [torch.ones(HIDDEN)]


CALLS = {
    "attention by plan": lambda world: attention_on(world, "plan"),
    "attention by a fixed plan": lambda world: attention_on(world, "fixed"),
    "attention by ticket": lambda world: attention_on(world, "ticket"),
    "layer, dispatch": lambda world: layer_on(world, "dispatch"),
    "layer, combine": lambda world: layer_on(world, "combine"),
    "module": lambda world: module_on(world, "inputs"),
    "module, weights inside": lambda world: module_on(world, "inputs", weights="experts"),
    "module, operations": lambda world: module_on(
        world, "inputs", fixed_rows=2 * ROWS, operations=True
    ),
    "module, operations, inside": lambda world: module_on(
        world, "inputs", fixed_rows=2 * ROWS, operations=True, weights="experts"
    ),
    "parameters": lambda world: module_on(world, "parameters"),
    "parameters, operations": lambda world: module_on(
        world, "parameters", fixed_rows=2 * ROWS, operations=True
    ),
}
NEEDS_OPERATIONS = ("ticket", "operations")


@pytest.fixture(params=CALLS)
def make(request):
    needs_operations = any(word in request.param for word in NEEDS_OPERATIONS)
    if needs_operations and not hasattr(torch.library, "custom_op"):
        pytest.skip("this torch has no custom_op")
    return CALLS[request.param]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tangents_are_refused(make, requires_grad):
    """Also of a tensor that requires no gradient, whose tangent torch would drop."""

    def body(world):
        call, inputs = make(world)
        for place in range(len(inputs)):
            with forward_ad.dual_level():
                given = [one.clone().requires_grad_(requires_grad) for one in inputs]
                given[place] = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
                with pytest.raises(waybill.Unsupported, match=TANGENT):
                    call(*given)

    wt.run_threads(1, body)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_torch_func_is_refused(make, transform):
    """Torch said what an autograd.Function lacks."""

    def body(world):
        call, inputs = make(world)
        for place in range(len(inputs)):
            one = functools.partial(call, *inputs[:place])
            rest = inputs[place + 1 :]
            with pytest.raises(waybill.Unsupported, match=r"is a tensor of torch.func, as of grad"):
                if transform == "grad":
                    torch.func.grad(lambda v, f=one, r=rest: f(v, *r).sum())(inputs[place])
                else:
                    torch.func.vmap(lambda v, f=one, r=rest: f(v, *r))(inputs[place][None])

    wt.run_threads(1, body)


@pytest.mark.parametrize(
    "make", [name for name in CALLS if "parameters" not in name], indirect=True
)
def test_jvp_is_refused(make):
    """As torch.func has forward mode. (Of parameters torch itself refuses: rows have no memory.)"""

    def body(world):
        call, inputs = make(world)
        tangents = tuple(torch.ones_like(one) for one in inputs)
        with pytest.raises(waybill.Unsupported, match=TANGENT):
            torch.func.jvp(call, tuple(inputs), tangents)

    wt.run_threads(1, body)


def test_second_derivatives_are_refused(make):
    """Also of a loss that is linear in the results, whose gradients depend on no gradient."""

    def body(world):
        call, inputs = make(world)
        for place in range(len(inputs)):
            for loss_of in (torch.sum, lambda out: out.square().sum()):
                given = [one.clone().requires_grad_() for one in inputs]
                first = torch.autograd.grad(loss_of(call(*given)), given, create_graph=True)
                with pytest.raises(waybill.Unsupported, match=SECOND):
                    first[place].square().sum().backward()

    wt.run_threads(1, body)


def test_a_tangent_of_a_gradient_is_refused(make):
    """Forward over reverse: the product of a Hessian and a vector."""

    def body(world):
        call, inputs = make(world)
        given = [one.clone().requires_grad_() for one in inputs]
        out = call(*given)
        with forward_ad.dual_level():
            gradient = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            with pytest.raises(waybill.Unsupported, match=TANGENT):
                torch.autograd.grad(out, given, gradient)

    wt.run_threads(1, body)
