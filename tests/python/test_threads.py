"""Long calls release the interpreter's lock; threads do not disturb each other."""

import itertools
import threading
import time

import numpy as np
import pytest

import waybill

pytestmark = pytest.mark.alone


class Ticker(threading.Thread):
    """Notes when it runs. While another thread holds the lock it cannot."""

    def __init__(self):
        super().__init__(daemon=True)
        self.times, self.done = [], threading.Event()

    def run(self):
        while not self.done.is_set():
            self.times.append(time.perf_counter())
            time.sleep(0.001)

    def longest_pause(self, begin, end):
        inside = [begin, *(t for t in self.times if begin < t < end), end]
        return max(b - a for a, b in itertools.pairwise(inside))


def pause_share(call):
    """The longest time that another thread stood still while the call ran, as a share of it."""
    ticker = Ticker()
    ticker.start()
    time.sleep(0.01)
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    ticker.done.set()
    ticker.join()
    return ticker.longest_pause(begin, end) / (end - begin)


def best_pause_share(call):
    """Other programs may keep the ticker from running: the best of a few counts."""
    return min(pause_share(call) for _ in range(3))


def test_a_call_that_holds_the_lock_is_noticed():
    assert best_pause_share(lambda: sum(range(10_000_000))) > 0.8


def test_compute_metadata():
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 9, (512, 512))
    dispatch = rng.integers(0, 512, (512, 512, 8))
    assert best_pause_share(lambda: waybill.compute_metadata(lens, dispatch)) < 0.6


def test_orchestrate_simulate():
    lens = np.full((4, 16), 512)
    dispatch = np.arange(64).reshape(4, 16) % 4
    fwd, _ = waybill.compute_metadata(lens, dispatch)
    tensor = np.ones((4, 16 * 512, 2048), np.float32)  # 256 MiB
    output = np.zeros_like(tensor)

    def call():
        waybill.orchestrate_simulate(tensor, output, fwd, num_threads=1)

    assert best_pause_share(call) < 0.6
    assert (output[:, ::511, ::2047] == 1).all()


def test_json():
    rng = np.random.default_rng(0)
    fwd, _ = waybill.compute_metadata(
        rng.integers(1, 9, (64, 1600)), rng.integers(0, 64, (64, 1600, 4))
    )
    text = fwd.to_json()
    assert best_pause_share(fwd.to_json) < 0.6
    assert best_pause_share(lambda: waybill.Metadata.from_json(text)) < 0.6


def test_threads_get_their_own_results():
    def work(seed, results):
        rng = np.random.default_rng(seed)
        lens, dispatch = rng.integers(0, 9, (5, 7)), rng.integers(0, 5, (5, 7))
        want = waybill.compute_metadata(lens, dispatch)[0]
        text = want.to_json()
        for _ in range(50):
            fwd, rev = waybill.compute_metadata(lens, dispatch)
            fine = fwd == want and waybill.validate(fwd, rev) == [] and fwd.to_json() == text
            try:
                waybill.compute_metadata(lens, dispatch + seed + 5)
                fine = False
            except waybill.InvalidArgument as error:
                fine = fine and "global_dispatch" in str(error)
            results.append(fine)

    results = []
    threads = [threading.Thread(target=work, args=(seed, results)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200
