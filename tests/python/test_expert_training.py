"""ExpertParallel in training: shared memory, presets, room that was too small, wrappers."""

import types

import pytest
from error_texts import FINALIZED
from wrapping import run_wrapped

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

import test_expert_parallel as one_process  # noqa: E402
from test_expert_parallel import EXPERTS, HIDDEN, MOST, SIZES, TOPK, WORLD  # noqa: E402

import waybill  # noqa: E402
from waybill.torch.experts.layer import suggested_sms  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel  # noqa: E402


def module_on(world, experts=None, **options):
    if experts is None:
        experts = one_process.own_experts(world.rank, world.device)
    given = {**SIZES, "dtype": torch.float32, "gradients": "mean", **options}
    return ExpertParallel(experts, group=world, **given)


def step(module, rank, seed=0):
    x, scores, ids, gradient = one_process.batch(rank, seed)
    x, scores = x.requires_grad_(), scores.requires_grad_()
    out = module(x, scores, ids)
    out.backward(gradient)
    return out.detach(), x.grad, scores.grad


def test_modules_of_the_same_sizes_share_a_layer():
    def body(world):
        one, two = module_on(world), module_on(world)
        other = module_on(world, topk=2)
        own = module_on(world, windows="own")
        assert one.layer is two.layer
        assert len({one.layer, other.layer, own.layer}) == 3
        one.finalize()
        step(two, world.rank)
        two.finalize()
        with pytest.raises(waybill.TransportError, match=FINALIZED):
            step(two, world.rank)
        again = module_on(world)
        step(again, world.rank)

    waybill.run_threads(WORLD, body)


def test_memory_of_four_layers_and_two_microbatches():
    """Windows of one layer, whatever is in flight; those of four with windows of their own."""

    def body(world):
        row = HIDDEN * 4
        for windows, layers in (("shared", 1), ("own", 4)):
            modules = [module_on(world, windows=windows)
                       for _ in range(4)]  # fmt: skip
            different = {id(module.layer): module.layer for module in modules}
            assert len(different) == layers
            for layer in different.values():
                rows = layer.output_rows
                # Two windows of rows with a tag (16 bytes) and a weight each, two for outputs.
                least = 2 * rows * (row + 16 + 4) + 2 * rows * row
                assert least <= layer.memory_bytes < 1.2 * least + 8192
            before = sum(layer.memory_bytes for layer in different.values())
            x, scores, ids, gradient = one_process.batch(world.rank)
            halves = 1 if windows == "own" else 2
            for _ in range(2):
                outs = []
                for _ in range(halves):
                    out = x.clone().requires_grad_()
                    for module in modules:
                        out = module(out, scores, ids)
                    outs.append(out)
                for out in outs:
                    out.backward(gradient)
            assert sum(layer.memory_bytes for layer in different.values()) == before
            for module in modules:
                module.finalize()

    waybill.run_threads(WORLD, body)


def same_products(one, other):
    """Of the same numbers; torch's products on CPUs may round by where in memory they lie."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


OVERWRITTEN = (
    r"^backward of EPAll2AllLayer.combine: dispatch \d+ \(a backward dispatches, too\) has"
    r" overwritten rows of dispatch \d+, .* copy_out = True, in ExpertParallel windows = \"shared\""
)


def test_own_windows_as_shared_ones():
    def body(world):
        shared, own = module_on(world), module_on(world, windows="own")
        for seed in range(3):
            for one, other in zip(step(shared, world.rank, seed), step(own, world.rank, seed)):
                same_products(one, other)
        for one, other in zip(shared.parameters(), own.parameters()):
            same_products(one.grad, other.grad)
        x, scores, ids, gradient = one_process.batch(world.rank)
        first = own(x.requires_grad_(), scores, ids)
        for _ in range(2):
            own(x, scores, ids)
        with pytest.raises(waybill.InvalidArgument, match=OVERWRITTEN):
            first.backward(gradient)

    waybill.run_threads(WORLD, body)


def test_own_windows_refuse_what_scores_alone_need():
    """Rows that need no gradients, but whose experts do, and whose scores do."""

    def body(world):
        own = module_on(world, windows="own")
        x, scores, ids, gradient = one_process.batch(world.rank)
        first = own(x, scores.requires_grad_(), ids)
        for _ in range(2):
            own(x, scores, ids)
        with pytest.raises(waybill.InvalidArgument, match=OVERWRITTEN):
            first.backward(gradient)

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("options", [{"windows": "own"}, {"preset": "decoding"}])
def test_a_second_forward_before_a_backward(options, first):
    """The gradients that a backward dispatches overwrite rows, too: those of its own forward."""

    def body(world):
        own, (x, scores, ids, gradient) = module_on(world, **options), one_process.batch(world.rank)
        x.requires_grad_()
        outputs = [own(x, scores, ids), own(x, scores, ids)]
        if first == 1:
            outputs[1].backward(gradient)  # the last one is as ever
        with pytest.raises(waybill.InvalidArgument, match=OVERWRITTEN):
            outputs[0].backward(gradient)
        again = own(x, scores, ids)
        again.backward(gradient)

    waybill.run_threads(WORLD, body)


class Doubled(torch.nn.Module):
    """Rows that autograd need not keep, but for the gradient of the factor."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((), 2.0))

    def forward(self, rows, ends):
        return rows * self.factor


def test_overwritten_rows_that_no_gradient_needs():
    """Autograd does not read them, and neither does what says that they are gone."""

    def body(world):
        x, scores, ids, gradient = one_process.batch(world.rank)
        x.requires_grad_()
        own = module_on(world, experts=Doubled(), windows="own")
        own.experts.factor.requires_grad_(False)
        outputs = [own(x, scores, ids), own(x, scores, ids)]
        (outputs[0] + outputs[1]).backward(gradient)
        whole = x.grad.clone()
        own.experts.factor.requires_grad_()
        for asked in ([x], [own.experts.factor], None):
            first, _ = own(x, scores, ids), own(x, scores, ids)
            with pytest.raises(waybill.InvalidArgument, match=OVERWRITTEN):
                first.backward(gradient, inputs=asked)
        assert whole.abs().sum() > 0

    waybill.run_threads(WORLD, body)


def test_weights_of_a_window_are_refused_when_it_has_others():
    def body(world):
        layer = EPAll2AllLayer(
            world, MOST, HIDDEN, TOPK, world.rank, EXPERTS, WORLD, WORLD, torch.float32,
            copy_out=False, dropped_id=-1,
        )  # fmt: skip
        x, scores, ids, gradient = one_process.batch(world.rank)
        rows, _, layout = layer.dispatch(x.requires_grad_(), ids, scores)
        first = layer.combine(2 * rows, layout, weighted=True)
        for _ in range(2):
            layer.dispatch(x.detach(), ids, scores)
        with pytest.raises(waybill.InvalidArgument, match=OVERWRITTEN):
            first.backward(gradient)

    waybill.run_threads(WORLD, body)


def test_finalize_twice_and_rooms_that_cannot_be():
    def body(world):
        room = WORLD * MOST * TOPK
        one, two = module_on(world, fixed_rows=room), module_on(world, fixed_rows=room)
        for _ in range(2):
            one.finalize()
        with pytest.raises(waybill.InvalidArgument, match=r"resize: fixed_rows = 0, expected >= 1"):
            two.resize(0)
        step(two, world.rank)
        with pytest.raises(waybill.InvalidArgument, match="operations = True with fixed_rows"):
            module_on(world, operations=True)

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize("operations", [None, True])
def test_autocast(operations):
    def body(world):
        module = ExpertParallel(
            one_process.own_experts(world.rank, world.device).to(torch.bfloat16), group=world,
            dtype=torch.bfloat16, fixed_rows=WORLD * MOST * TOPK, operations=operations,
            gradients="mean", **SIZES,
        )  # fmt: skip
        x, scores, ids, gradient = one_process.batch(world.rank)
        x = x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x, scores, ids)
        out.backward(gradient.to(out.dtype))
        assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()

    waybill.run_threads(WORLD, body)


def test_presets():
    def body(world):
        training, decoding = module_on(world), module_on(world, preset="decoding")
        assert training.layer.enable_local_combine and training.layer.fixed_rows is None
        assert decoding.layer.fixed_rows == WORLD * MOST * min(TOPK, EXPERTS // WORLD)
        assert not decoding.layer.copy_out
        shown = repr(decoding)
        for part in ("num_sm=20", "enable_local_combine=True", f"fixed_rows={WORLD * MOST * TOPK}"):
            assert part in shown
        x, scores, ids, _ = one_process.batch(world.rank)
        with torch.no_grad():
            assert torch.equal(training(x, scores, ids), decoding(x, scores, ids))
        with pytest.raises(waybill.InvalidArgument, match='preset = "fast", expected'):
            module_on(world, preset="fast")
        with pytest.raises(
            waybill.InvalidArgument, match='windows = 1, expected "shared" or "own"'
        ):
            module_on(world, windows=1)

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize(
    ("most", "per_node", "multiprocessors", "want"),
    [
        (4096, 8, 132, 32),  # as many as fill the links
        (4096, 8, 78, 19),
        (4096, 4, 132, 48),  # rows go on to other nodes
        (128, 8, 132, 64),  # latency
        (128, 8, 20, 10),
        (4096, 8, 2, 1),
    ],
)
def test_multiprocessors(monkeypatch, most, per_node, multiprocessors, want):
    device = types.SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    topology = types.SimpleNamespace(ranks_per_node=per_node)
    world = types.SimpleNamespace(device="cuda:0", topology=topology, world_size=8)
    assert suggested_sms(world, most) == want


@pytest.mark.parametrize(
    ("windows", "operations"), [("shared", None), ("own", None), ("shared", True)]
)
def test_rows_behind_the_last_are_poison(windows, operations):
    """As torch._grouped_mm leaves them: nothing reaches sums or gradients, wherever weights are."""

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, end):
            ctx.end = int(end)
            return torch.where(torch.arange(len(rows))[:, None] < ctx.end, rows, float("nan"))

        @staticmethod
        def backward(ctx, gradient):
            live = torch.arange(len(gradient))[:, None] < ctx.end
            return torch.where(live, gradient, float("nan")), None

    def body(world):
        found = []
        for weights in ("combine", "experts"):
            for room in (None, WORLD * MOST * TOPK):
                own = one_process.own_experts(world.rank, world.device)

                def poisoned(rows, ends, *more, own=own):
                    return Poison.apply(own(Poison.apply(rows, ends[-1]), ends, *more), ends[-1])

                module = module_on(
                    world, own if room is None else poisoned, weights=weights, fixed_rows=room,
                    windows=windows, operations=operations if room else None,
                )  # fmt: skip
                found.append([*step(module, world.rank), *(w.grad for w in own.parameters())])
                module.finalize()
        for others in found[1:]:
            for one, other in zip(found[0], others):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    waybill.run_threads(WORLD, body)


def test_too_little_room_is_seen_by_all_and_the_step_is_taken_again():
    def body(world):
        module, enough = module_on(world, fixed_rows=8), module_on(world)
        want = step(enough, world.rank)
        taken = 0
        while True:
            module.zero_grad()
            got = step(module, world.rank)
            taken += 1
            needed = module.take_overflow()
            if needed == 0:
                break
            assert needed > module.layer.fixed_rows
            module.resize(needed)
        assert taken == 2 and module.layer.fixed_rows > 8
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other)
        for one, other in zip(module.parameters(), enough.parameters()):
            torch.testing.assert_close(one.grad, other.grad)
        given = module_on(world, layer=enough.layer)
        with pytest.raises(waybill.InvalidArgument, match="the layer was given"):
            given.resize(30)

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize("operations", [False, True])
@pytest.mark.parametrize("needs", [["x"], ["x", "scores"], []], ids=str)
def test_backward_after_resize_says_so(operations, needs):
    """The forward's rows went with the layer that brought them."""

    def body(world):
        module = module_on(world, fixed_rows=WORLD * MOST * TOPK, operations=operations)
        x, scores, ids, _ = one_process.batch(world.rank)
        for name, tensor in (("x", x), ("scores", scores)):
            tensor.requires_grad_(name in needs)
        loss = module(x, scores, ids).sum()
        module.resize(WORLD * MOST * TOPK + 1)
        with pytest.raises(
            waybill.InvalidArgument, match="the layer was resized since its forward"
        ):
            loss.backward()
        module(x, scores, ids).sum().backward()
        assert module.experts.gate.grad is not None
        module.finalize()

    waybill.run_threads(WORLD, body)


WRAPPED = """
    import sys

    sys.path.insert(0, "{tests}")
    import torch
    from torch import distributed
    import test_expert_parallel as one_process
    from waybill.torch.moe import ExpertParallel

    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "experts")
    )
    part, place = mesh["replicate"].get_local_rank(), mesh["experts"].get_local_rank()

    def wrapped(experts):
        if "{wrapper}" == "ddp":
            group = mesh["replicate"].get_group()
            return torch.nn.parallel.DistributedDataParallel(experts, process_group=group)
        from torch.distributed.fsdp import fully_shard
        return fully_shard(experts, mesh=mesh["replicate"])

    own = one_process.own_experts(place, "cpu")
    module = ExpertParallel(
        wrapped(own), group=mesh["experts"], dtype=torch.float32, shared=one_process.shared_expert,
        gradients="mean", **one_process.SIZES,
    )
    # Two microbatches: gradients are means over the four ranks' losses, and add up.
    for micro in range(2):
        x, scores, ids, gradient = one_process.batch(place, seed=2 * part + micro)
        module(x, scores, ids).backward(gradient)
    batches = [
        [one_process.batch(place, seed) for place in range(2)] for seed in range(4)
    ]
    found = [one_process.alone(of_both)[2] for of_both in batches]
    first = place * one_process.LOCAL
    for number, weight in enumerate(own.parameters()):
        got = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        whole = sum(gradients[number] for gradients in found) / W
        torch.testing.assert_close(
            got, whole[first : first + one_process.LOCAL], rtol=1e-4, atol=1e-5
        )
    module.finalize()
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_replicated_experts(tmp_path, wrapper):
    """Two by two ranks and two microbatches, against one process."""
    run_wrapped(tmp_path, WRAPPED, wrapper, world_size=4)
