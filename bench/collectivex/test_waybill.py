"""CollectiveX's own tests of a backend, with Waybill's in the place of their fake one. This file
runs in the folder tests of a checkout, where add_backend.py puts it. No GPU.
"""

from __future__ import annotations

import types
import unittest
from typing import Any
from unittest import mock

import test_backends
import torch
from ep_waybill import WaybillBackend


class Ours(WaybillBackend):
    """Waybill's backend with the arguments of the fake one."""

    def __init__(self, options: Any, *, cap: int | None = None, world_size: int = 1) -> None:
        options.gpus_per_node = world_size
        super().__init__(options, 0, world_size, 0, torch.device("cpu"))
        self.cap = cap

    def buffer_cap(self, args: Any) -> int | None:
        return self.cap or super().buffer_cap(args)

    def _build_rank_inputs(self, options: Any, tokens: int) -> Any:
        return test_backends.RankInputs(tokens, None, None, None)


class WaybillTests(test_backends.BackendTests):  # type: ignore[misc]
    def setUp(self) -> None:
        ours = mock.patch.object(test_backends, "FakeBackend", Ours)
        ours.start()
        self.addCleanup(ours.stop)

    def test_precision_is_fail_closed(self) -> None:
        """The fake one lacks fp8, which Waybill has."""
        with self.assertRaises(ValueError):
            Ours(test_backends.args(precision="fp4"))

    def test_the_ladder_ends_where_memory_does(self) -> None:
        low_latency = Ours(test_backends.args(mode="low-latency", tokens_ladder="8 512"))
        spec = low_latency.make_inputs(low_latency.args)
        self.assertEqual((spec.ladder, spec.dropped), ([8], [512]))
        normal = Ours(test_backends.args(tokens_ladder="8 512"))
        self.assertEqual(normal.make_inputs(normal.args).ladder, [8, 512])

    def test_what_is_said_of_the_wire(self) -> None:
        plain, float8 = (
            Ours(test_backends.args(hidden=256, precision=precision))
            for precision in ("bf16", "fp8")
        )
        self.assertEqual((plain.dispatch_value_bytes, plain.dispatch_scale_bytes_per_copy), (2, 0))
        self.assertEqual(
            (float8.dispatch_value_bytes, float8.dispatch_scale_bytes_per_copy), (1, 8)
        )
        # Rows become bfloat16 again in stage(), which is no part of a round trip.
        self.assertEqual(plain.stage_excluded_from_roundtrip, False)
        self.assertEqual(float8.stage_excluded_from_roundtrip, True)

    def test_float8_is_closed_under_its_own_rounding(self) -> None:
        float8 = Ours(test_backends.args(hidden=256, precision="fp8"))
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        once = float8.semantic_payload(x)
        self.assertFalse(torch.equal(once, x))
        self.assertLess((once - x).abs().max().item(), 0.07 * x.abs().max().item())


class WaybillStages(unittest.TestCase):
    def test_a_stage_gives_combine_its_input(self) -> None:
        rows = torch.ones(3, 256)
        plain = Ours(test_backends.args(hidden=256))
        handle = types.SimpleNamespace(rows=rows)
        plain.stage(None, handle)
        self.assertIs(handle.combine_input, rows)


if __name__ == "__main__":
    unittest.main()
