"""Health of GPUs for unattended runs: persistence mode and memory errors, from NVML, read-only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU; None for unknown values."""

    index: int
    """Index in ``nvidia-smi``."""
    name: str
    """Model of the GPU."""
    persistent: bool | None
    """True if the driver stays loaded while no process uses it."""
    ecc: bool | None
    """True if its memory corrects errors."""
    uncorrected: int | None
    """Lifetime count of uncorrectable memory errors."""
    needs_reset: bool | None
    """True if a retired row waits for a reset, or could not be replaced."""


def ask_gpus() -> tuple[GpuHealth, ...]:
    """Returns NVML's answers; empty if NVML does not respond."""
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
        except pynvml.NVMLError:  # unsupported by this GPU, or not permitted
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
        # Corrected and uncorrected rows; a row waits for a reset; a row could not be replaced.
        needs_reset=told(lambda: any(pynvml.nvmlDeviceGetRemappedRows(gpu)[2:])),
    )
