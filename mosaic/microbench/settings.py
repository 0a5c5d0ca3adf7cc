"""How much, how carefully and how long the questions measure."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal, Self

from mosaic.backends.base import Backend

Scale = Literal["tiny", "host", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Sizes and bounds, the same for every question.

    Raises:
        ValueError: A bound is out of range.
    """

    scale: Scale
    """Sizes of kernels and modules: ``tiny`` for dry runs, ``host`` for CPUs, ``gpu``."""
    repeats: int = 30
    """Timed pieces of a measurement."""
    piece_ms: float = 0.2
    """Shortest timed piece; quicker work is repeated within it."""
    sample_ms: float = 150.0
    """Time after which a measurement is taken as it is, with at least three pieces."""
    together_ms: float = 60.0
    """How long two lanes are kept running side by side."""
    rounds: int = 10
    """Rounds in which variants take turns."""
    steps_per_round: int = 5
    """Steps of each variant in a round."""
    lends: int = 100_000
    """Times that a stream is lent, for a mean."""
    max_contexts: int = 64
    """Contexts to make at most while looking for a limit."""
    grid: int = 8
    """Most quotas to measure; the slots nearest to equal parts of the device."""

    def __post_init__(self) -> None:
        counts = (self.repeats, self.rounds, self.steps_per_round, self.lends, self.max_contexts, self.grid)
        if min(counts) < 1 or not min(self.piece_ms, self.sample_ms, self.together_ms) > 0:
            raise ValueError(f"{self}: counts start at 1 and times are positive")

    @classmethod
    def fit(cls, backend: Backend, *, quick: bool = False) -> Self:
        """Returns settings for a backend; ``quick`` ones take about a tenth of the time."""
        scale: Scale = "gpu" if backend.torch_device.type == "cuda" else "host"
        full = cls(scale=scale, repeats=30, grid=16 if scale == "gpu" else 8)
        if not quick:
            return full
        return replace(
            full, repeats=10, sample_ms=30.0, together_ms=20.0, rounds=4, steps_per_round=3, lends=10_000, grid=4,
            max_contexts=16,
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Self:
        """Returns the smallest settings that go through everything: for dry runs and tests."""
        return cls(
            scale="tiny", repeats=3, piece_ms=0.02, sample_ms=2.0, together_ms=2.0, rounds=2, steps_per_round=2,
            lends=200, max_contexts=4, grid=2,
        )  # fmt: skip

    def quotas(self, num_slots: int, *, at_most: int | None = None) -> tuple[int, ...]:
        """Returns quotas at equal parts of a device, ``grid`` or ``at_most``, the whole of it included."""
        parts = min(self.grid, num_slots, at_most or self.grid)
        return tuple(sorted({max(1, round(part * num_slots / parts)) for part in range(1, parts + 1)}))

    def splits(self, num_slots: int) -> tuple[tuple[int, int], ...]:
        """Returns pairs of quotas, at eighths at the finest, that share a whole device; none where it has one slot."""
        return tuple((quota, num_slots - quota) for quota in self.quotas(num_slots, at_most=8) if quota < num_slots)


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
