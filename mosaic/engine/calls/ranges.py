"""Ranges that profilers show: ``mosaic::<module>.<phase>`` around each placed forward and backward.

They take some ten microseconds, and are left out where nothing reads them.
torch's profiler shows the host's lanes, which are threads, only with ``_ExperimentalConfig(profile_all_threads=True)``.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch.autograd import profiler

_NVTX: Any = getattr(torch._C, "_nvtx", None)
_HAS_TOOL = "NVTX_INJECTION64_PATH" in os.environ  # as Nsight Systems starts programs


class ProfilerRange:
    """A range, which ends with ``close`` or a block; ranges of one thread may overlap, as backwards do."""

    __slots__ = ("_nvtx", "_record")

    def __init__(self, module: str, phase: str) -> None:
        self._nvtx = None if _NVTX is None else _NVTX.rangeStartA(f"mosaic::{module}.{phase}")
        self._record: Any = None
        if profiler._is_profiler_enabled:  # in any thread of this process
            self._record = profiler.record_function(f"mosaic::{module}.{phase}").__enter__()

    def __enter__(self) -> Self:
        return self

    def close(self, *_: object) -> None:
        record, self._record = self._record, None
        if record is not None:
            record.__exit__(None, None, None)
        if self._nvtx is not None:
            _NVTX.rangeEnd(self._nvtx)
            self._nvtx = None

    __exit__ = close


def profiler_range(module: str, phase: str) -> AbstractContextManager[object]:
    return ProfilerRange(module, phase) if is_profiled() else nullcontext()


def is_profiled() -> bool:
    """Returns True while torch's profiler runs in any thread, or if a tool that reads NVTX started this process."""
    return _HAS_TOOL or profiler._is_profiler_enabled
