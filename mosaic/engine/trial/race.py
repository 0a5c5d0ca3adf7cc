"""Which way to run a loop is fastest: decided from the times of steps alone. No clock, no torch, no chance.

Contenders take turns, a few steps each, the baseline first in every round: the plain loop, or data-parallel training on
several ranks. After each turn those are dropped that are surely slower than the best, or cannot be faster than it by
the smallest gain any more (successive elimination). A contender wins only if its interval lies wholly below the
baseline's, and it gains round by round, too: steps that follow each other share what the machine does then, so that of
four fast ones in one turn three say nothing. Otherwise the baseline stays. A baseline that cannot run gives its place
to the next contender.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from mosaic.engine.trial.report import Standing
from mosaic.engine.trial.settings import TrialSettings

PLAIN = "the plain loop"

_SURELY_SLOWER = 1.5
_SLOW_IN_A_ROW = 2
_MIN_BASELINE = 2


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
class Contender:
    """One way to run the loop, and what was measured of it."""

    name: str
    """What ``describe()`` calls it."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds of the steps that count."""
    rounds: dict[int, list[float]] = field(default_factory=dict)
    """The same by round."""
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
class Turn:
    """One turn."""

    contender: int
    """Whose, by its number."""
    num_warm: int
    """Steps to throw away first."""
    num_timed: int
    """Steps that count."""

    @property
    def num_steps(self) -> int:
        """All of them."""
        return self.num_warm + self.num_timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How a trial ended."""

    winner: int
    """Number of the contender that runs from now on."""
    reason: str
    """Why."""


class Race:
    """Takes the times of steps, says whose turn is next and when it is decided.

    Args:
        settings: Bounds.
        names: What contenders are called; the first one is the baseline, which others have to beat.
        trains: Whether steps train the model, so that only what they take longer than the baseline's is lost;
            otherwise all time of the steps that count is.

    Attributes:
        contenders: The baseline, then the others.
        num_steps: Steps taken so far.
        num_rounds: Rounds begun so far.
        lost_ms: Time lost so far; see ``TrialSettings``.
        took_ms: Time that all steps took.
    """

    def __init__(self, settings: TrialSettings, names: Sequence[str] = (PLAIN,), *, trains: bool = True) -> None:
        self.settings = settings
        self.contenders = [Contender(name) for name in names]
        self.num_steps = 0
        self.num_rounds = 0
        self.lost_ms = 0.0
        self.took_ms = 0.0
        self._trains = trains
        self._baseline = 0
        self._queue: list[int] = []
        self._turn: Turn | None = None
        self._noted = 0
        self._slow = 0

    @property
    def baseline(self) -> Contender:
        """What others have to beat."""
        return self.contenders[self._baseline]

    def add(self, name: str) -> int:
        """Lets another one take part from now on; returns its number."""
        self.contenders.append(Contender(name))
        if self.num_rounds:
            self._queue.append(len(self.contenders) - 1)
        return len(self.contenders) - 1

    def drop(self, number: int, reason: str) -> None:
        """Takes one out for another reason than its times; it cannot win any more.

        The others were only compared with the baseline: where that goes, all begin anew, the slower ones too.
        """
        self.contenders[number].dropped = reason
        self.contenders[number].is_counted_out = True
        if number != self._baseline:
            return
        left = [index for index, one in enumerate(self.contenders) if not one.is_counted_out]
        for index in left:
            self.contenders[index] = Contender(self.contenders[index].name)
        self._baseline, self.num_rounds, self._queue = left[0], 0, []

    def lose(self, ms: float) -> None:
        """Counts time that preparations took."""
        self.lost_ms += ms

    @property
    def budget_ms(self) -> float:
        """Time that may be lost; infinite until the baseline was timed."""
        return self.settings.max_lost_steps * self.baseline.median_ms

    @property
    def is_over_budget(self) -> bool:
        """Whether no further time may be lost."""
        return self.lost_ms >= self.budget_ms

    @property
    def has_room(self) -> bool:
        """Whether one more could have the two turns that it takes to win, with one of the baseline's between them."""
        turn = self.settings.steps_per_visit
        needed = self.settings.warm_steps + turn + 2 * (min(1, self.settings.warm_steps) + turn)
        return not self.is_over_budget and self.num_steps + needed <= self.settings.max_steps

    @property
    def is_round_over(self) -> bool:
        """Whether everybody who takes part has had as many turns."""
        return self.num_rounds > 0 and not self._queue

    def next_turn(self) -> Turn | Decision:
        """Says whose turn is next, or how it was decided."""
        self._turn = None
        if self._baseline and not self._rivals(self._baseline):
            reason = f"{self.baseline.name} is the only plan that is left"
            return Decision(winner=self._baseline, reason=reason)
        if self.num_rounds and len(self.baseline.samples) < _MIN_BASELINE:
            return self._turn_of(self._baseline, best=self._baseline)
        best = self._eliminate()
        if self.num_rounds and not self._rivals(best):
            return self._decision(best)
        if self.is_over_budget:
            return self._decision(best, f"{self.lost_ms:.1f} ms were lost by then, which is all that a trial may take")
        while self._queue and self.contenders[self._queue[0]].dropped is not None:
            self._queue.pop(0)
        if not self._queue:
            self.num_rounds += 1
            self._queue = [index for index, one in enumerate(self.contenders) if one.dropped is None]
        return self._turn_of(self._queue.pop(0), best)

    def _turn_of(self, number: int, best: int) -> Turn | Decision:
        one, settings = self.contenders[number], self.settings
        warm = settings.warm_steps if not one.num_visits else min(1, settings.warm_steps)
        turn = Turn(contender=number, num_warm=warm, num_timed=settings.steps_per_visit)
        if self.num_steps + turn.num_steps > settings.max_steps:
            if not self.baseline.samples:
                reason = "no two steps in a row were alike (other shapes, other calls, errors)"
                return Decision(winner=self._baseline, reason=reason)
            return self._decision(best, f"a trial takes no more than {settings.max_steps} steps")
        self._turn, self._noted, self._slow = turn, 0, 0
        one.num_visits += 1
        return turn

    def note(self, step_ms: float | None) -> None:
        """Takes the time of the present turn's next step; None for a step that cannot be compared with others."""
        assert self._turn is not None, "nobody has a turn"
        one, baseline = self.contenders[self._turn.contender], self.baseline
        is_warm = self._noted < self._turn.num_warm
        self._noted += 1
        self.num_steps += 1
        if step_ms is None:
            return
        self.took_ms += step_ms
        if not self._trains:
            self.lost_ms += 0.0 if is_warm else step_ms
        elif one is not baseline:
            self.lost_ms += max(0.0, step_ms - baseline.median_ms)
        if is_warm:
            return
        one.samples.append(step_ms)
        one.rounds.setdefault(self.num_rounds, []).append(step_ms)
        if one is not baseline:
            limit = _SURELY_SLOWER * max(baseline.samples, default=math.inf)
            self._slow = self._slow + 1 if step_ms > limit else 0
            if self._slow == _SLOW_IN_A_ROW and one.dropped is None:
                one.dropped = f"{self._slow} steps in a row took more than {_SURELY_SLOWER:g} times {baseline.name}'s"

    @property
    def is_cut(self) -> bool:
        """Whether the present turn is to end before its steps are taken."""
        if self._turn is None or self._turn.contender == self._baseline:
            return False
        return self.is_over_budget or self.contenders[self._turn.contender].dropped is not None

    def standings(self, decision: Decision | None) -> tuple[Standing, ...]:
        """Says what was measured of each."""
        return tuple(self._standing(number, decision) for number in range(len(self.contenders)))

    def _standing(self, number: int, decision: Decision | None) -> Standing:
        one = self.contenders[number]
        low, high = self._interval(one)
        if decision is not None and decision.winner == number:
            outcome = "runs from now on"
        elif one.dropped is not None:
            outcome = one.dropped
        elif number == self._baseline:
            outcome = "what others are compared with"
        else:
            outcome = "not faster beyond the noise" if decision is not None else "being tried"
        median = one.median_ms if one.samples else None
        return Standing(
            name=one.name, num_steps=len(one.samples), median_ms=median, low_ms=low, high_ms=high, outcome=outcome
        )

    def _interval(self, one: Contender) -> tuple[float, float]:
        return median_interval(one.samples, self.settings.confidence)

    def _beats_baseline(self, one: Contender) -> bool:
        baseline = self.baseline
        gains = self._gains(one)
        if one is baseline or one.is_counted_out or len(gains) < self.settings.rounds_to_win:
            return False
        low = median_interval(gains, self.settings.confidence)[0] or min(gains)
        return self._interval(one)[1] < self._interval(baseline)[0] and low >= self.settings.smallest_gain

    def _gains(self, one: Contender) -> list[float]:
        """Returns how many times as fast as the baseline it was in each round that both took part in."""
        theirs = self.baseline.rounds
        return [
            statistics.median(theirs[at]) / statistics.median(own) for at, own in one.rounds.items() if at in theirs
        ]

    def _eliminate(self) -> int:
        """Drops those that cannot win any more; returns the best that surely beats the baseline, or the baseline."""
        winners = [number for number, one in enumerate(self.contenders) if self._beats_baseline(one)]
        best = min(winners, key=lambda number: self.contenders[number].median_ms, default=self._baseline)
        for number in self._rivals(best):
            one, target = self.contenders[number], self.contenders[best]
            if self._interval(one)[0] * self.settings.smallest_gain >= target.median_ms:
                one.dropped = f"surely not {self.settings.smallest_gain - 1:.0%} faster than {target.name}"
        return best

    def _rivals(self, best: int) -> list[int]:
        out = (self._baseline, best)
        return [number for number, one in enumerate(self.contenders) if number not in out and one.dropped is None]

    def _decision(self, best: int, end: str = "") -> Decision:
        one, baseline = self.contenders[best], self.baseline
        why = f"; {end}" if end else ""
        if one is not baseline:
            gain = statistics.median(self._gains(one))
            return Decision(
                winner=best, reason=f"{one.name} is measured {gain:.2f} times as fast as {baseline.name}{why}"
            )
        tried = sum(bool(other.num_visits) for other in self.contenders if other is not baseline)
        found = "of the plans that were tried none is" if tried else "no plan was tried that is"
        return Decision(winner=best, reason=f"{found} faster than {baseline.name} beyond the noise{why}")
