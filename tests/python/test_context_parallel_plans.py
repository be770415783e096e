"""Plans of batches as data; documents packed and unpacked; what is wrong is named."""

import gc
import pickle

import numpy as np
import pytest
from error_texts import a_divisor, lies_on
from packed import close, leaves_of, module, pieces_in_order, pieces_zigzag, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")


def planner(world_size=2, **options):
    return wt.BatchPlanner(world_size, 4, 2, 16, block_tokens=4, **options)


def test_a_plan_says_where_rows_are_from():
    plan = planner().plan([[(7, 0, 3), (9, 4, 2)], [(9, 0, 4), (7, 3, 1)]])
    assert plan.home_tokens == [5, 5] and plan.world_size == 2
    assert plan.positions(0).tolist() == [0, 1, 2, 4, 5]
    assert plan.documents(1).tolist() == [9, 9, 9, 9, 7]
    assert plan.last_rows(0).tolist() == [False] * 4 + [True]
    assert plan.last_rows(1).tolist() == [False] * 4 + [True]
    assert plan.pieces(1) == [wt.Piece(9, 0, 4), wt.Piece(7, 3, 1)]
    home = plan.home_sequences(0)
    assert home.cu_seqlens_q.tolist() == [0, 3, 5] and home.cu_seqlens_q.dtype == torch.int32
    assert home.max_seqlen_q == 3 and len(home) == 2
    assert waybill.validate(plan.qkv_plan) == [] and plan.work.sum() == 10 + 21


def test_plans_and_planners_are_the_same_everywhere():
    ours = planner(window=9, scale=0.5, in_place=True)
    again = pickle.loads(pickle.dumps(ours))
    held = [[90, 7], [(3, 0, 20)]]
    plans = [ours.plan(held), again.plan(held), pickle.loads(pickle.dumps(ours.plan(held)))]
    for plan in plans:
        assert plan.qkv_plan == plans[0].qkv_plan and plan.in_place
        assert plan.planner.shape == ours.shape
        assert plan.pieces(1) == [wt.Piece(3, 0, 20)]
        assert plan.pieces(0)[0].document < 0  # without a number


def test_work_is_even_wherever_documents_lie():
    lengths = [900, 300, 77, 40, 512]
    for pieces in (pieces_in_order(lengths, 4), pieces_zigzag(lengths, 4), [lengths, [], [], []]):
        plan = planner(4).plan(pieces)
        assert plan.imbalance == plan.work.max() / plan.work.mean() < 1.05
        assert waybill.validate(plan.qkv_plan) == []


def test_planning_takes_no_time():
    """Of 2 x 64 documents; under 1 ms where nothing else runs."""
    import time

    rng = np.random.default_rng(0)
    held = [rng.integers(10, 6000, 64).tolist() for _ in range(2)]
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        planner().plan(held).routing()
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.001


def test_tables_go_with_their_plan():
    def body(world):
        attend = module(world)
        for step in range(5):
            plan = attend.plan([[60 + step, 9], [12]])
            n = plan.home_tokens[world.rank]
            q, k, v = (torch.ones(n, h, 8).double().requires_grad_() for h in (2, 1, 1))
            attend(plan, q, k, v).sum().backward()
            assert attend._step(plan) is attend._step(plan)
        assert len(attend._steps) == 1
        del plan
        gc.collect()
        assert len(attend._steps) == 0

    wt.run_threads(2, body)


def test_gather_grows_with_the_batch():
    def body(world):
        attend = module(world)
        few = attend.gather([3, (5, 0, 2)] if world.rank == 0 else [])
        many = attend.gather([1] * 600 * world.rank)
        again = attend.gather([2])
        return [[len(held) for held in pieces] for pieces in (few, many, again)], few[0][1].tolist()

    for found, piece in wt.run_threads(2, body):
        assert found == [[2, 0], [0, 600], [1, 1]] and piece == [5, 0, 2, 0]


def test_pack_cut_and_unpack():
    documents = [torch.arange(4), torch.arange(0), torch.arange(10, 13)]
    packed = wt.pack(documents)
    assert packed.tokens.tolist() == [0, 1, 2, 3, 10, 11, 12]
    assert packed.labels.tolist() == [1, 2, 3, -100, 11, 12, -100]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2] and packed.pieces == [4, 3]
    assert [t.tolist() for t in wt.unpack(packed.tokens, packed.pieces)] == [
        [0, 1, 2, 3], [10, 11, 12],
    ]  # fmt: skip
    numbered = wt.pack(documents, first_document=5)
    parts = [numbered.cut(0, 3), numbered.cut(3, 7)]
    assert parts[0].pieces == [wt.Piece(5, 0, 3)]
    assert parts[1].pieces == [wt.Piece(5, 3, 1), wt.Piece(6, 0, 3)]
    assert parts[0].labels.tolist() == [1, 2, 3]  # the next token, though another rank holds it
    assert parts[1].positions.tolist() == [3, 0, 1, 2]
    plan = planner().plan([part.pieces for part in parts])
    for rank, part in enumerate(parts):
        assert torch.equal(plan.positions(rank), part.positions)
        assert torch.equal(plan.last_rows(rank), part.labels == -100)
    assert wt.pack([]).pieces == [] and len(wt.pack([]).tokens) == 0
    with pytest.raises(waybill.InvalidArgument, match="no numbers"):
        packed.cut(0, 3)
    with pytest.raises(waybill.InvalidArgument, match=r"expected within 0\.\.7"):
        numbered.cut(0, 9)
    with pytest.raises(waybill.InvalidArgument, match="7 rows, expected 4"):
        wt.unpack(packed.tokens, [4])


@pytest.mark.parametrize(
    "held, message",
    [
        ([[(1, 0, 4)]], "pieces of 1 ranks, expected 2"),
        ([[(1, 0, 4)], [(1, 6, 2)]], r"document 1: tokens 4\.\.5 are held by no rank.*of rank 1"),
        ([[(1, 0, 4)], [(1, 3, 2)]], "document 1: token 3 is held twice, by rank 0 and rank 1"),
        ([[(1, 2, 4)], []], r"document 1: tokens 0\.\.1 are held by no rank"),
        ([[4, 0], []], r"pieces of rank 0: \[1\] has length 0"),
        ([[], [(1, -1, 4)]], r"pieces of rank 1: \[0\] has offset -1"),
        ([[], [(-1, 0, 4)]], r"pieces of rank 1: \[0\] has document -1, expected >= 0"),
        ([[], [(1, 0, 4, 2, 3)]], r"pieces of rank 1: \[0\] has 5 numbers"),
        ([4, 4], "pieces of rank 0 = 4, expected .*: gather gives those of all ranks"),
        ([["x"], []], r"pieces of rank 0: \[0\]"),
    ],
)
def test_pieces_that_do_not_add_up(held, message):
    with pytest.raises(waybill.InvalidArgument, match=message):
        planner().plan(held)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads": 0}, "heads = 0, expected >= 1"),
        ({"kv_heads": 3}, a_divisor("kv_heads", 3, r"heads \(4\)")),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"v_head_dim": -1}, "v_head_dim = -1"),
        ({"dtype": torch.int32}, "dtype = torch.int32"),
        ({"mask": "tree"}, 'mask = "tree", expected "causal", "full" or "prefix"'),
        ({"mask": "full", "window": 4}, "window = 4, expected None"),
        ({"window": 0}, "window = 0"),
        ({"scale": -1.0}, "scale = -1.0"),
        ({"in_place": 3}, "in_place = 3"),
        ({"kernel": "fast"}, 'kernel = "fast", expected "auto", "varlen"'),
        ({"kernel": 3}, "kernel is a int"),
        ({"kernel": "varlen"}, 'kernel = "varlen" on cpu'),
        ({"kernel": "flash_attn"}, "needs the package flash_attn"),
        ({"kernel": "flash_attn_3"}, "needs the package flash_attn_interface"),
        ({"group": 3}, "group is 3, expected a process group"),
    ],
)
def test_modules_that_cannot_be(options, message):
    def body(world):
        given = {"group": world, "heads": 4, **options}
        with pytest.raises(waybill.Error, match=message):
            wt.ContextParallelAttention(**given)

    wt.run_threads(1, body)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("imbalance_target", 1.0, "expected a number > 1"),
        ("imbalance_target", float("nan"), "expected a number > 1"),
        ("block_tokens", 2**20 + 1, r"expected 1\.\.1048576"),
    ],
)
def test_what_no_plan_can_have_is_refused_when_it_is_made(option, value, expected):
    """Not by every plan of it."""
    wrong = {option: value}
    with pytest.raises(waybill.InvalidArgument, match=rf"^BatchPlanner: {option} = .*{expected}"):
        wt.BatchPlanner(2, 4, **wrong)

    def body(world):
        who = "ContextParallelAttention"
        with pytest.raises(waybill.InvalidArgument, match=rf"^{who}: {option} = .*{expected}"):
            wt.ContextParallelAttention(world, 4, **wrong)

    wt.run_threads(2, body, timeout_s=20)


def test_plans_and_planners_are_read_only():
    made = planner(in_place=True)
    plan = made.plan([[40, 3], [9]])
    fields = {
        plan: ("planner", "qkv_plan", "in_place", "world_size", "work", "imbalance", "home_tokens"),
        made: ("world_size", "shape", "in_place", "costs", "latent_dim", "fingerprint"),
    }
    for thing, names in fields.items():
        for name in names:
            before = getattr(thing, name)
            with pytest.raises(AttributeError, match=name):
                setattr(thing, name, False)
            with pytest.raises(AttributeError, match=name):
                delattr(thing, name)
            assert np.array_equal(getattr(thing, name), before)
    again = pickle.loads(pickle.dumps(plan))
    assert again.in_place and again.qkv_plan == plan.qkv_plan and again.pieces(0) == plan.pieces(0)
    assert plan.routing() is plan.routing()  # made once
    with pytest.raises(AttributeError):
        again.in_place = False


def test_work_is_what_is_balanced():
    """Pairs alone without costs; with them also what rows and shards take."""
    costs = waybill.AttentionCosts(1e9, row_pairs=300, shard_pairs=3000)
    lengths = [3000, 200, 1700]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert waybill.plan(lengths, 2, 0).work.sum() == pairs
    plan = waybill.plan(lengths, 2, 0, costs=costs)
    qkv = plan.to_qkv_plan()
    assert qkv.work.sum() == pairs
    assert plan.work.sum() == pairs + 300 * sum(lengths) + 3000 * len(qkv.shard_len)
    for kind in (type(plan), type(wt.BatchPlanner(2, 4).plan([[5], [6]]))):
        assert "costs" in kind.work.__doc__


def test_kernels_say_what_they_do_not_take():
    varlen, device = wt.kernels.VarlenKernel(), torch.device("cuda")
    for given, message in (
        ((4, 2, 36), 'head_dim = 36, kernel "varlen" takes multiples of 8 up to 256'),
        ((4, 2, 512), "head_dim = 512"),
        ((4, 2, 64, 128), r"v_head_dim = 128, kernel \"varlen\" takes at most head_dim \(64\)"),
    ):
        with pytest.raises(waybill.Unsupported, match=message):
            varlen.check(wt.BatchPlanner(1, *given).shape, device, "ContextParallelAttention")
    shape = wt.BatchPlanner(1, 4, 2, 64, dtype=torch.float32).shape
    with pytest.raises(waybill.Unsupported, match=r"dtype = torch\.float32.*takes bfloat16"):
        varlen.check(shape, device, "ContextParallelAttention")


def test_calls_that_do_not_fit_their_plan():
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    def body(world):
        attend = module(world)
        plan = attend.plan(pieces)
        q, k, v = tensors[world.rank][:3]
        at = f"rank {world.rank}"

        def refused(message, *args):
            with pytest.raises(waybill.InvalidArgument, match=message):
                attend(*args)

        refused("plan is a list", pieces, q, k, v)
        refused(rf"q has shape \[55, 2, 8\], expected \[56, 2, 8\].*{at}", plan, q[1:], k, v)
        refused(rf"k has shape.*expected \[56, 1, 8\].*{at}", plan, q, k[:, :, :4], v)
        refused(
            rf"v has dtype torch.float32, expected torch.float64 on {at}", plan, q, k, v.float()
        )
        refused(lies_on("q", "meta", "cpu"), plan, q.to("meta"), k, v)
        refused("q is a ndarray", plan, q.numpy(), k, v)
        refused("the plan is of 4 ranks, expected 2", module_plan(4, pieces * 2), q, k, v)
        refused("heads=4", planner().plan(pieces), q, k, v)
        with pytest.raises(waybill.WrongType, match="make one on each rank"):
            pickle.dumps(attend)
        # Nothing was sent: the ranks still agree.
        close([attend(plan, q, k, v)], [whole(pieces, tensors)[world.rank][0]])

    def module_plan(world_size, held):
        numbered = [[(100 * r + d, 0, n) for d, _, n in mine] for r, mine in enumerate(held)]
        return wt.BatchPlanner(world_size, 2, 1, 8, dtype=torch.float64).plan(numbered)

    wt.run_threads(2, body)


def test_ranks_that_disagree():
    """Plans of different batches, whose rows are as many: no rank hangs, and the text says so."""

    def body(world):
        attend = module(world)
        held = [[(0, 0, 60)], [(1, 0, 20)]] if world.rank == 0 else [[(0, 0, 50)], [(1, 0, 20)]]
        plan = attend.plan(held)
        q, k, v = (torch.zeros(plan.home_tokens[world.rank], h, 8).double() for h in (2, 1, 1))
        attend(plan, q, k, v)

    with pytest.raises(waybill.Disagreement, match="the plan differs"):
        wt.run_threads(2, body, timeout_s=5)


def test_a_wide_v_and_many_ranges():
    """More ranges of rows than are copied one by one: of every second document the queries of its
    second half travel, with all of its keys.
    """
    lengths, shards = [3, 4, 5] * 6, [*range(18)]
    ends = [end for pair in range(6) for end in (3 * pair, 3 * pair + 2)] + [18]
    given = waybill.QkvPlan(2, [0, 18, 18], lengths, [0, 1, 0] * 6, ends, shards)
    pieces = [[(d, 0, 7 if d % 2 == 0 else 5) for d in range(12)], []]
    tensors = tensors_of(pieces, 2, 1, 4, 8)

    def body(world):
        attend = module(world, head_dim=4, v_head_dim=8)
        q, k, v = leaves_of(tensors[world.rank])
        plan = attend.plan(given)
        out = attend(plan, q, k, v)
        (out * tensors[world.rank][3]).sum().backward()
        step = attend._step(plan)
        if world.rank == 0:
            assert len(step.q_rows.ranges) == len(step.kv_rows.ranges) == 6
        return out.detach(), q.grad, k.grad, v.grad

    for got, expected in zip(wt.run_threads(2, body), whole(pieces, tensors)):
        close(got, expected[:4])
