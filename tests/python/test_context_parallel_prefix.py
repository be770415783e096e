"""Attention with prefixes: full among the first tokens of a document, causal after them."""

import pickle

import numpy as np
import pytest
from packed import (
    close,
    leaves_of,
    module,
    pieces_in_order,
    pieces_scattered,
    pieces_zigzag,
    rng_of,
)
from packed import tensors_of as numbers_of

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")


def tensors_of(pieces, seed):
    return numbers_of([[piece[:3] for piece in held] for held in pieces], 2, 1, 8, 8, seed)


def dense(pieces, tensors):
    """Output and gradients of q, k and v of each rank, by one dense attention of all rows."""
    leaves = [[t.clone().requires_grad_() for t in of[:3]] for of in tensors]
    q, k, v = (torch.cat([of[i] for of in leaves]) for i in range(3))
    rows = [(d, o + i, p) for held in pieces for d, o, n, p in held for i in range(n)]
    document, position, prefix = np.array(rows, np.int64).reshape(-1, 3).T
    seen = (position <= position[:, None]) | (np.maximum(position, position[:, None]) < prefix)
    seen = torch.from_numpy(seen & (document == document[:, None]))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    (out * torch.cat([of[3] for of in tensors])).sum().backward()
    lse = scores.logsumexp(-1).t().detach()
    sizes = [len(of[0]) for of in tensors]
    outs, lses = out.detach().split(sizes), lse.split(sizes)
    return [
        [o, *(t.grad for t in of), s.float()] for o, of, s in zip(outs, leaves, lses)
    ]  # fmt: skip


def of_rank(world, pieces, tensors, **options):
    attend = module(world, mask="prefix", **options)
    q, k, v = leaves_of(tensors)
    plan = attend.plan(attend.gather(pieces))
    out, lse = attend(plan, q, k, v, return_lse=True)
    (out * tensors[3]).sum().backward()
    attend.close()
    return [out.detach(), q.grad, k.grad, v.grad, lse]


def random_case(seed):
    rng = rng_of(seed)
    world = rng.choice((1, 2, 3, 4))
    lengths = [rng.choice((1, 2, 7, 16, 40, 90)) for _ in range(rng.randint(1, 5))]
    prefixes = [rng.choice((0, 1, 2, n - 1, n, n + 3, rng.randint(0, n))) for n in lengths]
    kind = rng.choice((pieces_in_order, pieces_zigzag, None))
    pieces = kind(lengths, world) if kind else pieces_scattered(lengths, world, rng)
    return rng, [[(*piece, prefixes[piece[0]]) for piece in held] for held in pieces]


def gapless(q, k, v, sequences, shape):
    """A kernel of one's own, which takes no gaps and no prefixes."""
    assert shape.mask in ("causal", "full") and all(sequences.q_lens) and all(sequences.k_lens)
    kernel = wt.kernels.DotProductKernel()
    return kernel.forward(q, k, v, sequences, shape, True)


@pytest.mark.parametrize("seed", range(12))
def test_as_dense_attention(seed):
    rng, pieces = random_case(seed)
    tensors = tensors_of(pieces, seed)
    options = {
        "in_place": rng.choice((True, False)), "relay": rng.choice(("auto", "always")),
        "kernel": rng.choice(("dot_product", gapless)),
    }  # fmt: skip
    got = wt.run_threads(
        len(pieces),
        lambda world: of_rank(world, pieces[world.rank], tensors[world.rank], **options),
    )
    for rank, expected in enumerate(dense(pieces, tensors)):
        close(got[rank][:4], expected[:4])
        close(got[rank][4:], expected[4:], 1e-6)


def test_many_prefixes_in_place():
    """More ranges of rows than slices are made for, and all of them on their rank."""
    pieces = [[(10 * rank + i, 0, 20, 3 + i) for i in range(8)] for rank in range(2)]
    tensors = tensors_of(pieces, 5)
    got = wt.run_threads(2, lambda world: of_rank(world, pieces[world.rank], tensors[world.rank]))
    for rank, expected in enumerate(dense(pieces, tensors)):
        close(got[rank][:4], expected[:4])


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_flex_attention_serves_both_kinds():
    pieces = [[(0, 0, 50, 20)], [(0, 50, 30, 20), (1, 0, 9, 9)]]
    tensors = [[t.float() for t in of] for of in tensors_of(pieces, 3)]

    def body(world):
        attend = module(world, mask="prefix", kernel="flex", dtype=torch.float32)
        with torch.no_grad():
            plan = attend.plan(attend.gather(pieces[world.rank]))
            return attend(plan, *tensors[world.rank][:3])

    for got, expected in zip(wt.run_threads(2, body), dense(pieces, tensors)):
        close([got], expected[:1], 1e-4)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_other_masks_refuse_a_prefix_by_name(mask):
    """Not in tables that a module with prefixes gathered, which serve modules of all masks."""
    says = f'pieces of rank 1: [0] has prefix 5, expected none with mask = "{mask}"'
    held = [[30], [(40, 5)]]

    def body(world):
        attend = module(world, mask=mask)
        with pytest.raises(waybill.InvalidArgument) as error:
            attend.gather(held[world.rank])
        text = str(error.value)
        assert text.startswith("ContextParallelAttention.gather: ") and says in text
        assert "; two numbers are (length, prefix), and a rank gives its own documents" in text
        for pieces in (held, [[30], [(7, 0, 40, 5)]]):
            with pytest.raises(waybill.InvalidArgument) as error:
                attend.plan(pieces)
            assert str(error.value) == f"ContextParallelAttention.plan: {says}"
        shared = module(world, mask="prefix").gather(held[world.rank])
        without = attend.gather([30] if world.rank == 0 else [(40, 0)])
        assert attend.plan(shared).qkv_plan == attend.plan(without).qkv_plan

    wt.run_threads(2, body, timeout_s=20)


def test_plans_balance_prefixes():
    rng = np.random.default_rng(3)
    held = [[(n, n * rng.integers(0, 10) // 9) for n in rng.integers(100, 9000, 6).tolist()]
            for _ in range(4)]  # fmt: skip
    held[2] = [(60000, 20000)]
    planner = wt.BatchPlanner(4, 8, 2, 64, mask="prefix")
    plan = planner.plan(held)
    assert plan.imbalance < 1.01 and waybill.validate(plan.qkv_plan) == []
    assert plan.prefixes(2) == [20000] and plan.pieces(2)[0][1:] == (0, 60000)
    pairs = [n * (n + 1) // 2 + min(p, n) * (min(p, n) - 1) // 2 for of in held for n, p in of]
    assert plan.work.sum() == sum(pairs)
    again = pickle.loads(pickle.dumps(plan))
    assert again.qkv_plan == plan.qkv_plan and again.prefixes(2) == [20000]
    assert waybill.predict_step(plan).work.sum() == sum(pairs)


def test_without_prefixes_plans_are_causal():
    held = [[(900, 0), (30, 1)], [400]]
    causal = wt.BatchPlanner(2, 4).plan([[900, 30], [400]])
    assert wt.BatchPlanner(2, 4, mask="prefix").plan(held).qkv_plan == causal.qkv_plan
    whole = wt.BatchPlanner(2, 4, mask="prefix").plan([[(900, 900), (30, 99)], [(400, 400)]])
    assert whole.qkv_plan == wt.BatchPlanner(2, 4, mask="full").plan([[900, 30], [400]]).qkv_plan


def test_a_plan_of_the_planner_is_taken():
    lengths, prefixes = [[90], [7, 33], [], [40]], [[20], [7, 0], [], [41]]
    own = waybill.plan(lengths, 4, 0, q_hidden=16, kv_hidden=8, mask="prefix", prefix=prefixes)
    planner = wt.BatchPlanner(4, 2, 1, 8, mask="prefix")
    plan = planner.plan(own)
    assert plan.pieces(1) == [(1, 0, 7), (2, 0, 33)] and plan.prefixes(1) == [7, 0]
    tables = own.to_qkv_plan()
    assert tables.mask == "prefix"
    late = waybill.QkvPlan(4, [0, 2, 2, 2, 2], [3, 4], [0, 1], [0, 2], [0, 1], kv_end=[0, 2])
    with pytest.raises(
        waybill.InvalidArgument, match="shard 0 has kv_end = 0, expected 1: mask = "
    ):
        planner.plan(late)
    with pytest.raises(waybill.InvalidArgument, match="has mask = prefix"):
        wt.BatchPlanner(4, 2, 1, 8).plan(own)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 4}, 'window = 4, expected None with mask = "prefix"'),
        ({"chunk": 4}, 'chunk = 4, expected None with mask = "prefix"'),
    ],
)
def test_prefixes_have_no_windows_and_no_chunks(options, message):
    with pytest.raises(waybill.InvalidArgument, match=message):
        wt.BatchPlanner(2, 4, mask="prefix", **options)
    with pytest.raises(waybill.InvalidArgument, match=message):
        waybill.plan([90], 2, mask="prefix", prefix=4, **options)


@pytest.mark.parametrize(
    "held, message",
    [
        ([[(1, 0, 4, 2)], [(1, 4, 2, 3)]], "document 1: pieces have prefix 2 and 3"),
        ([[(1, 0, 4, -2)], []], "prefix -2"),
        ([[(9, 4, 2, 3, 1)], []], "has 5 numbers"),
    ],
)
def test_errors_name_documents(held, message):
    with pytest.raises(waybill.InvalidArgument, match=message):
        wt.BatchPlanner(2, 4, mask="prefix").plan(held)


def test_arguments_of_plan():
    plan = waybill.plan([300, 40], 2, mask="prefix", prefix=[100, 0])
    assert plan.validate() == []
    assert plan.work.sum() == 300 * 301 // 2 + 100 * 99 // 2 + 40 * 41 // 2
    assert waybill.AttentionPlan.from_json(plan.to_json()) == plan
    steps = waybill.compare([3000, 400], 2, 0, mask="prefix", prefix=[1000, 0])
    pairs = 3000 * 3001 // 2 + 1000 * 999 // 2 + 400 * 401 // 2
    assert all(step.work.sum() == pairs for step in steps.values())
    with pytest.raises(
        waybill.InvalidArgument, match='prefix = 4, expected None with mask = "full"'
    ):
        waybill.plan([90], 2, mask="full", prefix=4)
    with pytest.raises(
        waybill.InvalidArgument, match="1 prefixes, expected one for each document: 2"
    ):
        waybill.plan([90, 4], 2, mask="prefix", prefix=[4])
    with pytest.raises(waybill.InvalidArgument, match="prefix"):
        waybill.plan([90, 4], 2, mask="prefix")
    with pytest.raises(waybill.InvalidArgument, match="prefix"):
        wt.run_threads(1, fixed_plan)


def fixed_plan(world):
    attend = module(world, mask="prefix")
    plan = attend.plan([[(9, 4)]])
    try:
        attend.fixed_plan(plan, wt.Capacities.of(plan))
    except waybill.Unsupported as error:
        raise waybill.InvalidArgument(str(error)) from None
