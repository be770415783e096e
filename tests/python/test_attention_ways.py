"""bench/python/attention_ways.py, Ulysses by hand: against whole documents, on CPU ranks."""

import importlib
import pathlib
import sys

import pytest
from test_process_worlds import expect_all_well, run_ranks

torch = pytest.importorskip("torch")

BENCH = pathlib.Path(__file__).parents[2] / "bench" / "python"
ULYSSES = """
    sys.path.insert(0, "{bench}")
    import torch
    from attention_ways import Ulysses, ulysses_heads
    from torch import distributed
    from waybill._bench.attention import kernel_of
    from waybill.torch.kernels import AttentionShape

    torch.set_num_threads(1)
    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    heads, kv_heads, head = {heads}, {kv_heads}, 8
    lengths = [23, 1, 40, 7, 2, 15]  # 88 tokens: documents lie on several ranks
    generator = torch.Generator().manual_seed(5)
    q, k, v, weights = (
        torch.randn(sum(lengths), n, head, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads, heads)
    )

    def whole(q, k, v):
        outputs = []
        for document in zip(*(t.split(lengths) for t in (q, k, v))):
            one, keys, values = document
            keys, values = (t.repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", one, keys) / head**0.5
            hidden = torch.ones(len(one), len(one), dtype=torch.bool).triu(1)
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", shares, values))
        return torch.cat(outputs)

    def out_and_gradients(attention, rows):
        leaves = [t[rows].clone().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves)
        (out * weights[rows]).sum().backward()
        return out.detach(), *(leaf.grad for leaf in leaves)

    of_rank = ulysses_heads(heads, kv_heads, W)
    assert of_rank == (heads // W, max(1, kv_heads // W))
    shape = AttentionShape(*of_rank, head, head, torch.float64, "causal", None, head**-0.5)
    attend = kernel_of(torch.device("cpu"), shape)
    way = Ulysses(lengths, torch.device("cpu"))
    rows = way.token_rows()
    each = sum(lengths) // W
    assert rows.tolist() == list(range(me * each, (me + 1) * each))
    got = out_and_gradients(lambda *given: way.attention(attend, *given), rows)
    for mine, every in zip(got, out_and_gradients(whole, torch.arange(sum(lengths)))):
        torch.testing.assert_close(mine, every[rows], rtol=1e-12, atol=1e-12)
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("world_size", "heads", "kv_heads"),
    [(2, 4, 4), (2, 6, 2), (4, 4, 4), (2, 2, 1), (4, 8, 2), (4, 4, 1)],
)
def test_as_whole_documents(tmp_path, world_size, heads, kv_heads):
    """Heads of K and V are as many as ranks or more, or are repeated: those of two or four ranks
    are one.
    """
    program = ULYSSES.format(bench=BENCH, folder=tmp_path, heads=heads, kv_heads=kv_heads)
    expect_all_well(run_ranks(tmp_path, program, world_size))


def test_heads_that_do_not_divide(monkeypatch):
    """There is no such way then: attention_step.py leaves it out."""
    monkeypatch.syspath_prepend(BENCH)
    ways = importlib.import_module("attention_ways")
    try:
        assert ways.ulysses_heads(8, 2, 4) == (2, 1)
        for heads, kv_heads, size in ((3, 1, 2), (6, 2, 4), (6, 3, 2), (12, 4, 6)):
            assert ways.ulysses_heads(heads, kv_heads, size) is None
    finally:
        for name in ("attention_ways", "collectives"):
            sys.modules.pop(name, None)
