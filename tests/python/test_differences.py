"""Random programs in which some ranks say something else: no rank gets a wrong result, or hangs, or
hears of it in foreign words (sequence_programs.py and expert_calls.py run as many as one likes).
"""

import importlib

import pytest
import sequence_programs
from error_texts import DISAGREE_IN_EXCHANGE


@pytest.mark.parametrize("first", range(0, 40, 8))
@pytest.mark.parametrize("programs", ["sequence_programs", "expert_calls"])
def test_ranks_that_differ_are_told_so(programs, first):
    if programs == "expert_calls":
        pytest.importorskip("torch")
    run_case = importlib.import_module(programs).run_case
    for seed in range(first, first + 8):
        what, complaints, _ = run_case(seed, timeout_s=0.3)
        assert not complaints, (seed, what, complaints)


def test_windows_reserved_in_another_order():
    """A program that was drawn: one rank reserves for its second dispatcher first."""
    what, complaints, errors = sequence_programs.run_case(169, timeout_s=0.3)
    assert "swap_any" in what and not complaints
    assert any(DISAGREE_IN_EXCHANGE in text for _, _, text in errors)
