"""Odd values at every door: an error of ours that names the argument, or a result; never another
error, and nothing that is silently taken for something else.
"""

import inspect

import numpy as np
import pytest

import waybill
import waybill.moe

torch = pytest.importorskip("torch")
import waybill.torch as wt  # noqa: E402
from waybill.integrations.deep_ep.events import EventHandle  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts  # noqa: E402

MATRIX = np.ones((2, 3))
ODD = [
    None, "abc", "", b"x", [], [[]], [[1], [1, 2]], {}, {"a": 1}, {1, 2}, object(), print,
    1.5, -5, 0, 3, float("nan"), float("inf"), 2**63, 2**70, 10**5000, True, np.int32(3),
    np.array(3), np.ones(0),
    *(MATRIX.astype(kind) for kind in (bool, np.int16, np.uint8, complex, ">i8", np.longdouble)),
    MATRIX * np.nan, -MATRIX.astype(int), np.full((2, 3), 2**62), np.array([object()]),
    np.array(["a"]), np.array(["2020-01-01"], "M8[D]"), np.zeros(3, [("a", int)]),
    np.ones((2, 3, 4), int)[:, ::2], torch.tensor(2), torch.empty(0), torch.ones(2, 3),
    torch.ones(2, 3, requires_grad=True), torch.ones(2, 3).to_sparse(),
    torch.ones(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bfloat16),
    torch.ones(2, 3, dtype=torch.cfloat).conj(),
    torch._neg_view(torch.ones(2, 5, 8)), "\ud800\x1b[31m",
]  # fmt: skip
LENGTHS, DISPATCH = np.array([[3, 2], [4, 1]]), np.array([[1, 0], [1, 0]])
DOCUMENTS = [300, 80, 20]
#: Errors about the other argument, which no longer fits.
PARTNERS = {
    "tensor": ("mask", "index", "scalar", "source", "dim"),
    "tensors": ("num_recv_tokens", "world_size", "source"),
    "seq_len": ("global_dispatch",), "doc_lengths": ("lists of documents",),
    "world_size": ("rank_shard_offsets", "lists of documents"),
    "shard_len": ("rank_shard_offsets", "doc_shard"), "q_dst": ("plan.",),
}  # fmt: skip


def functions(face):
    given = torch.tensor if face is wt else np.array
    fwd, _ = face.compute_metadata(given(LENGTHS), given(DISPATCH))
    rows = given(np.ones((2, 5, 8)))
    sizes = {"doc_lengths": DOCUMENTS, "world_size": 2, "tokens_per_rank": 200}
    random = {"world_size": 2, "total_seq_len": 16, "num_seqs": 2, "max_cp_degree": 2, "seed": 1}
    return [
        (face.compute_metadata, {"seq_len": given(LENGTHS), "global_dispatch": given(DISPATCH)}),
        (face.exclusive_cumsum, {"tensor": given(LENGTHS)}),
        (face.prepend_zero, {"tensor": given(LENGTHS)}),
        (face.mask_by_neg, {"tensor": given(LENGTHS), "mask": given(DISPATCH)}),
        (
            face.index_put_with_neg_padding_1d,
            {"tensor": given([1, 2, 3]), "src": given([1, 2]), "index": given([0, -1])},
        ),
        (face.mlp_layout_packed_params, {"seq_lens": given([1, 2])}),
        (
            face.orchestrate_simulate,
            {"tensor": rows, "output_tensor": given(np.zeros((2, 7, 8))), "metadata": fwd},
        ),
        (face.simulate_communication, {"tensors": [rows[0], rows[1]], "metadata": fwd}),
        (face.create_qkv_dispatch, random),
        (face.create_raw_qkv_dispatch, random),
        (face.gen_seq_lens, {"world_size": 2, "num_seqs": 3, "total_len": 30, "seed": 1}),
        (fwd.get_slice, {"rank": 0}),
        (face.run_threads, {"world_size": 2, "body": lambda world: 1, "timeout_s": 5}),
        (face.plan, sizes),
        (face.zigzag_plan, sizes),
        (face.compare, {**sizes, "degree": 1}),
        (face.predict_step, {"plan": face.plan(**sizes)}),
    ]


PLAN = {
    "world_size": 1, "rank_shard_offsets": [0, 1], "shard_len": [2], "q_dst": [0],
    "doc_shard_offsets": [0, 1], "doc_shards": [0],
}  # fmt: skip
OTHERS = [
    (waybill.QkvPlan, PLAN),
    (waybill.moe.EPConfig, dict(zip(
        ("max_tokens", "hidden", "topk", "num_experts", "rank", "world_size", "local_world_size"),
        (4, 8, 2, 4, 0, 2, 2)))),
    (wt.BatchPlanner, {"world_size": 2, "heads": 2}),
    (wt.pack, {"documents": [torch.ones(3)]}),
    (wt.unpack, {"rows": torch.ones(3), "pieces": [1, 2]}),
    (waybill.moe.quantize_fp8, {"rows": np.ones((2, 128), np.float32)}),
]  # fmt: skip
CASES = [*functions(waybill), *functions(wt), *OTHERS]


def refusal(call, argument):
    """The text of the error that a call ends with; None without."""
    try:
        call()
    except waybill.Error as error:
        text = str(error)
        text.encode()  # prints on any terminal
        assert len(text) < 1000
        names = (argument, *PARTNERS.get(argument, ()))
        assert any(name in text for name in names), f"{argument}: {text}"
        return text
    return None


@pytest.mark.filterwarnings("ignore:.*carries none")
@pytest.mark.parametrize(
    ("function", "given"), CASES, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_functions(function, given):
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name not in ("args", "who")
    ]
    for name in names:
        for value in ODD:
            refusal(lambda name=name, value=value: function(**{**given, name: value}), name)


@pytest.mark.filterwarnings("ignore:.*carries none")
@pytest.mark.parametrize("face", [waybill, wt])
def test_dispatchers(face):
    plan = waybill.plan(DOCUMENTS, world_size=1, tokens_per_rank=400)
    routing = plan.to_routing()
    rows = torch.ones(400, 8) if face is wt else np.ones((400, 8), np.float32)

    def body(world):
        dispatcher = face.SequenceDispatcher(world)
        ready = dispatcher.plan_dispatch((routing.fwd_q, rows))
        sums = dispatcher.plan_kv_gradient((routing.fwd_kv, rows))
        for odd in ODD:
            for name in ("num_sms", "chunk_bytes", "local_by_copy_engine", "relay", "world"):
                given = {"world": world, name: odd}
                refusal(lambda given=given: face.SequenceDispatcher(**given), name)
            for argument, call in (
                ("parts[0]", lambda odd=odd: dispatcher.plan_dispatch(odd)),
                ("parts[0][0]", lambda odd=odd: dispatcher.plan_dispatch((odd, rows))),
                ("parts[0][1]", lambda odd=odd: dispatcher.plan_dispatch((routing.fwd_q, odd))),
                ("dtype", lambda odd=odd: dispatcher.plan_dispatch(
                    (routing.fwd_q, waybill.TensorFormat(odd, (8,))))),
                ("row_shape", lambda odd=odd: dispatcher.plan_dispatch(
                    (routing.fwd_q, waybill.TensorFormat("float32", odd)))),
                ("plan", lambda odd=odd: dispatcher.dispatch(odd, rows)),
                ("plan", lambda odd=odd: dispatcher.replace_plan(odd, (routing.fwd_q, rows))),
                ("parts", lambda odd=odd: dispatcher.replace_plan(ready, odd)),
                ("tensors", lambda odd=odd: dispatcher.dispatch(ready, odd)),
                ("of_dispatch", lambda odd=odd: dispatcher.dispatch(ready, rows, of_dispatch=odd)),
                ("gradients", lambda odd=odd: dispatcher.kv_gradient(sums, odd)),
                ("out", lambda odd=odd: dispatcher.kv_gradient(sums, rows, out=odd)),
                ("out", lambda odd=odd: dispatcher.kv_gradient(sums, rows, out=[odd])),
                ("", lambda odd=odd: dispatcher.kv_gradient(sums, rows, dtype=odd)),
                ("plan", lambda odd=odd: dispatcher.gradient_inputs(odd)),
                ("bytes", lambda odd=odd: odd is None or dispatcher.reserve(odd)),
            ):  # fmt: skip
                refusal(call, argument)
        (received,) = dispatcher.dispatch(ready, rows)
        assert (received == rows).all()  # nothing of this has harmed it
        dispatcher.close()

    face.run_threads(1, body)


def test_sums_need_memory_of_their_own():
    """Rows that lie on each other would hold the last sum."""
    routing = waybill.plan([3, 2], 1, 5).to_routing()

    def body(world):
        dispatcher = wt.SequenceDispatcher(world)
        gradients = torch.arange(40.0).reshape(5, 8)
        plan = dispatcher.plan_kv_gradient((routing.fwd_kv, gradients))
        (sums,) = dispatcher.kv_gradient(plan, gradients, out=[torch.zeros(5, 8)])
        assert torch.equal(sums, gradients)
        with pytest.raises(waybill.InvalidArgument, match=r"out\[0\] has rows of 8 elements, 0 ap"):
            dispatcher.kv_gradient(plan, gradients, out=[torch.zeros(1, 8).expand(5, 8)])
        with pytest.raises(waybill.InvalidArgument, match=r"out is Tensor, expected a list of 1"):
            dispatcher.kv_gradient(plan, gradients, out=torch.zeros(5, 8))
        with pytest.raises(waybill.InvalidArgument, match=r"parts\[0\] = a tuple, expected"):
            dispatcher.plan_dispatch((routing.fwd_q,))
        assert dispatcher.kv_gradient(plan, gradients, dtype="float32")[0].dtype == torch.float32

    wt.run_threads(1, body)


def test_layers():
    def body(world):
        given = {
            "ep_group": world, "max_tokens": 4, "hidden": 128, "topk": 2, "rank": 0,
            "num_tot_experts": 4, "local_world_size": 1, "world_size": 1,
        }  # fmt: skip
        for name in inspect.signature(EPAll2AllLayer).parameters:
            for odd in ODD:
                refusal(lambda name=name, odd=odd: EPAll2AllLayer(**{**given, name: odd}), name)
        layer = EPAll2AllLayer(**given)
        tokens, weights = torch.ones(3, 128, dtype=torch.bfloat16), torch.ones(3, 2)
        ids = torch.tensor([[0, 1], [2, 3], [0, 3]])
        call = {"input": tokens, "exp_indices": ids, "weight": weights}
        rows, _, layout = layer.dispatch(**call)
        for odd in ODD:
            for name in inspect.signature(layer.dispatch).parameters:
                refusal(lambda name=name, odd=odd: layer.dispatch(**{**call, name: odd}), name)
            refusal(lambda odd=odd: layer.combine(odd, layout), "input")
            refusal(lambda odd=odd: layer.combine(rows, odd), "ep_a2a_layout_desc")
            refusal(lambda odd=odd: layer.combine(rows, layout, weighted=odd), "weighted")
        layer.finalize()

    wt.run_threads(1, body)


def test_nothing_is_taken_for_none():
    """A tensor without axes is no tensor to the compiled part: its weights were left out."""

    def body(world):
        layer = EPAll2AllLayer(world, 4, 128, 2, 0, 4, 1, 1)
        tokens, ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)
        for name in ("weight", "scales", "full_scatter_indices"):
            with pytest.raises(waybill.InvalidArgument, match=f"dispatch: {name} has no axes"):
                layer.dispatch(tokens, ids, **{name: torch.tensor(2.0)})
        with pytest.raises(waybill.InvalidArgument, match="device = 'cuda', expected cpu, that of"):
            EPAll2AllLayer(world, 4, 128, 2, 0, 4, 1, 1, device="cuda")
        with pytest.raises(waybill.InvalidArgument, match="EPAll2AllLayer: num_tot_experts = -1"):
            EPAll2AllLayer(world, 4, 128, 2, 0, -1, 1, 1)
        layer.finalize()

    wt.run_threads(1, body)


@pytest.mark.parametrize("value", ["no", "never", 2, None, [], 0.0])
def test_switches_are_true_or_false(value):
    with pytest.raises(waybill.WrongType, match=r"plan: relay = .*, expected True or False"):
        waybill.plan(DOCUMENTS, 2, 200, relay=value)
    assert waybill.plan(DOCUMENTS, 2, 200, relay=0) == waybill.plan(DOCUMENTS, 2, 200, relay=False)


def test_modules():
    """Their calls; and scores that lie otherwise than the tokens are those of other tokens."""

    def body(world):
        given = {
            "num_experts": 2, "topk": 1, "hidden": 8, "max_tokens": 8, "group": world,
            "gradients": "sum",
        }  # fmt: skip
        experts = SwiGLUExperts(2, 8, 8)
        for name in (*given, "weights", "windows", "chunks", "preset", "operations"):
            for odd in ODD:
                refusal(
                    lambda name=name, odd=odd: ExpertParallel(experts, **{**given, name: odd}),
                    "_experts" if name == "num_experts" else name,
                )
        module = ExpertParallel(experts, **given)
        call = {
            "tokens": torch.ones(2, 3, 8, dtype=torch.bfloat16), "scores": torch.ones(2, 3, 1),
            "ids": torch.zeros(2, 3, 1, dtype=torch.int64),
        }  # fmt: skip
        want = module(**call)
        flat = {name: value.flatten(0, 1) for name, value in call.items() if name != "tokens"}
        assert torch.equal(module(call["tokens"], **flat), want)
        for name in call:
            for odd in ODD:
                refusal(
                    lambda name=name, odd=odd: module(**{**call, name: odd}), "ExpertParallel: "
                )
        with pytest.raises(
            waybill.InvalidArgument, match=r"scores has shape \[3, 2, 1\], expected"
        ):
            module(**{**call, "scores": call["scores"].transpose(0, 1)})
        module.finalize()

    wt.run_threads(1, body)


@pytest.mark.parametrize("stream", ["x", 1, [], object()])
def test_streams(stream):
    def body(world):
        layer = EPAll2AllLayer(world, 4, 8, 1, 0, 2, 1, 1, torch.float32)
        for call in (layer.ep_barrier_all, layer.synchronize):
            with pytest.raises(waybill.InvalidArgument) as caught:
                call(stream)
            text = str(caught.value)
            assert text.startswith(f"{call.__name__}: stream = "), text
            assert text.endswith(", expected a torch.cuda.Stream or None"), text

    wt.run_threads(1, body)
    with pytest.raises(waybill.InvalidArgument, match=r"^EventHandle\.stream_wait: stream = "):
        EventHandle().stream_wait(stream)
