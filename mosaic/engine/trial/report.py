"""The report of a trial, whether plans were tried in a loop or on ranks before it: sentences and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What was measured of one contender."""

    name: str
    """What it is."""
    num_steps: int
    """Timed steps."""
    median_ms: float | None
    """Median step in milliseconds; None before the first."""
    low_ms: float
    """Lower end of the median's interval."""
    high_ms: float
    """Upper end; infinite with too few steps."""
    outcome: str
    """What became of it."""

    def sentence(self) -> str:
        """Says it in a line."""
        if self.median_ms is None:
            return f"tried {self.name}: no step timed; {self.outcome}"
        within = f" ({self.low_ms:.2f} to {self.high_ms:.2f})" if self.high_ms < math.inf else ""
        steps = f"{self.num_steps} step{'s' if self.num_steps > 1 else ''}"
        return f"tried {self.name}: measured {self.median_ms:.2f} ms a step{within}, {steps}; {self.outcome}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """What ``describe()`` and ``metrics()`` tell of a trial, or of there having been none."""

    sentences: tuple[str, ...]
    """What was tried, measured and decided, and why."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``trials``, ``trial_steps``, ``trial_lost_ms`` and ``trial_ms/PLAN``, all measured."""

    @property
    def has_steps(self) -> bool:
        """Whether any step was taken."""
        return self.metrics.get("trial_steps", 0.0) > 0

    @staticmethod
    def of(head: str, standings: Sequence[Standing], *, num_trials: int, num_steps: int, lost_ms: float) -> TrialReport:
        """Returns the report of a trial that has begun; ``head`` says how far it is, or how it ended."""
        times = {f"trial_ms/{one.name}": one.median_ms for one in standings if one.median_ms is not None}
        counts = {"trials": float(num_trials), "trial_steps": float(num_steps), "trial_lost_ms": lost_ms}
        return TrialReport(sentences=(head, *(one.sentence() for one in standings)), metrics={**counts, **times})
