"""The six models that are measured: size ``gpu`` of ``mosaic.models``, with as many samples as memory holds."""

from __future__ import annotations

from mosaic import models
from mosaic.errors import MosaicError

MAX_BATCH = 8
"""Samples of a step where memory holds them."""
GPU_BYTES = 78 << 30
"""Memory that ``Row.gpu_batch`` is counted for."""


def samples_that_fit(name: str, memory_bytes: int, batch: int = MAX_BATCH) -> int:
    """Returns how many samples of at most ``batch`` a device's memory holds.

    Raises:
        MosaicError: It does not hold one.
    """
    most = models.find_model(name).gpu_batch * memory_bytes // GPU_BYTES
    if most < 1:
        raise MosaicError(
            f"{name}-gpu with one sample does not fit in {memory_bytes / 2**30:.0f} GiB; take a larger device"
        )
    return min(batch, most)
