"""Errors name what the caller called: the function, the argument, and the shape as it was given."""

import re

import numpy as np
import pytest

import waybill

LENGTHS = [30, 50, 20]
ROW = (4, 16)


def refused(text, call, *arguments, **options):
    with pytest.raises(waybill.InvalidArgument, match=re.escape(text)) as caught:
        call(*arguments, **options)
    assert isinstance(caught.value, waybill.Error)


def one_rank():
    plan = waybill.plan(LENGTHS, 1, 0)
    return plan.to_routing(), sum(LENGTHS)


def test_of_a_dispatcher():
    routing, rows = one_rank()

    def body(world):
        dispatcher = waybill.SequenceDispatcher(world)
        q = np.zeros((rows, *ROW), np.float16)
        ready = dispatcher.plan_dispatch((routing.fwd_q, q))
        batched = "dispatch: tensors[0] has shape [1, 100, 4, 16], expected [rows, 4, 16]"
        refused(batched, dispatcher.dispatch, ready, q[None])
        few = "dispatch: tensors[0] has shape [99, 4, 16], expected at least 100 rows"
        refused(few, dispatcher.dispatch, ready, q[:99])
        wide = "dispatch: tensors[0] has dtype float32, expected float16, as in the plan"
        refused(wide, dispatcher.dispatch, ready, q.astype(np.float32))
        flat = dispatcher.dispatch(ready, q.reshape(rows, 64))  # rows are what counts
        assert flat[0].shape == (rows, *ROW)

        sums = dispatcher.plan_kv_gradient((routing.fwd_kv, q))
        refused(
            "kv_gradient: gradients[0] has shape [99, 4, 16], expected at least 100 rows",
            dispatcher.kv_gradient, sums, q[:99],
        )  # fmt: skip
        refused(
            "kv_gradient: out[0] has shape [99, 4, 16], expected at least 100 rows",
            dispatcher.kv_gradient, sums, q, out=[q[:99]],
        )  # fmt: skip
        refused("kv_gradient: got 2 gradients, expected 1", dispatcher.kv_gradient, sums, q, q)

    waybill.run_threads(1, body)


def test_of_a_simulation():
    fwd, _ = waybill.compute_metadata([[3]], [[0]])
    tensor = np.zeros((1, 3, 4))
    with pytest.raises(waybill.ShapeMismatch, match="output_tensor has shape"):
        waybill.orchestrate_simulate(tensor, np.zeros((1, 3, 5)), fwd)


def test_all_classes_derive_from_error():
    names = [name for name in waybill.__all__ if isinstance(getattr(waybill, name), type)]
    classes = [getattr(waybill, name) for name in names]
    errors = [c for c in classes if issubclass(c, BaseException)]
    assert len(errors) > 10 and all(issubclass(c, waybill.Error) for c in errors)
    assert issubclass(waybill.Interrupted, KeyboardInterrupt)
