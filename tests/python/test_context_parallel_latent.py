"""Latent rows travel, and K and V are projected where they arrive: equal to whole documents."""

import pytest
from packed import close, module, pieces_in_order, random_pieces, rng_of, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

HEADS, KV_HEADS, HEAD, V_HEAD, LATENT, ROPE = 4, 2, 8, 6, 5, 3


def project(rows, up_k, up_v):
    """As of MLA: a part of K is one for all heads."""
    shared = rows[:, None, LATENT:].expand(-1, KV_HEADS, -1)
    k = (rows[:, :LATENT] @ up_k).unflatten(1, (KV_HEADS, HEAD - ROPE))
    v = (rows[:, :LATENT] @ up_v).unflatten(1, (KV_HEADS, V_HEAD))
    return torch.cat([k, shared], -1), v


def weights_of(dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    sizes = (KV_HEADS * (HEAD - ROPE), KV_HEADS * V_HEAD)
    return [torch.randn(LATENT, n, dtype=torch.float64, generator=generator) for n in sizes]


def batch(pieces, seed):
    """q, latent rows and weights of the output of each rank."""
    tensors = tensors_of(pieces, HEADS, KV_HEADS, HEAD, V_HEAD, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(len(t[0]), LATENT + ROPE, dtype=torch.float64, generator=generator)
        for t in tensors
    ]
    return tensors, rows


def expected(pieces, tensors, rows, weights, **mask):
    """(output, gradients of q and latent rows) of each rank; gradients of weights, of all."""
    leaves = [t.clone().requires_grad_() for t in (*rows, *weights)]
    latent, ups = leaves[: len(rows)], leaves[len(rows) :]
    kv = [project(r, *ups) for r in latent]
    given = [[t[0], k.detach(), v.detach(), t[3]] for t, (k, v) in zip(tensors, kv)]
    found = whole(pieces, given, **mask)
    torch.autograd.backward(
        [t for pair in kv for t in pair], [g for f in found for g in (f[2], f[3])]
    )
    return [(f[0], f[1], r.grad) for f, r in zip(found, latent)], [u.grad for u in ups]


def results(world_size, pieces, tensors, rows, call=None, **options):
    def body(world):
        attend = module(world, HEADS, KV_HEADS, HEAD, V_HEAD, latent_dim=LATENT + ROPE, **options)
        plan = attend.plan(attend.gather(pieces[world.rank]))
        q, latent = (
            t[world.rank].clone().requires_grad_() for t in ([t[0] for t in tensors], rows)
        )
        ups = [w.clone().requires_grad_() for w in weights_of()]
        run = call or (lambda attend, *given: attend.latent(*given))
        out = run(attend, plan, q, latent, project, *ups)
        (out * tensors[world.rank][3]).sum().backward()
        return (out.detach(), q.grad, latent.grad), [up.grad for up in ups]

    return wt.run_threads(world_size, body)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed, in_place):
    rng = rng_of(300 + seed)
    world_size = rng.choice((1, 2, 3, 4))
    pieces = random_pieces(rng, world_size)
    tensors, rows = batch(pieces, seed)
    mask = rng.choice([{}, {"window": 9}, {"mask": "full"}])
    got = results(world_size, pieces, tensors, rows, in_place=in_place, **mask)
    by_rank, of_weights = expected(pieces, tensors, rows, weights_of(), **mask)
    for mine, want in zip(got, by_rank):
        close(mine[0], want, 1e-10)
    sums = [sum(mine[1][i] for mine in got) for i in range(2)]
    close(sums, of_weights, 1e-9)


def checkpointed(reentrant):
    from torch.utils.checkpoint import checkpoint

    def call(attend, plan, q, latent, project, *ups):
        return checkpoint(
            lambda *t: attend.latent(plan, t[0], t[1], project, *t[2:]), q, latent, *ups,
            use_reentrant=reentrant,
        )  # fmt: skip

    return call


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed(reentrant):
    pieces = pieces_in_order([120, 9, 33], 2)
    tensors, rows = batch(pieces, 3)
    got = results(2, pieces, tensors, rows, checkpointed(reentrant))
    by_rank, _ = expected(pieces, tensors, rows, weights_of())
    for mine, want in zip(got, by_rank):
        close(mine[0], want, 1e-10)


def test_latent_rows_are_what_travels():
    def body(world):
        wide = module(world, HEADS, KV_HEADS, 64, 64)
        latent = module(world, HEADS, KV_HEADS, 64, 64, latent_dim=8)
        bytes_ = []
        for attend in (wide, latent):
            plan = attend.plan(pieces_in_order([4000, 90], 2))
            step = attend._step(plan)
            ready = step._moves._plan("qkv")
            kept = attend.memory(plan).kept
            bytes_.append((sum(f.hidden for f in ready.formats), kept))
        return bytes_

    for (wide, wide_kept), (latent, latent_kept) in wt.run_threads(2, body):
        assert (wide, latent) == (4 * 64 + 2 * 2 * 64, 4 * 64 + 8)
        assert latent_kept <= wide_kept


def test_bad_input():
    def body(world):
        attend = module(world, 2, 1, 8, latent_dim=4)
        plan = attend.plan([[5]])
        q, rows = torch.zeros(5, 2, 8).double(), torch.zeros(5, 4).double()
        up = torch.zeros(4, 16).double()

        def both(rows, up):
            return tuple(t.unflatten(1, (1, 8)) for t in (rows @ up).chunk(2, 1))

        assert attend.latent(plan, q, rows, both, up).shape == q.shape
        for given, words in (
            ((q, rows[:, :3], both, up), r"rows has shape \[5, 3\], expected \[5, 4\]"),
            (
                (q, rows, lambda r, w: (r[:, None], r[:, None]), up),
                "project on rank [01]: its k has shape",
            ),
            ((q, rows, both, 3), r"weights\[0\] is a int"),
        ):
            with pytest.raises(waybill.InvalidArgument, match=words):
                attend.latent(plan, *given)
        with pytest.raises(waybill.InvalidArgument, match=r"expected latent\(...\)"):
            attend(plan, q, q[:, :1], q[:, :1])
        with pytest.raises(waybill.Unsupported, match="latent_dim"):
            attend.ticket(plan)
        plain = module(world, 2, 1, 8)
        with pytest.raises(waybill.InvalidArgument, match="latent_dim=4, expected"):
            plain(plan, q, q[:, :1], q[:, :1])
        with pytest.raises(waybill.InvalidArgument, match="got latent rows"):
            plain.latent(plain.plan([[5]]), q, rows, both, up)

    wt.run_threads(1, body)


@pytest.mark.parametrize("in_place", [True, False])
def test_under_autocast(in_place):
    """Weights in float32: what came is projected as what stayed, forward and backward."""
    pieces = pieces_in_order([120, 9, 33], 2)
    tensors, rows = batch(pieces, 3)

    def body(world):
        attend = module(
            world, HEADS, KV_HEADS, HEAD, V_HEAD, latent_dim=LATENT + ROPE, in_place=in_place,
            dtype=torch.bfloat16,
        )  # fmt: skip
        q, latent = (
            t[world.rank].float().requires_grad_() for t in ([t[0] for t in tensors], rows)
        )
        ups = [w.float().requires_grad_() for w in weights_of()]
        with torch.autocast("cpu", torch.bfloat16):
            out = attend.latent(attend.plan(pieces), q, latent, project, *ups)
        (out.float() * tensors[world.rank][3]).sum().backward()
        assert all(t.grad.dtype == torch.float32 for t in (q, latent, *ups))
        return (out.detach(), q.grad, latent.grad), [up.grad for up in ups]

    got = wt.run_threads(2, body)
    by_rank, of_weights = expected(pieces, tensors, rows, weights_of())
    sums = [sum(mine[1][i] for mine in got) for i in range(2)]
    for found, want in [*((g[0], w) for g, w in zip(got, by_rank)), (sums, of_weights)]:
        for a, b in zip(found, want):
            assert (a.double() - b).norm() < 0.03 * b.norm()


def test_weights_that_have_no_gradient():
    """Numbers of rows to take, and a K that nothing of the rows goes into."""
    pieces = pieces_in_order([120, 9, 33], 2)
    tensors, rows = batch(pieces, 3)

    def body(world):
        attend = module(world, HEADS, KV_HEADS, HEAD, V_HEAD, latent_dim=LATENT + ROPE)
        q, latent = tensors[world.rank][0], rows[world.rank].clone().requires_grad_()
        ups = [w.clone().requires_grad_() for w in weights_of()]
        order = torch.arange(KV_HEADS * V_HEAD)

        def fixed_k(rows, up_k, up_v, order):
            k, v = project(rows, up_k, up_v[:, order])
            return k.detach(), v

        out = attend.latent(attend.plan(pieces), q, latent, fixed_k, *ups, order)
        (out * tensors[world.rank][3]).sum().backward()
        return ups[0].grad, ups[1].grad

    of_k, of_v = zip(*wt.run_threads(2, body))
    _, want = expected(pieces, tensors, rows, weights_of())
    close([sum(of_v)], want[1:], 1e-9)
    assert all(g is None or not g.any() for g in of_k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: k, "project returned a Tensor on rank [01], expected k and v"),
        (lambda k, v: (k, v, v), "project returned 3 results"),
        (lambda k, v: (k, None), "project on rank [01]: its v is None"),
        (lambda k, v: (k[:5], v), r"project on rank [01]: its k has shape \[5, 2, 8\]"),
        (lambda k, v: (k, v.float()), "project on rank [01]: its v has dtype torch.float32"),
    ],
)
def test_projections_of_another_form(change, message):
    pieces = pieces_in_order([120, 9, 33], 2)
    tensors, rows = batch(pieces, 3)

    def body(world):
        attend = module(world, HEADS, KV_HEADS, HEAD, V_HEAD, latent_dim=LATENT + ROPE)
        with pytest.raises(waybill.InvalidArgument, match=message):
            attend.latent(
                attend.plan(pieces), tensors[world.rank][0], rows[world.rank],
                lambda *given: change(*project(*given)), *weights_of(),
            )  # fmt: skip
        with pytest.raises(waybill.InvalidArgument, match="project = 3, expected a function"):
            attend.latent(attend.plan(pieces), tensors[world.rank][0], rows[world.rank], 3)

    wt.run_threads(2, body)
