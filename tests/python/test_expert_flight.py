"""ExpertParallel: several microbatches in flight, gradients that accumulate, what runs between the
experts and combine, and room as a share of the worst case.
"""

import math

import pytest

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

from test_expert_parallel import EXPERTS, HIDDEN, LOCAL, MOST, TOPK, WORLD, batch  # noqa: E402
from test_expert_training import module_on  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import waybill  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

BATCHES = range(3)


def forward(modules, rank, seed, recompute):
    x, scores, ids, gradient = batch(rank, seed)
    hidden = x = x.requires_grad_()
    scores.requires_grad_()
    for module in modules:
        if recompute:
            hidden = checkpoint(module, hidden, scores, ids, use_reentrant=False)
        else:
            hidden = module(hidden, scores, ids)
    return hidden, gradient, (x, scores)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["f0 f1 f2 b0 b1 b2", "f0 f1 b0 f2 b1 b2", "f0 f1 f2 b2 b1 b0"])
@pytest.mark.parametrize("fixed_rows", [None, 1.0])
def test_microbatches_in_flight_share_windows(order, recompute, fixed_rows):
    """Two layers with one memory: gradients, also of the experts, are those of one after another,
    and add up over the microbatches.
    """

    def body(world):
        def run(steps):
            modules = [module_on(world, fixed_rows=fixed_rows) for _ in range(2)]
            assert modules[0].layer is modules[1].layer
            flying, found = {}, {}
            for step in steps.split():
                seed = int(step[1])
                if step[0] == "f":
                    flying[seed] = forward(modules, world.rank, seed, recompute)
                    continue
                out, gradient, leaves = flying.pop(seed)
                out.backward(gradient)
                found[seed] = [out.detach(), *(leaf.grad for leaf in leaves)]
            grads = [weight.grad for module in modules for weight in module.parameters()]
            for module in modules:
                module.finalize()
            return [*(one for seed in BATCHES for one in found[seed]), *grads]

        alone = run(" ".join(f"f{seed} b{seed}" for seed in BATCHES))
        for one, other in zip(alone, run(order)):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)

    waybill.run_threads(WORLD, body)


class Seen(TorchDispatchMode):
    """Names of torch's operations that compute or copy."""

    free = ("detach", "view", "alias", "empty", "new_empty", "as_strided", "t.", "reshape", "slice")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, result = function.__name__, function(*args, **(kwargs or {}))
        nothing = isinstance(result, torch.Tensor) and result.numel() == 0
        if not nothing and not name.startswith(self.free):
            self.names.append(name)
        return result


@pytest.mark.parametrize("enable_local_combine", [False, True])
def test_no_operation_of_torch_between_experts_and_combine(enable_local_combine):
    """Neither forward nor backward: weights are applied, and their gradients made, by the layer."""

    def body(world):
        layer = EPAll2AllLayer(
            world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD, torch.float32,
            torch.float32, enable_local_combine=enable_local_combine, dropped_id=-1,
        )  # fmt: skip
        x, scores, ids, gradient = batch(world.rank)
        rows, weights, layout = layer.dispatch(x, ids, scores.requires_grad_())
        outputs = rows.detach().requires_grad_()
        with Seen() as forward_seen:
            sums = layer.combine(outputs, layout, weighted=True)
        with Seen() as backward_seen:
            needed = (outputs, weights)
            of_rows, of_weights = torch.autograd.grad(sums, needed, gradient)
        torch.autograd.grad(weights, scores, of_weights)  # home: a call of all ranks
        layer.finalize()
        assert of_rows.shape == rows.shape and of_weights.shape == weights.shape
        return forward_seen.names, backward_seen.names

    for forward_names, backward_names in waybill.run_threads(WORLD, body):
        assert forward_names == []
        assert backward_names == []


@pytest.mark.parametrize("rows, alignment", [("grouped", 1), ("grouped", 4), ("compact", 1)])
def test_room_as_a_share_of_the_worst_case(rows, alignment):
    def body(world):
        def layer_of(share):
            return EPAll2AllLayer(
                world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD, torch.float32,
                fixed_rows=share, rows=rows, expert_alignment=alignment, dropped_id=-1,
            )  # fmt: skip

        worst = WORLD * MOST * (min(TOPK, LOCAL) if rows == "grouped" else 1)
        spare = LOCAL * (alignment - 1) if rows == "grouped" else 0
        for share in (1.0, 0.5, 0.01):
            layer = layer_of(share)
            assert layer.fixed_rows == math.ceil(share * worst) + spare
            assert f"fixed_rows={layer.fixed_rows}" in repr(layer)
            if share == 1.0:  # all tokens choose experts of rank 0
                x = torch.ones(MOST, HIDDEN)
                ids = torch.arange(TOPK).repeat(MOST, 1)
                got, _, layout = layer.dispatch(x, ids)
                layer.combine(got, layout)
                layer.check_overflow()
            layer.finalize()
        for wrong in (0.0, -0.5, 1.5, float("nan")):
            with pytest.raises(waybill.InvalidArgument, match=r"fixed_rows = .*share of the worst"):
                layer_of(wrong)

    waybill.run_threads(WORLD, body)
