"""Attention within chunks of documents: as dense attention with a mask of blocks."""

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
    tensors_of,
    whole,
)

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")


def results(pieces, tensors, fixed=False, **options):
    """(output, gradients of q, k and v) of each rank."""

    def body(world):
        attend = module(world, **options)
        q, k, v = leaves_of(tensors[world.rank])
        plan = attend.plan(attend.gather(pieces[world.rank]))
        weights = tensors[world.rank][3]
        if fixed:
            room = wt.Capacities.of(plan)
            plan = attend.fixed_plan(plan, room)
            spare = (0, 0, 0, 0, 0, room.max_rows - len(q))
            given = [torch.nn.functional.pad(t, spare) for t in (q, k, v)]
            out = attend(plan, *given)[: len(q)]
        else:
            out = attend(plan, q, k, v)
        (out * weights).sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    return wt.run_threads(len(pieces), body)


def chunked(pieces, chunk):
    """Pieces of which every chunk of a document is a document, by plain loops over tokens."""
    ranks = []
    for held in pieces:
        cut = []
        for document, offset, rows in held:
            for token in range(offset, offset + rows):
                number, at = 1000 * document + token // chunk, token % chunk
                if cut and cut[-1][0] == number and cut[-1][1] + cut[-1][2] == at:
                    cut[-1] = (number, cut[-1][1], cut[-1][2] + 1)
                else:
                    cut.append((number, at, 1))
        ranks.append(cut)
    return ranks


@pytest.mark.parametrize("seed", range(10))
def test_as_dense_attention(seed):
    rng = rng_of(500 + seed)
    world = rng.choice((1, 2, 3, 4))
    lengths = [rng.choice((1, 7, 16, 40, 90)) for _ in range(rng.randint(1, 5))]
    kind = rng.choice((pieces_in_order, pieces_zigzag, None))
    pieces = kind(lengths, world) if kind else pieces_scattered(lengths, world, rng)
    tensors = tensors_of(pieces, 2, 1, 8, 8, seed)
    chunk = rng.choice((1, 5, 16, 32, 200))
    mask = rng.choice(({}, {"mask": "full"}, {"window": 6}))
    got = results(
        pieces, tensors, chunk=chunk, in_place=rng.choice((True, False)),
        relay=rng.choice(("auto", "always")), fixed=rng.choice((True, False)), **mask,
    )  # fmt: skip
    for rank, expected in enumerate(whole(chunked(pieces, chunk), tensors, **mask)):
        close(got[rank], expected[:4])


def test_plans_know_documents_and_balance_chunks():
    planner = wt.BatchPlanner(4, 8, 2, 64, chunk=4096)
    rng = np.random.default_rng(3)
    held = [[20000], rng.integers(100, 9000, 5).tolist(), [8192], [30000]]
    plan = planner.plan(held)
    assert plan.imbalance < 1.01
    assert waybill.validate(plan.qkv_plan) == []
    assert plan.positions(0)[-1] == 19999 and plan.last_rows(0).sum() == 1
    sizes = [n for lengths in held for n in lengths]
    chunks = [min(4096, n - at) for n in sizes for at in range(0, n, 4096)]
    assert plan.qkv_plan.num_documents == len(sizes)
    assert plan.work.sum() == sum(n * (n + 1) // 2 for n in chunks)
    again = pickle.loads(pickle.dumps(plan))
    assert again.qkv_plan == plan.qkv_plan and again.planner.chunk == 4096
    whole_document = wt.BatchPlanner(4, 8, 2, 64, chunk=30000).plan(held)
    assert whole_document.work.tolist() == wt.BatchPlanner(4, 8, 2, 64).plan(held).work.tolist()


@pytest.mark.parametrize(
    "held, message",
    [
        ([[(1, 0, 4)], [(1, 8, 2)]], r"document 1: tokens 4\.\.7 are held by no rank"),
        ([[(1, 0, 3)], [(1, 4, 4)]], r"document 1: token 3 is held by no rank|tokens 3\.\.3"),
        ([[(1, 0, 4)], [(1, 3, 3)]], "document 1: token 3 is held twice"),
        ([[(1, 4, 4)], []], r"document 1: tokens 0\.\.3 are held by no rank"),
        ([[], [(1, -1, 4)]], r"\[0\] has offset -1"),
        ([[4, 0], []], r"\[1\] has length 0"),
    ],
)
def test_errors_name_documents(held, message):
    with pytest.raises(waybill.InvalidArgument, match=message):
        wt.BatchPlanner(2, 4, chunk=4).plan(held)


def test_a_plan_of_other_chunks_is_refused():
    def body(world):
        attend = module(world, chunk=4)
        assert attend.plan([[9], []]).planner.chunk == 4
        q = torch.zeros(9 if world.rank == 0 else 0, 2, 8).double()
        for other in (wt.BatchPlanner(2, 2, 1, 8, dtype=torch.float64, block_tokens=4),
                      wt.BatchPlanner(2, 2, 1, 8, dtype=torch.float64, chunk=5)):  # fmt: skip
            with pytest.raises(waybill.InvalidArgument, match=r"expected .*chunk=4"):
                attend(other.plan([[9], []]), q, q[:, :1], q[:, :1])
        with pytest.raises(waybill.InvalidArgument, match="chunk"):
            module(world, chunk=4 + world.rank)

    wt.run_threads(2, body)


@pytest.mark.parametrize("mask", [{}, {"mask": "full"}, {"window": 6}])
def test_a_plan_of_the_planner_is_taken(mask):
    lengths = [[90], [7, 33], [], [40]]
    own = waybill.plan(lengths, 4, 0, q_hidden=16, kv_hidden=8, chunk=16, block_tokens=4, **mask)
    assert own.validate() == [] and own.to_qkv_plan().num_documents == 4
    pieces = [wt.BatchPlanner(4, 2, 1, 8, chunk=16, **mask).plan(own).pieces(r) for r in range(4)]
    assert pieces == [[(0, 0, 90)], [(1, 0, 7), (2, 0, 33)], [], [(3, 0, 40)]]
    tensors = tensors_of(pieces, 2, 1, 8, 8, 3)

    def body(world):
        attend = module(world, chunk=16, **mask)
        q, k, v = leaves_of(tensors[world.rank])
        out = attend(attend.plan(own), q, k, v)
        (out * tensors[world.rank][3]).sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    for got, expected in zip(wt.run_threads(4, body), whole(chunked(pieces, 16), tensors, **mask)):
        close(got, expected[:4])
    for other in (8, 32):
        with pytest.raises(waybill.InvalidArgument, match=f"chunk = {other}"):
            wt.BatchPlanner(4, 2, 1, 8, chunk=other, **mask).plan(own)


def test_edges():
    for held in ([[], []], [[1], []], [[], [4, 4]], [[5], [3]]):
        plan = wt.BatchPlanner(2, 2, chunk=4).plan(held)
        assert plan.home_tokens == [sum(lengths) for lengths in held]
    for wrong in (0, -1, "x"):
        with pytest.raises((waybill.InvalidArgument, waybill.WrongType), match="chunk"):
            wt.BatchPlanner(2, 2, chunk=wrong)


def test_printing_says_what_is_attended_to():
    planner = wt.BatchPlanner(1, heads=2, head_dim=8, chunk=4, latent_dim=6)
    assert ", latent_dim=6, chunk=4)" in repr(planner)

    def body(world):
        chunked, whole = (wt.ContextParallelAttention(world, 2, chunk=c) for c in (4, None))
        assert "chunk=4" in repr(chunked) and "chunk" not in repr(whole)

    wt.run_threads(1, body)
