"""Copies of experts in one process: weights from home, gradients home in a written order."""

import numpy as np
import pytest

import waybill
from waybill.moe import simulate_expert_copies, simulate_expert_copy_gradients

SLOTS = np.array([[0, 1, -1, 3], [2, 3, 0, -1], [4, 5, 0, 3]])
SPARE = 2


def arrays(shape, dtype, seed, world=3):
    draws = np.random.default_rng(seed)
    return [(draws.standard_normal(shape) * 8).astype(dtype) for _ in range(world)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_copies_are_their_homes(dtype):
    weights = arrays((2, 3, 5), dtype, 1)
    made = simulate_expert_copies(SLOTS, weights)
    for rank, slots in enumerate(SLOTS):
        assert made[rank].dtype == dtype and made[rank].shape == (4, 3, 5)
        for slot, expert in enumerate(slots):
            wanted = 0 if expert < 0 else weights[expert // 2][expert % 2]
            assert (made[rank][slot] == wanted).all()


def test_weights_of_any_strides_and_none():
    weights = [one.transpose(1, 0, 2) for one in arrays((3, 2, 4), "f4", 2)]
    assert (simulate_expert_copies(SLOTS, weights)[1][2] == weights[0][0]).all()
    assert simulate_expert_copies([[0, 1]], [np.zeros((2, 0), "f4")])[0].shape == (2, 0)
    assert simulate_expert_copies([[0]], [np.ones((1, 2), "f4")])[0].tolist() == [[1, 1]]


def by_definition(gradients, copies, wide):
    """Home first, then copies by rank; in float32, rounded once."""
    made = []
    for rank, own in enumerate(gradients):
        sums = own.astype(wide)
        for local in range(len(own)):
            for other, slots in enumerate(SLOTS):
                for slot in range(SPARE):
                    if slots[2 + slot] == rank * 2 + local:
                        sums[local] = sums[local] + copies[other][slot]
        made.append(sums.astype(own.dtype))
    return made


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_gradients_come_home_in_order(dtype):
    of = dtype
    if dtype == "bfloat16":
        of = pytest.importorskip("ml_dtypes").bfloat16
    wide = "float64" if dtype == "float64" else "float32"
    gradients, copies = arrays((2, 7), "f4", 3), arrays((SPARE, 7), wide, 4)
    gradients = [one.astype(of) for one in gradients]
    made = simulate_expert_copy_gradients(SLOTS, gradients, copies)
    for got, wanted in zip(made, by_definition(gradients, copies, wide)):
        assert got.dtype == wanted.dtype
        assert (got == wanted).all()


def test_the_order_is_the_written_one():
    """1 + 2^-24 + 2^-24 in float32."""
    small = np.float32(2.0**-24)
    slots = [[0, -1], [1, 0], [2, 0]]

    def sum_of(home, first, second):
        gradients = [np.array([[value]], "f4") for value in (home, 0, 0)]
        copies = [np.array([[value]], "f4") for value in (7, first, second)]
        return simulate_expert_copy_gradients(slots, gradients, copies)[0].item()

    assert sum_of(1, small, small) == 1
    assert sum_of(small, small, 1) == 1 + 2.0**-23


def test_refused_by_name():
    weights = arrays((2, 3), "f4", 5)
    copies = arrays((SPARE, 3), "f4", 6)

    def refuses(text, call, *given):
        with pytest.raises(waybill.InvalidArgument, match=text):
            call(*given)

    refuses(r"simulate_expert_copies: slots has shape \[4\]", simulate_expert_copies, [0, 1, 2, 3],
            weights)  # fmt: skip
    refuses("weights has 2 entries, expected one for each of 3", simulate_expert_copies, SLOTS,
            weights[:2])  # fmt: skip
    wrong = SLOTS.copy()
    wrong[1, 2] = 2
    refuses(r"slots\[1\]\[2\] = 2, expected an expert that rank 1 has not yet",
            simulate_expert_copies, wrong, weights)  # fmt: skip
    wrong[1, 2] = -2
    refuses("slots: -2, expected -1 or an expert", simulate_expert_copies, wrong, weights)
    refuses(r"weights\[1\] is float64 of shape \[2, 3\], expected float32", simulate_expert_copies,
            SLOTS, [weights[0], weights[1].astype("f8"), weights[2]])  # fmt: skip
    call = simulate_expert_copy_gradients
    refuses("copy_gradients is int32, expected floats", call, SLOTS, weights,
            [one.astype("i4") for one in copies])  # fmt: skip
    refuses(r"copies\[0\] is float64", call, SLOTS, weights, [one.astype("f8") for one in copies])
    refuses(r"copies\[0\] is float32 of shape \[2, 2\]", call, SLOTS, weights,
            [one[:, :2] for one in copies])  # fmt: skip
