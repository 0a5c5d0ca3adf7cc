"""Sizes, care and time of the measurements."""

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
    """Time after which a measurement ends, with at least three pieces."""
    together_ms: float = 60.0
    """Time that two lanes run side by side."""
    rounds: int = 10
    """Rounds over all variants."""
    steps_per_round: int = 5
    """Steps of each variant in a round."""
    lends: int = 100_000
    """Lends of a stream, for a mean."""
    max_contexts: int = 64
    """Most contexts to create in the search for a limit."""
    grid: int = 8
    """Most quotas to measure; the slots nearest to equal parts of the device."""

    def __post_init__(self) -> None:
        counts = (self.repeats, self.rounds, self.steps_per_round, self.lends, self.max_contexts, self.grid)
        if min(counts) < 1 or not min(self.piece_ms, self.sample_ms, self.together_ms) > 0:
            raise ValueError(f"{self}: counts start at 1 and times are positive")

    @classmethod
    def fit(cls, backend: Backend, *, quick: bool = False) -> Self:
        """Returns settings for a backend; ``quick`` takes about a tenth of the time."""
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
        """Returns the smallest settings that run all code, for dry runs and tests."""
        return cls(
            scale="tiny", repeats=3, piece_ms=0.02, sample_ms=2.0, together_ms=2.0, rounds=2, steps_per_round=2,
            lends=200, max_contexts=4, grid=2,
        )  # fmt: skip

    def quotas(self, num_slots: int, *, at_most: int | None = None) -> tuple[int, ...]:
        """Returns quotas at equal parts of a device, ``grid`` or ``at_most``, the whole of it included."""
        parts = min(self.grid, num_slots, at_most or self.grid)
        return tuple(sorted({max(1, round(part * num_slots / parts)) for part in range(1, parts + 1)}))

    def splits(self, num_slots: int) -> tuple[tuple[int, int], ...]:
        """Returns pairs of quotas that share a whole device, at most in eighths; none for one slot."""
        return tuple((quota, num_slots - quota) for quota in self.quotas(num_slots, at_most=8) if quota < num_slots)


class Budget:
    """A time limit, checked before each piece of a measurement.

    A started piece finishes, so a question may take one piece longer.

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
        """Seconds since its creation."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Remaining seconds, never negative."""
        return max(0.0, self.seconds - self.used_s)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Pieces without time, in order."""
        return tuple(self._left_out)

    def allows(self, piece: str, *, needs_s: float = 0.0) -> bool:
        """Returns True if at least ``needs_s`` remain; else notes ``piece`` as left out."""
        if self.used_s + needs_s < self.seconds:
            return True
        self._left_out.append(piece)
        return False
