"""Bounds of a profiling run: its time, its repetitions, its tolerance of noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from mosaic.profile import COMPARABLE_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Bounds of a profiling run.

    Raises:
        ValueError: A bound is out of range.
    """

    warmup: int = 2
    """Repetitions that are thrown away before the first one is kept."""
    min_repeats: int = 5
    """Fewest repetitions of a sample."""
    max_repeats: int = 40
    """Most repetitions of a sample."""
    spread: float = 0.05
    """Repeat until the quartiles lie within this share of the median."""
    sample_seconds: float = 1.0
    """Time after which a sample is taken as it is."""
    foreign_share: float = COMPARABLE_SHARE
    """Share of this process's cores' time that others may take before a sample on the host is measured again."""
    retry_seconds: float = 20.0
    """Time for measuring again, over the whole run; then the quietest try counts."""
    strict: bool = False
    """Whether to raise where others took more than ``foreign_share``; otherwise the profile is marked. Times on a GPU
    are those of its own events, and are marked at most."""
    pairs: bool = True
    """Whether to measure modules side by side, two at a time."""
    max_seconds: float | None = None
    """Time for all measurements; once it is over, what is left is left out (``Profile.left_out`` says what). Two quotas
    of each module, the largest and the smallest, are measured however long it takes: nothing is predicted outside of
    them. None is no deadline."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 1 <= self.min_repeats <= self.max_repeats:
            raise ValueError(
                f"warmup={self.warmup}, min_repeats={self.min_repeats}, max_repeats={self.max_repeats}; use a warm-up "
                "of 0 or more and 1 <= min_repeats <= max_repeats"
            )
        if not (self.spread > 0 and self.sample_seconds > 0 and self.foreign_share > 0 and self.retry_seconds >= 0):
            raise ValueError("spread, sample_seconds and foreign_share are positive, and retry_seconds is 0 or more")
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise ValueError(f"max_seconds={self.max_seconds}; use 0 or more, or None for no deadline")


class Deadline:
    """The end of a profiling run's time, and what it left out; begins when it is made.

    Args:
        seconds: Until it is over; None for never.
        clock: Tells seconds.

    Attributes:
        left_out: What was not measured for want of time, in words.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = monotonic) -> None:
        self.left_out: list[str] = []
        self._clock = clock
        self._ends = None if seconds is None else clock() + seconds

    def leaves_out(self, what: str) -> bool:
        """Returns whether the time is over; notes what is therefore not measured."""
        if self._ends is None or self._clock() < self._ends:
            return False
        self.left_out.append(what)
        return True
