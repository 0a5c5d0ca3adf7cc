"""How long a question may take: what does not fit is left out, and named."""

from __future__ import annotations

import time


class Budget:
    """A bound on time that is looked at before each piece of a measurement.

    A piece that has started is finished, so a question may take one piece longer.

    Args:
        seconds: From now; infinite by default.
    """

    def __init__(self, seconds: float = float("inf")) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}; a budget is not negative")
        self.seconds = seconds
        self._start = time.monotonic()
        self._left_out: list[str] = []

    @property
    def used_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self.seconds - self.used_s)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What there was no time for, in the order it was asked for."""
        return tuple(self._left_out)

    def allows(self, piece: str, *, needs_s: float = 0.0) -> bool:
        """Tells whether there is time left, at least ``needs_s``; notes ``piece`` as left out where there is not."""
        if self.used_s + needs_s < self.seconds:
            return True
        self._left_out.append(piece)
        return False
