"""Every snippet in DistCA's documents, unchanged but for its imports, on tensors and on arrays."""

import dataclasses
import inspect
import re
from typing import Optional, Union

import numpy as np
import pytest
from error_texts import WRITTEN_TWICE
from upstream import (
    SEQUENCE_PAGES,
    answers,
    for_face,
    names_for,
    numpy_as_torch,
    printed_value,
    run,
    snippet,
    snippets,
)

import waybill

ENGINE, CLASS, NOTES, README = (
    "distca_orchestrate_simulate",
    "distca_metadata_class",
    "distca_notes",
    "distca_readme",
)
NUM_SNIPPETS = {ENGINE: 4, CLASS: 11, NOTES: 7, README: 0}
HIDDEN = 3
LENS = [[10, 5, 0], [8, 12, 4], [6, 0, 9]]
DISPATCH = [[[1], [2], [-1]], [[2], [0], [1]], [[0], [-1], [2]]]


def table(face, values):
    return face.array(np.array(values))


def documented(face):
    """Tables of the example in the notes."""
    return face.module.compute_metadata(table(face, LENS), table(face, DISPATCH))


def random_tables(face, seed):
    return face.module.create_qkv_dispatch(4, 64, 3, 4, seed=seed)[:4]


def payload(face, world_size, rows):
    values = np.random.default_rng(7).random((world_size, rows, HIDDEN), np.float32) + 1
    return face.array(values)


def zeros(face, world_size, rows):
    return face.array(np.zeros((world_size, int(rows), HIDDEN), np.float32))


def equal(face, a, b):
    assert face.host(a).tolist() == face.host(b).tolist()


def test_every_snippet_is_run_here():
    source = inspect.getsource(inspect.getmodule(test_every_snippet_is_run_here))
    here = {"ENGINE": ENGINE, "CLASS": CLASS, "NOTES": NOTES}
    used = {(here[p], int(n)) for p, n in re.findall(r"snippet\((\w+), (\d+)\)", source)}
    used |= {(here[p], int(n)) for p, n in re.findall(r'"(\w+) (\d+)"', source)}
    for page in SEQUENCE_PAGES:
        found = snippets(page)
        assert len(found) == NUM_SNIPPETS[page]
        assert {(page, s.number) for s in found} <= used


@pytest.mark.parametrize("where", ["ENGINE 1", "NOTES 4", "NOTES 7"])
def test_signatures(face, where):
    page, number = where.split()
    text = snippet({"ENGINE": ENGINE, "NOTES": NOTES}[page], int(number)).text.strip()
    # One of them is written without def, all without a body.
    text = re.sub(r"^(?=\w+\()", "def ", text, flags=re.MULTILINE) + ": pass"
    scope = run(face, text, Tuple=tuple)
    name = re.search(r"def (\w+)", text).group(1)
    theirs = inspect.signature(scope[name]).parameters
    ours = inspect.signature(getattr(face.module, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for parameter in theirs.values():
        assert ours[parameter.name].default == parameter.default
        assert ours[parameter.name].kind == parameter.POSITIONAL_OR_KEYWORD
    rest = list(ours.values())[len(theirs) :]
    assert all(p.default is not p.empty for p in rest)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("which", range(4))
def test_the_loop_that_says_what_orchestrate_simulate_does(face, seed, which):
    metadata = random_tables(face, seed)[which]
    sent = int(face.host(metadata.seq_len).sum(axis=1).max())
    room = int(face.host(metadata.dst_offset).max() + face.host(metadata.seq_len).max())
    tensor, theirs = payload(face, 4, sent), zeros(face, 4, room)
    run(
        face, snippet(ENGINE, 2).text, world_size=4, metadata=metadata, tensor=tensor,
        output_tensor=theirs,
    )  # fmt: skip
    ours = face.module.orchestrate_simulate(tensor, zeros(face, 4, room), metadata)
    equal(face, ours, theirs)


def test_there_and_back(face):
    forward, reverse = random_tables(face, 1)[:2]
    given = payload(face, 4, 64)
    scope = run(
        face, snippet(ENGINE, 3).text, world_size=4, hidden_size=HIDDEN, fwd_metadata=forward,
        input_tensor=given,
    )  # fmt: skip
    assert scope["output_tensor"].shape == (4, max(forward.num_total_recv_tokens), HIDDEN)
    scope = run(
        face, snippet(ENGINE, 4).text, world_size=4, hidden_size=HIDDEN, total_seq_len=64,
        attention_output=scope["output_tensor"], rev_metadata=reverse,
    )  # fmt: skip
    planes = face.host(scope["rev_tensor"])
    assert (planes == face.host(given)).all()


def test_the_class_has_these_fields(face):
    names = {"dataclass": dataclasses.dataclass, "Optional": Optional, "Union": Union}
    theirs = run(face, snippet(CLASS, 1).text, **names)["Metadata"]
    ours = face.module.Metadata
    assert [(f.name, f.default) for f in dataclasses.fields(theirs)] == [
        (f.name, f.default) for f in dataclasses.fields(ours)
    ]


class Theirs:
    """A Metadata whose method is the one in a snippet."""

    def __init__(self, face, metadata, number):
        self.__dict__.update(vars(metadata))
        text = "class Made:\n" + "\n".join(
            "    " + line for line in snippet(CLASS, number).text.splitlines()
        )
        text = text.replace(".cuda()", ".cpu()")
        scope = {**names_for(face), "Metadata": dict}
        exec(for_face(face, text), scope)
        self.made = scope["Made"]


@pytest.mark.parametrize("tail", ["padding at the end", "padding between"])
def test_get_slice(face, tail):
    """`snippet(CLASS, 2)`. What differs: it loses a shard behind padding."""
    forward, _ = documented(face) if tail == "padding between" else random_tables(face, 3)[2:]
    for rank in range(3):
        theirs = Theirs(face, forward, 2)
        fields = theirs.made.get_slice(theirs, rank)
        ours = forward.get_slice(rank)
        for name, value in fields.items():
            mine = getattr(ours, name)
            if tail == "padding between" and rank == 2 and np.ndim(value) > 0 and name[0] != "n":
                assert len(mine) == len(value) == 2
                assert mine[1] != value[1] or name == "dst_rank"
            elif isinstance(value, int):
                assert mine == value
            else:
                equal(face, mine, value)
    if tail == "padding between":
        assert face.host(forward.get_slice(2).seq_len).tolist() == [6, 9]


def test_normalize_dtype(face):
    """`snippet(CLASS, 3)`"""
    for metadata in (*documented(face), *random_tables(face, 5)):
        theirs = Theirs(face, metadata, 3)
        fields = theirs.made.normalize_dtype(theirs)
        ours = metadata.normalize_dtype()
        assert fields.pop("normalized") is ours.normalized is True
        assert len(fields) == 4
        for name, value in fields.items():
            equal(face, getattr(ours, name), value)
            assert getattr(ours, name).dtype == value.dtype, name


def test_to_a_device(face):
    """`snippet(CLASS, 4)`, to the CPU where there is no GPU: arrays have none at all."""
    metadata = documented(face)[0]
    if face.name == "numpy":
        pytest.importorskip("torch")
        import waybill.torch

        metadata = waybill.torch.Metadata.from_numpy(metadata)
        from faces import torch_face

        face = torch_face()
    metadata.dst_rank = metadata.dst_rank.transpose(0, 1).contiguous().transpose(0, 1)
    theirs = Theirs(face, metadata, 4)
    for name, value in theirs.made.cuda(theirs).items():
        mine = getattr(metadata.cpu(), name)
        assert mine.is_contiguous() and value.is_contiguous()
        equal(face, mine, value)


def test_sending_by_the_tables(face):
    forward, _ = face.module.compute_metadata(table(face, LENS), table(face, DISPATCH)[:, :, 0])
    source, theirs = payload(face, 3, 24), zeros(face, 3, 22)
    begin = [0, 0, 0]

    def send_data(src_rank, dst_rank, dst_offset, seq_len):
        rows = source[src_rank][begin[src_rank] : begin[src_rank] + seq_len]
        theirs[dst_rank][dst_offset : dst_offset + seq_len] = rows
        begin[src_rank] += int(seq_len)

    run(face, snippet(CLASS, 5).text, world_size=3, fwd_metadata=forward, send_data=send_data)
    equal(face, face.module.orchestrate_simulate(source, zeros(face, 3, 22), forward), theirs)


def test_the_way_back_by_the_tables(face):
    """What differs: it is a table of what to send, where the snippet speaks of receiving."""
    forward, reverse = face.module.compute_metadata(
        table(face, LENS), table(face, DISPATCH)[:, :, 0]
    )
    source = payload(face, 3, 24)
    attention = face.module.orchestrate_simulate(source, zeros(face, 3, 22), forward)
    home, begin = zeros(face, 3, 24), [0, 0, 0]

    def receive_data(src_rank, dst_rank, src_offset, seq_len):
        rows = attention[dst_rank][begin[dst_rank] : begin[dst_rank] + seq_len]
        home[src_rank][src_offset : src_offset + seq_len] = rows
        begin[dst_rank] += int(seq_len)

    run(face, snippet(CLASS, 6).text, world_size=3, rev_metadata=reverse, receive_data=receive_data)
    for rank, rows in enumerate([15, 24, 15]):
        equal(face, home[rank][:rows], source[rank][:rows])


def test_a_simple_example_of_tables(face):
    """What differs: its offsets let shards write over each other."""
    given = run(face, snippet(CLASS, 7).text)
    tables = [given[name] for name in ("dst_rank", "dst_offset", "seq_len")]
    metadata = face.module.Metadata(*tables, None)
    moved = face.module.orchestrate_simulate(payload(face, 2, 256), zeros(face, 2, 512), metadata)
    assert (face.host(moved)[1, 64:128] != 0).all()
    with pytest.raises(waybill.ShapeMismatch, match=WRITTEN_TWICE):
        face.module.orchestrate_simulate(
            payload(face, 2, 256), zeros(face, 2, 512), metadata, overlap="reject"
        )
    forward, _ = face.module.compute_metadata(tables[2], tables[0])
    assert face.host(forward.dst_offset).tolist() == [[0, 0, 0], [64, 128, 160]]


def test_an_example_with_copies(face):
    lens = run(face, snippet(CLASS, 7).text)["seq_len"]
    dispatch = run(face, snippet(CLASS, 8).text)["dst_rank"]
    forward, reverse = face.module.compute_metadata(lens, dispatch)
    assert tuple(forward.dst_rank.shape) == (2, 3, 2)
    assert waybill.validate(forward, reverse) == []
    source = payload(face, 2, 256)
    there = face.module.orchestrate_simulate(
        source, zeros(face, 2, max(forward.num_total_recv_tokens)), forward
    )
    planes = face.module.orchestrate_simulate(there, zeros(face, 2, 512), reverse)
    for rank, rows in enumerate([192, 256]):
        ours = face.host(face.module.sum_kv_copies(planes[rank][: 2 * rows], reverse, rank))
        copies = (face.host(dispatch)[rank] >= 0).sum(axis=1)
        times = np.repeat(copies, face.host(lens)[rank])[:, None]
        assert np.allclose(ours, face.host(source)[rank, :rows] * times)


def test_padding(face):
    given = run(face, snippet(CLASS, 9).text)
    lens = table(face, [[5, 3, 0, 0], [2, 4, 0, 0]])
    forward, _ = face.module.compute_metadata(lens, given["dst_rank"])
    equal(face, forward.num_seqs, given["num_seqs"])
    assert face.host(forward.get_slice(0).seq_len).tolist() == [5, 3]
    assert face.host(forward.get_slice(1).dst_rank).tolist() == [0, 1]


def test_sizes_of_dtypes(face):
    meta, _ = documented(face)
    given = run(face, snippet(CLASS, 10).text, meta=meta, dst_rank=meta.dst_rank)
    normal = given["normalized_meta"]
    assert given["optimized_size"] * 2 == given["original_size"]
    assert face.host(normal.dst_rank).nbytes == given["optimized_size"]
    assert face.host(meta.dst_rank).nbytes == given["original_size"]


@pytest.mark.gpu
def test_onto_a_gpu(face):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    gpu_meta = run(face, snippet(CLASS, 11).text, meta=documented(face)[0])["gpu_meta"]
    assert gpu_meta.dst_rank.is_cuda and gpu_meta.seq_len.is_contiguous()


@pytest.mark.parametrize("where", ["NOTES 1", "NOTES 2", "NOTES 3"])
def test_helpers(face, where):
    ((expression, printed),) = answers(snippet(NOTES, int(where[-1])).text)
    got = eval(expression, names_for(face))
    assert face.host(got).tolist() == printed_value(printed)


def test_what_compute_metadata_builds(face):
    forward, _ = documented(face)
    given = {
        "global_dispatch": table(face, DISPATCH), "dispatch_shape": (3, 3, 1),
        "seq_begin_offset": forward.dst_offset, "seq_len": table(face, LENS), "world_size": 3,
        "num_recv_tokens": forward.num_recv_tokens, "num_seqs": forward.num_seqs,
    }  # fmt: skip
    made = run(face, snippet(NOTES, 5).text, **given)["fwd_metadata"]
    assert made == forward
    session = answers(snippet(NOTES, 6).text)
    assert len(session) == 7
    for expression, printed in session:
        got = eval(expression, {**names_for(face), **given})
        got = face.host(got).tolist() if hasattr(got, "tolist") else got
        assert got == printed_value(printed), expression


def test_arrays_stand_in_for_tensors():
    """The numpy face is given numpy's arrays, by names of torch."""
    torch = numpy_as_torch()
    assert torch.zeros((2, np.int64(3)), device="cpu").dtype == np.float32
    assert torch.tensor([1, 2]).dtype == np.int64
