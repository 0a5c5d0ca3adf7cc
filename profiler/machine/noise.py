"""The share of the machine that other processes take, from ``/proc``: a time measured beside them means little."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC_STAT = Path("/proc/stat")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; guest time is part of user


@dataclass(frozen=True, slots=True)
class _Reading:
    wall: float
    machine: float
    own: float


class ForeignLoad:
    """Measures the share of all CPU time that other processes took since it was made or last reset.

    Where the system does not tell (no ``/proc/stat``), ``share`` is None: unknown, not zero.
    """

    def __init__(self, stat: Path = _PROC_STAT, *, friends: Sequence[int] = ()) -> None:
        """Starts measuring; processes in ``friends`` do not count as others."""
        self._stat = stat
        self._friends = tuple(friends)
        self._start = self._read()

    def reset(self) -> None:
        """Starts over."""
        self._start = self._read()

    @property
    def share(self) -> float | None:
        """CPU time of others over CPU time that the whole machine has, 0 to 1; None where unknown.

        The kernel counts in ticks of 10 ms: a share over less than a second is coarse.
        """
        now = self._read()
        if now is None or self._start is None:
            return None
        capacity = (now.wall - self._start.wall) * (os.cpu_count() or 1)
        if capacity <= 0:
            return 0.0
        foreign = (now.machine - self._start.machine) - (now.own - self._start.own)
        return min(1.0, max(0.0, foreign / capacity))

    def _read(self) -> _Reading | None:
        try:
            fields = self._stat.read_text(encoding="utf-8").splitlines()[0].split()[1:]
            ticks = sum(int(fields[index]) for index in _BUSY_FIELDS)
        except (OSError, IndexError, ValueError):
            return None
        own = os.times()
        return _Reading(
            wall=time.monotonic(),
            machine=ticks / os.sysconf("SC_CLK_TCK"),
            own=own.user
            + own.system
            + own.children_user
            + own.children_system
            + sum(_cpu_seconds(process) for process in self._friends),
        )


def _cpu_seconds(process: int) -> float:
    """Returns the CPU time of another process; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
