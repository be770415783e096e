"""Random programs of layers in which some ranks say something else: no rank gets a wrong result, or
hangs, or hears of it in foreign words (expert_calls.py runs as many as one likes).
"""

import pytest

pytest.importorskip("torch")

from expert_calls import run_case


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_ranks_that_differ_are_told_so(first):
    for seed in range(first, first + 8):
        what, complaints, _ = run_case(seed, timeout_s=0.3)
        assert not complaints, (seed, what, complaints)
