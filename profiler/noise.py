"""The share of the CPU used by other processes, from ``/proc``; it marks disturbed measurements.

The process tree counts as own, including ended children; under torchrun, that of the ranks' common parent. The cores
are those that the process may use, or its control group's quota if that is less.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mosaic.device import Device
from mosaic.hardware.find import available_cores
from mosaic.profile import note_of_others
from mosaic.profiler.settings import ProfileSettings

_Measured = TypeVar("_Measured")
_TRIES = 3
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)  # user, nice, system, irq, softirq, steal; guest time is part of user
_SHORTEST_S = 0.2  # the kernel counts ticks of 10 ms


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU time over an interval, in seconds."""

    foreign: float = 0.0
    """CPU time of other processes; may be negative by a tick."""
    capacity: float = 0.0
    """CPU time of all cores."""
    wall: float = 0.0

    @property
    def share(self) -> float | None:
        """Share of the CPU time used by other processes, 0 to 1; None if the interval is too short."""
        return None if self.wall < _SHORTEST_S else min(1.0, max(0.0, self.foreign / self.capacity))

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.foreign + other.foreign, self.capacity + other.capacity, self.wall + other.wall)


class ForeignLoad:
    """Measures the CPU time of other processes since its creation; None without ``/proc/stat``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._cores = available_cores()
        self._start = self._read()

    @property
    def taken(self) -> CpuTime | None:
        """CPU time so far; None if unknown."""
        start, now = self._start, self._read()
        if start is None or now is None:
            return None
        (began, foreign, _), (ended, foreign_now, num_cores) = start, now
        return CpuTime(foreign_now - foreign, (ended - began) * num_cores, ended - began)

    @property
    def share(self) -> float | None:
        return None if (taken := self.taken) is None else taken.share

    def _read(self) -> tuple[float, float, float] | None:
        """Returns the clock, the CPU seconds of other processes since boot, and the number of cores."""
        wall, hertz = time.monotonic(), os.sysconf("SC_CLK_TCK")
        try:
            busy_s, num_cores = self._limited_group() or (self._busy_ticks() / hertz, float(len(self._cores)))
            several_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
            own_s = sum(map(self._ticks_of, self._tree(os.getppid() if several_ranks else os.getpid()))) / hertz
        except (OSError, IndexError, ValueError):
            return None
        return wall, busy_s - own_s, num_cores

    def _busy_ticks(self) -> int:
        names = {f"cpu{core}" for core in self._cores}
        lines = (line.split() for line in (self._root / "proc/stat").read_text(encoding="utf-8").splitlines())
        listed = [fields for fields in lines if fields and fields[0] in names]
        if not listed:
            raise ValueError("no core of this process is listed")
        return sum(int(fields[index]) for fields in listed for index in _BUSY_FIELDS)

    def _limited_group(self) -> tuple[float, float] | None:
        """Returns CPU seconds and cores of the control group (version 2) with the smallest quota; None: no quota."""
        top = self._root / "sys/fs/cgroup"
        lines = (self._root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        inner = top / next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
        limits = []
        for folder in (inner, *inner.parents):
            quota, _, period = _text_of(folder / "cpu.max").partition(" ")
            used = dict(line.split() for line in _text_of(folder / "cpu.stat").splitlines())
            if quota.isdecimal() and "usage_usec" in used:
                limits.append((int(used["usage_usec"]) / 1e6, int(quota) / int(period)))
        least = min(limits, key=lambda limit: limit[1], default=(0.0, math.inf))
        return least if least[1] < len(self._cores) else None

    def _tree(self, process: int) -> Iterator[int]:
        """Yields a process and its live descendants."""
        yield process
        for listed in (self._root / f"proc/{process}/task").glob("*/children"):
            for child in _text_of(listed).split():
                yield from self._tree(int(child))

    def _ticks_of(self, process: int) -> int:
        """Returns user and system time of a process and its ended children; 0 after its end."""
        fields = _text_of(self._root / f"proc/{process}/stat").rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))


def _text_of(path: Path) -> str:
    """Returns a file's text; empty if it does not exist, such as after the end of its process."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Retries:
    """Repeats measurements on the host that other processes disturbed, for ``settings.retry_seconds`` in total."""

    def __init__(self, settings: ProfileSettings, device: Device) -> None:
        self.taken = CpuTime()
        """CPU time over the accepted tries."""
        self._settings, self._device = settings, device
        self._seconds = settings.retry_seconds if device.kind == "host" else 0.0  # events measure the GPU itself

    @property
    def note(self) -> str:
        """A note for the result if other processes used the CPU; UnstableMeasurementError if settings are strict."""
        share, settings = self.taken.share or 0.0, self._settings
        return note_of_others(share, self._device, strict=settings.strict) if share > settings.foreign_share else ""

    def quietest(self, take: Callable[[], _Measured]) -> tuple[_Measured, float | None]:
        """Measures up to three times, until the CPU is idle enough.

        Returns the least disturbed try and the share of other processes, None if unknown.
        """
        tries: list[tuple[_Measured, CpuTime]] = []
        while True:
            began, load = time.perf_counter(), ForeignLoad()
            tries.append((take(), load.taken or CpuTime()))
            share, took_s = tries[-1][1].share, time.perf_counter() - began
            if share is None or share <= self._settings.foreign_share or len(tries) == _TRIES or took_s > self._seconds:
                break
            self._seconds -= took_s
        measured, taken = min(tries, key=lambda attempt: attempt[1].share or 0.0)
        self.taken += taken
        return measured, taken.share
