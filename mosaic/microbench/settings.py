"""Settings of the measurements, and times of a lane's work alone and beside others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from mosaic.backends.base import Backend, Lane, Lanes
from mosaic.profiler.timing import MAX_PIECES, Call, Pieces, TimedWork, run_alone, run_together, window_ms

Scale = Literal["tiny", "host", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Sizes and limits of all questions."""

    scale: Scale
    """Sizes of kernels and modules: ``tiny`` for dry runs, ``host`` for CPUs, ``gpu``."""
    repeats: int = 30
    """Timed pieces of a measurement."""
    piece_ms: float = 0.2
    """Minimum timed piece; faster work is repeated within it."""
    sample_ms: float = 150.0
    """Maximum time of a measurement, which has at least three pieces."""
    together_ms: float = 60.0
    """Time for which two lanes run side by side."""
    rounds: int = 10
    """Rounds over all variants."""
    steps_per_round: int = 5
    """Steps of each variant per round."""
    lends: int = 100_000
    """Repetitions of acquiring a stream, for a mean."""
    max_contexts: int = 64
    """Maximum number of contexts to create."""
    grid: int = 8
    """Maximum number of quotas to measure, nearest to equal parts of the device."""

    @classmethod
    def fit(cls, backend: Backend, *, quick: bool = False) -> Self:
        """Returns settings for a backend; ``quick`` takes about a tenth of the time."""
        on_gpu = backend.torch_device.type == "cuda"
        full = cls(scale="gpu" if on_gpu else "host", grid=16 if on_gpu else 8)
        if not quick:
            return full
        bounds: Any = {"rounds": 4, "steps_per_round": 3, "lends": 10_000, "grid": 4, "max_contexts": 16}
        return replace(full, repeats=10, sample_ms=30.0, together_ms=20.0, **bounds)

    @classmethod
    def tiny(cls) -> Self:
        """Returns minimal settings, for dry runs and tests."""
        bounds = {"repeats": 3, "rounds": 2, "steps_per_round": 2, "lends": 200, "max_contexts": 4, "grid": 2}
        return cls(scale="tiny", piece_ms=0.02, sample_ms=2.0, together_ms=2.0, **bounds)

    def quotas(self, num_slots: int, *, at_most: int | None = None) -> tuple[int, ...]:
        """Returns quotas at equal parts of a device, ``grid`` or ``at_most``, including the whole device."""
        parts = min(self.grid, num_slots, at_most or self.grid)
        return tuple(sorted({max(1, round(part * num_slots / parts)) for part in range(1, parts + 1)}))

    def splits(self, num_slots: int) -> tuple[tuple[int, int], ...]:
        """Returns pairs of quotas that fill a device, at most in eighths; none for one slot."""
        return tuple((quota, num_slots - quota) for quota in self.quotas(num_slots, at_most=8) if quota < num_slots)


class Budget:
    """A time limit from now on, checked before each piece of a measurement."""

    def __init__(self, seconds: float = float("inf")) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}; use 0 or more")
        self.seconds = seconds
        self.left_out: tuple[str, ...] = ()
        """Omitted pieces, in order."""
        self._start = time.monotonic()

    @property
    def used_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self.seconds - self.used_s)

    def allows(self, piece: str) -> bool:
        """Returns True if time remains; otherwise adds ``piece`` to ``left_out``."""
        if self.used_s < self.seconds:
            return True
        self.left_out += (piece,)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of a quantity, whose name in the row has the unit."""

    median: float
    first_quartile: float
    third_quartile: float
    count: int
    samples: tuple[float, ...]
    """All samples in order."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarises at least one measurement."""
        values = tuple(float(sample) for sample in samples)
        if not values:
            raise ValueError("a spread needs at least one measurement")
        first, middle, third = (values[0],) * 3
        if len(values) > 1:
            first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=middle, first_quartile=first, third_quartile=third, count=len(values), samples=values)

    def __str__(self) -> str:
        places = 1 if self.median >= 100 else 3
        return f"{self.median:.{places}f} ({self.first_quartile:.{places}f}-{self.third_quartile:.{places}f})"


def time_alone(lane: Lane, call: Call, settings: BenchSettings, *, held_on: torch.device | None = None) -> Pieces:
    """Times work alone on a lane; ``held_on`` as in ``run_alone``."""
    lane.submit(call).wait()
    call_ms = max(1e-4, min(run_alone(lane, call, calls=1, pieces=3).all_ms))
    calls = _calls_in_piece(call_ms, settings.piece_ms)
    few = max(3, round(settings.sample_ms / (calls * call_ms)))
    return run_alone(lane, call, calls=calls, pieces=min(settings.repeats, few), held_on=held_on)


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Times of one of two lanes, in milliseconds per call."""

    alone_ms: tuple[float, ...]
    """With the other lane idle, measured just before."""
    beside_ms: tuple[float, ...]
    """Pieces during the other lane's work; may be empty."""
    overlap_ms: float
    """Time of both together; 0 without overlap."""


def measure_beside(
    lanes: Lanes, both: Sequence[tuple[Lane, Call]], settings: BenchSettings, device: torch.device
) -> tuple[LaneTimes, ...]:
    """Times lanes alone, then side by side for about ``settings.together_ms``."""
    alone = [time_alone(lane, call, settings, held_on=device).all_ms for lane, call in both]
    parts = []
    for (lane, call), times in zip(both, alone, strict=True):
        call_ms = max(1e-4, sorted(times)[len(times) // 2])
        calls = _calls_in_piece(call_ms, settings.piece_ms)
        pieces = min(MAX_PIECES, max(3, math.ceil(settings.together_ms / (call_ms * calls))))
        parts.append(TimedWork(lane, call, calls, pieces, call_ms))
    beside = run_together(parts, inline=lanes.launches_inline, device=device)
    start, end = window_ms(beside)
    return tuple(
        LaneTimes(times, piece.within(start, end), max(0.0, end - start))
        for times, piece in zip(alone, beside, strict=True)
    )


def _calls_in_piece(call_ms: float, piece_ms: float) -> int:
    return max(1, math.ceil(piece_ms / call_ms))
