"""What DistCA's documents promise of the functions, one test a promise, on tensors and arrays.

Each test quotes what it tests; that the words are in the documents is tested too.
"""

import inspect
import pathlib
import re

import numpy as np
import pytest
from upstream import SEQUENCE_PAGES, text_of

import waybill

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SIZES = [(1, 8, 1, 1), (2, 16, 2, 2), (4, 96, 5, 4), (8, 256, 7, 8), (5, 30, 3, 2)]
CASES = [(*size, seed) for size in SIZES for seed in (0, 1)]
#: The pages of 001, and what there is of each here.
PAGES = {
    "test_comm_metadata_guide.md": "docs/guide.md",
    "functions/orchestrate_simulate.md": "docs/functions/simulation.md",
    "functions/create_qkv_dispatch.md": "docs/functions/generators.md",
    "functions/compute_metadata.md": "docs/functions/metadata.md",
    "functions/compute_metadata_kv.md": "docs/functions/metadata.md",
    "functions/gen_seq_lens.md": "docs/functions/generators.md",
    "functions/metadata_class.md": "docs/functions/metadata.md",
    "functions/cuda_dispatch_kernel.md": "docs/sequence_kernel.md",
    "unit_tests/test_gen_seq_lens.py": "docs/unit_tests/test_gen_seq_lens.py",
    "unit_tests/test_orchestrate_simulate.py": "docs/unit_tests/test_orchestrate_simulate.py",
    "unit_tests/test_compute_metadata.py": "docs/unit_tests/test_compute_metadata.py",
    "unit_tests/test_create_qkv_dispatch.py": "docs/unit_tests/test_create_qkv_dispatch.py",
    "unit_tests/test_test_qkv_dispatch.py": "docs/unit_tests/test_test_qkv_dispatch.py",
    "examples/simple_usage.py": "examples/python/simple_usage.py",
    "examples/advanced_scenarios.py": "examples/python/advanced_scenarios.py",
}


def promise(*quotes):
    """Marks a test with what it tests, word for word."""
    documents = [text_of(page) for page in SEQUENCE_PAGES]
    for quote in quotes:
        assert any(quote in document for document in documents), quote
    return lambda function: function


def planned(face, case):
    world, rows, sequences, copies, seed = case
    return face.module.create_qkv_dispatch(world, rows, sequences, copies, seed=seed)


def uniform(face, world, rows, seed=3, hidden=2):
    """Between 1 and 2, since 0 means that nothing came."""
    values = np.random.default_rng(seed).random((world, rows, hidden), np.float32) + 1
    return face.array(values)


def moved(face, tensor, rows, metadata):
    world, _, hidden = tensor.shape
    output = face.array(np.zeros((world, int(rows), hidden), np.float32))
    return face.module.orchestrate_simulate(tensor, output, metadata)


@promise("**Conservation**: Total tokens sent = total tokens received")
@pytest.mark.parametrize("case", CASES)
def test_conservation(face, case):
    for metadata in planned(face, case)[:4]:
        lens, ranks = face.host(metadata.seq_len), face.host(metadata.dst_rank)
        copies = ranks[..., None] if ranks.ndim == 2 else ranks
        sent = (lens[..., None] * (copies >= 0)).sum()
        assert sent == face.host(metadata.num_recv_tokens)[:, -1].sum()
        assert sent == sum(metadata.num_total_recv_tokens)


@promise("**Bijection**: Forward + reverse = identity (for queries)")
@pytest.mark.parametrize("case", CASES)
def test_bijection(face, case):
    forward, reverse, *_ = planned(face, case)
    world, rows = case[:2]
    q = uniform(face, world, rows)
    there = moved(face, q, max(forward.num_total_recv_tokens), forward)
    assert (face.host(moved(face, there, rows, reverse)) == face.host(q)).all()


@promise(
    "**Consistency**: All tensor shapes and indices are valid",
    "**Shape compatibility**: All tensors have compatible shapes",
    "**Padding consistency**: -1 ranks correspond to 0 lengths",
    "**Offset validity**: All offsets within destination buffer bounds",
    "**No overwrites**: Destination regions don't overlap",
    "**Complete coverage**: All data has valid destination",
)
@pytest.mark.parametrize("case", CASES)
def test_consistency(face, case):
    world = case[0]
    fwd_q, rev_q, fwd_k, rev_k, _ = planned(face, case)
    assert waybill.validate(fwd_q, rev_q) == [] and waybill.validate(fwd_k, rev_k) == []
    for metadata in (fwd_q, rev_q, fwd_k):
        lens, ranks, offsets = (
            face.host(getattr(metadata, name)) for name in ("seq_len", "dst_rank", "dst_offset")
        )
        assert ranks.shape == offsets.shape and ranks.shape[:2] == lens.shape
        assert ((ranks >= -1) & (ranks < world)).all()
        none = (ranks < 0).all(axis=-1) if ranks.ndim == 3 else ranks < 0
        assert (lens[none] == 0).all() and (lens[~none] > 0).all()
        written = np.zeros((world, max(metadata.num_total_recv_tokens)), int)
        wide = ranks[..., None] if ranks.ndim == 2 else ranks
        begins = offsets.reshape(wide.shape)
        for place in np.argwhere(wide >= 0):
            begin, length = begins[tuple(place)], lens[tuple(place[:2])]
            written[wide[tuple(place)], begin : begin + length] += 1
        totals = metadata.num_total_recv_tokens
        assert all((written[r, : totals[r]] == 1).all() for r in range(world))


@promise(
    "**Causality**: KV shards respect attention constraints",
    "**Causal constraints**: KV shards respect attention causality",
)
@pytest.mark.parametrize("case", CASES)
def test_causality(face, case):
    """A query meets as many rows as come before its last one in its document."""
    *_, fwd_k, _, attention = planned(face, case)
    for rank in range(case[0]):
        q_begin, kv_begin = face.host(attention[0][rank]), face.host(attention[1][rank])
        assert (np.diff(q_begin) <= np.diff(kv_begin)).all()
        assert kv_begin[-1] == fwd_k.num_total_recv_tokens[rank]


@promise("**Reproducibility**: Same seeds produce same results")
def test_reproducibility(face):
    first, second = (planned(face, (4, 96, 5, 4, 7)) for _ in range(2))
    assert first[:4] == second[:4]
    assert planned(face, (4, 96, 5, 4, 8))[0] != first[0]
    lens = [face.host(face.module.gen_seq_lens(3, 4, 50, seed=s)).tolist() for s in (1, 1, 2)]
    assert lens[0] == lens[1] != lens[2] and all(sum(row) == 50 for row in lens[0])


@promise(
    "**Padding handling**: -1 values properly ignored",
    "**Value -1** in `dst_rank` indicates padding (no operation)",
    "**Positive values** indicate valid destination ranks",
    "**No error** if padding values are encountered",
)
def test_padding(face):
    """What differs: 0 is a valid rank too, and so is no other negative number than -1 in plans."""
    ranks = face.array(np.array([[-1, 0, -1], [1, -1, -1]]))
    offsets = face.array(np.array([[7, 0, 9], [1, 5, 5]]))
    lens = face.array(np.array([[2, 3, 0], [2, 0, 0]]))
    metadata = face.module.Metadata(ranks, offsets, lens, None)
    q = uniform(face, 2, 5)
    got, given = face.host(moved(face, q, 4, metadata)), face.host(q)
    assert (got[0, :3] == given[0, 2:5]).all() and (got[0, 3] == 0).all()
    assert (got[1, 1:3] == given[1, :2]).all() and (got[1, [0, 3]] == 0).all()


@promise(
    "**1D dst_rank**: Simple rank-to-rank communication",
    "**2D dst_rank**: One sequence shard sent to multiple ranks",
    "**Broadcasts data** when multiple destinations exist",
    "**Multi-destination handling**: Context parallelism works",
    "**Correct addressing**: Data goes to right rank and offset",
    "**Proper slicing**: Sequence boundaries respected",
)
def test_destinations(face):
    lens = face.array(np.array([[2, 1], [3, 0]]))
    for dispatch in ([[1, 0], [0, -1]], [[[1, 0], [0, -1]], [[0, 1], [-1, -1]]]):
        ranks = np.array(dispatch)
        forward, _ = face.module.compute_metadata(lens, face.array(ranks))
        assert tuple(forward.dst_rank.shape) == ranks.shape
        q = uniform(face, 2, 3)
        got = face.host(moved(face, q, max(forward.num_total_recv_tokens), forward))
        given, offsets = face.host(q), face.host(forward.dst_offset)
        for place in np.argwhere(ranks >= 0):
            rank, shard = place[:2]
            begin = face.host(lens)[rank, :shard].sum()
            rows = face.host(lens)[rank, shard]
            at = offsets[tuple(place)]
            shown = got[ranks[tuple(place)], at : at + rows]
            assert (shown == given[rank, begin : begin + rows]).all()


@promise(
    "**Shape mismatches** will raise `RuntimeError`",
    "**Debug information** printed on errors (source rank, destination rank, offsets, lengths)",
    "- Source and destination ranks",
    "- Tensor shapes",
    "- Accumulated token count",
    "**IndexError**: Check tensor shapes match metadata expectations",
    "**Shape mismatch**: Verify `dst_offset + seq_len <= output_tensor.shape[1]`",
)
def test_errors(face):
    """What differs: all of it is in the error's text, and nothing was written."""
    lens = face.array(np.array([[2, 3], [4, 0]]))
    forward, _ = face.module.compute_metadata(lens, face.array(np.array([[1, 0], [1, -1]])))
    q, output = uniform(face, 2, 5), face.array(np.zeros((2, 5, 2), np.float32))
    with pytest.raises(RuntimeError) as error:
        face.module.orchestrate_simulate(q, output, forward)
    text = str(error.value)
    for part in (
        "source rank 1", "destination rank 1", "offset 2", "length 4", "[2, 5, 2]", "consumed"
    ):  # fmt: skip
        assert part in text, (part, text)
    assert (face.host(output) == 0).all()
    forward.dst_rank[0][0] = 2
    with pytest.raises(IndexError, match="destination rank = 2"):
        face.module.orchestrate_simulate(q, output, forward)


@promise("**Error handling**: Invalid inputs cause appropriate failures")
@pytest.mark.parametrize(
    "call",
    [
        lambda face: face.module.compute_metadata([[3]], [[1]]),
        lambda face: face.module.compute_metadata([[-3]], [[0]]),
        lambda face: face.module.create_qkv_dispatch(2, 16, 2, 4),
        lambda face: face.module.create_qkv_dispatch(2, 15, 2, 2),
        lambda face: face.module.gen_seq_lens(0, 2, 2),
        lambda face: face.module.Metadata([[0]], [[0]], [[3]], [[3, 3]]).get_slice(5),
    ],
)
def test_invalid_inputs(face, call):
    with pytest.raises(waybill.InvalidArgument, match="expected"):
        call(face)


@promise("**Edge cases**: Minimal and maximal configurations work")
def test_edges(face):
    forward, reverse, *_ = planned(face, (1, 1, 1, 1, 0))
    assert face.host(forward.seq_len).tolist() == [[1]]
    forward, reverse, *_ = planned(face, (32, 512, 16, 32, 0))
    assert waybill.validate(forward, reverse) == []
    none, _ = face.module.compute_metadata(
        face.array(np.zeros((2, 0), np.int64)), face.array(np.zeros((2, 0), np.int64))
    )
    assert sum(none.num_total_recv_tokens) == 0


@promise("| `test_qkv_dispatch` | End-to-end integration test | test parameters |")
def test_integration(face):
    face.module.test_qkv_dispatch(world_size=4, num_seqs=3, max_seq_shard=4, num_tokens=256)


@promise(
    "| `gen_seq_lens` | Generate random sequence lengths | world_size, num_seqs, total_len |",
    "| `compute_metadata` | Create query communication routing | seq_lens, dispatch |",
)
def test_the_table_of_functions(face):
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", text_of("distca_readme"), re.MULTILINE)
    assert len(rows) == 7
    for name, inputs in rows:
        if name == "dispatch_kernel":  # What differs: a dispatcher launches it
            dispatcher = face.module.SequenceDispatcher
            assert list(inspect.signature(dispatcher.dispatch).parameters)[1] == "plan"
            continue
        assert callable(getattr(face.module, name))
        if name == "gen_seq_lens":
            given = [word.strip() for word in inputs.split(",")]
            ours = inspect.signature(getattr(face.module, name)).parameters
            assert list(ours)[: len(given)] == given


def test_the_pages():
    linked = set(re.findall(r"\]\(([\w/]+\.(?:md|py))\)", text_of("distca_readme")))
    assert linked == set(PAGES)
    for name, here in PAGES.items():
        assert (ROOT / here).is_file(), f"{name} -> {here}"
