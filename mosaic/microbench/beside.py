"""Two pieces of work on two lanes: each alone, then both at the same time, and the window in which they met."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mosaic.backends.base import Lane, Lanes
from mosaic.microbench.settings import BenchSettings
from mosaic.microbench.timing import Call, time_alone, time_beside, window_ms


@dataclass(frozen=True, slots=True)
class Beside:
    """Times of one of two lanes, in milliseconds a call."""

    alone_ms: tuple[float, ...]
    """With the other lane idle, taken right before."""
    beside_ms: tuple[float, ...]
    """Of the pieces during which the other lane was running throughout; empty where there is none."""
    overlap_ms: float
    """How long both were running; 0 where they never met."""


def measure_beside(
    lanes: Lanes, both: tuple[tuple[Lane, Call], tuple[Lane, Call]], settings: BenchSettings, device: torch.device
) -> tuple[Beside, Beside]:
    """Times both lanes alone, then side by side."""
    alone = [time_alone(lane, call, settings, held_on=device).all_ms for lane, call in both]
    middle = [max(1e-4, sorted(times)[len(times) // 2]) for times in alone]
    pieces = time_beside(lanes, both, middle, settings, device)
    start, end = window_ms(pieces)
    first, second = (
        Beside(times, found.within(start, end), max(0.0, end - start))
        for times, found in zip(alone, pieces, strict=True)
    )
    return first, second
