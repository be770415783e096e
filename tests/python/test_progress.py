"""Calls that take more than two seconds say so in one line, on a terminal."""

import io
import sys
import time

import pytest

import waybill
from waybill import simulate


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(simulate, "_AFTER_S", 0.05)


def test_a_long_call_says_what_it_does(soon, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with simulate.progress("plan of 4096 ranks"):
        time.sleep(0.3)
    text = sys.stderr.getvalue()
    assert text.startswith("\rwaybill: plan of 4096 ranks, 0 s ...")
    assert text.endswith("\r\033[K") and "\n" not in text  # one line, gone at the end


def test_a_calibration_says_that_it_is_one(soon, monkeypatch):
    calibrate = pytest.importorskip("waybill.torch.attention.calibrate")

    def timed(case, kernel, shape, device, repeats):
        time.sleep(0.02)
        pairs = calibrate.pairs(case, shape)
        return 1e-9 * pairs, 3e-9 * pairs

    monkeypatch.setattr(calibrate, "_timed", timed)
    monkeypatch.setattr(sys, "stderr", Terminal())
    calibrate.calibrate_attention(2, head_dim=16, device="cpu", rows=1024)
    assert sys.stderr.getvalue().startswith("\rwaybill: calibrate_attention, 0 s ...")


def test_a_short_call_says_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    waybill.test_qkv_dispatch(world_size=2, num_tokens=16)
    waybill.compare([40, 20], world_size=2, tokens_per_rank=64)
    assert sys.stderr.getvalue() == ""


def test_no_terminal_no_line(soon, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with simulate.progress("plan"):
        time.sleep(0.2)
    assert sys.stderr.getvalue() == ""


def test_an_error_ends_it(soon, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(waybill.InvalidArgument), simulate.progress("plan"):
        time.sleep(0.2)
        waybill.gen_seq_lens(0, 1, 1)
    assert sys.stderr.getvalue().endswith("\r\033[K")
