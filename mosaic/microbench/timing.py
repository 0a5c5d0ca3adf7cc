"""Times of one lane alone, or two side by side, by a question's settings, with the profiler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mosaic.backends.base import Lane, Lanes
from mosaic.microbench.settings import BenchSettings
from mosaic.profiler.together import (
    MAX_PIECES,
    Call,
    Pieces,
    TimedWork,
    run_alone,
    run_together,
    window_ms,
)

__all__ = ["Call", "Pieces", "time_alone", "time_beside", "window_ms"]


def time_alone(lane: Lane, call: Call, settings: BenchSettings, *, held_on: torch.device | None = None) -> Pieces:
    """Times work on a lane while the others are idle; ``held_on`` as in ``run_alone``."""
    estimate = _estimate_ms(lane, call)
    calls = _calls_in_piece(estimate, settings.piece_ms)
    few = max(3, round(settings.sample_ms / (calls * estimate)))
    return run_alone(lane, call, calls=calls, pieces=min(settings.repeats, few), held_on=held_on)


def time_beside(
    lanes: Lanes,
    both: Sequence[tuple[Lane, Call]],
    alone_ms: Sequence[float],
    settings: BenchSettings,
    device: torch.device,
) -> tuple[Pieces, ...]:
    """Runs two or more lanes side by side for about ``settings.together_ms``.

    Args:
        lanes: Owner of the lanes.
        both: Each lane and its work.
        alone_ms: Time of a call of each alone, which sets their numbers.
        settings: Bounds.
        device: Device of the lanes.
    """
    parts = []
    for (lane, call), ms in zip(both, alone_ms, strict=True):
        calls = _calls_in_piece(ms, settings.piece_ms)
        pieces = min(MAX_PIECES, max(3, math.ceil(settings.together_ms / (ms * calls))))
        parts.append(TimedWork(lane, call, calls, pieces, ms))
    return run_together(parts, inline=lanes.launches_inline, device=device)


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Times of one of two lanes, in milliseconds a call."""

    alone_ms: tuple[float, ...]
    """With the other lane idle, measured right before."""
    beside_ms: tuple[float, ...]
    """Of the pieces within the other lane's run; empty without any."""
    overlap_ms: float
    """Time of both together; 0 without overlap."""


def measure_beside(
    lanes: Lanes, both: tuple[tuple[Lane, Call], tuple[Lane, Call]], settings: BenchSettings, device: torch.device
) -> tuple[LaneTimes, LaneTimes]:
    """Times both lanes alone, then side by side."""
    alone = [time_alone(lane, call, settings, held_on=device).all_ms for lane, call in both]
    middle = [max(1e-4, sorted(times)[len(times) // 2]) for times in alone]
    pieces = time_beside(lanes, both, middle, settings, device)
    start, end = window_ms(pieces)
    first, second = (
        LaneTimes(times, piece.within(start, end), max(0.0, end - start))
        for times, piece in zip(alone, pieces, strict=True)
    )
    return first, second


def _estimate_ms(lane: Lane, call: Call) -> float:
    """Warms up and estimates the time of one call."""
    lane.submit(call).wait()
    return max(1e-4, min(run_alone(lane, call, calls=1, pieces=3).all_ms))


def _calls_in_piece(call_ms: float, piece_ms: float) -> int:
    """Returns the calls of a piece of at least ``piece_ms``."""
    return max(1, math.ceil(piece_ms / call_ms))
