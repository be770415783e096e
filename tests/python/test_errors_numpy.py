"""What the numpy face refuses, and garbage of every kind: an error of ours, never a crash."""

import contextlib
import inspect
import itertools
import warnings

import numpy as np
import pytest
from error_texts import lies_on
from hypothesis import given, settings
from hypothesis import strategies as st

import waybill

LENS, DISPATCH = np.array([[4, 2], [3, 0]]), np.array([[1, 0], [1, -1]])


class OnADevice:
    """An array that says it lies elsewhere; its memory must not be asked for."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **_):
        raise AssertionError("its memory was asked for")


@pytest.mark.parametrize(
    ("device", "where"), [(2, "a CUDA device"), (13, "a CUDA device"), (10, "DLPack device 10")]
)
def test_arrays_of_other_devices(device, where):
    fwd, _ = waybill.compute_metadata(LENS, DISPATCH)
    there = OnADevice(device)
    for name, call in {
        "compute_metadata: seq_len": lambda: waybill.compute_metadata(there, DISPATCH),
        "exclusive_cumsum: tensor": lambda: waybill.exclusive_cumsum(there),
        "gen_seq_lens: uniforms": lambda: waybill.gen_seq_lens(1, 1, 1, uniforms=there),
        "orchestrate_simulate: tensor": lambda: waybill.orchestrate_simulate(there, there, fwd),
        "sum_kv_copies: planes": lambda: waybill.sum_kv_copies(there, fwd, 0),
        "Metadata: dst_rank": lambda: waybill.Metadata(there, LENS, LENS, LENS).normalize_dtype(),
    }.items():
        with pytest.raises(waybill.InvalidArgument) as caught:
            call()
        host = "host memory: use waybill.torch for GPU tensors"
        assert str(caught.value) == lies_on(name, where, host)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "has dtype object, expected int64"),
        (["a", "b"], "has dtype <U1, expected int64"),
        ([[1], [2, 3]], "is no array: "),
        ([[1.5]], "has dtype float64, expected int64"),
        ([[2**70]], "has dtype object, expected int64"),
        (object(), "has dtype object, expected int64"),
        ({1: 2}, "has dtype object, expected int64"),
        (LENS.astype(complex), "has dtype complex128, expected int64"),
        (LENS.astype("datetime64[s]"), "has dtype datetime64[s], expected int64"),
    ],
)
def test_what_is_no_table(value, text):
    with pytest.raises(waybill.InvalidArgument) as caught:
        waybill.compute_metadata(value, DISPATCH)
    assert str(caught.value).startswith(f"compute_metadata: seq_len {text}")


def test_tables_of_another_byte_order_and_layout():
    want = waybill.compute_metadata(LENS, DISPATCH)
    assert waybill.compute_metadata(LENS.astype(">i8"), np.asfortranarray(DISPATCH)) == want
    assert waybill.compute_metadata(LENS.tolist(), DISPATCH.tolist()) == want


def test_outputs_that_cannot_be_written():
    fwd, _ = waybill.compute_metadata(LENS, DISPATCH)
    tensor, output = np.zeros((2, 6, 3), np.float32), np.zeros((2, 9, 3), np.float32)
    locked = output.copy()
    locked.flags.writeable = False
    for bad, text in (
        (locked, "output_tensor is read-only, expected an array to write to"),
        (np.broadcast_to(output[:, :, :1], (2, 9, 3)), "output_tensor is read-only"),
        (output.tolist(), "output_tensor is a list, expected an array to write to"),
        (None, "output_tensor is a NoneType, expected an array to write to"),
        (output.astype(">f4"), "output_tensor has dtype >f4, expected float32"),
        (output.astype(object), "output_tensor has dtype object of 8 bytes"),
    ):
        with pytest.raises(waybill.Error) as caught:
            waybill.orchestrate_simulate(tensor, bad, fwd)
        assert str(caught.value).startswith(f"orchestrate_simulate: {text}")
    tensor.flags.writeable = False  # a source may be read-only
    assert waybill.orchestrate_simulate(tensor, output, fwd) is output


def test_rows_of_another_byte_order_move_as_they_are():
    fwd, _ = waybill.compute_metadata(LENS, DISPATCH)
    tensor = np.arange(36, dtype=">f4").reshape(2, 6, 3)
    output = np.zeros((2, 9, 3), ">f4")
    waybill.orchestrate_simulate(tensor, output, fwd)
    assert output[1, :4].tolist() == tensor[0, :4].tolist()
    with pytest.raises(waybill.ShapeMismatch, match="dtype float32, expected >f4"):
        waybill.orchestrate_simulate(tensor, output.astype("<f4"), fwd)


def test_bfloat16_tensors_need_the_torch_face():
    torch = pytest.importorskip("torch")
    fwd, _ = waybill.compute_metadata(LENS, DISPATCH)
    tensor = torch.zeros(2, 6, 3, dtype=torch.bfloat16)
    with pytest.raises(waybill.InvalidArgument, match="tensor cannot be seen as a numpy array"):
        waybill.orchestrate_simulate(tensor, np.zeros((2, 9, 3)), fwd)


def test_classes():
    assert issubclass(waybill.InvalidArgument, ValueError)
    for error, builtin in (
        (waybill.ShapeMismatch, RuntimeError),
        (waybill.RankOutOfRange, IndexError),
        (waybill.NotThreeAxes, AssertionError),
    ):
        assert issubclass(error, waybill.InvalidArgument) and issubclass(error, builtin)
    assert issubclass(waybill.Unsupported, NotImplementedError)
    assert issubclass(waybill.IoError, OSError)
    assert issubclass(waybill.InternalError, RuntimeError)
    errors = [v for v in vars(waybill).values() if inspect.isclass(v) and issubclass(v, Exception)]
    assert issubclass(waybill.Timeout, TimeoutError)
    assert issubclass(waybill.TransportError, RuntimeError)
    assert issubclass(waybill.CudaError, RuntimeError)
    assert len(errors) == 15 and all(issubclass(error, waybill.Error) for error in errors)
    assert all(error.__module__ == "waybill" and error.__doc__ for error in errors)


def metadata_of(values):
    return waybill.Metadata(*values)


garbage = st.sampled_from(
    [
        None, "", "text", b"x", object(), {}, set(), [], [[]], [None], [[1, 2], [3]], 1.5, True,
        float("nan"), 1j, 0, 1, -1, 2**31, 2**63, -(2**63), 2**70, (1, 2), [2**62, 2**62], [-5],
        [[0]], [[1]], [[[0]]], [[-1]], [["a"]], np.int64(3), np.float32(1), np.zeros(0), range(3),
        np.zeros((2, 2), np.int64), np.full((2, 2), 7), np.full((1, 1, 1, 2), 0), np.zeros((1, 1)),
        np.array("text"), np.array(None), np.zeros((2, 2), "V3"), np.zeros((0, 4, 0), np.int64),
        np.zeros((2, 3, 4), np.float32), np.full((2, 2), -(2**63)), np.full((2, 2), 2**63 - 1),
        np.ones((2, 2), bool), np.zeros((2, 2), np.uint64), np.ma.masked_array([1], [True]),
        waybill.Metadata(LENS, LENS, LENS, LENS), waybill.Metadata(None, 1, "a", []),
        waybill.compute_metadata(LENS, DISPATCH)[0],
        waybill.compute_metadata(LENS, DISPATCH[..., None])[1],
        OnADevice(2), lambda: 1, int, ...,
    ]
) | st.builds(waybill.QkvPlan, *map(st.just, (1, [0, 1], [3], [0], [0, 1], [0])))  # fmt: skip
SKIPPED = {"test_qkv_dispatch"}  # makes of an argument a size, however large


def functions(module):
    names = sorted(set(module.__all__) - SKIPPED)
    return [n for n in names if inspect.isfunction(getattr(module, n))]


def call(function, arguments):
    """Anything but an error of ours, a TypeError, or the system's for a path, is a defect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r".*; goes in 0\.\d", DeprecationWarning)
        with contextlib.suppress(waybill.Error, TypeError, MemoryError, OSError):
            function(*arguments)


@settings(max_examples=800)
@given(data=st.data())
def test_garbage_for_functions(data):
    module = waybill
    function = getattr(module, data.draw(st.sampled_from(functions(module))))
    needed = inspect.signature(function).parameters.values()
    count = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in needed)
    call(function, [data.draw(garbage) for _ in range(count + data.draw(st.integers(0, 2)))])


@settings(max_examples=400)
@given(data=st.data())
def test_garbage_for_the_torch_face(data):
    torch = pytest.importorskip("torch")
    import waybill.torch as module

    function = getattr(module, data.draw(st.sampled_from(functions(module))))
    needed = inspect.signature(function).parameters.values()
    count = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in needed)
    arguments = [data.draw(garbage) for _ in range(count)]
    for i, value in enumerate(arguments):
        if isinstance(value, np.ndarray) and value.dtype.kind in "ifb" and data.draw(st.booleans()):
            arguments[i] = torch.from_numpy(np.array(value))
    call(function, arguments)


@settings(max_examples=400)
@given(fields=st.lists(garbage, min_size=4, max_size=10), rank=garbage, others=garbage)
def test_garbage_for_metadata(fields, rank, others):
    metadata = metadata_of(fields)
    tensor, output = np.zeros((2, 6, 3), np.float32), np.zeros((2, 9, 3), np.float32)
    for method, arguments in {
        "get_slice": [rank], "normalize_dtype": [], "to_json": [], "traffic": [], "__str__": [],
        "_repr_html_": [], "__eq__": [others],
    }.items():  # fmt: skip
        call(getattr(metadata, method), arguments)
    repr(metadata)
    call(waybill.validate, [metadata])
    call(waybill.validate, [metadata, metadata])
    call(waybill.orchestrate_simulate, [tensor, output, metadata])
    call(waybill.simulate_communication, [[tensor[0], tensor[1]], metadata])
    call(waybill.sum_kv_copies, [tensor[0], metadata, rank])
    assert not output.any()


@settings(max_examples=300)
@given(arguments=st.lists(garbage, min_size=6, max_size=8))
def test_garbage_for_plans(arguments):
    call(waybill.QkvPlan, arguments)
    for position, value in itertools.islice(enumerate(arguments), 8):
        good = [1, [0, 1], [3], [0], [0, 1], [0], [0], "per_rank"]
        good[position] = value
        call(waybill.QkvPlan, good)


@settings(max_examples=200)
@given(field=st.integers(0, 4), value=garbage, layout=st.sampled_from(["per_rank", "per_query"]))
def test_garbage_in_an_attention_layout(field, value, layout):
    plan = waybill.QkvPlan(1, [0, 1], [3], [0], [0, 1], [0], None, layout)
    *four, attention = plan.to_metadata()
    bad = attention._replace(**{attention._fields[field]: value})
    call(waybill.validate, [plan, waybill.QkvMetadata(*four, bad)])
    call(waybill.validate, [plan, (*four, value)])


def test_hostile_numbers_in_good_shapes():
    """Every table of int64 extremes: refused or computed, but nothing reads out of bounds."""
    extremes = [-(2**63), -(2**31) - 1, -2, 2, 2**31, 2**32, 2**40 + 1, 2**62, 2**63 - 1]
    fwd, rev = waybill.compute_metadata(LENS, DISPATCH[..., None])
    for name, value in itertools.product(
        ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens", "recv_seq_lens", "num_seqs"),
        extremes,
    ):
        for table in (fwd, rev):
            if getattr(table, name) is None:
                continue
            bad = waybill.Metadata(
                *(np.copy(f) if isinstance(f, np.ndarray) else f for f in table._fields())
            )
            getattr(bad, name).flat[0] = value
            tensor, output = np.zeros((2, 9, 3), np.float32), np.zeros((2, 9, 3), np.float32)
            for function, arguments in (
                (waybill.orchestrate_simulate, (tensor, output, bad)),
                (waybill.simulate_communication, (list(tensor), bad)),
                (waybill.sum_kv_copies, (tensor[0], bad, 0)),
                (waybill.validate, (fwd, bad)),
                (waybill.validate, (bad, rev)),
                (bad.get_slice, (0,)),
                (bad.normalize_dtype, ()),
            ):
                call(function, arguments)
