"""Ranks that are threads and share a GPU: what CUDA must have been told before its first context.

A rank's kernel waits on the device for those of the others. A kernel that CUDA loads at its first
use waits until the device is idle; one that stands after it in a hardware queue waits for it.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any, Optional

__all__ = ["load_eagerly", "separate_queues"]

_LOADING, _QUEUES = "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"
_ENOUGH_QUEUES = 32
_LAZY_LOADING = 2  # of CUmoduleLoadingMode


def load_eagerly() -> None:
    """For contexts that this process makes from now on, unless the user has said how."""
    os.environ.setdefault(_LOADING, "EAGER")


def separate_queues(num_gpus: int, who: str) -> None:
    """The same for hardware queues; and says so where it is too late for one of both."""
    driver = _driver()
    late = [f"{_LOADING}=EAGER"] if _loads_lazily(driver) else []
    unset = _QUEUES not in os.environ
    queues = os.environ.setdefault(_QUEUES, str(_ENOUGH_QUEUES))
    few = not queues.isdigit() or int(queues) < _ENOUGH_QUEUES
    if few or (unset and _has_context(driver, num_gpus)):
        late.append(f"{_QUEUES}={_ENOUGH_QUEUES}")
    if late:
        warnings.warn(
            f"{who}: ranks share a GPU, and CUDA began in this process without"
            f" {' and '.join(late)}: a kernel's first use, or a copy, may wait for"
            " another rank's call until its deadline; set that in the environment before the"
            " program starts",
            RuntimeWarning,
            stacklevel=5,
        )


def _driver() -> Optional[Any]:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _loads_lazily(driver: Optional[Any]) -> bool:
    """Whether this process has begun with a CUDA that does. Before that the variable decides."""
    mode = ctypes.c_int(0)
    if driver is None or driver.cuModuleGetLoadingMode(ctypes.byref(mode)) != 0:
        return False
    return mode.value == _LAZY_LOADING


def _has_context(driver: Optional[Any], num_gpus: int) -> bool:
    """Whether any of these devices has its primary context, which torch and Waybill use."""
    flags, active = ctypes.c_uint(0), ctypes.c_int(0)
    return driver is not None and any(
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        and active.value != 0
        for device in range(num_gpus)
    )
