"""What calls keep and take is what the module says, and is bounded by what travels."""

import pytest
from packed import module, pieces_in_order, tensors_of

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")
kernels = wt.kernels

LENGTHS = [700, 40, 333, 90]
HEADS = (4, 2, 8, 6)


class WithLse(kernels.DotProductKernel):
    """As kernels of GPUs: what backward needs is kept."""

    needs_lse = True

    def forward(self, q, k, v, sequences, shape, want_lse):
        return super().forward(q, k, v, sequences, shape, True)


def bytes_of(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def kept_by(layers, attend, plan, q, k, v):
    """Bytes that autograd keeps of a chain of layers, without q, k, v and the outputs."""
    saved, known = [], [q, k, v]

    def pack(tensor):
        saved.append(tensor)
        return tensor

    for _ in range(layers):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend(plan, q, k, v)
        q = torch.nn.functional.pad(out, (0, q.shape[2] - out.shape[2]))
        known += [q, out]
    mine = {t.data_ptr() for t in known}
    return bytes_of([t for t in saved if t.numel() > 0 and t.data_ptr() not in mine])


@pytest.mark.parametrize("kernel", [kernels.DotProductKernel, WithLse])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("layers", [1, 32])
def test_kept_is_what_is_said(layers, in_place, kernel):
    pieces = pieces_in_order(LENGTHS, 2)
    tensors = tensors_of(pieces, *HEADS, dtype=torch.float32)

    def body(world):
        attend = module(
            world, *HEADS[:1], kv_heads=HEADS[1], v_head_dim=HEADS[3], kernel=kernel(),
            dtype=torch.float32, in_place=in_place,
        )  # fmt: skip
        plan = attend.plan(pieces)
        q, k, v = (t.clone().requires_grad_() for t in tensors[world.rank][:3])
        said = attend.memory(plan)
        assert said.windows == 0
        kept = kept_by(layers, attend, plan, q, k, v)
        said = attend.memory(plan)
        assert said.windows == 2 * attend._dispatcher.window_bytes > 0
        return kept, layers * said.kept

    for kept, said in wt.run_threads(2, body):
        assert kept == said


def test_in_place_keeps_only_what_travels():
    """Of rows that stay nothing, of those that travel each once."""
    pieces = [[(d, 0, 100) for d in range(8)], [(8 + d, 0, 100) for d in range(8)]]

    def body(world):
        attend = module(world, dtype=torch.float32)
        still = attend.memory(attend.plan(pieces))
        assert still.kept == still.backward == still.windows == 0
        plan = attend.plan(pieces_in_order([400, 60, 60, 60], 2))
        said, rows = attend.memory(plan), sum(attend._step(plan).arrived_rows)
        assert said.kept <= rows * 4 * 4 * 2 * attend.planner.shape.head_dim
        return said.kept

    assert max(wt.run_threads(2, body)) > 0


def test_backward_frees_what_was_kept():
    """A second step takes no more than the first."""
    pieces = pieces_in_order(LENGTHS, 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend = module(world)
        plan = attend.plan(pieces)
        sizes = []
        for _ in range(4):
            q, k, v = (t.clone().requires_grad_() for t in tensors[world.rank][:3])
            attend(plan, q, k, v).sum().backward()
            sizes.append(attend.memory(plan))
        assert len(set(sizes)) == 1

    wt.run_threads(2, body)
