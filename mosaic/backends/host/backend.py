"""The host backend: lanes are threads pinned to disjoint cores, each with its own intra-op thread count.

A slot is one core. Lanes run concurrently inside torch operators, which release the interpreter lock, and during the
whole backward. OpenMP pools belong to the calling thread and inherit its affinity, so a lane's operators stay on its
cores.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from mosaic.backends.base import Backend, checked_partitions
from mosaic.backends.host.lanes import HostLanes
from mosaic.device import Device
from mosaic.hardware.find import available_cores, machine_bytes


class HostBackend(Backend):
    """Runs modules on disjoint sets of CPU cores.

    Args:
        num_slots: Number of slots; by default the cores that this process may use. More slots than cores are unpinned,
            without any speed-up: for tests on a small machine.
        num_threads: Intra-op threads of every lane; by default its number of slots. The order of sums depends on it, so
            1 makes a colocated loop equal, bit for bit, to a plain one with one thread at any quotas.
        cores: The cores; by default those that this process may use. Ranks on one machine use a share each.
    """

    def __init__(
        self, num_slots: int | None = None, *, num_threads: int | None = None, cores: Sequence[int] | None = None
    ) -> None:
        cores = available_cores() if cores is None else tuple(cores)
        for name, value in (("num_slots", num_slots), ("num_threads", num_threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; use at least 1")
        count = num_slots or len(cores)
        self._num_threads, self._cores = num_threads, dict(enumerate(cores))
        self._pinned = hasattr(os, "sched_setaffinity") and count <= len(cores)
        self._device = Device(
            name=f"{cpu_name()}, {count} core{'s' if count > 1 else ''}",
            kind="host",
            num_slots=count,
            memory_bytes=machine_bytes(),
        )

    @property
    def name(self) -> str:
        return "host"

    @property
    def device(self) -> Device:
        return self._device

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def notes(self) -> tuple[str, ...]:
        sentences = []
        if self._device.num_slots == 1:
            sentences.append("there is only one core, so modules run one after the other")
        if self._device.num_slots > len(self._cores):
            slots = f"num_slots={self._device.num_slots} exceeds the {len(self._cores)} cores"
            sentences.append(f"{slots}: lanes are not pinned, and times mean nothing")
        elif not self._pinned:
            sentences.append("this system has no thread affinity: lanes have their thread counts but are not pinned")
        if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
            sentences.append(SPINNING)
        return tuple(sentences)

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> HostLanes:
        if SPINNING in self.notes and self._device.num_slots > 1:
            _warn_once(SPINNING)
        distinct = checked_partitions(self._device, partitions)
        return HostLanes(distinct, self._cores if self._pinned else None, self._num_threads)

    def read_units(self) -> tuple[int, ...]:
        """Returns the cores that the calling thread may run on."""
        return available_cores() if hasattr(os, "sched_getaffinity") else super().read_units()


SPINNING = (
    "OMP_WAIT_POLICY is not PASSIVE: idle OpenMP threads spin and disturb the other lanes; set it before torch is "
    "imported (the mosaic command does)"
)
"""Note if idle OpenMP threads spin."""


@cache
def _warn_once(sentence: str) -> None:
    logging.getLogger("mosaic").warning("%s", sentence)


def cpu_name() -> str:
    """Returns the processor's product name, or its architecture without one."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"
