"""How plans are tried in a loop's first steps, and what that may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


class StepClock(Protocol):
    """Tells how long steps took, without waiting for them while they run."""

    def mark(self) -> Any:
        """Notes the point that the loop's work has come to."""

    def is_past(self, mark: Any) -> bool:
        """Whether the loop's work has come to a point, so that times up to it are known."""

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Returns the milliseconds from one point to another; both are past."""

    def settle(self) -> None:
        """Waits until all work up to now is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Bounds of a trial.

    A trial takes at most ``max_steps`` steps of the loop, which train as all others do. Of these, at most as much time
    is lost as ``max_lost_steps`` steps of the plain loop take: what steps with a plan took beyond the plain loop's
    median, what solving again took, and what opening lanes took. Once it is used up, no further step with a plan and
    no further preparation begins; so what is running then is all that can go beyond it (on a GPU, where times are
    known late, the steps that were launched by then). The defaults are 2 % of a run of 1,000 steps.

    Raises:
        ValueError: A bound is out of range.
    """

    max_steps: int = 120
    """Most steps of one trial, those included whose times are thrown away."""
    max_lost_steps: float = 20.0
    """Most time lost to slower plans and to preparing them, in steps of the plain loop."""
    steps_per_visit: int = 4
    """Steps that are timed each time it is a plan's turn."""
    warm_steps: int = 2
    """Steps thrown away when a plan is first run: its modules are learned, caches fill; later turns throw away one."""
    rounds_to_win: int = 2
    """Rounds that a plan and what it has to beat take part in before it can win."""
    max_plans: int = 3
    """Plans to begin with, besides the plain loop."""
    max_replans: int = 2
    """How often measured times go back into the cost model and the plan is solved again."""
    smallest_gain: float = 1.02
    """Speed-up below which nothing is worth running, predicted or measured."""
    confidence: float = 0.9
    """Confidence of the intervals that must lie apart, for one to be surely faster than another."""
    drift_steps: int = 100
    """Steps in a row that have to be slower than the trial saw, or of other shapes, before a new trial starts."""
    retrial_steps: int = 500
    """Fewest steps between two trials; doubles with each new one."""
    clock: StepClock | None = None
    """What tells the time; None: the processor's on the host, events on a GPU."""

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in ("steps_per_visit", "rounds_to_win", "max_plans", "drift_steps", "retrial_steps")
        }
        wrong = [f"{name}={value}" for name, value in counts.items() if value < 1]
        wrong += [f"{name}={getattr(self, name)}" for name in ("warm_steps", "max_replans") if getattr(self, name) < 0]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}; use 1 or more, 0 or more for warm_steps and max_replans")
        if not 0 <= self.max_lost_steps < math.inf or not 1 <= self.smallest_gain < math.inf:
            raise ValueError(
                f"max_lost_steps={self.max_lost_steps}, smallest_gain={self.smallest_gain}; use a finite number of 0 "
                "or more and one of 1 or more"
            )
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence={self.confidence}; use 0.5 or more and less than 1")
        least = 2 * (self.warm_steps + self.steps_per_visit)
        if self.max_steps < least:
            raise ValueError(
                f"max_steps={self.max_steps}; the plain loop and one plan need {least} steps for one turn each: allow "
                "more steps, or shorter turns (steps_per_visit, warm_steps)"
            )
