"""What is wrong with a call of ExpertParallel or EPAll2AllLayer is said before any communication,
in the words of the caller, with the rank; nothing is taken for something else.
"""

import pytest
from error_texts import FINALIZED, a_multiple, a_number, an_integer, lies_on

pytest.importorskip("torch")

import torch

import waybill
from waybill.moe import EPConfig
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

WORLD, HIDDEN, EXPERTS, TOPK, MOST = 2, 16, 4, 2, 8
SIZES = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": MOST}


def plain(rows, ends):
    return rows * 2


def module(world, experts=plain, **options):
    given = {**SIZES, "dtype": torch.float32, "gradients": "sum", **options}
    return ExpertParallel(experts, group=world, **given)


def call(count=3, **other):
    ids = (torch.arange(TOPK * count).view(count, TOPK) * 3) % EXPERTS
    given = {"tokens": torch.ones(count, HIDDEN), "scores": torch.ones(count, TOPK), "ids": ids}
    return {**given, **other}


WRONG_OPTIONS = [
    ({"num_experts": 5}, a_multiple("num_experts", 5, "ranks = 2")),
    ({"num_experts": 2**40}, an_integer("num_experts", 2**40) + " within its range"),
    ({"topk": 33}, r"topk = 33, expected 1\.\.32"),
    ({"max_tokens": -3, "chunks": 4}, r"max_tokens = -3, expected 1\.\."),
    ({"dtype": torch.int32}, r"dtype = int32, expected bfloat16"),
    ({"weight_dtype": torch.int8}, r"weight_dtype = int8, expected float32"),
    ({"rows": "compact"}, r"rows = 'compact', expected \"grouped\""),
    ({"payload": "mxfp8"}, r"payload = 'mxfp8', expected \"plain\": rows .* no gradients"),
    ({"rank": 0}, r"there is no argument rank, expected one of"),
    ({"capacty": 3}, r"there is no argument capacty, did you mean capacity\?"),
    (
        {"experts": SwiGLUExperts(EXPERTS, HIDDEN, 8)},
        r"experts has 4 experts, expected 2 on rank [01]: num_experts = 4 over 2 ranks",
    ),
    ({"experts": 5}, r"experts = 5, expected a module or function"),
    ({"shared": torch.ones(2)}, r"shared = .*expected a module or function"),
]


@pytest.mark.parametrize(
    ("options", "text"), WRONG_OPTIONS, ids=[" ".join(options) for options, _ in WRONG_OPTIONS]
)
def test_sizes_and_options(options, text):
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match=r"^ExpertParallel: " + text):
            module(world, **options)
        module(world)(**call())  # nothing was sent, and ranks are in step

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_gradients_are_chosen_by_the_caller():
    """A default would be wrong, in silence, for half of the programs."""

    def body(world):
        with pytest.raises(waybill.InvalidArgument) as error:
            ExpertParallel(plain, group=world, dtype=torch.float32, **SIZES)
        said = str(error.value)
        assert said.startswith('ExpertParallel: gradients = None, expected "sum" or "mean"')
        for reason in ("add gradients over the ranks", "average them (DDP, FSDP)"):
            assert reason in said
        with pytest.raises(waybill.InvalidArgument, match=r"^ExpertParallel: .*gradients"):
            module(world, gradients=None if world.rank == 1 else "sum")
        module(world)(**call())  # nothing was sent, and ranks are in step

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_a_layers_own_words():
    sizes = {"max_tokens": 4, "hidden": 8, "topk": 2, "num_tot_experts": 4}

    def body(world):
        def make(**other):
            given = {**sizes, "rank": world.rank, "local_world_size": 2, "world_size": 2, **other}
            return EPAll2AllLayer(world, **given)

        for other, text in (
            ({"num_tot_experts": 3}, a_multiple("num_tot_experts", 3, "world_size = 2")),
            ({"dtype": torch.int8}, "dtype = int8, expected bfloat16"),
            ({"dropped_id": 9}, "dropped_id = 9, expected -1 or num_tot_experts = 4"),
            ({"expert_alignment": 0}, r"expert_alignment = 0, expected 1\.\."),
            ({"payload": "quantized"}, a_multiple("hidden", 8, 128)),
            ({"payload": "x"}, 'payload = "x", expected "plain"'),
            ({"rows": 3}, 'rows = 3, expected "grouped"'),
            (
                {"payload": "quantized", "dtype": torch.float64, "hidden": 128},
                'dtype = float64, expected bfloat16, float16 or float32 for payload = "float8"',
            ),
            ({"fixed_rows": True}, a_number("fixed_rows", True) + " of rows"),
        ):
            with pytest.raises(waybill.InvalidArgument, match=f"^EPAll2AllLayer: {text}"):
                make(**other)
        layer = make(dtype=torch.float32)
        tokens, ids = torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int64)
        for wrong in (torch.full((3, 2), 7), ids.float(), torch.zeros(5, 2, dtype=torch.int64)):
            with pytest.raises(
                waybill.InvalidArgument, match=f"^dispatch: .*, on rank {world.rank}$"
            ):
                layer.dispatch(tokens, wrong)
        rows, _, layout = layer.dispatch(tokens, ids)
        for biases in (5, tokens, [None]):
            with pytest.raises(waybill.InvalidArgument, match=r"^combine: biases is a "):
                layer.combine(rows, layout, biases=biases)
        assert torch.equal(layer.combine(rows, layout), 2 * tokens)
        layer.finalize()

    waybill.run_threads(WORLD, body, timeout_s=10.0)
    with pytest.raises(waybill.InvalidArgument, match=r"^EPConfig: num_experts = 3, expected"):
        EPConfig(4, 8, 2, 3, 0, 2, 2)


META = torch.ones(3, HIDDEN, device="meta")
WRONG_CALLS = [
    (call(9), r"tokens are 9, expected at most max_tokens = 8"),
    (
        call(tokens=torch.ones(3, HIDDEN).double()),
        r"tokens is torch.float64, expected torch.float32",
    ),
    (call(tokens=META), lies_on("tokens", "meta", "cpu")),
    (call(scores=torch.ones(3, TOPK).cfloat()), r"scores is torch.complex64, expected floats"),
    (call(scores=torch.ones(3, TOPK).long()), r"scores is torch.int64, expected floats"),
    (call(ids=torch.ones(3, TOPK).short()), r"ids is torch.int16, expected int32 or int64"),
    (
        call(ids=torch.full((3, TOPK), 4)),
        r"ids\[0, 0\] of rank \d is 4, expected 0..3, or -1 for none",
    ),
    (call(ids=torch.full((3, TOPK), -2)), r"ids\[0, 0\] of rank \d is -2, expected 0..3"),
]


@pytest.mark.parametrize("options", [{}, {"fixed_rows": 1.0, "operations": True}, {"chunks": 2}])
@pytest.mark.parametrize(("given", "text"), WRONG_CALLS, ids=[text[:12] for _, text in WRONG_CALLS])
def test_calls(given, text, options):
    def body(world):
        made = module(world, **options)
        if world.rank == 1:  # the other does not wait
            with pytest.raises(waybill.InvalidArgument, match=f"^ExpertParallel: {text}") as error:
                made(**given)
            assert "rank 1" in str(error.value)
        assert torch.equal(made(**call()), torch.full((3, HIDDEN), 4.0))
        made.finalize()

    waybill.run_threads(WORLD, body, timeout_s=10.0)


@pytest.mark.parametrize("options", [{}, {"fixed_rows": 1.0, "operations": True}])
@pytest.mark.parametrize(
    "outputs",
    [lambda rows: rows[:, :8], lambda rows: rows[:1], lambda rows: rows.long(), lambda _: None],
)
def test_what_experts_give(outputs, options):
    """Integers would be taken for floats."""

    def body(world):
        made = module(world, lambda rows, ends: outputs(rows), **options)
        with pytest.raises(waybill.InvalidArgument, match=r"what the experts of rank . gave"):
            made(**call())
        made.finalize()

    waybill.run_threads(WORLD, body, timeout_s=10.0)


@pytest.mark.parametrize("options", [{}, {"fixed_rows": 1.0, "operations": True}])
def test_what_shared_experts_give(options):
    """A column, or a row, would be spread over all of them."""

    def body(world):
        for shared in (lambda x: x[:, :1], lambda x: x.sum(0), lambda x: None):
            made = module(world, shared=shared, **options)
            with pytest.raises(waybill.InvalidArgument, match=r"what shared gave on rank"):
                made(**call())
            made.finalize()

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_experts_of_all_ranks_on_each():
    def body(world):
        experts = SwiGLUExperts(EXPERTS, HIDDEN, 16, torch.float32)
        made = module(world, lambda rows, ends: experts(rows, ends))  # does not say how many
        with pytest.raises(waybill.InvalidArgument, match=r"rows of 2 experts, expected 4: num_"):
            made(**call())
        made.finalize()

    waybill.run_threads(WORLD, body, timeout_s=10.0)


@pytest.mark.parametrize("operations", [False, True])
def test_ends_of_an_overflow_lie_in_the_rows(operations):
    """A grouped product by ends behind its rows would write to what is behind them."""

    def body(world):
        seen = []

        def experts(rows, ends):
            seen.append((rows.shape[0], ends.tolist()))
            return rows

        made = module(world, experts, fixed_rows=3, operations=operations)
        sums = made(**call(MOST, ids=torch.zeros(MOST, TOPK, dtype=torch.int64)))
        assert all(ends[-1] <= rows for rows, ends in seen), seen
        assert sums.isnan().any() and made.take_overflow() == WORLD * MOST * TOPK
        made.finalize()
        with pytest.raises(waybill.InvalidArgument, match=f"the module {FINALIZED}"):
            made.resize(5)

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_a_choice_made_twice_is_beyond_the_worst_case():
    """A share of fixed_rows counts different choices; one too many is seen, never silent."""

    def body(world):
        experts = SwiGLUExperts(1, HIDDEN, 16, torch.float32)
        made = module(world, experts, num_experts=WORLD, fixed_rows=1.0)
        different = torch.tensor([[0, 1]]).repeat(MOST, 1)
        assert made(**call(MOST, ids=different)).isfinite().all() and made.take_overflow() == 0
        twice = torch.zeros(MOST, TOPK, dtype=torch.int64)
        assert made(**call(MOST, ids=twice)).isnan().all() == (world.rank == 1)
        assert made.take_overflow() == 2 * WORLD * MOST
        made.finalize()

    waybill.run_threads(WORLD, body, timeout_s=10.0)


@pytest.mark.parametrize(
    "differs",
    [
        {"gradients": "mean"},
        {"weights": "experts"},
        {"windows": "own"},
        {"chunks": 2},
        {"topk": 1},
        {"weight_dtype": torch.bfloat16},
    ],
    ids=lambda differs: next(iter(differs)),
)
def test_what_ranks_have_otherwise_is_told(differs):
    """Also where modules share a layer that is there: nothing else would compare it."""
    name = next(iter(differs))

    def body(world):
        there = module(world)
        with pytest.raises(waybill.InvalidArgument, match=rf"^ExpertParallel: .*{name}"):
            module(world, **(differs if world.rank == 1 else {}))
        there(**call())
        there.finalize()

    waybill.torch.run_threads(WORLD, body, timeout_s=20)
