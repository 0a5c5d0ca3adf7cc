"""Whether a loop still runs as it did when its trial ended: decided from times and shapes alone. No clock, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Hashable

from mosaic.engine.trial.settings import TrialSettings

_WINDOW = 20
_MARGIN = 1.1


class DriftWatch:
    """Looks at steps after a trial, a window of 20 at a time.

    A loop has drifted when the medians of windows that make up ``drift_steps`` steps in a row are all above what nine
    of ten steps took in the trial, and above its median by 10 % at least; when as many steps in a row had one same
    other shape; or when somebody else has come to the device.

    Args:
        samples: Milliseconds of steps in the trial, of the way that now runs; empty: the first windows are taken.
        shapes: Of the trial's batches.
        settings: Bounds.
    """

    def __init__(self, samples: list[float], shapes: Hashable, settings: TrialSettings) -> None:
        self.shapes = shapes
        self._settings = settings
        self._window: list[float] = []
        self._slow = 0
        self._others = 0
        self._other: Hashable = None
        self._tenants: frozenset[int] | None = None
        self._limit_ms = _limit(samples) if samples else None

    def note(self, step_ms: float) -> str | None:
        """Takes a step of the trial's shapes; returns what has changed, or None."""
        self._window.append(step_ms)
        if len(self._window) < _WINDOW:
            return None
        median, window = statistics.median(self._window), self._window
        self._window = []
        if self._limit_ms is None:
            self._limit_ms = _limit(window)
            return None
        self._slow = self._slow + _WINDOW if median > self._limit_ms else 0
        if self._slow < self._settings.drift_steps:
            return None
        return f"{self._slow} steps in a row were slower than in the trial: {median:.2f} ms, above {self._limit_ms:.2f}"

    @property
    def has_other_shapes(self) -> bool:
        """Whether a window of batches in a row had one same other shape, so that the trial says nothing of them."""
        return self._others >= _WINDOW

    def note_shapes(self, shapes: Hashable) -> str | None:
        """Takes the shapes of a step's batch; returns what has changed, or None."""
        if shapes == self.shapes:
            self._others = 0
            return None
        self._others = self._others + 1 if shapes == self._other else 1
        self._other = shapes
        if self._others < self._settings.drift_steps:
            return None
        return f"the last {self._others} batches had other shapes than those of the trial"

    def note_tenants(self, processes: frozenset[int]) -> str | None:
        """Takes the other processes on the device; returns what has changed, or None."""
        known, self._tenants = self._tenants, processes
        come = processes - known if known is not None else frozenset()
        if not come:
            return None
        return f"another process uses the device now (id {', '.join(map(str, sorted(come)))})"


def _limit(samples: list[float]) -> float:
    ordered = sorted(samples)
    return max(ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))], _MARGIN * statistics.median(ordered))
