"""torch.compile and functions: they end a graph cleanly; results and dtypes are those without."""

import subprocess
import sys

import numpy as np
import pytest

import waybill

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")

from compiling import MARKS, Graphs, same  # noqa: E402

import waybill.torch as wt  # noqa: E402

pytestmark = MARKS
FORWARD, REVERSE = wt.compute_metadata(
    torch.tensor([[3, 1], [2, 0]]), torch.tensor([[[1, 0], [0, -1]], [[0, 1], [-1, -1]]])
)


HELPERS = {
    "exclusive_cumsum": lambda x: wt.exclusive_cumsum(x),
    "exclusive_cumsum of rows": lambda x: wt.exclusive_cumsum(x.reshape(2, 2), 1),
    "prepend_zero": lambda x: wt.prepend_zero(x),
    "prepend_zero_fn": lambda x: wt.prepend_zero_fn(x),
    "mask_by_neg": lambda x: wt.mask_by_neg(x, x > 3),
    "index_put": lambda x: wt.index_put_with_neg_padding_1d(x, x, torch.tensor([3, -1, 0, 1])),
}


@pytest.mark.parametrize("dtype", ["int32", "bfloat16"])
@pytest.mark.parametrize("name", HELPERS)
def test_helpers(name, dtype):
    """Graphs before and behind."""
    values = torch.tensor([1, 2, 3, 0]).to(getattr(torch, dtype))

    def program(x):
        return HELPERS[name](x * 2) + 1

    graphs = Graphs()
    same(torch.compile(program, backend=graphs)(values), program(values))
    assert graphs.count >= 2


def test_helpers_by_a_compiler(backend):
    def program(x, mask):
        tables = wt.exclusive_cumsum(x * 2, 1), wt.mask_by_neg(x + 1, mask)
        return tables[0] + tables[1].sum(), wt.prepend_zero(tables[1] * 3)

    given = torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.tensor([1, 0, 1])
    for got, want in zip(torch.compile(program, backend=backend)(*given), program(*given)):
        same(got, want)


def test_orchestrate_simulate(backend):
    kind = torch.bool if backend == "eager" else torch.bfloat16

    def program(x, output):
        moved = wt.orchestrate_simulate(x.roll(1, 0), output, FORWARD)
        assert moved is output
        return moved.flip(0)

    x = (torch.arange(2 * 4 * 3).reshape(2, 4, 3) % 5).to(kind)
    outputs = [torch.zeros(2, 6, 3, dtype=kind) for _ in range(2)]
    got = torch.compile(program, backend=backend)(x, outputs[0])
    same(got, program(x, outputs[1]))
    same(outputs[0], outputs[1])
    assert got.any()


def test_a_simulation_says_here_too_that_it_carries_no_gradients():
    def program(x):
        output = torch.zeros(2, 6, 3)
        return wt.orchestrate_simulate(x * 2, output, FORWARD)

    with pytest.warns(UserWarning, match="carries none") as caught:
        got = torch.compile(program, backend="eager")(torch.ones(2, 4, 3, requires_grad=True))
    assert not got.requires_grad
    assert [w.filename for w in caught if "carries none" in str(w.message)] == [__file__]


def test_routing():
    """Tables, slices, device forms, layouts and generators, made from tensors of a graph."""

    def program(lens, dispatch):
        forward, reverse = wt.compute_metadata(lens + 1, dispatch * 1)
        part = forward.get_slice(1).normalize_dtype()
        layout = wt.compute_attn_layout_seqlens(lens + 1, lens + 1, dispatch, True, False)
        packed = wt.mlp_layout_packed_params(lens[0] + 1)
        drawn = wt.gen_seq_lens(2, 3, 40, seed=1)
        moved = wt.simulate_communication([lens[0][:, None].float() + 1, lens[1][:2, None] * 1.0],
                                          FORWARD)  # fmt: skip
        return (
            forward.dst_offset + 1, reverse.num_recv_tokens * 2, part.seq_len,
            layout.cu_seqlens_q + 0, packed.cu_seqlens_q * 1, drawn + 1, moved[0] * 1,
        )  # fmt: skip

    lens, dispatch = torch.tensor([[4, 2, 1, 3], [1, 3, 2, 5]]), torch.tensor([[1, 0] * 2] * 2)
    for got, want in zip(
        torch.compile(program, backend="eager")(lens, dispatch), program(lens, dispatch)
    ):
        same(got, want)


def test_functions_for_arrays():
    """numpy's, in a compiled function: arrays stay arrays."""

    def program(x):
        forward, _ = waybill.compute_metadata([[3, 1], [2, 0]], [[1, 0], [0, -1]])
        output = np.zeros((2, 5, 2), np.float32)
        waybill.orchestrate_simulate(np.ones((2, 4, 2), np.float32), output, forward)
        return x + float(output.sum())

    same(torch.compile(program, backend="eager")(torch.ones(2)), torch.full((2,), 13.0))


def test_the_compiler_is_not_imported_with_waybill():
    code = "import sys, torch\nimport waybill.torch.moe\nsys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


#: Not traced either way (they start processes), or plain operations of torch.
TRACEABLE = {"initialize_distributed", "cpu", "cuda", "to", "from_numpy", "extra_repr"}


def test_no_function_or_method_of_the_torch_face_is_traced():
    """A new one must say so, with outside_graphs, or that it may be."""
    from waybill.torch import moe

    functions = {name: getattr(wt, name) for name in wt.__all__}
    functions = {
        name: value
        for name, value in functions.items()
        if callable(value)
        and not isinstance(value, type)
        and value.__module__.startswith("waybill.torch")
    }
    kinds = [wt.SequenceDispatcher, wt.AttentionStep, wt.Metadata, moe.EPAll2AllLayer]
    kinds += [moe.DispatchCombineContext, moe.BarrierAllContext]
    for kind in kinds:
        for base in kind.__mro__:
            if not base.__module__.startswith(("waybill.torch", "waybill.sequence_dispatcher")):
                continue
            for name, value in vars(base).items():
                value = getattr(value, "__func__", value)
                found = callable(value) and hasattr(value, "__code__") and name[0] != "_"
                if found and not isinstance(value, type):
                    functions[f"{kind.__name__}.{name}"] = getattr(kind, name)
    assert len(functions) > 40
    traced = {
        name
        for name, value in functions.items()
        if name.split(".")[-1] not in TRACEABLE
        and not getattr(value, "_torchdynamo_disable", False)
    }
    assert not traced
