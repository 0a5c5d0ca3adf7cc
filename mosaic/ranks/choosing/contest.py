"""Which plan for all ranks is fastest: decided from the times of steps alone. No clock, no torch, no chance.

The race is that of one rank's trial (``mosaic.engine.trial_race``) with the first plan, data-parallel training, in the
place of the plain loop: it runs unless another is surely faster. Here no step trains anything, so all that count are
time lost (and those before them, of which each turn has one or two, have no bound but their number). The first can
fail as any other can; then the next one takes its place. The last one that is left runs, tried or not: what fails in it
fails in the loop.

Every rank holds a contest of its own and is told the same times, so all know whose turn it is without asking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.engine.trial.settings import TrialSettings
from mosaic.engine.trial_race import Measured, Race, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Whose turn it is."""

    plan: int
    """Of those that began."""
    num_steps: int
    """Steps to take, those included that do not count."""
    num_warm: int
    """Steps that do not count; the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it was decided."""

    winner: int
    """What runs."""
    reason: str
    """Why."""
    measured: tuple[Measured, ...]
    """What is known of each, the failed ones last."""
    num_steps: int
    """Steps that were taken."""
    lost_ms: float
    """Time that they took."""


class Contest:
    """Plans that take turns.

    Args:
        names: What they are called; the first is the one to beat.
        settings: Bounds; no plan is solved again.
    """

    def __init__(self, names: Sequence[str], settings: TrialSettings) -> None:
        self._names = tuple(names)
        self._settings = settings
        self._live = list(range(len(names)))
        self._failed: list[Measured] = []
        self._num_steps, self._took_ms = 0, 0.0
        self._noted = 0
        self._turn: Turn | None = None
        self._race = self._begun()

    def next(self) -> Turn | Outcome:
        """Says whose turn is next, or how it was decided."""
        self._turn = None
        if len(self._live) < 2:
            return self._without_rivals()
        found = self._race.next_visit()
        if isinstance(found, Verdict):
            return self._outcome(self._live[found.winner], found.reason, self._race.report(found))
        self._turn, self._noted = (
            Turn(plan=self._live[found.entry], num_steps=found.num_steps, num_warm=found.num_warm),
            0,
        )
        return self._turn

    def note(self, times_ms: Sequence[float]) -> None:
        """Takes the time of a step on each rank; the slowest one's counts."""
        assert self._turn is not None, "nobody has a turn"
        step_ms, lost_ms = max(times_ms), self._race.lost_ms
        is_warm = self._noted < self._turn.num_warm
        self._noted += 1
        self._num_steps += 1
        self._took_ms += step_ms
        self._race.note(step_ms)
        self._race.lose((0.0 if is_warm else step_ms) - (self._race.lost_ms - lost_ms))

    @property
    def is_cut(self) -> bool:
        """Whether the present turn is to end before its steps are taken."""
        return self._race.is_cut

    def fail(self, reason: str) -> None:
        """Takes the plan out whose turn it is: it could not run."""
        assert self._turn is not None, "nobody has a turn"
        entry = self._live.index(self._turn.plan)
        if entry:
            self._race.drop(entry, f"could not run: {reason}")
            return
        # Whoever is left was only compared with this one: also those that were slower take part again.
        failed = {self._turn.plan: f"could not run: {reason}"}
        for number, other in zip(self._live[1:], self._race.entries[1:], strict=True):
            if other.is_counted_out and other.dropped is not None:
                failed[number] = other.dropped
        self._failed += [_unmeasured(self._names[number], why) for number, why in failed.items()]
        self._live = [number for number in self._live if number not in failed]
        self._race = self._begun()

    def _begun(self) -> Race:
        first, *others = [self._names[number] for number in self._live]
        race = Race(self._settings, baseline=first)
        for name in others:
            race.add(name)
        return race

    def _without_rivals(self) -> Outcome:
        name = self._names[self._live[0]]
        left = _unmeasured(name, "runs from now on")
        return self._outcome(self._live[0], f"{name} is the only plan that is left", (left,))

    def _outcome(self, winner: int, reason: str, measured: Sequence[Measured]) -> Outcome:
        return Outcome(
            winner=winner,
            reason=reason,
            measured=(*measured, *self._failed),
            num_steps=self._num_steps,
            lost_ms=self._took_ms,
        )


def _unmeasured(name: str, outcome: str) -> Measured:
    return Measured(name=name, num_steps=0, median_ms=None, low_ms=0.0, high_ms=math.inf, outcome=outcome)
