"""Which way to run a loop is fastest: decided from the times of steps alone. No clock, no torch, no chance.

Ways take turns, a few steps each, the plain loop first in every round. After each turn those are dropped that are
surely slower than the best, or cannot be faster than it by the smallest gain any more (successive elimination). A way
wins only if its interval lies wholly below the plain loop's; otherwise the plain loop stays.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from mosaic.engine.trial.settings import TrialSettings

PLAIN = "the plain loop"

_SURELY_SLOWER = 1.5
_SLOW_IN_A_ROW = 2
_LEAST_PLAIN = 2


def median_interval(samples: list[float], confidence: float) -> tuple[float, float]:
    """Returns an interval that holds the median of what ``samples`` were drawn from, whatever its distribution.

    The r-th least and the r-th largest sample, with the largest r for which the binomial distribution gives the
    confidence; from nothing to infinity where there are too few samples.
    """
    ordered, n = sorted(samples), len(samples)
    outside, rank = 0.0, 0
    while rank < n // 2:
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - confidence:
            break
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else (0.0, math.inf)


@dataclass(slots=True)
class Entry:
    """One way to run the loop, and what was measured of it."""

    name: str
    """What ``describe()`` calls it."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds of the steps that count."""
    num_visits: int = 0
    """Turns that it has had."""
    dropped: str | None = None
    """Why it is not tried any more."""
    is_counted_out: bool = False
    """Dropped for another reason than its times, so that it cannot win."""

    @property
    def median_ms(self) -> float:
        """Median step; infinite before the first."""
        return statistics.median(self.samples) if self.samples else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One turn."""

    entry: int
    """Whose; 0 is the plain loop."""
    num_warm: int
    """Steps to throw away first."""
    num_timed: int
    """Steps that count."""

    @property
    def num_steps(self) -> int:
        """All of them."""
        return self.num_warm + self.num_timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one way to run the loop."""

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
class Verdict:
    """How a trial ended."""

    winner: int
    """What runs from now on; 0 is the plain loop."""
    reason: str
    """Why."""


class Race:
    """Takes the times of steps, says whose turn is next and when it is decided.

    Args:
        settings: Bounds.
        baseline: What the first entry is called: what others have to beat.

    Attributes:
        entries: The plain loop, or what stands in its place; then the others.
        num_steps: Steps taken so far.
        num_rounds: Rounds begun so far.
        lost_ms: Time lost so far; see ``TrialSettings``.
    """

    def __init__(self, settings: TrialSettings, baseline: str = PLAIN) -> None:
        self.settings = settings
        self.entries = [Entry(baseline)]
        self.num_steps = 0
        self.num_rounds = 0
        self.lost_ms = 0.0
        self._queue: list[int] = []
        self._visit: Visit | None = None
        self._noted = 0
        self._slow = 0

    def add(self, name: str) -> int:
        """Lets another one take part from now on; returns its number."""
        self.entries.append(Entry(name))
        if self.num_rounds:
            self._queue.append(len(self.entries) - 1)
        return len(self.entries) - 1

    def drop(self, entry: int, reason: str) -> None:
        """Takes one out for another reason than its times; it cannot win any more. The plain loop stays."""
        if entry:
            self.entries[entry].dropped = reason
            self.entries[entry].is_counted_out = True

    def lose(self, ms: float) -> None:
        """Counts time that preparations took."""
        self.lost_ms += ms

    @property
    def budget_ms(self) -> float:
        """Time that may be lost; infinite until the plain loop was timed."""
        return self.settings.max_lost_steps * self.entries[0].median_ms

    @property
    def is_over_budget(self) -> bool:
        """Whether no further time may be lost."""
        return self.lost_ms >= self.budget_ms

    @property
    def has_room(self) -> bool:
        """Whether one more could have the two turns that it takes to win, with one of the plain loop's between them."""
        turn = self.settings.steps_per_visit
        needed = self.settings.warm_steps + turn + 2 * (min(1, self.settings.warm_steps) + turn)
        return not self.is_over_budget and self.num_steps + needed <= self.settings.max_steps

    @property
    def is_round_over(self) -> bool:
        """Whether everybody who takes part has had as many turns."""
        return self.num_rounds > 0 and not self._queue

    def next_visit(self) -> Visit | Verdict:
        """Says whose turn is next, or how it was decided."""
        self._visit = None
        if self.num_rounds and len(self.entries[0].samples) < _LEAST_PLAIN:
            return self._turn_of(0, best=0)
        best = self._eliminate()
        if self.num_rounds and not self._rivals(best):
            return self._verdict(best)
        if self.is_over_budget:
            return self._verdict(best, f"{self.lost_ms:.1f} ms were lost by then, which is all that a trial may take")
        while self._queue and self.entries[self._queue[0]].dropped is not None:
            self._queue.pop(0)
        if not self._queue:
            self.num_rounds += 1
            self._queue = [index for index, entry in enumerate(self.entries) if entry.dropped is None]
        return self._turn_of(self._queue.pop(0), best)

    def _turn_of(self, index: int, best: int) -> Visit | Verdict:
        warm = self.settings.warm_steps if not self.entries[index].num_visits else min(1, self.settings.warm_steps)
        visit = Visit(entry=index, num_warm=warm, num_timed=self.settings.steps_per_visit)
        if self.num_steps + visit.num_steps > self.settings.max_steps:
            if not self.entries[0].samples:
                return Verdict(winner=0, reason="no two steps in a row were alike (other shapes, other calls, errors)")
            return self._verdict(best, f"a trial takes no more than {self.settings.max_steps} steps")
        self._visit, self._noted, self._slow = visit, 0, 0
        self.entries[index].num_visits += 1
        return visit

    def note(self, step_ms: float | None) -> None:
        """Takes the time of the present turn's next step; None for a step that cannot be compared with others."""
        assert self._visit is not None, "nobody has a turn"
        entry, plain = self.entries[self._visit.entry], self.entries[0]
        is_warm = self._noted < self._visit.num_warm
        self._noted += 1
        self.num_steps += 1
        if step_ms is None:
            return
        if entry is not plain:
            self.lost_ms += max(0.0, step_ms - plain.median_ms)
        if is_warm:
            return
        entry.samples.append(step_ms)
        if entry is not plain:
            limit = _SURELY_SLOWER * max(plain.samples, default=math.inf)
            self._slow = self._slow + 1 if step_ms > limit else 0
            if self._slow == _SLOW_IN_A_ROW and entry.dropped is None:
                entry.dropped = f"{self._slow} steps in a row took more than {_SURELY_SLOWER:g} times {plain.name}'s"

    @property
    def is_cut(self) -> bool:
        """Whether the present turn is to end before its steps are taken."""
        if self._visit is None or self._visit.entry == 0:
            return False
        return self.is_over_budget or self.entries[self._visit.entry].dropped is not None

    def report(self, verdict: Verdict | None) -> tuple[Measured, ...]:
        """Says what was measured of each."""
        found = []
        for index, entry in enumerate(self.entries):
            low, high = self._interval(entry)
            if verdict is not None and verdict.winner == index:
                outcome = "runs from now on"
            elif entry.dropped is not None:
                outcome = entry.dropped
            elif index == 0:
                outcome = "what others are compared with"
            else:
                outcome = "not faster beyond the noise" if verdict is not None else "being tried"
            median = entry.median_ms if entry.samples else None
            count = len(entry.samples)
            found.append(
                Measured(name=entry.name, num_steps=count, median_ms=median, low_ms=low, high_ms=high, outcome=outcome)
            )
        return tuple(found)

    def _interval(self, entry: Entry) -> tuple[float, float]:
        return median_interval(entry.samples, self.settings.confidence)

    def _beats_plain(self, entry: Entry) -> bool:
        plain = self.entries[0]
        if entry is plain or entry.is_counted_out or min(entry.num_visits, plain.num_visits) < 2:
            return False
        apart = self._interval(entry)[1] < self._interval(plain)[0]
        return apart and entry.median_ms * self.settings.smallest_gain <= plain.median_ms

    def _eliminate(self) -> int:
        """Drops those that cannot win any more; returns the best of those that surely beat the plain loop, or 0."""
        winners = [index for index, entry in enumerate(self.entries) if self._beats_plain(entry)]
        best = min(winners, key=lambda index: self.entries[index].median_ms, default=0)
        for index in self._rivals(best):
            entry, target = self.entries[index], self.entries[best]
            if self._interval(entry)[0] * self.settings.smallest_gain >= target.median_ms:
                least = self.settings.smallest_gain - 1
                entry.dropped = f"surely not {least:.0%} faster than {target.name}"
        return best

    def _rivals(self, best: int) -> list[int]:
        return [i for i, entry in enumerate(self.entries) if i not in (0, best) and entry.dropped is None]

    def _verdict(self, best: int, end: str = "") -> Verdict:
        entry, plain = self.entries[best], self.entries[0]
        why = f"; {end}" if end else ""
        if best:
            gain = plain.median_ms / entry.median_ms
            return Verdict(
                winner=best, reason=f"{entry.name} is measured {gain:.2f} times as fast as {plain.name}{why}"
            )
        tried = sum(bool(other.num_visits) for other in self.entries[1:])
        found = "of the plans that were tried none is" if tried else "no plan was tried that is"
        return Verdict(winner=0, reason=f"{found} faster than {plain.name} beyond the noise{why}")
