"""Arguments of a wrong type or size: an error of ours that names them, and a TypeError too."""

import inspect
import pickle

import numpy as np
import pytest
from error_texts import a_number, an_integer

import waybill
import waybill.moe
from waybill import _core, _errors

LENS, DISPATCH = np.array([[4, 2], [3, 0]]), np.array([[1, 0], [1, -1]])
PLAN = waybill.QkvPlan(1, [0, 1], [3], [0], [0, 1], [0])
HUGE = 2**63


def config():
    return waybill.moe.EPConfig(4, 8, 1, 2, 0, 1, 1)


CASES = [
    (lambda: waybill.gen_seq_lens("two", 1, 1), "gen_seq_lens: world_size = 'two', expected an in"),
    (lambda: waybill.gen_seq_lens(HUGE, 1, 1), f"gen_seq_lens: world_size = {HUGE}, expected"),
    (lambda: waybill.gen_seq_lens(1, 1, 1.5), an_integer("gen_seq_lens: total_len", 1.5)),
    (lambda: waybill.sample_documents(5, 10), "sample_documents: distribution = 5, expected str"),
    (lambda: waybill.sample_documents("x", HUGE), f"sample_documents: num_tokens = {HUGE}, exp"),
    (lambda: waybill.exclusive_cumsum(LENS, "x"), "exclusive_cumsum: dim = 'x', expected an integ"),
    (lambda: waybill.exclusive_cumsum(LENS, -HUGE - 1), f"exclusive_cumsum: dim = {-HUGE - 1}, ex"),
    (lambda: PLAN.summary("wide"), an_integer("summary_text: q_row_bytes", "'wide'")),
    (lambda: PLAN.summary(1, HUGE), an_integer("summary_text: kv_row_bytes", HUGE)),
    (lambda: PLAN.summary(1, 1, "fast"), a_number("summary_text: gb_per_s", "'fast'")),
    (lambda: PLAN.to_html(title=7), "report_page: title = 7, expected str"),
    (lambda: PLAN.to_metadata("all"), an_integer("to_metadata: num_threads", "'all'")),
    (lambda: PLAN.to_raw_dispatch(HUGE), f"to_raw_dispatch: max_cp_degree = {HUGE}, expected"),
    (lambda: PLAN.to_routing(HUGE), f"QkvPlan.to_routing: num_threads = {HUGE}, expected an in"),
    (lambda: waybill.validate(PLAN, max_findings="x"), an_integer("max_findings", "'x'")),
    (lambda: waybill.plan([5], 1, imbalance_target="x"), "plan: imbalance_target = 'x', expected"),
    (lambda: waybill.plan([5], 1, byte_weight=None), a_number("plan: byte_weight", None)),
    (lambda: waybill.plan([5], HUGE), an_integer("plan: world_size", HUGE) + " of 64"),
    (
        lambda: waybill.compare([5], 1, message_seconds=[]),
        a_number("compare: message_seconds", "a list"),
    ),
    (lambda: waybill.predict_step(PLAN, 5), "predict_step: transfer = 5, expected str"),
    (lambda: waybill.predict_step(PLAN, pull_share="x"), "predict_step: pull_share = 'x', expect"),
    (
        lambda: waybill.moe.summarize(config(), [[[0]]], payload=3),
        "summarize: payload = 3, expected",
    ),
]


@pytest.mark.parametrize(("call", "text"), CASES, ids=[text for _, text in CASES])
def test_wrong_types_are_named(call, text):
    with pytest.raises(waybill.WrongType) as caught:
        call()
    assert text in str(caught.value)
    assert len(str(caught.value)) < 300 and "incompatible" not in str(caught.value)
    assert isinstance(caught.value, (waybill.InvalidArgument, TypeError, ValueError))
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), waybill.WrongType)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, float("-inf")])
def test_options_that_are_no_numbers_of_the_world(value):
    for call in (
        *(
            lambda name=name: waybill.plan([5, 6], 2, **{name: value})
            for name in ("imbalance_target", "byte_weight", "nvlink_bytes_per_second",
                         "network_bytes_per_second", "message_seconds", "pairs_per_second")
        ),
        *(
            lambda name=name: waybill.predict_step(PLAN, **{name: value})
            for name in ("nvlink_bytes_per_second", "network_bytes_per_second", "message_seconds",
                         "pairs_per_second", "phase_seconds", "pull_share", "forward_share",
                         "network_message_seconds", "forward_flops_per_second",
                         "backward_flops_per_second")
        ),
        lambda: waybill.compare([5, 6], 2, message_seconds=value),
        lambda: PLAN.summary(gb_per_s=value),
        lambda: PLAN.to_html(gb_per_s=value),
        lambda: waybill.moe.summarize(config(), [[[0]]]).text(nvlink=value),
        lambda: waybill.moe.summarize(config(), [[[0]]]).limit_seconds(network=value),
    ):  # fmt: skip
        with pytest.raises(waybill.InvalidArgument, match="expected"):
            call()


SIZES = (2**31, 2**32, HUGE - 1, HUGE, 2**64, 2**70, 10**5000, -HUGE, -HUGE - 1)


@pytest.mark.parametrize("value", SIZES, ids=range(len(SIZES)))
def test_integers_of_any_size(value):
    rev_kv = PLAN.to_metadata().rev_kv
    for call in (
        lambda: waybill.plan([5], 1, ranks_per_node=value),
        lambda: waybill.predict_step(PLAN, ranks_per_node=value),
        lambda: waybill.predict_step(PLAN, forward_chunk_bytes=-abs(value)),
        lambda: waybill.compare([5], 1, ranks_per_node=value),
        lambda: waybill.compare([5], 1, degree=value),
        lambda: waybill.create_qkv_dispatch(value, 8, 1, 1),
        lambda: waybill.create_raw_qkv_dispatch(2, 8, value, 1),
        lambda: waybill.mlp_layout_packed_params([value, -1]),
        lambda: waybill.moe.EPConfig(4, 8, value, 2, 0, 1, 1),
        lambda: waybill.run_threads(value, print),
        lambda: waybill.run_threads(2, print, ranks_per_node=value),
        lambda: waybill.sum_kv_copies(np.zeros((3, 1)), rev_kv, value),
    ):
        with pytest.raises(waybill.InvalidArgument):
            call()


def test_all_functions_of_the_compiled_part_are_guarded():
    """But operators, and what tells it of the errors."""
    num = 0
    for name, owner in [("_core", _core), *vars(_core).items()]:
        if owner is not _core and not inspect.isclass(owner):
            continue
        for member, value in vars(owner).items():
            kind = type(value).__name__
            if kind in ("nb_func", "nb_method"):
                assert member.startswith("__"), f"{name}.{member}"
            num += kind == "Function"
    assert num > 60
    assert _core.gen_seq_lens.__name__ == "gen_seq_lens"
    with pytest.raises(TypeError):
        type(_core.gen_seq_lens)()


def test_other_type_errors_stay_as_they_are():
    def all_gather(_):
        raise TypeError("f(): incompatible by itself")

    with pytest.raises(TypeError, match="incompatible by itself") as caught:
        waybill.World.from_all_gather(0, 2, all_gather)
    assert not isinstance(caught.value, waybill.Error)


def test_texts_of_any_shape_are_described():
    one = "f(): incompatible function arguments. The following argument types are supported:\n"
    several = one + "    1. f(a: int, b: str | None = None, c: dict[str, int] = {}) -> None\n"

    def describe(text, given, by_name):
        return str(_errors._wrong_call(text, given, by_name))

    assert describe("no signature", [1], {}) == "no signature"
    assert describe(several, [1.5], {}) == an_integer("f: a", 1.5)
    assert describe(several, [1], {"b": 2}) == "f: b = 2, expected str or None"
    assert describe(several, [2**40], {}).startswith("f: a = 1099511627776, expected")
    assert describe(several, [1, "x"], {"d": 3}) == (
        "f: got (1, 'x', 3), expected (a: int, b: str | None, c: dict[str, int])"
    )
    assert len(describe(several, [10**5000], {})) < 200
    assert len(describe(several, ["x" * 10**6], {})) < 200


EVIL = "\x1b]0;x\x07\x9b31m\x7f\u202e\udc9b"


def test_errors_can_be_printed(tmp_path):
    shown = "\\x1b]0;x\\x07\\u009b31m\\x7f\\u202e\\x9b"
    assert str(waybill.InvalidArgument(EVIL + "\n")) == shown + "\n"
    assert str(waybill.IoError(EVIL)) == shown
    for call in (
        lambda: waybill.plan([5], 1, mask=EVIL),
        lambda: waybill.plan([5], 1, dtype=EVIL[:-1]),
        lambda: waybill.plan([5], 1, dtype=EVIL),  # a surrogate is no text for the compiled part
        lambda: waybill.sample_documents(EVIL[:-1], 5),
        lambda: waybill.QkvPlan.from_json('{"format": "\\u001b\\u009b"}'),
        lambda: waybill.QkvPlan.from_json(tmp_path / "\x1b\udc9b.json"),
        lambda: waybill.gen_seq_lens(EVIL, 1, 1),
    ):
        (tmp_path / "\x1b\udc9b.json").write_text('{"format": "x"}')
        with pytest.raises(waybill.Error) as caught:
            call()
        assert str(caught.value).isprintable(), ascii(str(caught.value))


def test_files_without_end():
    with pytest.raises(waybill.IoError, match="/dev/zero: cannot read: more than 1 GiB"):
        waybill.QkvPlan.from_json("/dev/zero")


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(waybill.IoError, match=r"plan\.json: is no UTF-8 text"):
        waybill.QkvPlan.from_json(tmp_path / "plan.json")
    with pytest.raises(waybill.InvalidArgument, match="expected a path"):
        waybill.QkvPlan.from_json("a\0b")
