"""What two modules cost each other: both run over and over on partitions of their own, each timed beside the other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch

from mosaic.backends.base import Lane
from mosaic.profile import PairSample, Phase
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject
from mosaic.profiler.together import MOST_PIECES, Call, Part, run_alone, run_together, window_ms

_HOST = torch.device("cpu")


def measure_pair(
    first: Subject,
    second: Subject,
    lanes: tuple[Lane, Lane],
    phase: Phase,
    settings: ProfileSettings,
    *,
    inline: bool = False,
    device: torch.device = _HOST,
) -> tuple[PairSample, ...]:
    """Times one phase of two modules, alone and side by side, and returns a sample for each of them.

    Alone and beside are taken in turn on the same lanes, so that a drift of the machine hits both. Only repetitions
    during which the other module ran from beginning to end count as beside.

    Args:
        first: One module.
        second: The other, which does not depend on it.
        lanes: A lane for each.
        phase: Forward or backward, of both.
        settings: How carefully.
        inline: Whether the calling thread launches the work of both lanes (``Lanes.launches_inline``).
        device: Where the lanes run.

    Returns:
        Nothing where one of the modules has no such phase, or where they never met.
    """
    subjects = (first, second)
    calls = [
        lane.submit(partial(_prepare, subject, phase)).wait() for lane, subject in zip(lanes, subjects, strict=True)
    ]
    alone = [_alone(lane, call, settings) for lane, call in zip(lanes, calls, strict=True)]
    if not all(alone):
        return ()
    beside = _beside(lanes, calls, alone, settings, inline=inline, device=device)
    if not all(beside):
        return ()
    return tuple(
        PairSample(
            module=subjects[mine].name,
            beside=subjects[other].name,
            phase=phase,
            quota=len(lanes[mine].slots),
            beside_quota=len(lanes[other].slots),
            times_ms=beside[mine],
            alone_ms=alone[mine],
        )
        for mine, other in ((0, 1), (1, 0))
    )


def _prepare(subject: Subject, phase: Phase) -> Call | None:
    """Returns one repetition of a phase, the other phase's work done once; None for a module without that phase."""
    if phase is Phase.FORWARD:
        return _forward(subject)
    outputs = subject.forward()
    return partial(subject.backward, outputs, keep=True) if outputs else None


def _forward(subject: Subject) -> Callable[[], None]:
    def call() -> None:
        subject.forward()  # its result, and with it the graph, goes at once

    return call


def _alone(lane: Lane, call: Call | None, settings: ProfileSettings) -> tuple[float, ...]:
    if call is None:
        return ()
    return run_alone(lane, call, calls=1, pieces=settings.warmup + settings.min_repeats).all_ms[settings.warmup :]


def _beside(
    lanes: tuple[Lane, Lane],
    calls: list[Call | None],
    alone: list[tuple[float, ...]],
    settings: ProfileSettings,
    *,
    inline: bool,
    device: torch.device,
) -> list[tuple[float, ...]]:
    """Keeps both running until each has its repetitions; the first of each may be warm-up."""
    middles = [max(1e-4, statistics.median(times)) for times in alone]
    least = settings.min_repeats + 2
    length_ms = max(middles) * least
    parts = [
        Part(lane, call, 1, min(MOST_PIECES, math.ceil(length_ms / ms)) if inline else least, ms)
        for lane, call, ms in zip(lanes, calls, middles, strict=True)
        if call is not None
    ]
    pieces = run_together(parts, inline=inline, device=device, seconds=2 * settings.sample_seconds)
    window = window_ms(pieces)
    return [found.within(*window) for found in pieces]
