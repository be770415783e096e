"""The torch generators draw from torch's generator as DistCA does: same seed, same plan.

DistCA's draws are written out here in plain torch.
"""

import math

import pytest

torch = pytest.importorskip("torch")

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402


def lengths(world_size, num_seqs, total):
    """Shares of uniform draws, rounded; the last takes the rest."""
    share = torch.rand(world_size, num_seqs) + 0.25 / num_seqs
    lens = (share / share.sum(dim=1, keepdim=True) * total).round().to(torch.int32)
    lens[:, -1] += total - lens.sum(dim=1)
    return lens


def plan(world_size, total, num_seqs, degree):
    """(rows of every shard, destinations, rows of every sequence) as nested lists."""
    lens = lengths(world_size, num_seqs, total // degree).long() * degree
    highest = int(math.log2(degree))
    cp_num = 2 ** torch.randint(0, highest + 1, (world_size, num_seqs))
    cp_dst = torch.rand(world_size, num_seqs, world_size).argsort(dim=2)[:, :, :degree]
    shards, destinations = [], []
    for w in range(world_size):
        shards.append([])
        destinations.append([])
        for i in range(num_seqs):
            n = int(cp_num[w, i])
            shards[w] += [int(lens[w, i]) // n] * n
            destinations[w] += cp_dst[w, i, :n].tolist()
    return shards, destinations, lens


SIZES = [
    (1, 64, 1, 1),
    (2, 64, 4, 2),
    (4, 4096, 8, 4),
    (4, 96, 3, 2),
    (5, 700, 2, 1),
    (8, 8192, 6, 8),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 42])
def test_create_raw_qkv_dispatch(sizes, seed):
    torch.manual_seed(seed)
    shards, destinations, lens = plan(*sizes)
    after = torch.rand(3)
    assert min(lens.flatten()) >= 0, "choose another seed: DistCA makes a negative length"
    torch.manual_seed(seed)
    raw = wt.create_raw_qkv_dispatch(*sizes, return_mlp_no_shard_seq_lens=True)
    assert torch.equal(torch.rand(3), after), "another number of draws than DistCA"
    assert torch.equal(raw.seq_lens[0], lens)
    assert raw.num_cp_shards.tolist() == [len(row) for row in shards]
    for w, (rows, dst) in enumerate(zip(shards, destinations)):
        padding = raw.cp_seq_lens.shape[1] - len(rows)
        assert raw.cp_seq_lens[w].tolist() == rows + [0] * padding
        assert raw.cp_query_dst[w].tolist() == dst + [-1] * padding
    assert raw.kv_to_q_mapping.shape[2] == sizes[3]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_create_qkv_dispatch_is_that_of_the_raw_plan(sizes):
    torch.manual_seed(7)
    lens, num_shards, dst, *tables, _ = wt.create_raw_qkv_dispatch(*sizes)
    torch.manual_seed(7)
    *four, layout, inside = wt.create_qkv_dispatch(*sizes, return_intermediate=True)
    *want, fa_params = wt.compute_e2e_metadata(lens, num_shards, dst, *tables)
    assert four == want and len(inside) == 4
    for part, whole in zip(layout, fa_params):
        assert [t.tolist() for t in part] == [t.tolist() for t in whole]


@pytest.mark.parametrize("sizes", [(1, 1, 5), (2, 8, 1000), (8, 32, 4096), (3, 4, 77)], ids=str)
@pytest.mark.parametrize("seed", [0, 3])
def test_gen_seq_lens(sizes, seed):
    torch.manual_seed(seed)
    want = lengths(*sizes)
    after = torch.rand(3)
    torch.manual_seed(seed)
    got = wt.gen_seq_lens(*sizes)
    assert got.dtype == torch.int32 and torch.equal(got, want)
    assert torch.equal(torch.rand(3), after), "another number of draws than DistCA"


def test_a_seed_of_its_own_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    wt.gen_seq_lens(2, 4, 100, seed=1)
    wt.create_raw_qkv_dispatch(2, 64, 3, 2, seed=1)
    wt.create_qkv_dispatch(2, 64, 3, 2, seed=1)
    wt.gen_seq_lens(2, 4, 100, uniforms=torch.full((2, 4), 0.5))
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wt.gen_seq_lens(0, 4, 100),
        lambda: wt.gen_seq_lens(2, 0, 100),
        lambda: wt.create_raw_qkv_dispatch(2, 65, 3, 2),
        lambda: wt.create_raw_qkv_dispatch(2, 64, 3, 3),
        lambda: wt.create_qkv_dispatch(0, 64, 3, 1),
    ],
)
def test_a_wrong_argument_draws_nothing(call):
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(waybill.InvalidArgument):
        call()
    assert torch.equal(torch.rand(3), want)
