"""Candidates take turns at the steps of a loop until one is surely the fastest. No clock, no torch, no chance.

Every comparison of ways to run a loop is made here: the trials on one rank, on many ranks and of pipelines,
``mosaic run`` and the studies in bench/.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

PLAIN = "the plain loop"
_Sample = TypeVar("_Sample")

_SURELY_SLOWER = 1.5
"""A candidate whose steps take so many times the baseline's slowest, twice in a row, is dropped within its turn."""
_SLOW_IN_A_ROW = 2
_MIN_BASELINE = 2
_CONFIDENCE = 0.9
"""Of the intervals that must lie apart."""


class StepClock(Protocol):
    """Times steps without waiting for them while they run."""

    def mark(self) -> Any:
        """Marks the present end of the loop's work."""

    def is_past(self, mark: Any) -> bool:
        """Returns True if the work up to a mark is done, so times up to it are known."""

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Returns the milliseconds between two marks; waits for both."""

    def settle(self) -> None:
        """Waits until all work up to now is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Bounds of a trial, whose steps train as all others do; the defaults are 2 % of a run of 1,000 steps.

    After ``max_lost_steps`` no further step with a candidate begins; on a GPU, where times are known late, the steps
    that were launched by then still run.

    Raises:
        ValueError: A bound is out of range.
    """

    max_steps: int = 120
    """Most steps of one trial, including those whose times are discarded."""
    max_lost_steps: float = 20.0
    """Most time lost to slower candidates and to preparing them, in steps of the plain loop."""
    steps_per_visit: int = 4
    """Timed steps in each turn."""
    warm_steps: int = 2
    """Discarded steps in a candidate's first turn, where caches fill; later turns discard one."""
    rounds_to_win: int = 2
    """Rounds that a candidate and the baseline both need before the candidate can win."""
    max_plans: int = 3
    """Candidates beside the plain loop."""
    smallest_gain: float = 1.02
    """Speed-up below which nothing is worth running, predicted or measured."""
    clock: StepClock | None = None
    """Times the steps; None: the processor's clock on the host, events on a GPU."""

    def __post_init__(self) -> None:
        least = 2 * (self.warm_steps + self.steps_per_visit)
        counts = ("steps_per_visit", "rounds_to_win", "max_plans")
        rules = [
            *((name, getattr(self, name) >= 1, "1 or more") for name in counts),
            ("warm_steps", self.warm_steps >= 0, "0 or more"),
            ("max_lost_steps", 0 <= self.max_lost_steps < math.inf, "a finite number of 0 or more"),
            ("smallest_gain", 1 <= self.smallest_gain < math.inf, "a finite number of 1 or more"),
            ("max_steps", self.max_steps >= least, f"{least} or more, for one turn of the plain loop and of one plan"),
        ]
        if broken := [f"{name}={getattr(self, name)}; use {rule}" for name, holds, rule in rules if not holds]:
            raise ValueError("; ".join(broken))


def take_turns(
    runs: Mapping[str, Callable[[], Sequence[_Sample]]], rounds: int, *, more: Callable[[], bool] = lambda: True
) -> dict[str, list[list[_Sample]]]:
    """Runs each candidate once a round, every other round in reverse order; returns its samples by round.

    ``more`` is called before each round; False ends the comparison.
    """
    samples: dict[str, list[list[_Sample]]] = {name: [] for name in runs}
    for number in range(rounds):
        if not more():
            break
        for name in reversed(list(runs)) if number % 2 else list(runs):
            samples[name].append(list(runs[name]()))
    return samples


def median_interval(samples: Sequence[float], confidence: float) -> tuple[float, float]:
    """Returns an interval that holds the median of the distribution of ``samples``, whatever that distribution is.

    The r-th least and the r-th largest sample, with the largest r for which the binomial distribution gives the
    confidence; from nothing to infinity if the samples are too few.
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
class Candidate:
    """One way to run the loop, with its measurements."""

    name: str
    rounds: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds of its timed steps, by round."""
    num_visits: int = 0
    dropped: str | None = None
    """The reason why it is not tried any more."""
    is_excluded: bool = False
    """The reason is another than its times, so it cannot win."""

    @property
    def excluded_because(self) -> str | None:
        return self.dropped if self.is_excluded else None

    @property
    def samples(self) -> list[float]:
        return [step_ms for steps in self.rounds.values() for step_ms in steps]

    @property
    def median_ms(self) -> float:
        """Median step; infinite before the first."""
        return statistics.median(samples) if (samples := self.samples) else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        return median_interval(self.samples, _CONFIDENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One turn of one candidate, by its number; the first ``num_warm`` of its steps are discarded."""

    candidate: int
    num_warm: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The end of a trial: the number of the candidate that runs from now on, and the reason."""

    winner: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """Sentences for ``describe()`` and figures for ``metrics()``."""

    sentences: tuple[str, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``trials``, ``trial_steps``, ``trial_lost_ms`` and ``trial_ms/CANDIDATE``, all measured."""

    @property
    def has_steps(self) -> bool:
        return self.metrics.get("trial_steps", 0.0) > 0


class Turns:
    """Candidates that take turns, the baseline (the plain loop, or data-parallel training) first in every round.

    After each turn those candidates are dropped that are surely slower than the best, or cannot gain the smallest gain
    over it any more (successive elimination). A candidate wins only if its median's interval lies wholly below the
    baseline's, and if it gains round by round, too: steps that follow each other share the state of the machine.
    Otherwise the baseline stays. A baseline that cannot run gives its place to the next candidate.

    Args:
        settings: Bounds.
        names: The candidates; the first one is the baseline.
        trains: Whether steps train the model, so that only their time beyond the baseline's is lost; otherwise all
            time of timed steps is.
        late: Numbers of candidates that take long to prepare: they wait until the others could have won.
    """

    def __init__(
        self, settings: TrialSettings, names: Sequence[str], *, trains: bool = True, late: Collection[int] = ()
    ) -> None:
        self.settings = settings
        self.candidates = [Candidate(name) for name in names]
        self.num_steps = self.num_rounds = 0
        self.lost_ms = self.took_ms = 0.0
        self._trains = trains
        self._late = late
        self._baseline = 0
        self._queue: list[int] = []
        self._visit: Visit | None = None
        self._noted = self._slow = 0

    @property
    def baseline(self) -> Candidate:
        return self.candidates[self._baseline]

    @property
    def is_over_budget(self) -> bool:
        """True if no further time may be lost; never before the baseline was timed."""
        return self.lost_ms >= self.settings.max_lost_steps * self.baseline.median_ms

    @property
    def is_cut(self) -> bool:
        """True if the present turn ends before its last step."""
        if self._visit is None or self._visit.candidate == self._baseline:
            return False
        return self.is_over_budget or self.candidates[self._visit.candidate].dropped is not None

    def exclude(self, number: int, reason: str) -> None:
        """Drops a candidate for another reason than its times.

        The others were only compared with the baseline: if that is excluded, all begin anew, the slower ones too.
        """
        self.candidates[number].dropped, self.candidates[number].is_excluded = reason, True
        if number != self._baseline:
            return
        left = [index for index, candidate in enumerate(self.candidates) if not candidate.is_excluded]
        for index in left:
            self.candidates[index] = Candidate(self.candidates[index].name)
        self._baseline, self.num_rounds, self._queue = left[0], 0, []

    def next_visit(self) -> Visit | Decision:
        """Returns the next turn, or the decision."""
        self._visit = None
        if self._baseline and not self._rivals(self._baseline):
            return Decision(winner=self._baseline, reason=f"{self.baseline.name} is the only plan that is left")
        if self.num_rounds and len(self.baseline.samples) < _MIN_BASELINE:
            return self._visit_of(self._baseline, best=self._baseline)
        best = self._eliminate()
        if self.num_rounds and not self._rivals(best):
            return self._decision(best)
        if self.is_over_budget:
            return self._decision(best, f"{self.lost_ms:.1f} ms were lost by then, which is all that a trial may take")
        self._queue = [number for number in self._queue if self.candidates[number].dropped is None]
        if not self._queue:
            self.num_rounds += 1
            waiting = self._late if self.num_rounds <= self.settings.rounds_to_win else ()
            taking_part = (number for number, entry in enumerate(self.candidates) if entry.dropped is None)
            self._queue = [number for number in taking_part if number not in waiting]
        return self._visit_of(self._queue.pop(0), best)

    def note(self, step_ms: float | None) -> None:
        """Records the next step of the present turn; None for a step that cannot be compared with others."""
        assert self._visit is not None, "no candidate has its turn"
        candidate, baseline = self.candidates[self._visit.candidate], self.baseline
        is_warm = self._noted < self._visit.num_warm
        self._noted += 1
        self.num_steps += 1
        if step_ms is None:
            return
        self.took_ms += step_ms
        if not self._trains:
            self.lost_ms += 0.0 if is_warm else step_ms
        elif candidate is not baseline:
            self.lost_ms += max(0.0, step_ms - baseline.median_ms)
        if is_warm:
            return
        candidate.rounds.setdefault(self.num_rounds, []).append(step_ms)
        if candidate is not baseline:
            is_slow = step_ms > _SURELY_SLOWER * max(baseline.samples, default=math.inf)
            self._slow = self._slow + 1 if is_slow else 0
            if self._slow == _SLOW_IN_A_ROW and candidate.dropped is None:
                limit = f"{_SURELY_SLOWER} times {baseline.name}'s"
                candidate.dropped = f"{self._slow} steps in a row took more than {limit}"

    def report(self, head: str, decision: Decision | None, *, num_trials: int = 1) -> TrialReport:
        """Returns the report of a trial; ``head`` is its first sentence."""
        metrics = {"trials": float(num_trials), "trial_steps": float(self.num_steps), "trial_lost_ms": self.lost_ms}
        for entry in self.candidates:
            if entry.rounds:
                metrics[f"trial_ms/{'plain' if entry.name == PLAIN else entry.name}"] = entry.median_ms
        sentences = (self._sentence(number, decision) for number in range(len(self.candidates)))
        return TrialReport(sentences=(head, *sentences), metrics=metrics)

    def _sentence(self, number: int, decision: Decision | None) -> str:
        candidate = self.candidates[number]
        if decision is not None and decision.winner == number:
            outcome = "runs from now on"
        elif candidate.dropped is not None:
            outcome = candidate.dropped
        elif number == self._baseline:
            outcome = "what others are compared with"
        else:
            outcome = "not faster beyond the noise" if decision is not None else "being tried"
        if not (samples := candidate.samples):
            return f"tried {candidate.name}: no step timed; {outcome}"
        low, high = candidate.interval
        within = f" ({low:.2f} to {high:.2f})" if high < math.inf else ""
        steps = f"{len(samples)} step{'s' if len(samples) > 1 else ''}"
        return f"tried {candidate.name}: measured {candidate.median_ms:.2f} ms a step{within}, {steps}; {outcome}"

    def _visit_of(self, number: int, best: int) -> Visit | Decision:
        candidate, settings = self.candidates[number], self.settings
        warm = min(1, settings.warm_steps) if candidate.num_visits else settings.warm_steps
        visit = Visit(candidate=number, num_warm=warm, num_steps=warm + settings.steps_per_visit)
        if self.num_steps + visit.num_steps > settings.max_steps:
            if not self.baseline.samples:
                reason = "no two steps in a row were alike (other shapes, other calls, errors)"
                return Decision(winner=self._baseline, reason=reason)
            return self._decision(best, f"a trial takes no more than {settings.max_steps} steps")
        self._visit, self._noted, self._slow = visit, 0, 0
        candidate.num_visits += 1
        return visit

    def _eliminate(self) -> int:
        """Drops candidates that cannot win any more; returns the best that surely beats the baseline, or that."""
        winners = [number for number, candidate in enumerate(self.candidates) if self._beats_baseline(candidate)]
        best = min(winners, key=lambda number: self.candidates[number].median_ms, default=self._baseline)
        for number in self._rivals(best):
            candidate, target = self.candidates[number], self.candidates[best]
            if candidate.interval[0] * self.settings.smallest_gain >= target.median_ms:
                candidate.dropped = f"surely not {self.settings.smallest_gain - 1:.0%} faster than {target.name}"
        return best

    def _beats_baseline(self, candidate: Candidate) -> bool:
        gains = self._gains(candidate)
        if candidate is self.baseline or candidate.is_excluded or len(gains) < self.settings.rounds_to_win:
            return False
        low = median_interval(gains, _CONFIDENCE)[0] or min(gains)
        is_apart = candidate.interval[1] < self.baseline.interval[0]
        return is_apart and low >= self.settings.smallest_gain

    def _gains(self, candidate: Candidate) -> list[float]:
        """Returns the ratio of the baseline's time to the candidate's in each round that both took part in."""
        baseline = self.baseline.rounds
        shared = [number for number in candidate.rounds if number in baseline]
        return [statistics.median(baseline[at]) / statistics.median(candidate.rounds[at]) for at in shared]

    def _rivals(self, best: int) -> list[int]:
        out = (self._baseline, best)
        return [at for at, entry in enumerate(self.candidates) if at not in out and entry.dropped is None]

    def _decision(self, best: int, end: str = "") -> Decision:
        candidate, baseline = self.candidates[best], self.baseline
        why = f"; {end}" if end else ""
        if candidate is not baseline:
            gain = statistics.median(self._gains(candidate))
            reason = f"{candidate.name} is measured {gain:.2f} times as fast as {baseline.name}{why}"
            return Decision(winner=best, reason=reason)
        tried = any(other.num_visits for other in self.candidates if other is not baseline)
        none = "of the plans that were tried none is" if tried else "no plan was tried that is"
        return Decision(winner=best, reason=f"{none} faster than {baseline.name} beyond the noise{why}")
