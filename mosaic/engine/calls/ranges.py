"""Ranges that profilers show: ``mosaic::<module>.<phase>`` around each placed forward and backward.

torch's profiler and its NVTX emitter get them from ``record_function``, which takes some ten microseconds and is left
out while neither runs. A build of torch that has NVTX always sets NVTX ranges, since nothing says whether a tool
listens; a range takes less than a microsecond. Lanes of the host are threads, which torch's profiler leaves out unless
it is asked for all of them (``torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd import profiler

_NVTX: Any = getattr(torch._C, "_nvtx", None)


def are_seen() -> bool:
    return _NVTX is not None or profiler._is_profiler_enabled


class ProfilerRange:
    """A range of one placed forward or backward, from its making to ``close``.

    Ranges of one thread may overlap, as backwards of several modules do.
    """

    __slots__ = ("_nvtx", "_record")

    def __init__(self, module: str, phase: str) -> None:
        self._record: Any = None
        self._nvtx: int | None = None
        if _NVTX is not None:
            self._nvtx = _NVTX.rangeStartA(f"mosaic::{module}.{phase}")
        if profiler._is_profiler_enabled:  # in any thread of this process
            self._record = profiler.record_function(f"mosaic::{module}.{phase}")
            self._record.__enter__()

    def close(self) -> None:
        """Ends the range; calling it again does nothing."""
        record, self._record = self._record, None
        if record is not None:
            record.__exit__(None, None, None)
        started, self._nvtx = self._nvtx, None
        if started is not None:
            _NVTX.rangeEnd(started)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
