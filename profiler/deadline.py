"""The end of a profiling run's time, and what it left out."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class Deadline:
    """Begins when it is made.

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
