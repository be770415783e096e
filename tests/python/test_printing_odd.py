"""Printing never raises: exactly when something is odd one prints."""

import numpy as np
import pytest

import waybill

LENS = np.array([[3, 2], [4, 0]])
DISPATCH = np.array([[[1, 0], [0, -1]], [[0, 1], [-1, -1]]])


class NoText:
    def __repr__(self):
        raise RuntimeError("no text")


ODD_ARRAYS = {
    "None": None,
    "object": object(),
    "no text": NoText(),
    "text": "seven",
    "number": 7,
    "ragged": [[1], [2, 3]],
    "floats": np.full((2, 2), 0.5),
    "complex": np.ones((2, 2), complex),
    "texts": np.full((2, 2), "x"),
    "one axis": np.arange(7),
    "no axis": np.array(3),
    "four axes": np.zeros((2, 2, 2, 2), np.int64),
    "no ranks": np.zeros((0, 0), np.int64),
    "no elements": np.zeros((2, 0, 3), np.int64),
    "more ranks": np.zeros((5, 9), np.int64),
    "one column": np.zeros((2, 1), np.int64),
    "uint64": np.full((2, 2), 2**64 - 1, np.uint64),
    "int16": np.full((2, 2), -7, np.int16),
    "bool": np.ones((2, 2), bool),
    "dates": np.zeros((2, 2), "M8[s]"),
}
ODD_NUMBERS = {
    "world_size": [object(), NoText(), "two", 2**70, 5, -1, 2.5],
    "num_total_recv_tokens": [object(), "two", 2**70, [2**70, 1], [1, 2, 3], [[1]], [0.5], []],
    "normalized": [NoText(), np.zeros(2), "no"],
}


def tables(face):
    return face.module.compute_metadata(face.array(LENS), face.array(DISPATCH))


def printed(metadata):
    """All texts of it."""
    texts = [str(metadata), repr(metadata), f"{metadata}", metadata._repr_html_()]
    assert all(isinstance(text, str) and text for text in texts)
    return texts[0]


def changed(metadata, **fields):
    return type(metadata)(**{**vars(metadata), **fields})


@pytest.mark.parametrize("odd", ODD_ARRAYS)
def test_any_field_may_hold_anything(face, odd):
    value = ODD_ARRAYS[odd]
    for table in tables(face):
        for part in (table, table.get_slice(0)):
            for name in vars(table):
                text = printed(changed(part, **{name: value}))
                if odd in ("four axes", "more ranks", "ragged", "text") and name == "dst_rank":
                    assert "odd: dst_rank" in text, text
        everything = dict.fromkeys(vars(table), value)
        printed(changed(table, **everything))


@pytest.mark.parametrize("name", ODD_NUMBERS)
def test_any_number_may_be_anything(face, name):
    for table in tables(face):
        for value in ODD_NUMBERS[name]:
            text = printed(changed(table, **{name: value}))
            assert "shard 0: rows 0..3" in text, text  # the tables are as they were


def test_what_is_odd_is_named_and_shown(face):
    forward, _ = tables(face)
    text = str(changed(forward, num_recv_tokens=face.array(np.array([[7, 8], [9, 10]]))))
    assert "shard 0: rows 0..3 -> rank 1 at 0, rank 0 at 0" in text
    assert "receives [7, 8] rows\n" in text
    assert "odd: num_recv_tokens has shape [2, 2], expected [2, 3]\n" in text
    text = str(changed(forward, dst_offset=face.array(np.arange(6).reshape(2, 3))))
    assert "dst_offset: [[0, 1, 2], [3, 4, 5]]" in text
    assert "odd: dst_offset has shape [2, 3], expected [2, 2, 2]\n" in text
    text = str(changed(forward, seq_len=face.array(np.array([[0.5, 1], [2, 3]]))))
    assert "odd: seq_len has dtype float64" in text and "0.5" in text
    text = str(changed(forward, seq_len=None))
    assert "odd: seq_len is missing\n" in text
    text = str(changed(forward, num_seqs="seven"))
    assert "num_seqs: seven\n" in text and "odd: num_seqs" in text and "rank 1 at 0" in text
    huge = np.full(DISPATCH.shape, 2**64 - 1, np.uint64)
    assert "18446744073709551615" in str(changed(forward, dst_offset=face.array(huge)))
    far = np.where(DISPATCH == 0, -2, DISPATCH)
    assert "rank -2 at 0" in str(changed(forward, dst_rank=face.array(far)))


def texts_of(thing):
    html = thing._repr_html_() if hasattr(thing, "_repr_html_") else ""
    return [str(thing), repr(thing), f"{thing}", html]


def test_a_finding_of_anything():
    for text in (None, 7, NoText, "a text"):
        found = waybill.Finding("shape", "fwd", "dst_rank", -1, -1, -1, None, object(), text)
        assert str(found) == str(text)


def test_plans_of_nothing(face):
    for lengths in ([], [[], []], [1], [[1], []]):
        plan = face.module.plan(lengths, 2, 0, block_tokens=4)
        routing = plan.to_routing()
        metadata = plan.to_metadata()
        for thing in (plan, plan.to_qkv_plan(), routing, routing.fwd_kv, metadata, *metadata):
            assert all(isinstance(text, str) for text in texts_of(thing))


def test_worlds_dispatchers_and_layers_after_their_end():
    torch = pytest.importorskip("torch")
    import waybill.torch as wt
    from waybill.torch.moe import EPAll2AllLayer

    kept = []

    def body(world):
        routing = waybill.plan([10, 20], 2, 15).to_routing()
        dispatcher = wt.SequenceDispatcher(world)
        rows = torch.zeros(15, 4)
        plan = dispatcher.plan_dispatch((routing.fwd_q, rows))
        layer = EPAll2AllLayer(world, 4, 8, 2, world.rank, 4, 2, 2, torch.float32, torch.float32)
        ids = torch.zeros(3, 2, dtype=torch.int64)
        layout = layer.dispatch(torch.zeros(3, 8), ids)[2]
        dispatcher.close()
        layer.finalize()
        kept.extend((world, dispatcher, plan, layer, layout))

    wt.run_threads(2, body)
    assert len(kept) == 10
    for thing in kept:
        assert all(isinstance(text, str) for text in texts_of(thing)), type(thing)
