"""Changes of a loop since its trial, from times and shapes alone. No clock, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence

from mosaic.take_turns import TrialSettings

_WINDOW = 20
_MARGIN = 1.1


class DriftWatch:
    """Watches the steps after a trial; each method returns a sentence once the loop has changed.

    A loop has drifted when the medians of windows that make up ``drift_steps`` steps in a row are all above what nine
    of ten steps took in the trial, and above its median by 10 % at least; when as many steps in a row had one same
    other shape; or when another process has come to the device.

    Args:
        samples: Milliseconds of the trial's steps of the candidate that runs; without any, the first window.
        shapes: The shapes of the trial's batches.
        settings: Bounds.
    """

    def __init__(self, samples: Sequence[float], shapes: Hashable, settings: TrialSettings) -> None:
        self.shapes = shapes
        self._drift_steps = settings.drift_steps
        self._window: list[float] = []
        self._num_slow = self._num_others = 0
        self._other: Hashable = None
        self._tenants: frozenset[int] | None = None
        self._limit_ms = _limit(samples) if samples else None

    @property
    def has_other_shapes(self) -> bool:
        """True after 20 batches in a row of one shape that the trial did not measure."""
        return self._num_others >= _WINDOW

    def note_time(self, step_ms: float) -> str | None:
        """Records the time of a step with the trial's shapes."""
        self._window.append(step_ms)
        if len(self._window) < _WINDOW:
            return None
        median, window = statistics.median(self._window), self._window
        self._window = []
        if self._limit_ms is None:
            self._limit_ms = _limit(window)
            return None
        self._num_slow = self._num_slow + _WINDOW if median > self._limit_ms else 0
        if self._num_slow < self._drift_steps:
            return None
        limit = f"{median:.2f} ms, above {self._limit_ms:.2f}"
        return f"{self._num_slow} steps in a row were slower than in the trial: {limit}"

    def note_shapes(self, shapes: Hashable) -> str | None:
        """Records the shapes of a step's batch."""
        if shapes == self.shapes:
            self._num_others = 0
            return None
        self._num_others = self._num_others + 1 if shapes == self._other else 1
        self._other = shapes
        if self._num_others < self._drift_steps:
            return None
        return f"the last {self._num_others} batches had other shapes than those of the trial"

    def note_tenants(self, processes: frozenset[int]) -> str | None:
        """Records the other processes on the device."""
        known, self._tenants = self._tenants, processes
        added = processes - known if known is not None else frozenset()
        return f"another process uses the device now (id {', '.join(map(str, sorted(added)))})" if added else None


def _limit(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return max(ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))], _MARGIN * statistics.median(ordered))
