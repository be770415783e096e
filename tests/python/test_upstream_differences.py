"""docs/what_differs.md: a test for each line of its tables, on tensors and on arrays."""

import inspect
import pathlib
import re
import warnings

import numpy as np
import pytest

import waybill

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "what_differs.md"
TESTED = {}
#: Lines that are tested beside the snippet or the promise that they are about.
ELSEWHERE = {
    "metadata class": "test_upstream_snippets.py",
    "notes": "test_upstream_snippets.py",
    '`orchestrate_simulate` | "positive': "test_upstream_claims.py: test_padding",
    "read me | lengths": "here, `gen_seq_lens`",
    "`num_sm` left out": "test_upstream_experts.py: test_every_class_and_method_can_be_called_so",
    "`use_aot`": "test_upstream_experts.py: test_options",
    "descriptor without local combine": "test_upstream_experts.py: test_every_attribute_is_there",
    "`topk_indices_tensor`": "test_upstream_experts.py: test_every_attribute_is_there",
    "expert ids outside": "test_upstream_experts.py",
    "gradients | none": "test_torch_moe.py",
    "a rank that does not come": "test_agreement.py",
    "device | CUDA": "test_upstream_experts.py, test_torch_moe_devices.py",
    "NVSHMEM | needed": "test_torch_moe_devices.py",
    "the attention layout and reverse KV metadata of the documented": "tests/golden: all records",
    "`dispatch_kernel`": "test_upstream_claims.py: test_the_table_of_functions",
}


def line(begin):
    def marked(function):
        TESTED[begin] = function
        return function

    return marked


def integers(face, values):
    return face.array(np.array(values))


def values(face, result):
    return face.host(result).tolist()


def refuses(match, call, *arguments, **options):
    with pytest.raises(waybill.InvalidArgument, match=match):
        call(*arguments, **options)


@line("`compute_metadata`: a shard with rows and destination -1")
def silent_loss(face):
    lens, dispatch = integers(face, [[3, 2]]), integers(face, [[-1, 0]])
    refuses("has no destination", face.module.compute_metadata, lens, dispatch)
    forward, _ = face.module.compute_metadata(lens, dispatch, undispatched="keep")
    assert forward.num_total_recv_tokens == [2]


@line("`compute_metadata_kv`: `num_recv_tokens`")
def counts_of_kv(face):
    """A document on ranks 0 and 1, whose second query goes to rank 0."""
    plan = waybill.QkvPlan(2, [0, 1, 2], [3, 2], [1, 0], [0, 2], [0, 1], kv_layout="per_query")
    raw = plan.to_raw_dispatch()
    tables = [integers(face, table) for table in (*raw[3:8], raw[0], raw[1], raw[2])]
    forward, _ = face.module.compute_metadata_kv(*tables)
    assert values(face, forward.num_recv_tokens) == [[3, 2, 5], [3, 0, 3]]


@line("`compute_metadata_kv` in a world of one rank")
def one_rank(face):
    mapping, place = [[[[0, 0], [-1, -1]]]], [[[0, -1]]]
    one = ([[0]], [[1]], [[5]], [[5]], [1], [[0]])
    tables = [integers(face, table) for table in (mapping, place, *one)]
    forward, _ = face.module.compute_metadata_kv(*tables)
    assert values(face, forward.dst_rank) == [[[0, -1]]]


@line("`compute_attn_layout_seqlens`: a rank that receives nothing")
def empty_rank(face):
    lens, dispatch = integers(face, [[5], [4]]), integers(face, [[1], [1]])
    layout = face.module.compute_attn_layout_seqlens(lens, lens, dispatch, True, True)
    assert values(face, layout.num_local_seqs_recv) == [0, 2]
    assert values(face, layout.cu_seqlens_q[0]) == [0]


@line("`get_slice` with padding between shards")
def slices(face):
    forward, _ = face.module.compute_metadata(
        integers(face, [[6, 0, 9]]), integers(face, [[0, -1, 0]])
    )
    assert values(face, forward.get_slice(0).seq_len) == [6, 9]


@line("`gen_seq_lens`")
def lengths(face):
    for seed in range(40):
        assert face.host(face.module.gen_seq_lens(8, 32, 32, seed=seed)).min() >= 0


@line("`max_cp_degree` above `world_size`")
def too_many_copies(face):
    refuses(
        "max_cp_degree = 4, expected 1..world_size = 2",
        face.module.create_qkv_dispatch,
        2,
        16,
        2,
        4,
    )


@line("tables with a wrong shape or dtype")
def wrong_tables(face):
    for lens, dispatch in (
        ([[3, 2]], [[0]]), ([[3.5]], [[0]]), ([[3]], [[1]]), ([[-3]], [[0]])
    ):  # fmt: skip
        lens, dispatch = integers(face, lens), integers(face, dispatch)
        refuses("expected", face.module.compute_metadata, lens, dispatch)


def simulation(face, ranks, offsets, lens, source=(2, 4, 2), output=(2, 5, 2), dtype=np.float32):
    metadata = face.module.Metadata(*(integers(face, t) for t in (ranks, offsets, lens)), None)
    tensor = face.array(np.ones(source, np.float32))
    return tensor, face.array(np.zeros(output, dtype)), metadata


@line("`orchestrate_simulate` with tables that do not fit")
def all_or_nothing(face):
    for ranks, offsets in (([[0], [1]], [[0], [3]]), ([[[0]], [[1]]], [[[0]], [[3]]])):
        given = simulation(face, ranks, offsets, [[3], [4]])
        with pytest.raises(RuntimeError, match=r"source rank 1, destination rank 1, .*consumed 0"):
            face.module.orchestrate_simulate(*given)
        assert not face.host(given[1]).any()


@line("`orchestrate_simulate`: negative offsets")
def mistakes(face):
    one = [[0], [-1]]
    for given in (
        simulation(face, one, [[-2], [0]], [[2], [0]]),
        simulation(face, one, [[0], [0]], [[2], [0]], dtype=np.float64),
        simulation(face, one, [[0], [0]], [[3], [0]], source=(2, 1, 2)),
    ):
        with pytest.raises(waybill.ShapeMismatch):
            face.module.orchestrate_simulate(*given)


@line("`orchestrate_simulate`: two shards")
def overlap(face):
    given = simulation(face, [[0, 0], [-1, -1]], [[0, 1], [0, 0]], [[2, 2], [0, 0]])
    given[0][0, 2:] = 7
    assert values(face, face.module.orchestrate_simulate(*given))[0][1] == [7, 7]
    with pytest.raises(waybill.ShapeMismatch, match="also written"):
        face.module.orchestrate_simulate(*given, overlap="reject")


@line("`orchestrate_simulate`: an output that shares memory")
def shared_memory(face):
    tensor, _, metadata = simulation(face, [[0], [1]], [[0], [0]], [[2], [2]])
    with pytest.raises(waybill.ShapeMismatch, match="shares memory"):
        face.module.orchestrate_simulate(tensor, tensor, metadata)


@line("`get_slice(-1)`")
def from_the_end(face):
    forward, _ = face.module.compute_metadata(integers(face, [[6]]), integers(face, [[0]]))
    refuses("rank = -1, expected 0..0", forward.get_slice, -1)


@line("`mask_by_neg` of unsigned numbers")
def unsigned(face):
    numbers = face.array(np.array([5, 6], np.uint8))
    assert values(face, face.module.mask_by_neg(numbers, integers(face, [1, 0]))) == [5, -1]


@line("`normalize_dtype` with values that do not fit")
def narrow(face):
    tables = [integers(face, t) for t in ([[0]], [[2**32]], [[3]], [[3, 3]])]
    refuses(r"dst_offset.*4294967296", face.module.Metadata(*tables).normalize_dtype)


@line("`mask_by_neg` with a mask of other numbers")
def masks(face):
    got = face.module.mask_by_neg(integers(face, [5, 5, 5]), integers(face, [2, 0, -1]))
    assert values(face, got) == [5, -1, 5]


@line("`index_put_with_neg_padding_1d`: index -2")
def outside(face):
    put = face.module.index_put_with_neg_padding_1d
    tensor, src = integers(face, [1, 2]), integers(face, [7])
    for index in (-2, 2):
        refuses("index", put, tensor, src, integers(face, [index]))
    assert values(face, put(tensor, src, integers(face, [-1]))) == [1, 2]


@line("the same, repeated indices")
def repeated(face):
    put = face.module.index_put_with_neg_padding_1d
    got = put(integers(face, [1, 2]), integers(face, [7, 8]), integers(face, [0, 0]))
    assert values(face, got) == [8, 2]


@line("the same, `src` of another dtype")
def other_dtype(face):
    put = face.module.index_put_with_neg_padding_1d
    tensor = face.array(np.array([1, 2], np.int8))
    got = put(tensor, integers(face, [7]), integers(face, [0]))
    assert values(face, got) == [7, 2] and face.dtype_name(got) == "int8"
    refuses("300", put, tensor, integers(face, [300]), integers(face, [0]))


@line("`exclusive_cumsum`, `prepend_zero_fn` of nothing")
def nothing(face):
    none = face.array(np.zeros(0, np.int64))
    assert values(face, face.module.exclusive_cumsum(none)) == []
    assert values(face, face.module.prepend_zero_fn(none)) == [0]


@line("`mlp_layout_packed_params` of no sequences")
def no_sequences(face):
    params = face.module.mlp_layout_packed_params(face.array(np.zeros(0, np.int64)))
    assert values(face, params.cu_seqlens_q) == [0] and int(params.max_seqlen_q) == 0


@line("`mlp_layout_packed_params` | Megatron's")
def own_class(face):
    params = face.module.mlp_layout_packed_params(integers(face, [3, 4]))
    assert type(params) is waybill.PackedSeqParams


@line("`compute_metadata_kv` | needs")
def left_out(face):
    ours = inspect.signature(face.module.compute_metadata_kv).parameters
    assert ours["q_seq_to_dst"].default is ours["max_num_local_seqs"].default is None


@line("seeds |")
def seeds(face):
    first, second = (face.module.gen_seq_lens(2, 3, 40, seed=5) for _ in range(2))
    assert values(face, first) == values(face, second) == waybill.gen_seq_lens(2, 3, 40, 5).tolist()
    if face.name == "torch":
        face.torch.manual_seed(1)
        first = face.module.gen_seq_lens(2, 3, 40)
        assert values(face, first) != values(face, face.module.gen_seq_lens(2, 3, 40))
        face.torch.manual_seed(1)
        assert values(face, first) == values(face, face.module.gen_seq_lens(2, 3, 40))


@line("`orchestrate_simulate` on tensors that require gradients")
def no_gradients(face):
    tensor, output, metadata = simulation(face, [[0], [1]], [[0], [0]], [[2], [2]])
    if face.name == "torch":
        with pytest.warns(UserWarning, match="carries none"):
            face.module.orchestrate_simulate(tensor.requires_grad_(), output, metadata)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            face.module.orchestrate_simulate(tensor, output, metadata)


@line('read me | total length is "across all ranks"')
def rows_of_each_rank(face):
    *_, lens = face.module.create_qkv_dispatch(
        4, 64, 3, 2, return_mlp_no_shard_seq_lens=True, seed=0
    )
    assert face.host(lens).sum(axis=1).tolist() == [64] * 4


def experts(face, **options):
    """Rows, sums and weights of two ranks with two experts each; every number is small."""
    ids = [np.array([[0, 1], [3, 1]]), np.array([[1, 0], [2, 3]])]
    tokens = [np.full((2, 4), 1.0 + rank, np.float32) for rank in range(2)]
    weights = [np.full((2, 2), 0.5, np.float32)] * 2
    config = waybill.moe.EPConfig(2, 4, 2, 4, 0, 2, 2, "float32")
    there = waybill.moe.simulate_dispatch(config, tokens, ids, weights)
    scaled = [rows * (np.arange(len(rows))[:, None] + 1) for rows in there.recv_tokens]
    sums = there.combine(scaled, **options)
    if face.name == "numpy":
        return there, sums

    def body(world):
        layer = waybill.torch.moe.EPAll2AllLayer(
            world, 2, 4, 2, world.rank, 4, 2, 2, face.torch.float32, capacity=1,
            enable_local_combine=options.get("local_combine", False),
        )  # fmt: skip
        given = [face.torch.from_numpy(part[world.rank]) for part in (tokens, ids, weights)]
        rows, row_weights, layout = layer.dispatch(*given)
        assert (rows.numpy() == there.recv_tokens[world.rank]).all()
        assert (row_weights.numpy() == there.recv_weights[world.rank]).all()
        scale = face.torch.arange(len(rows))[:, None] + 1
        home = layer.combine(rows * scale, layout).detach()
        assert (home.numpy() == sums[world.rank]).all()
        layer.finalize()

    waybill.torch.run_threads(2, body)
    return there, sums


@line("`topk` above 32")
def more_than_a_warp(face):
    refuses("topk = 33, expected 1..32", waybill.moe.EPConfig, 4, 8, 33, 66, 0, 2, 2, "float32")


@line("`offset_dtype` other than int32")
def wide_offsets(face):
    sizes = (4, 8, 2, 2, 0, 2, 2, "float32", "float32")
    refuses("offset_dtype = int64", waybill.moe.EPConfig, *sizes, "int64")


@line("`capacity` of `DispatchCombineContext.create`")
@line("`combine` by a descriptor")
@line("`finalize` | frees")
def a_ranks_objects(face):
    """Of torch's face alone: the other has no such objects."""
    if face.name == "numpy":
        return

    def body(world):
        moe, torch = waybill.torch.moe, face.torch
        config = moe.EPConfig(4, 8, 2, 2, world.rank, 2, 2, torch.float32)
        with pytest.raises(waybill.WrongType, match=r"capacity = 1\.5"):
            moe.DispatchCombineContext.create(config, capacity=1.5, world=world)
        layer = moe.EPAll2AllLayer(world, 4, 8, 2, world.rank, 2, 2, 2, torch.float32)
        tokens, ids = torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.int64)
        rows, _, layout = layer.dispatch(tokens, ids)
        own = moe.EPAllToAllLayoutDesc(
            layout.num_dispatch_token_cur_rank, layout.num_input_tokens_per_rank, None,
            layout.topk_indices_tensor, layout.token_dst_scatter_idx, None, None,
        )  # fmt: skip
        refuses("expected one that dispatch gave", layer.combine, rows, own)
        layer.combine(rows, layout)
        for _ in range(2):
            layer.finalize()
        with pytest.raises(waybill.TransportError, match="finalized"):
            layer.dispatch(tokens, ids)

    waybill.torch.run_threads(2, body)


@line("order of the received rows")
def order(face):
    there, _ = experts(face)
    assert there.recv_origin[0].tolist() == [[0, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 1], [1, 0, 0]]


@line("`combine` with `enable_local_combine=True`")
def local_combine(face):
    _, plain = experts(face)
    _, local = experts(face, local_combine=True)
    assert all((a == b).all() for a, b in zip(plain, local))
    assert plain[0][0].tolist() == [1 + 3] * 4  # not twice the first row


@line("float8 of a group of zeros")
def zeros_in_float8(face):
    numbers, scales = waybill.moe.quantize_fp8(np.zeros((2, 128), np.float32))
    assert not np.asarray(numbers, np.float32).any() and np.isfinite(scales).all()


@line("weights after the buffers have grown")
def weights_after_growth(face):
    there, _ = experts(face)
    assert [weights.shape for weights in there.recv_weights] == [(5,), (3,)]


@line("`full_scatter_indices`")
def positions_of_all_ranks(face):
    """The order of all rows turned around: one rank's own positions are too few."""
    ids, tokens = [np.array([[0], [1]])] * 2, [np.arange(8.0, dtype=np.float32).reshape(2, 4)] * 2
    of_all = np.array([[3], [2], [1], [0]])
    config = waybill.moe.EPConfig(2, 4, 1, 4, 0, 2, 2, "float32")
    simulate = waybill.moe.simulate_dispatch
    there = simulate(config, tokens, ids, full_scatter_indices=of_all)
    wanted = r"full_scatter_indices has shape \[2, 1\], expected \[4, 1\]"
    refuses(wanted, simulate, config, tokens, ids, full_scatter_indices=of_all[:2])
    if face.name == "numpy":
        return

    def body(world):
        layer = waybill.torch.moe.EPAll2AllLayer(
            world, 2, 4, 1, world.rank, 4, 2, 2, face.torch.float32
        )
        give = [face.torch.from_numpy(part[world.rank]) for part in (tokens, ids)]
        positions = face.torch.from_numpy(of_all)
        own = positions[2 * world.rank :][:2]
        text = "has 2 tokens, expected 4: those of all ranks, one rank after another"
        refuses(text, layer.dispatch, *give, None, own)
        rows, _, _ = layer.dispatch(*give, None, positions)
        assert (rows.numpy() == there.recv_tokens[world.rank]).all()
        layer.finalize()

    waybill.torch.run_threads(2, body)


@pytest.mark.parametrize("begin", TESTED)
def test_line(face, begin):
    if face.name == "torch":
        import waybill.torch.moe  # noqa: F401
    TESTED[begin](face)


def test_every_line_has_a_test():
    page, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## In C++\n")
    lines = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"^\| (R\d \| )?", "", text))
        for text in page.splitlines()
        if text.startswith("| ") and not text.startswith(("| call", "| | call", "| page", "|---"))
    ]
    begins = [*TESTED, *ELSEWHERE]
    for text in lines:
        assert any(text.startswith(begin) for begin in begins), text
    for begin in begins:
        assert any(text.startswith(begin) for text in lines), begin
