"""Copies of experts between GPU ranks: what arrives, and modules with copies and without."""

import copy

import numpy as np
import pytest

import waybill
from waybill.moe import simulate_expert_copies, simulate_expert_copy_gradients

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not (waybill.num_gpus() and torch.cuda.is_available() and hasattr(torch, "_grouped_mm")),
    reason="no GPU, an installation without CUDA, or a torch without _grouped_mm",
)

HIDDEN, INNER, LOCAL, TOPK, MOST = 64, 128, 4, 4, 256


def drawn(shape, seed, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def batch(rank, world_size, seed, count=MOST):
    x = drawn((count, HIDDEN), 100 * seed + rank)
    scores, ids = drawn((count, world_size * LOCAL), 100 * seed + rank + 50).sigmoid().topk(TOPK)
    ids[: count * 2 // 3, 0] = seed % 3  # hot
    return [one.cuda() for one in (x.bfloat16(), scores, ids, drawn(x.shape, seed).bfloat16())]


def of_copies(spare):
    return {"spare_experts": spare, "min_rows": 1, "limit": 1.0} if spare else {}


def module_on(world, seed, spare, dtype=torch.bfloat16, **options):
    from waybill.torch.moe import ExpertParallel, SwiGLUExperts

    experts = SwiGLUExperts(LOCAL, HIDDEN, INNER, dtype, device="cuda")
    for n, weight in enumerate(experts.parameters()):
        weight.data.copy_(drawn(weight.shape, 1000 * seed + 10 * world.rank + n, 0.1))
    module = ExpertParallel(
        experts, num_experts=world.world_size * LOCAL, topk=TOPK, hidden=HIDDEN, max_tokens=MOST,
        group=world, gradients="sum", dtype=dtype, **of_copies(spare), **options,
    )  # fmt: skip
    return experts, module


def settle():
    """Waits for this rank's stream. A copy between pageable memory and a GPU that follows a waiting
    kernel would keep other ranks on this GPU from their copies.
    """
    torch.cuda.current_stream().synchronize()


def close(got, wanted):
    largest = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * largest)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_arrives_is_that_of_the_simulation(world_size):
    """The store of a module, looked at: weights and sums of gradients, bit for bit."""
    bits = {}

    def body(world):
        half = torch.float16  # numpy has it
        experts, module = module_on(world, 3, 2, half)
        x, scores, ids, _ = batch(world.rank, world_size, 1)
        draw = [drawn(one.shape, 7 + world.rank).cuda().to(half) for one in experts.parameters()]
        wide = [drawn((2, *one.shape[1:]), 17 + world.rank).cuda() for one in draw]
        (copies,) = module._copies
        layer = module.layer
        _, _, layout = layer.dispatch(x.to(half), ids, scores)
        call = copies.begin(layer, layout)
        copies.fetch(call)
        weights = [one.clone() for one in copies.parts_of(call.store)]
        assert [one.shape for one in weights] == [one.shape for one in wide]
        sums = copies.add(call, draw, wide, [True] * len(draw))
        settle()
        slots = layout.all_slot_experts.cpu().numpy().copy()
        slots[layout.all_slot_quotas.cpu().numpy() == 0] = -1
        slots[:, :LOCAL] = np.arange(world_size * LOCAL).reshape(world_size, LOCAL)
        bits[world.rank] = slots, *(
            [one.detach().cpu() for one in part]
            for part in (experts.parameters(), weights, draw, wide, sums)
        )  # fmt: skip
        world.barrier()

    waybill.run_threads(world_size, body, device="cuda")
    slots = bits[0][0]
    assert (slots[:, LOCAL:] >= 0).any()

    def raw(tensor):
        return tensor.reshape(tensor.shape[0], -1).contiguous().view(torch.int16).numpy()

    for part in range(3):
        given = [bits[r][1][part] for r in range(world_size)]
        arrived = simulate_expert_copies(slots, [raw(one) for one in given])
        wide = [bits[r][4][part] for r in range(world_size)]
        summed = simulate_expert_copy_gradients(
            slots,
            [bits[r][3][part].reshape(LOCAL, -1).numpy() for r in range(world_size)],
            [one.reshape(2, -1).numpy() for one in wide],
        )
        for r in range(world_size):
            assert np.array_equal(bits[r][0], slots)
            there = slots[r, LOCAL:] >= 0
            got = raw(bits[r][2][part])
            assert np.array_equal(got[there], np.asarray(arrived[r])[LOCAL:][there])
            sums = bits[r][5][part].reshape(LOCAL, -1).numpy()
            assert np.array_equal(sums.view(np.int16), summed[r].view(np.int16))


@pytest.mark.parametrize("options", [
    {}, {"keep_copies": True}, {"fixed_rows": 4 * MOST * TOPK}, {"chunks": 2},
])  # fmt: skip
def test_as_without_copies(options):
    def body(world):
        experts, module = module_on(world, 5, 2, **options)
        plainly = {name: value for name, value in options.items() if name != "keep_copies"}
        other, plain = module_on(world, 5, 0, **plainly)
        for step in range(3):
            given = batch(world.rank, 2, step, count=0 if world.rank == step else MOST)
            found = []
            for one in (module, plain):
                x, scores, ids, gradient = (tensor.clone() for tensor in given)
                out = one(x.requires_grad_(), scores, ids)
                out.backward(gradient)
                found.append((out.detach(), x.grad))
            settle()
            for got, wanted in zip(*found):
                if wanted.numel():
                    close(got, wanted)
        for got, wanted in zip(experts.parameters(), other.parameters()):
            close(got.grad, wanted.grad)
        module.finalize()
        plain.finalize()

    waybill.run_threads(2, body, device="cuda")


def test_a_graph_holds_forward_and_backward():
    def body(world):
        experts, module = module_on(world, 6, 2, fixed_rows=2 * MOST * TOPK)
        x, scores, ids, gradient = batch(world.rank, world.world_size, 1)

        def step():
            for one in experts.parameters():
                one.grad = None
            out = module(x, scores, ids)
            out.backward(gradient)
            return [out.detach(), *(one.grad for one in experts.parameters())]

        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = step()
        for seed in (2, 3):
            for place, value in zip(
                (x, scores, ids, gradient), batch(world.rank, world.world_size, seed)
            ):
                place.copy_(value)
            with torch.no_grad():
                experts.gate.mul_(1.5)  # replays fetch what is there now
            graph.replay()
            torch.cuda.synchronize()
            got = copy.deepcopy(made)
            for one, wanted in zip(got, step()):
                assert torch.equal(one, wanted)

    waybill.run_threads(waybill.num_gpus(), body, device="cuda")


STEPS = 50


def trained(device, spare, **options):
    """Of each rank: losses, weights before and after, and the experts of each step's tokens. Two
    ranks train a mixture with a skewed router; each step in turn one or none has no tokens.
    """
    from waybill.torch.moe import ExpertParallel, SwiGLUExperts

    def body(world):
        rank, experts = world.rank, SwiGLUExperts(LOCAL, HIDDEN, INNER, device=device)
        for n, weight in enumerate(experts.parameters()):
            weight.data.copy_(drawn(weight.shape, 10 * rank + n, 0.1))
        likes = torch.zeros(2 * LOCAL)
        likes[0] = 1.5  # most tokens choose expert 0
        likes = likes.to(device)
        router = drawn((2 * LOCAL, HIDDEN), 5, 0.1).to(device).requires_grad_()
        module = ExpertParallel(
            experts, num_experts=2 * LOCAL, topk=TOPK, hidden=HIDDEN, max_tokens=MOST, group=world,
            gradients="sum", dtype=torch.bfloat16, **of_copies(spare), **options,
        )  # fmt: skip
        weights = [*experts.parameters(), router]
        before = [one.detach().clone() for one in weights]
        optimizer = torch.optim.SGD(weights, lr=0.05)
        tokens = [drawn((0 if rank == step % 5 else MOST, HIDDEN), 100 * step + rank).to(device)
                  for step in range(STEPS)]  # fmt: skip
        losses, chosen = [], []
        for x in tokens:
            # Without a library's product, whose memory a rank would get while another waits.
            liked = (x[:, None] * router).sum(2) + likes
            scores, ids = liked.softmax(-1).topk(TOPK)
            out = module(x.bfloat16(), scores, ids).float()
            loss = (x + out - x.roll(1, -1)).square().sum() / MOST
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            chosen.append(ids)
        if device == "cuda":
            settle()
        module.finalize()
        after = [one.detach().cpu() for one in weights]
        return torch.stack(losses).cpu(), [one.cpu() for one in before], after, chosen

    return waybill.run_threads(2, body, device=device)


def steps_with_copies(ranks):
    """How many steps' loads need a copy of an expert."""
    found = 0
    for step in range(STEPS):
        ids = [rank[3][step].cpu().numpy().ravel() for rank in ranks]
        rows = np.array([np.bincount(one, minlength=2 * LOCAL) for one in ids])
        plan = waybill.moe.even_experts(rows, spare_experts=2, min_rows=1, limit=1.0)
        found += bool(plan.quotas[:, LOCAL:].any())
    return found


def check_training(device, **options):
    """As without copies but for the rounding of gradients to bfloat16, of which a copy's part is
    rounded alone; the same bits in each run.
    """
    plain = trained(device, 0, **{k: v for k, v in options.items() if k != "keep_copies"})
    copied, again = (trained(device, 2, **options) for _ in range(2))
    assert steps_with_copies(copied) >= 45
    for rank in range(2):
        losses, before, weights, _ = copied[rank]
        wanted, _, want_weights, _ = plain[rank]
        assert wanted[-5:].sum() < 0.9 * wanted[:5].sum()
        torch.testing.assert_close(losses, wanted, rtol=0.01, atol=0.01)
        for was, got, want in zip(before, weights, want_weights):
            learnt = (want - was).abs().max()
            assert learnt > 0 and (got - want).abs().max() <= 0.04 * learnt
        assert torch.equal(losses, again[rank][0])
        for got, same in zip(weights, again[rank][2]):
            assert torch.equal(got, same)


@pytest.mark.parametrize("options", [{}, {"keep_copies": True}, {"fixed_rows": 2 * MOST * TOPK}])
def test_training_on_one_gpu_is_the_same_as_without_copies(options):
    check_training("cuda", **options)
