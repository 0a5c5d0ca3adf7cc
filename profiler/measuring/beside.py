"""Modules that run over and over side by side, each on a partition of its own and timed beside all the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from mosaic.backends.base import Lane
from mosaic.profile import PairSample, Phase
from mosaic.profiler.measuring.measure import prepare_phase
from mosaic.profiler.measuring.together import MAX_PIECES, Call, TimedWork, run_alone, run_together, window_ms
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject

HOST = torch.device("cpu")

_TRIES = 3  # on a busy machine a thread may wait for its core while all others run


class BesideTimes(NamedTuple):
    """Raw measurements of one of several modules, in milliseconds."""

    beside_ms: tuple[float, ...]
    """While all others ran."""
    alone_ms: tuple[float, ...]
    """With the other partitions idle."""


def measure_beside(
    subjects: Sequence[Subject],
    lanes: Sequence[Lane],
    phase: Phase,
    settings: ProfileSettings,
    *,
    inline: bool = False,
    device: torch.device = HOST,
) -> tuple[BesideTimes, ...]:
    """Times one phase of modules, alone and side by side, on the same lanes, so that a drift of the machine hits both.

    Only repetitions during which all others ran from beginning to end count as beside.

    Args:
        subjects: Modules whose inputs are given, so that none waits for another.
        lanes: A lane for each, without slots in common.
        phase: Forward or backward, of all.
        settings: How carefully.
        inline: Whether the calling thread launches the work of all lanes (``Lanes.launches_inline``).
        device: Where the lanes run.

    Returns:
        The times of each; none where one of them has no such phase, or where they never met.
    """
    calls = [
        lane.submit(partial(prepare_phase, subject, phase)).wait()
        for lane, subject in zip(lanes, subjects, strict=True)
    ]
    alone = [_alone(lane, call, settings) for lane, call in zip(lanes, calls, strict=True)]
    if not all(alone):
        return ()
    for _ in range(_TRIES):
        beside = _beside(lanes, calls, alone, settings, inline=inline, device=device)
        if all(beside):
            return tuple(BesideTimes(found, single) for found, single in zip(beside, alone, strict=True))
    return ()


def measure_pair(
    subjects: Sequence[Subject],
    lanes: Sequence[Lane],
    phase: Phase,
    settings: ProfileSettings,
    *,
    inline: bool = False,
    device: torch.device = HOST,
) -> tuple[PairSample, ...]:
    """Times two modules as ``measure_beside`` does; returns a sample for each, none where they never met."""
    times = measure_beside(subjects, lanes, phase, settings, inline=inline, device=device)
    return tuple(
        PairSample(
            module=subjects[mine].name,
            beside=subjects[other].name,
            phase=phase,
            quota=len(lanes[mine].slots),
            beside_quota=len(lanes[other].slots),
            times_ms=times[mine].beside_ms,
            alone_ms=times[mine].alone_ms,
        )
        for mine, other in ((0, 1), (1, 0))
        if times
    )


def _alone(lane: Lane, call: Call | None, settings: ProfileSettings) -> tuple[float, ...]:
    if call is None:
        return ()
    return run_alone(lane, call, calls=1, pieces=settings.warmup + settings.min_repeats).all_ms[settings.warmup :]


def _beside(
    lanes: Sequence[Lane],
    calls: Sequence[Call | None],
    alone: Sequence[tuple[float, ...]],
    settings: ProfileSettings,
    *,
    inline: bool,
    device: torch.device,
) -> list[tuple[float, ...]]:
    """Keeps all running until each has its repetitions; the first of each may be warm-up."""
    middles = [max(1e-4, statistics.median(times)) for times in alone]
    least = settings.min_repeats + 2
    length_ms = max(middles) * least
    parts = [
        TimedWork(lane, call, 1, min(MAX_PIECES, math.ceil(length_ms / ms)) if inline else least, ms)
        for lane, call, ms in zip(lanes, calls, middles, strict=True)
        if call is not None
    ]
    pieces = run_together(parts, inline=inline, device=device, seconds=2 * settings.sample_seconds)
    window = window_ms(pieces)
    return [found.within(*window) for found in pieces]
