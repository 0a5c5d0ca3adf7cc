"""Whether GPUs are fit for nights alone: persistence mode, memory errors; asked of NVML, which changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU; None for what it does not tell."""

    index: int
    """As ``nvidia-smi`` counts."""
    name: str
    """Its model."""
    persistent: bool | None
    """Whether the driver stays loaded while nobody uses it."""
    ecc: bool | None
    """Whether its memory corrects errors."""
    uncorrected: int | None
    """Errors of its memory, ever, that could not be corrected."""
    needs_reset: bool | None
    """Whether memory was taken out of use, which a reset completes, or could not be."""


def ask_gpus() -> tuple[GpuHealth, ...]:
    """Returns what NVML says; empty where it does not answer."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_ask(pynvml, index) for index in range(int(pynvml.nvmlDeviceGetCount())))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _ask(pynvml: Any, index: int) -> GpuHealth:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)

    def told(question: Callable[[], T]) -> T | None:
        try:
            return question()
        except pynvml.NVMLError:  # this kind of GPU does not know it, or this user may not
            return None

    name = pynvml.nvmlDeviceGetName(gpu)
    return GpuHealth(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        persistent=told(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(gpu))),
        ecc=told(lambda: bool(pynvml.nvmlDeviceGetEccMode(gpu)[0])),
        uncorrected=told(
            lambda: int(
                pynvml.nvmlDeviceGetTotalEccErrors(
                    gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC
                )
            )
        ),
        # Corrected and uncorrected rows; whether one waits for a reset; whether one could not be replaced.
        needs_reset=told(lambda: any(pynvml.nvmlDeviceGetRemappedRows(gpu)[2:])),
    )
