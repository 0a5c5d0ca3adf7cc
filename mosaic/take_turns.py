"""Candidates take turns at the steps of a loop until one is surely the fastest. No clock, no torch, no chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

PLAIN = "the plain loop"
_CONFIDENCE = 0.9
"""Of intervals of medians, which must lie apart."""
_SURELY_SLOWER = 1.5
"""A candidate is out if its first two or more steps all took so many times the baseline's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Bounds of a trial, whose steps train as all others do; the defaults are 2 % of a run of 1,000 steps."""

    max_steps: int = 120
    """Most steps of one trial, including those whose times are discarded."""
    max_lost_steps: float = 20.0
    """Most time lost to slower candidates and to preparing them, in steps of the plain loop; on a GPU, where times are
    known late, the steps that were launched by then still run."""
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

    def __post_init__(self) -> None:
        one_turn_each = 2 * (self.warm_steps + self.steps_per_visit)
        least = {"max_steps": one_turn_each, "max_lost_steps": 0, "steps_per_visit": 1, "warm_steps": 0}
        for name, bound in (least | {"rounds_to_win": 1, "max_plans": 1, "smallest_gain": 1}).items():
            if not bound <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value}; use {bound} or more, and a finite number")


def take_turns(
    runs: Mapping[str, Callable[[], Sequence[float]]], rounds: Iterable[int]
) -> dict[str, list[list[float]]]:
    """Runs each candidate once in each round, every other round in reverse order; returns their times by round."""
    samples: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in rounds:
        for name in reversed(list(runs)) if number % 2 else list(runs):
            samples[name].append(list(runs[name]()))
    return samples


@dataclass(slots=True)
class Candidate:
    """One way to run the loop, with its measurements."""

    name: str
    samples: list[float] = field(default_factory=list)
    """Milliseconds of its timed steps."""
    num_visits: int = 0
    elimination: str | None = None
    """The reason that its times cannot win."""
    exclusion: str | None = None
    """Another reason not to run it, such as an error."""

    @property
    def median_ms(self) -> float:
        """Median step; infinite before the first."""
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """Two samples that enclose the median of any distribution; 0 and infinity if there are too few."""
        ordered, n = sorted(self.samples), len(self.samples)
        outside = accumulate(2 * math.comb(n, rank) / 2**n for rank in range(n // 2))
        rank = sum(share <= 1 - _CONFIDENCE for share in outside)
        return (ordered[rank - 1], ordered[n - rank]) if rank else (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One turn of one candidate, by its number."""

    candidate: int
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


class Turns:
    """Candidates that take turns, the baseline (the plain loop, or data-parallel training) first in every round.

    A candidate wins if its median is below the baseline's by the smallest gain and their intervals lie apart; otherwise
    the baseline stays. Several rounds are needed, since steps that follow each other share the state of the machine.
    If steps ``train`` the model, only their time beyond the baseline's is lost; otherwise all but discarded steps are.
    Candidates that take long to prepare, whose numbers are ``late``, wait until the others could have won.
    """

    def __init__(
        self, settings: TrialSettings, names: Sequence[str], *, train: bool = True, late: Collection[int] = ()
    ) -> None:
        self.settings = settings
        self.candidates = [Candidate(name) for name in names]
        self.baseline = self.candidates[0]
        self.num_steps = self.num_rounds = 0
        self.lost_ms = self.took_ms = 0.0
        self._train, self._late = train, late
        self._queue: list[int] = []
        self._present = self.baseline  # the candidate of the present turn
        self._num_warm = 0  # next steps of the visit that are discarded

    @property
    def is_over_budget(self) -> bool:
        """True if no further time may be lost; never before the baseline was timed."""
        return self.lost_ms >= self.settings.max_lost_steps * self.baseline.median_ms

    @property
    def is_cut(self) -> bool:
        """True if the present turn ends before its last step."""
        return self._present is not self.baseline and (self.is_over_budget or self._is_slow(self._present))

    def next_visit(self) -> Visit | Decision:
        """Returns the next turn, or the decision."""
        self._present = self.baseline
        if self.baseline.exclusion is not None:
            winner = next((number for number, entry in enumerate(self.candidates) if entry.exclusion is None), 0)
            return Decision(winner=winner, reason=f"{self.baseline.name} {self.baseline.exclusion}")
        best = self._eliminate()
        if self.num_rounds and not self._rivals(best):
            return self._decision(best)
        if self.is_over_budget:
            return self._decision(best, f"; {self.lost_ms:.1f} ms were lost by then, all that a trial may lose")
        rivals = (0, *self._rivals(0))
        self._queue = [number for number in self._queue if number in rivals]
        if self.num_rounds and not self.baseline.samples:
            self._queue.insert(0, 0)
        elif not self._queue:
            self.num_rounds += 1
            waiting = self._late if self.num_rounds <= self.settings.rounds_to_win else ()
            self._queue = [number for number in rivals if number not in waiting]
        candidate, settings = self.candidates[self._queue[0]], self.settings
        self._num_warm = min(1, settings.warm_steps) if candidate.num_visits else settings.warm_steps
        num_steps = self._num_warm + settings.steps_per_visit
        if self.num_steps + num_steps > settings.max_steps:
            if not self.baseline.samples:
                return Decision(winner=0, reason="no two steps in a row were alike (other shapes, other calls, errors)")
            return self._decision(best, f"; a trial takes no more than {settings.max_steps} steps")
        candidate.num_visits += 1
        self._present = candidate
        return Visit(candidate=self._queue.pop(0), num_steps=num_steps)

    def note(self, step_ms: float | None) -> None:
        """Records the next step of the present turn; None for a step that cannot be compared with others."""
        is_warm = self._num_warm > 0
        self._num_warm -= 1
        self.num_steps += 1
        if step_ms is None:
            return
        self.took_ms += step_ms
        if not self._train:
            self.lost_ms += 0.0 if is_warm else step_ms
        elif self._present is not self.baseline:
            self.lost_ms += max(0.0, step_ms - self.baseline.median_ms)
        if not is_warm:
            self._present.samples.append(step_ms)

    def report(self, head: str, decision: Decision | None, *, num_trials: int = 1) -> TrialReport:
        """Returns the report of a trial; ``head`` is its first sentence."""
        metrics = {"trials": float(num_trials), "trial_steps": float(self.num_steps), "trial_lost_ms": self.lost_ms}
        sentences = [head]
        for number, entry in enumerate(self.candidates):
            default = "not faster beyond the noise" if entry.samples else "its turn never came"
            default = "being tried" if decision is None else default
            outcome = entry.exclusion or entry.elimination or (default if number else "what others are compared with")
            if decision is not None and decision.winner == number:
                outcome = "runs from now on"
            measured = "no step timed"
            if entry.samples:
                metrics[f"trial_ms/{'plain' if entry.name == PLAIN else entry.name}"] = entry.median_ms
                low, high = entry.interval
                within = f" ({low:.2f} to {high:.2f})" if high < math.inf else ""
                measured = f"measured {entry.median_ms:.2f} ms a step{within}, steps: {len(entry.samples)}"
            sentences.append(f"tried {entry.name}: {measured}; {outcome}")
        return TrialReport(sentences=tuple(sentences), metrics=metrics)

    def _eliminate(self) -> int:
        """Eliminates candidates that cannot win any more; returns the best that surely beats the baseline, or that."""
        winners = [number for number in self._rivals(0) if self._beats_baseline(self.candidates[number])]
        best = min(winners, key=lambda number: self.candidates[number].median_ms, default=0)
        target, gain = self.candidates[best], self.settings.smallest_gain
        for candidate in (self.candidates[number] for number in self._rivals(best)):
            if self._is_slow(candidate) or candidate.interval[0] * gain >= target.median_ms:
                candidate.elimination = f"surely not {gain - 1:.0%} faster than {target.name}"
        return best

    def _rivals(self, best: int) -> list[int]:
        left = [at for at, each in enumerate(self.candidates) if each.elimination is None and each.exclusion is None]
        return [number for number in left if number not in (0, best)]

    def _beats_baseline(self, candidate: Candidate) -> bool:
        is_apart = candidate.interval[1] < self.baseline.interval[0]
        has_rounds = candidate.num_visits >= self.settings.rounds_to_win
        return is_apart and has_rounds and candidate.median_ms * self.settings.smallest_gain <= self.baseline.median_ms

    def _is_slow(self, candidate: Candidate) -> bool:
        return len(candidate.samples) > 1 and min(candidate.samples) > _SURELY_SLOWER * self.baseline.median_ms

    def _decision(self, best: int, end: str = "") -> Decision:
        name, plain = self.candidates[best].name, self.baseline.name
        reason = f"of the plans that were tried none is faster than {plain} beyond the noise"
        if best:
            gain = self.baseline.median_ms / self.candidates[best].median_ms
            reason = f"{name} is measured {gain:.2f} times as fast as {plain}"
        return Decision(winner=best, reason=reason + end)
