"""Timing one lane alone, or two side by side, by a question's settings; the profiler does the rest."""

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
    """Times work on a lane while the others have nothing to do; ``held_on`` as in ``run_alone``."""
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
    """Keeps two or more lanes running side by side for about ``settings.together_ms``.

    Args:
        lanes: What the lanes belong to.
        both: Each lane and what it repeats.
        alone_ms: How long a call of each takes alone, which decides how many there are.
        settings: Bounds.
        device: Where the lanes run.
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
    """With the other lane idle, taken right before."""
    beside_ms: tuple[float, ...]
    """Of the pieces during which the other lane was running throughout; empty where there is none."""
    overlap_ms: float
    """How long both were running; 0 where they never met."""


def measure_beside(
    lanes: Lanes, both: tuple[tuple[Lane, Call], tuple[Lane, Call]], settings: BenchSettings, device: torch.device
) -> tuple[LaneTimes, LaneTimes]:
    """Times both lanes alone, then side by side."""
    alone = [time_alone(lane, call, settings, held_on=device).all_ms for lane, call in both]
    middle = [max(1e-4, sorted(times)[len(times) // 2]) for times in alone]
    pieces = time_beside(lanes, both, middle, settings, device)
    start, end = window_ms(pieces)
    first, second = (
        LaneTimes(times, found.within(start, end), max(0.0, end - start))
        for times, found in zip(alone, pieces, strict=True)
    )
    return first, second


def _estimate_ms(lane: Lane, call: Call) -> float:
    """Warms up and returns about how long one call takes."""
    lane.submit(call).wait()
    return max(1e-4, min(run_alone(lane, call, calls=1, pieces=3).all_ms))


def _calls_in_piece(call_ms: float, piece_ms: float) -> int:
    """Returns how often to call in a piece that should not be shorter than ``piece_ms``."""
    return max(1, math.ceil(piece_ms / call_ms))
