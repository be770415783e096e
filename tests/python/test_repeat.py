"""``python -m waybill selftest --repeat``: all calls have the same bits; what differs is named."""

import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import waybill
from waybill import _selftest

torch = pytest.importorskip("torch")

from waybill.torch import SequenceDispatcher, _repeat  # noqa: E402
from waybill.torch._repeat import INPUTS, KINDS, Sizes  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

HAS_GPU = bool(waybill.num_gpus() and torch.cuda.is_available())
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU"))]
SMALL = Sizes(ranks=2, tokens=24, hidden=128)
CALLS = 200


def kind_of(name):
    return next(kind for kind in KINDS if kind.name == name)


def repeated(name, device, total=CALLS, progress=lambda done: None):
    return _repeat.repeat_kind(kind_of(name), total, SMALL, device, progress)


class Planted:
    """Changes what one rank's calls of a method return, from a number of calls on."""

    def __init__(self, monkeypatch, owner, method, rank, call, change, times=1):
        correct = getattr(owner, method)
        self.counted = {}
        lock = threading.Lock()

        def changed(one, *given, **options):
            world = one.world
            with lock:
                number = self.counted.get(world.rank, 0)
                self.counted[world.rank] = number + 1
            result = correct(one, *given, **options)
            planted = world.rank == rank and call <= number < call + times
            return change(result) if planted else result

        monkeypatch.setattr(owner, method, changed)


def test_all_kinds_repeat_their_bits(capsys):
    done = _selftest.main(
        ["--repeat", "20", "--device", "cpu", "--tokens", "24", "--hidden", "128"]
    )
    shown = capsys.readouterr().out.splitlines()
    assert done == 0, shown
    assert shown[1] == (
        "20 calls of each kind: 2 ranks in host memory, 24 tokens each, rows of 128"
    )
    lines = [line for line in shown if re.search(r" ok +[\d.]+ s  20 calls, 0 of them in", line)]
    assert len(lines) == len(KINDS) == len(shown) - 3
    assert re.fullmatch(rf"selftest: passed: {len(KINDS)} kinds in [\d.]+ s", shown[-1])


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_all_kinds_repeat_their_bits_on_a_gpu(kind, ranks):
    sizes = SMALL._replace(ranks=ranks, hidden=1024)
    found = _repeat.repeat_kind(kind, 2000, sizes, "cuda", lambda done: None)
    for one in found:
        assert one.first is None and one.bad_calls == 0, one
        assert (one.calls, one.in_graphs) == ((2000, 1728) if kind.graphs else (200, 0))


def add_one(row, element):
    def change(result):
        tensor = result[0] if isinstance(result, tuple) else result
        tensor[row, element] += 1
        return result

    return change


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "owner", "method", "tensor", "before"),
    [
        ("dispatch, counting", EPAll2AllLayer, "dispatch", "rows", 0),
        ("dispatch, known routing", EPAll2AllLayer, "dispatch", "rows", INPUTS),
        ("combine, grouped rows", EPAll2AllLayer, "combine", "sums", 0),
        ("sequence dispatch", SequenceDispatcher, "dispatch", "rows", 0),
        ("kv_gradient", SequenceDispatcher, "kv_gradient", "sums", 0),
    ],
)
def test_one_changed_element_is_named(monkeypatch, device, name, owner, method, tensor, before):
    """In call 17 of rank 1, one element: that rank reports it, and no other one."""
    Planted(monkeypatch, owner, method, 1, before + 17, add_one(7, 100))
    clean, found = repeated(name, device)
    assert clean.first is None and clean.bad_calls == 0
    assert found.bad_calls == 1 and found.calls == CALLS
    first = found.first
    assert (first.call, first.rank, first.tensor) == (17, 1, tensor)
    assert (first.row, first.element, first.in_graph) == (7, 100, False)
    assert re.fullmatch(r"0x[0-9a-f]{4}([0-9a-f]{4})?", first.got) and first.got != first.expected
    same, text = _repeat._verdict([clean, found])
    assert not same
    assert text == (
        f"call 17 (eager), rank 1, {tensor}: row 7, element 100 is {first.got}, in the first call"
        f" {first.expected}; 1 of {CALLS} calls differ"
    )


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_a_change_in_a_graph_is_named(monkeypatch):
    """It was captured with call 30, so every replay has it."""
    Planted(monkeypatch, EPAll2AllLayer, "combine", 1, 30, add_one(7, 100))
    clean, found = repeated("combine, grouped rows", "cuda")
    assert clean.first is None
    assert found.first.call == 30 and found.first.in_graph
    assert found.bad_calls == found.in_graphs // 96 > 0


def test_weights_are_compared_too(monkeypatch):
    def change(result):
        result[1][3] += 1
        return result

    Planted(monkeypatch, EPAll2AllLayer, "dispatch", 0, 9, change)
    found, _ = repeated("dispatch, counting", "cpu")
    assert (found.first.call, found.first.tensor, found.first.row) == (9, "weights", 3)
    assert len(found.first.got) == len("0x12345678")


def test_memory_that_a_call_did_not_write_is_found(monkeypatch):
    """It has the rows of the call before the last, in the same window: those of another input."""
    kept = []

    def stale(result):
        kept.append(result[0].clone())
        if len(kept) == 3:
            result[0].copy_(kept[0])
        return result

    Planted(monkeypatch, SequenceDispatcher, "dispatch", 1, 50, stale, times=3)
    _, found = repeated("sequence dispatch", "cpu")
    assert found.bad_calls == 1 and found.first.call == 52 and found.first.row == 0


def test_a_call_that_nobody_compared_is_no_success(monkeypatch):
    correct = _repeat._Rank._compare

    def forgetful(rank, slot, number, results):
        if slot != 50:
            correct(rank, slot, number, results)

    monkeypatch.setattr(_repeat._Rank, "_compare", forgetful)
    with pytest.raises(AssertionError, match="a call was not made"):
        repeated("kv_gradient", "cpu")


def test_the_first_of_several_is_named(monkeypatch):
    Planted(monkeypatch, EPAll2AllLayer, "combine", 0, 120, add_one(2, 2), times=30)
    found, _ = repeated("combine, weighted", "cpu")
    assert found.first.call == 120 and found.bad_calls == 30


def test_a_wrong_first_call_is_no_reference(monkeypatch):
    Planted(monkeypatch, EPAll2AllLayer, "combine", 1, 2, add_one(0, 0))
    with pytest.raises(AssertionError, match="rank 1, sums: the first call with input 2 differs"):
        repeated("combine, compact rows", "cpu")


def test_a_changed_input_is_found(monkeypatch):
    correct = EPAll2AllLayer.dispatch

    def changing(layer, tokens, *given, **options):
        result = correct(layer, tokens, *given, **options)
        if layer.world.rank == 0 and result[2]._handle.number == CALLS:  # too late to be dispatched
            tokens[1, 1] += 1
        return result

    monkeypatch.setattr(EPAll2AllLayer, "dispatch", changing)
    with pytest.raises(AssertionError, match="rank 0: a call changed its input"):
        repeated("dispatch, counting", "cpu")


def test_a_difference_fails_the_run(monkeypatch, capsys):
    Planted(monkeypatch, SequenceDispatcher, "kv_gradient", 0, 5, add_one(1, 1))
    monkeypatch.setattr(_repeat, "_SAY_EVERY_S", 0.0)
    arguments = ["--repeat", "300", "--device", "cpu", "--tokens", "8", "--hidden", "128"]
    assert _selftest.main([*arguments, "--only", "kv_gradient"]) == 1
    shown = capsys.readouterr().out
    assert "99 of 300 ... " in shown  # progress
    assert re.search(r"FAILED +[\d.]+ s  call 5 \(eager\), rank 0, sums: row 1, element 1", shown)
    assert "selftest: FAILED: kv_gradient (1 kinds, " in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "4"], "--tokens needs --repeat"),
        (["--repeat", "0"], "argument --repeat: 0, expected 1 to"),
        (["--repeat", "2", "--ranks", "65"], "argument --ranks: 65, expected 1 to 64"),
        (["--repeat", "2", "--hidden", "100"], "--hidden 100, expected a multiple of 128"),
        (["--repeat", "2", "--only", "x,y"], '--only "x,y": no kind of call has that in its name'),
    ],
)
def test_wrong_options(capsys, arguments, words):
    try:
        code = _selftest.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert _selftest.main(["--repeat", "2", "--device", "cuda"]) == 2
    assert "--device cuda: there is no GPU" in capsys.readouterr().err


def test_an_interrupt_ends_it_soon():
    how = [sys.executable, "-m", "waybill", "selftest", "--repeat", "100000000", "--device", "cpu"]
    process = subprocess.Popen(how, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(2):  # what is installed, what is repeated
            process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, (shown, errors)
    assert shown.endswith("selftest: interrupted\n") and errors == ""
