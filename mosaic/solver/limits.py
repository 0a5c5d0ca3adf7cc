"""Limits of a search, counted in work, so that the same input gives the same plan on a busy machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mosaic import _search


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of a search; it then returns its best plan, and a bound if the method has one."""

    effort: float = 10.0
    """Counted work, about seconds of a core; independent of machine and load. 0: the sequential plan."""
    seconds: float = math.inf
    """Wall time; a plan that it limits depends on the machine."""
    should_stop: Callable[[], bool] | None = None
    """Called several times per second; True ends the search."""

    def __post_init__(self) -> None:
        if not (self.effort >= 0 and self.seconds >= 0):
            raise ValueError(f"effort={self.effort}, seconds={self.seconds}; use values of 0 or more")

    @property
    def is_stopped(self) -> bool:
        return self.should_stop is not None and self.should_stop()


def repeatable_solver(effort: float) -> Any:
    """Returns a reproducible CP-SAT: one thread, a fixed seed and a limit in deterministic time."""
    from ortools.sat.python import cp_model  # 0.3 s to import

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # otherwise Python's own handler is lost
    return solver


class Countdown:
    """The remaining effort and time of limits, for one thread."""

    def __init__(self, limits: SearchLimits) -> None:
        self._ends = time.perf_counter() + limits.seconds
        self._limits = limits
        self._before = self.spend(0.0)

    def spend(self, effort: float) -> float:
        """Adds effort and returns this thread's total, including the extension's."""
        return _search.spend(effort)

    @property
    def left(self) -> float:
        """Remaining effort, at most the remaining seconds; 0 ends the search."""
        if self._limits.is_stopped:
            return 0.0
        spent = self.spend(0.0) - self._before
        return max(0.0, min(self._ends - time.perf_counter(), self._limits.effort - spent))

    def part(self, share: float = 1.0) -> SearchLimits:
        """Returns limits with a share of the remaining effort."""
        return replace(self._limits, effort=share * self.left, seconds=max(0.0, self._ends - time.perf_counter()))
