"""ExpertParallel, forward and backward, in a CUDA graph; and compiled on a GPU."""

import pytest

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

from compiling import compiles  # noqa: E402
from ways import captured  # noqa: E402

import waybill  # noqa: E402
from waybill.torch.moe import ExpertParallel, SwiGLUExperts  # noqa: E402

WORLD, HIDDEN, INNER, EXPERTS, TOPK, MOST = 2, 256, 128, 8, 3, 40


def module_on(world, **options):
    torch.manual_seed(world.rank)
    experts = SwiGLUExperts(EXPERTS // WORLD, HIDDEN, INNER, torch.bfloat16, world.device)
    return ExpertParallel(
        experts, group=world, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=MOST,
        fixed_rows=WORLD * MOST * TOPK, gradients="sum", **options,
    )  # fmt: skip


def batch(world, seed):
    draws = torch.Generator().manual_seed(10 * seed + world.rank)
    x, gradient = (torch.randn(MOST, HIDDEN, generator=draws).bfloat16() for _ in range(2))
    scores, ids = torch.rand(MOST, EXPERTS, generator=draws).topk(TOPK)
    ids[torch.rand(ids.shape, generator=draws) < 0.2] = -1
    return [t.to(world.device) for t in (x, scores, ids, gradient)]


def step(call, module, given):
    x, scores, ids, gradient = given
    out = call(x, scores, ids)
    leaves = (x, scores, *module.experts.parameters())
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


@pytest.fixture
def gpu_way(torch_way):
    if torch_way.device == "cpu":
        pytest.skip("for GPUs")
    return torch_way


@pytest.mark.gpu
@pytest.mark.parametrize("windows", ["shared", "own"])
@pytest.mark.parametrize("weights", ["combine", "experts"])
def test_a_step_in_a_graph(gpu_way, windows, weights):
    def body(world):
        module = module_on(world, windows=windows, weights=weights)
        given = batch(world, 0)
        for leaf in given[:2]:
            leaf.requires_grad_()
        for _ in range(2):
            step(module, module, given)
        torch.cuda.current_stream().synchronize()
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            found = step(module, module, given)
        world.barrier()
        for seed in (1, 2, 3):
            with torch.no_grad():
                for kept, new in zip(given, batch(world, seed)):
                    kept.copy_(new)
            graph.replay()
            got = [one.clone() for one in found]
            want = step(module, module, given)
            torch.cuda.current_stream().synchronize()
            assert module.take_overflow() == 0
            for one, other in zip(got, want):
                assert torch.equal(one, other)
            world.barrier()
        del graph
        module.finalize()

    gpu_way.run(WORLD, body)


@pytest.mark.gpu
@compiles
def test_compiled(gpu_way):
    if not hasattr(torch.library, "custom_op"):
        pytest.skip("this torch has no custom_op")

    def body(world):
        torch.manual_seed(0)
        experts = SwiGLUExperts(EXPERTS, HIDDEN, INNER, torch.bfloat16, world.device)
        module = ExpertParallel(
            experts, group=world, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=MOST,
            fixed_rows=MOST * TOPK, gradients="sum",
        )  # fmt: skip
        compiled = torch.compile(module, fullgraph=True)
        for seed in range(3):
            given = batch(world, seed)
            for leaf in given[:2]:
                leaf.requires_grad_()
            for one, other in zip(step(compiled, module, given), step(module, module, given)):
                # What is fused is not rounded in between, so single elements may differ by more.
                assert one.dtype == other.dtype
                difference, size = (one - other).float().norm(), other.float().norm()
                assert difference <= 1e-2 * size, (seed, float(difference), float(size))
        module.finalize()

    waybill.torch.run_threads(1, body, device=gpu_way.device)
