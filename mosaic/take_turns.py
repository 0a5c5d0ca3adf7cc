"""Candidates take turns at the steps of a loop until the fastest is known. Deterministic; without a clock and torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

PLAIN = "the plain loop"
_CONFIDENCE = 0.9
"""Confidence of the intervals of medians, which must not overlap."""
_SURELY_SLOWER = 1.5
"""A candidate is excluded if its first two or more steps all took this multiple of the baseline's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Limits of a trial, whose steps are training steps; the defaults are 2 % of a run of 1,000 steps."""

    max_steps: int = 120
    """Maximum number of steps, including discarded ones."""
    max_lost_steps: float = 20.0
    """Maximum time lost by slower candidates and their preparation, in steps of the plain loop. On a GPU, steps already
    launched still run."""
    steps_per_visit: int = 4
    """Timed steps in each turn."""
    warm_steps: int = 2
    """Discarded warm-up steps in a candidate's first turn; later turns discard one."""
    rounds_to_win: int = 2
    """Rounds that candidate and baseline need before the candidate can win."""
    max_plans: int = 3
    """Number of candidates besides the plain loop."""
    smallest_gain: float = 1.02
    """Minimum speed-up of a plan, predicted and measured."""

    def __post_init__(self) -> None:
        one_turn_each = 2 * (self.warm_steps + self.steps_per_visit)
        least = {"max_steps": one_turn_each, "max_lost_steps": 0, "steps_per_visit": 1, "warm_steps": 0}
        for name, bound in (least | {"rounds_to_win": 1, "max_plans": 1, "smallest_gain": 1}).items():
            if not bound <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value}; use {bound} or more, and a finite number")


def take_turns(
    runs: Mapping[str, Callable[[], Sequence[float]]], rounds: Iterable[int]
) -> dict[str, list[list[float]]]:
    """Runs each candidate once per round, every other round in reverse order; returns their times by round."""
    samples: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in rounds:
        for name in reversed(list(runs)) if number % 2 else list(runs):
            samples[name].append(list(runs[name]()))
    return samples


@dataclass(slots=True)
class Candidate:
    """A candidate with its measurements."""

    name: str
    samples: list[float] = field(default_factory=list)
    """Milliseconds of its timed steps."""
    num_visits: int = 0
    elimination: str | None = None
    """The reason why its times cannot win."""
    exclusion: str | None = None
    """Another reason for its exclusion, such as an error."""

    @property
    def median_ms(self) -> float:
        """Median step; infinite without steps."""
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """Two samples that enclose the median of any distribution; 0 and infinity with too few samples."""
        ordered, n = sorted(self.samples), len(self.samples)
        outside = accumulate(2 * math.comb(n, rank) / 2**n for rank in range(n // 2))
        rank = sum(share <= 1 - _CONFIDENCE for share in outside)
        return (ordered[rank - 1], ordered[n - rank]) if rank else (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A turn of a candidate, by its number."""

    candidate: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a trial: the number of the candidate to run, and the reason."""

    winner: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """Sentences for ``describe()`` and values for ``metrics()``."""

    sentences: tuple[str, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``trials``, ``trial_steps``, ``trial_lost_ms`` and ``trial_ms/CANDIDATE``, all measured."""


class Turns:
    """Candidates that take turns; the baseline (the plain loop, or data-parallel training) is the first.

    A candidate wins if its median is below the baseline's by the minimum gain and their intervals do not overlap;
    otherwise the baseline wins. Several rounds are needed, because consecutive steps share the state of the machine. If
    steps ``train`` the model, only their time beyond the baseline's is lost; otherwise that of all steps that are not
    discarded. Candidates with a long preparation (``late``) wait until the others could have won.
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
        self._present = self.baseline  # the current candidate
        self._num_warm = 0  # steps to discard in this turn

    @property
    def is_over_budget(self) -> bool:
        """True if no more time may be lost; False before the baseline is timed."""
        return self.lost_ms >= self.settings.max_lost_steps * self.baseline.median_ms

    @property
    def is_cut(self) -> bool:
        """True if the current turn ends before its last step."""
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
            return self._decision(best, f"; the trial reached its limit of lost time ({self.lost_ms:.1f} ms)")
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
                return Decision(winner=0, reason="no consecutive steps were comparable (other shapes or calls, errors)")
            return self._decision(best, f"; the trial reached its limit of {settings.max_steps} steps")
        candidate.num_visits += 1
        self._present = candidate
        return Visit(candidate=self._queue.pop(0), num_steps=num_steps)

    def note(self, step_ms: float | None) -> None:
        """Records the next step of the current turn; None for a step that is not comparable."""
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
            default = "not faster beyond the noise" if entry.samples else "not timed before the end of the trial"
            default = "in trial" if decision is None else default
            outcome = entry.exclusion or entry.elimination or (default if number else "the baseline")
            if decision is not None and decision.winner == number:
                outcome = "selected"
            measured = "no timed steps"
            if entry.samples:
                metrics[f"trial_ms/{'plain' if entry.name == PLAIN else entry.name}"] = entry.median_ms
                low, high = entry.interval
                within = f" ({low:.2f} to {high:.2f})" if high < math.inf else ""
                measured = f"measured {entry.median_ms:.2f} ms per step{within}, steps: {len(entry.samples)}"
            sentences.append(f"tried {entry.name}: {measured}; {outcome}")
        return TrialReport(sentences=tuple(sentences), metrics=metrics)

    def _eliminate(self) -> int:
        """Excludes candidates that cannot win; returns the fastest that beats the baseline, or the baseline."""
        winners = [number for number in self._rivals(0) if self._beats_baseline(self.candidates[number])]
        best = min(winners, key=lambda number: self.candidates[number].median_ms, default=0)
        target, gain = self.candidates[best], self.settings.smallest_gain
        for candidate in (self.candidates[number] for number in self._rivals(best)):
            if self._is_slow(candidate) or candidate.interval[0] * gain >= target.median_ms:
                candidate.elimination = f"less than {gain - 1:.0%} faster than {target.name}"
        return best

    def _rivals(self, best: int) -> list[int]:
        active = [at for at, each in enumerate(self.candidates) if each.elimination is None and each.exclusion is None]
        return [number for number in active if number not in (0, best)]

    def _beats_baseline(self, candidate: Candidate) -> bool:
        is_apart = candidate.interval[1] < self.baseline.interval[0]
        has_rounds = candidate.num_visits >= self.settings.rounds_to_win
        return is_apart and has_rounds and candidate.median_ms * self.settings.smallest_gain <= self.baseline.median_ms

    def _is_slow(self, candidate: Candidate) -> bool:
        return len(candidate.samples) > 1 and min(candidate.samples) > _SURELY_SLOWER * self.baseline.median_ms

    def _decision(self, best: int, end: str = "") -> Decision:
        name, plain = self.candidates[best].name, self.baseline.name
        reason = f"no plan is faster than {plain} beyond the noise"
        if best:
            gain = self.baseline.median_ms / self.candidates[best].median_ms
            reason = f"{name} is measured {gain:.2f} times as fast as {plain}"
        return Decision(winner=best, reason=reason + end)
