"""Odd arguments of attention in a training program: each is taken, or refused by the caller's name;
none ends in an error of something underneath.
"""

import contextlib
import inspect

import pytest
from packed import module
from test_odd_arguments import ODD, refusal

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

CPU = {"device": "cpu", "dtype": torch.float32, "rows": 256, "repeats": 1}


def refused(function, given, names, values=ODD):
    """How many of the values are."""
    count = 0
    for name in names:
        for value in values:
            call = {**given, name: value}
            count += refusal(lambda call=call: function(**call), name) is not None
    return count


def test_plans_pieces_and_capacities():
    plan = wt.BatchPlanner(2, 4).plan([[5], [3]])
    for method in (plan.positions, plan.documents, plan.last_rows, plan.home_sequences):
        assert refused(method, {"rank": 0}, ("rank", "device")) > 10
    for odd in ODD:
        refusal(lambda odd=odd: wt.Capacities.of(odd), "plans[0]")
        refusal(lambda odd=odd: wt.Capacities.of(plan).scaled(odd), "factor")
        refusal(lambda odd=odd: wt.InPlaceRule(1, odd) and rule(1, odd), "min_share")
        refusal(lambda odd=odd: rule(odd, 0.5), "min_rows")
        refusal(lambda odd=odd: wt.pack([torch.arange(3)]).to(odd), "device")
        for pieces in (odd, [odd, []], [[odd], []], [[(0, 0, odd)], []], [[(0, odd, 1)], []]):
            refusal(lambda pieces=pieces: plan.planner.plan(pieces), "BatchPlanner.plan")
    for wrong in (-1, 0, float("nan"), float("inf")):
        with pytest.raises(waybill.InvalidArgument, match="factor"):
            wt.Capacities.of(plan).scaled(wrong)
    with pytest.raises(waybill.InvalidArgument, match=r"BatchPlanner.plan: document 7: token 2"):
        plan.planner.plan([[(7, 0, 3)], [(7, 2, 3)]])


def rule(min_rows, min_share):
    return wt.BatchPlanner(2, 4, in_place=wt.InPlaceRule(min_rows, min_share))


def test_sequences():
    of = wt.kernels.Sequences.of
    refused(of, {"q_lens": [3], "k_lens": [3]}, ("q_lens", "k_lens", "device"))
    for q_lens, k_lens, message in (
        ([1], [2, 3], "k_lens are 2 lengths, expected 1"),
        ([-1], [2], r"q_lens = \[-1\], expected lengths >= 0"),
        ([1.5], [2], r"q_lens\[0\] = 1.5"),
        ([1, 1], [2**31 - 1, 5], "k_lens = .*, expected lengths >= 0, 2\\^31 - 1 in all"),
    ):
        with pytest.raises(waybill.InvalidArgument, match=message):
            of(q_lens, k_lens)


def test_a_plan_keeps_no_array_of_the_caller():
    np = pytest.importorskip("numpy")
    held = [np.array([[1, 0, 5]]), np.array([[1, 5, 5]])]
    plan = wt.BatchPlanner(2, 4).plan(held)
    held[0][:] = 0
    assert plan.home_tokens == [5, 5]
    with pytest.raises(waybill.InvalidArgument, match="document -1, expected >= 0"):
        wt.BatchPlanner(2, 4).plan([np.array([[-1, 0, 5]]), []])


def test_calibration_and_costs():
    given = {"heads": 2, "kv_heads": 1, "head_dim": 8, **CPU}
    for name in inspect.signature(wt.calibrate_attention).parameters:
        values = [v for v in ODD if not isinstance(v, int) or abs(v) < 2]
        for value in values:
            with contextlib.suppress(waybill.Error):  # also of times that are too short to tell
                wt.calibrate_attention(**{**given, name: value})
    for name, message in (("rows", "256..2"), ("repeats", "1..2"), ("device", "a device")):
        with pytest.raises(waybill.InvalidArgument, match=message):
            wt.calibrate_attention(**{**given, name: -1})
    if not torch.cuda.is_available():
        with pytest.raises(waybill.Unsupported, match="device = cuda, and torch sees no GPU"):
            wt.calibrate_attention(2)
    for odd in ODD:
        refusal(lambda odd=odd: waybill.AttentionCosts(1e12, about=odd).to_json(), "about")
    costs = waybill.AttentionCosts(1e12, about={"device": "H200"})
    assert hash(costs) == hash(waybill.AttentionCosts(1e12)) != hash(waybill.AttentionCosts(1e9))


def test_files_of_costs(tmp_path):
    """A number in place of a path is no file: 1 would be the output of the program."""
    costs, path = waybill.AttentionCosts(1e12, row_pairs=3), tmp_path / "costs.json"
    for odd in (0, 1, 5, True, [1], b"x", "\0", "\ud800"):
        with pytest.raises(waybill.InvalidArgument, match="to_json: path = "):
            costs.to_json(odd)
    costs.to_json(path)
    assert waybill.AttentionCosts.from_json(path) == costs
    for about in ({"a": torch.ones(2)}, {"a": float("nan")}, {(1, 2): 3}):
        with pytest.raises(waybill.InvalidArgument, match="about holds no JSON"):
            waybill.AttentionCosts(1e12, about=about).to_json()


def test_modules():
    names = [
        name
        for name in inspect.signature(wt.ContextParallelAttention).parameters
        if name not in ("group", "timeout_s")
    ]

    def body(world):
        given = {"group": world, "heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": torch.float32}
        assert refused(wt.ContextParallelAttention, given, names) > 100
        for kernel in (wt.kernels.FlexKernel, int):
            with pytest.raises(waybill.InvalidArgument, match="kernel is the class"):
                wt.ContextParallelAttention(**{**given, "kernel": kernel})
        for dtype in (torch.float8_e4m3fn, "float8_e5m2"):
            with pytest.raises(
                waybill.InvalidArgument, match="a torch float dtype of 16 bits or more"
            ):
                wt.ContextParallelAttention(**{**given, "dtype": dtype})

    wt.run_threads(1, body)


def rows_of(kind):
    ones = torch.ones(5, 2, 8).double()
    return {
        "nested": lambda: torch.nested.nested_tensor([torch.ones(5, 8)]),
        "meta": lambda: ones.to("meta"),
        "sparse": lambda: ones.to_sparse(),
        "integers": lambda: ones.long(),
    }[kind]()


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("way", ["plan", "ticket", "fixed"])
def test_calls(way):
    def body(world):
        attend = module(world)
        plan = attend.plan([[5]])
        fixed = attend.fixed_plan(plan, wt.Capacities.of(plan))
        ones = {n: torch.ones(5, 2 if n == "q" else 1, 8).double() for n in "qkv"}
        given = {"plan": {"plan": plan, "ticket": attend.ticket(plan), "fixed": fixed}[way], **ones}
        assert refused(attend, given, ("q", "k", "v", "plan", "return_lse", "token")) > 50
        for kind in ("nested", "meta", "sparse", "integers"):
            with pytest.raises(waybill.InvalidArgument, match="q "):
                attend(**{**given, "q": rows_of(kind)})
        for odd in ODD:
            refusal(lambda odd=odd: fixed.padded(odd), "tensor")
            refusal(lambda odd=odd: fixed.replace(odd), "plan")
            refusal(lambda odd=odd: attend.fixed_plan(plan, odd), "capacities")
            for call in (attend.prepare, attend.varlen, attend.memory, attend.ticket, attend.plan):
                refusal(lambda odd=odd, call=call: call(odd), "p")
        assert torch.equal(attend(**given), ones["q"])  # nothing of this has harmed it

    wt.run_threads(1, body)


def test_a_token_and_a_number_that_are_none():
    def body(world):
        attend = module(world)
        ticket = attend.ticket(attend.plan([[5]]))
        q, k, v = (torch.ones(5, n, 8).double() for n in (2, 1, 1))
        with pytest.raises(waybill.InvalidArgument, match=r"token is torch.float32 \[3\]"):
            attend(ticket, q, k, v, token=torch.zeros(3))
        with pytest.raises(waybill.InvalidArgument, match=r"number has shape \[2\]"):
            attend(ticket._replace(number=torch.tensor([1, 2])), q, k, v)

    wt.run_threads(1, body)


def test_packed_labels_have_a_number_for_ignored():
    """Tokens of few bits, as files of tokens hold them, or without a sign."""
    for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int32, torch.bool):
        packed = wt.pack([torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1]).to(dtype)])
        assert packed.tokens.dtype == dtype and packed.labels.dtype == torch.int64
        assert packed.labels.tolist() == [0, 1, -100, -100]
    assert wt.pack([torch.ones(2, 3)]).labels.dtype == torch.float32


@pytest.mark.parametrize(
    "documents, message",
    [
        ([torch.ones(2), torch.ones(2).long()], r"documents\[1\] has dtype torch.int64"),
        ([torch.ones(2), torch.ones(2, 3)], r"documents\[1\] has rows of shape \[3\]"),
        ([torch.ones(2), torch.ones(2, device="meta")], r"documents\[1\] has device meta"),
        ({"text": torch.ones(2)}, "documents is a dict"),
        ("text", "documents is a str"),
    ],
)
def test_documents_that_do_not_fit_each_other(documents, message):
    with pytest.raises(waybill.InvalidArgument, match=message):
        wt.pack(documents)
