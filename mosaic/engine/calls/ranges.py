"""Ranges that profilers show: ``mosaic::<module>.<phase>`` around each placed forward and backward.

torch's profiler and its NVTX emitter get them from ``record_function``, which takes some ten microseconds and is left
out while neither runs. A build of torch that has NVTX always sets NVTX ranges, which take less than a microsecond.
Lanes of the host are threads, which torch's profiler shows only if asked for all of them
(``torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import profiler

_NVTX: Any = getattr(torch._C, "_nvtx", None)


def profiler_range(module: str, phase: str) -> ExitStack:
    """Begins a range, which ends with ``close`` or a block; ranges of one thread may overlap, as backwards do."""
    opened = ExitStack()
    if _NVTX is not None:
        opened.callback(_NVTX.rangeEnd, _NVTX.rangeStartA(f"mosaic::{module}.{phase}"))
    if profiler._is_profiler_enabled:  # in any thread of this process
        opened.enter_context(profiler.record_function(f"mosaic::{module}.{phase}"))
    return opened
