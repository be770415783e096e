"""ContextParallelAttention: output and gradients are those of whole documents in one process."""

import pickle

import pytest
from packed import (
    attention,
    close,
    leaves_of,
    module,
    pieces_in_order,
    pieces_zigzag,
    random_pieces,
    rng_of,
    tensors_of,
    whole,
)

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

MASKS = [{}, {"window": 1}, {"window": 7}, {"window": 30}, {"mask": "full"}, {"scale": 0.3}]


def results(world_size, pieces, tensors, return_lse=False, rounds=1, **options):
    """(output, gradients of q, k and v, log-sum-exp) of each rank."""

    def body(world):
        attend = module(world, **options)
        q, k, v = leaves_of(tensors[world.rank])
        plan = attend.plan(attend.gather(pieces[world.rank]))
        for _ in range(rounds):
            out = attend(plan, q, k, v, return_lse=return_lse)
            out, lse = out if return_lse else (out, None)
            (out * tensors[world.rank][3]).sum().backward()
        return out.detach(), *(t.grad / rounds for t in (q, k, v)), lse

    return wt.run_threads(world_size, body)


def plain(q, k, v, sequences, shape):
    """A user's kernel, which takes no gaps."""
    assert all(sequences.q_lens) and all(sequences.k_lens)
    outs = []
    for q_, k_, v_ in zip(
        q.split(sequences.q_lens), k.split(sequences.k_lens), v.split(sequences.k_lens)
    ):
        longer = torch.cat([q_.new_zeros(len(k_) - len(q_), *q_.shape[1:]), q_])
        options = {"mask": shape.mask, "window": shape.window, "scale": shape.scale}
        outs.append(attention(longer, k_, v_, **options)[0][len(k_) - len(q_) :])
    return torch.cat(outs)


@pytest.mark.parametrize("seed", range(16))
def test_random_batches(seed):
    rng = rng_of(seed)
    world_size = rng.choice((1, 2, 2, 4))
    pieces = random_pieces(rng, world_size)
    mask = rng.choice(MASKS)
    kv_heads = rng.choice((1, 2, 4))
    sizes = {"heads": 4, "kv_heads": kv_heads, "head_dim": 6, "v_head_dim": rng.choice((6, 4))}
    tensors = tensors_of(pieces, *sizes.values(), seed=seed)
    got = results(
        world_size, pieces, tensors, return_lse=True, **sizes, **mask,
        in_place=rng.choice((True, True, False)), block_tokens=rng.choice((1, 4, 16)),
    )  # fmt: skip
    for rank, expected in enumerate(whole(pieces, tensors, **mask)):
        close(got[rank][:4], expected[:4])
        close(got[rank][4:], [expected[4].float()], 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_function_as_the_kernel(seed):
    rng = rng_of(100 + seed)
    pieces = random_pieces(rng, 2)
    tensors, mask = tensors_of(pieces, 2, 1, 8, 8, seed), rng.choice(MASKS)
    got = results(2, pieces, tensors, kernel=plain, **mask)
    for rank, expected in enumerate(whole(pieces, tensors, **mask)):
        close(got[rank][:4], expected[:4])


@pytest.mark.parametrize("seed", range(4))
def test_a_function_whose_gradients_are_one_tensor(seed):
    """K and V have the gradient of their sum: what comes from elsewhere is added to each once."""
    pieces = pieces_in_order([40 + 30 * seed], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8, seed)

    def on_sum(q, k, v, sequences, shape):
        return plain(q, k + v, k + v, sequences, shape)

    got = results(2, pieces, tensors, kernel=on_sum, in_place=True)
    summed = [[q, k + v, k + v, weights] for q, k, v, weights in tensors]
    for rank, (out, dq, dk, dv, _) in enumerate(whole(pieces, summed)):
        close(got[rank][:4], (out, dq, dk + dv, dk + dv))


def test_gradients_add_up_over_calls():
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)
    got = results(2, pieces, tensors, rounds=2)
    for rank, expected in enumerate(whole(pieces, tensors)):
        close(got[rank][:4], expected[:4])


def test_sixteen_bit_sums_are_rounded_once():
    """What stayed home and what travelled are added in float32."""
    pieces = pieces_in_order([150, 20, 30], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8, dtype=torch.bfloat16)
    wide = [[t.double() for t in mine] for mine in tensors]
    got = results(2, pieces, tensors, dtype=torch.bfloat16)
    for rank, expected in enumerate(whole(pieces, wide)):
        for mine, want in zip(got[rank][:4], expected):
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine.double(), want, rtol=0.05, atol=0.03)


def test_rows_that_stay_are_not_dispatched():
    """Four documents of one length on two ranks: nothing moves, and no call waits for another."""

    def body(world):
        attend = module(world)
        plan = attend.plan([[20, 20], [20, 20]])
        step = attend._step(plan)
        home, came = attend.varlen(plan)
        assert not step.moves and came is None and home.q_lens == (20, 20)
        assert attend._dispatcher.window_bytes == 0
        other = attend.plan([[90, 5], [10]])
        attend.prepare(other)
        moved = attend._step(other)
        sent = moved._moves._plan("qkv").wire_bytes
        kept = 95 - moved.q_rows.count if world.rank == 0 else 10
        return kept, sent[world.rank], moved._moves._plan("qkv").window_rows

    (kept, stays, _), (_, _, rows) = wt.run_threads(2, body)
    assert 0 < kept < 95 and stays == 0  # no row is copied on its own rank
    assert rows[0] > 0


def test_in_place_or_through_the_window():
    def body(world):
        few, many = [[30, 10], [12]], [[700] * 8, [500] * 12]
        long = [[(0, 0, 4600)], [(0, 4600, 4600)]]  # a quarter of the work stays
        automatic, always, never = (module(world, in_place=w) for w in ("auto", True, False))
        assert [automatic.plan(p).in_place for p in (few, many, long)] == [False, True, False]
        assert always.plan(few).in_place and not never.plan(many).in_place
        home, came = never.varlen(never.plan(few))
        assert home is None and len(came) >= 1

    wt.run_threads(2, body)


def test_the_line_is_drawn_where_a_rule_says():
    few, many = [[30, 30], [30, 30]], [[700] * 8, [500] * 12]
    long = [[(0, 0, 4600)], [(0, 4600, 4600)]]  # a quarter of the work stays

    def chosen(rule):
        planner = wt.BatchPlanner(2, 2, 1, 8, in_place=rule)
        again = pickle.loads(pickle.dumps(planner))
        assert again.in_place == planner.in_place and again.fingerprint == planner.fingerprint
        return [again.plan(pieces).in_place for pieces in (few, many, long)]

    assert chosen("auto") == chosen(wt.InPlaceRule()) == [False, True, False]
    assert chosen(wt.InPlaceRule(min_rows=0)) == [True, True, False]
    assert chosen(wt.InPlaceRule(min_share=0.2)) == [False, True, True]
    assert chosen(wt.InPlaceRule(min_share=1.0)) == [False, False, False]
    for rule in ("never", 1, None, wt.InPlaceRule(-1), wt.InPlaceRule(min_share=1.5)):
        with pytest.raises(waybill.InvalidArgument, match="in_place"):
            chosen(rule)


def test_a_rank_without_rows():
    pieces = [[(0, 0, 60), (1, 0, 8)], []]
    tensors = tensors_of(pieces, 2, 1, 8, 8)
    got = results(2, pieces, tensors)
    for rank, expected in enumerate(whole(pieces, tensors)):
        close(got[rank][:4], expected[:4])


def test_only_some_need_gradients():
    pieces = pieces_zigzag([64, 30], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)
    expected = whole(pieces, tensors)

    def body(world):
        attend = module(world)
        plan = attend.plan(pieces)
        mine = tensors[world.rank]
        for wanted in ((0,), (1, 2), (2,)):
            inputs = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(mine[:3])]
            (attend(plan, *inputs) * mine[3]).sum().backward()
            for i in range(3):
                assert (inputs[i].grad is not None) == (i in wanted)
                if i in wanted:
                    close([inputs[i].grad], [expected[world.rank][1 + i]])
        with torch.no_grad():
            assert not attend(plan, *inputs).requires_grad

    wt.run_threads(2, body)


def test_slices_of_one_projection():
    """q, k and v are views of one tensor, as of a common projection."""
    pieces = pieces_in_order([50, 30], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)
    expected = whole(pieces, tensors)

    def body(world):
        attend = module(world)
        mine = tensors[world.rank]
        joined = torch.cat([t.flatten(1) for t in mine[:3]], 1).requires_grad_()
        q, k, v = (t.unflatten(1, (-1, 8)) for t in joined.split([16, 8, 8], 1))
        out = attend(attend.plan(pieces), q, k, v)
        (out * mine[3]).sum().backward()
        parts = [t.unflatten(1, (-1, 8)) for t in joined.grad.split([16, 8, 8], 1)]
        close([out.detach(), *parts], expected[world.rank][:4])

    wt.run_threads(2, body)
