"""One measurement: repeat on a lane until the numbers agree, the time is up, or the machine is too busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from mosaic.backends.base import Lane, Mark
from mosaic.errors import UnstableMeasurementError
from mosaic.profiler.machine.noise import ForeignLoad
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject

_TRIES = 3
_MOST_IN_BATCH = 5
_BATCH_SHARE = 0.05  # of the time for a sample


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of the two halves of a module's step, in milliseconds, repetition by repetition."""

    forward_ms: tuple[float, ...]
    """Forward."""
    backward_ms: tuple[float, ...]
    """Backward; zeros for a module without gradients."""


def measure_alone(subject: Subject, lane: Lane, settings: ProfileSettings) -> StepTimes:
    """Times forward and backward of a module on a lane while the others are idle.

    Raises:
        UnstableMeasurementError: Others took more of the machine than ``settings.refuse_share``, three times.
    """
    return measure_quietly(subject, lane, settings)[0]


def measure_quietly(subject: Subject, lane: Lane, settings: ProfileSettings) -> tuple[StepTimes, float | None]:
    """As ``measure_alone``; also returns the share of the machine that others took, None where unknown."""
    return quietest(lambda: _repeat(subject, lane, settings), settings, what=subject.name)


def quietest(take: Callable[[], StepTimes], settings: ProfileSettings, *, what: str) -> tuple[StepTimes, float | None]:
    """Measures up to three times, until others take little enough of the machine, and keeps the quietest try."""
    best: tuple[StepTimes, float | None] | None = None
    for _ in range(_TRIES):
        load = ForeignLoad()
        times = take()
        share = load.share
        if best is None or (share is not None and best[1] is not None and share < best[1]):
            best = (times, share)
        if share is None or share <= settings.foreign_share:
            break
    assert best is not None
    if best[1] is not None and best[1] > settings.refuse_share:
        raise UnstableMeasurementError(
            f"other processes took {best[1]:.0%} of this machine's CPU time while {what!r} was measured, three times; "
            f"above {settings.refuse_share:.0%} a profile means nothing: stop them, measure later, give a profile or a "
            "plan, or allow more (ProfileSettings(refuse_share=...), --max-foreign-share)"
        )
    return best


def run_step(subject: Subject, lane: Lane) -> tuple[Mark, Mark, Mark]:
    """Runs or launches one forward and backward on a lane, from its work; returns marks around both."""
    start = lane.mark()
    outputs = subject.forward()
    middle = lane.mark()
    if not outputs:
        return start, middle, middle
    subject.backward(outputs)
    return start, middle, lane.mark()


def _repeat(subject: Subject, lane: Lane, settings: ProfileSettings) -> StepTimes:
    """Repeats in batches, since the calling thread waits for the device once a batch."""
    _batch(subject, lane, settings.warmup)
    deadline = time.perf_counter() + settings.sample_seconds
    steps = _batch(subject, lane, settings.min_repeats)
    while len(steps) < settings.max_repeats:
        totals = [forward + backward for forward, backward in steps]
        if time.perf_counter() > deadline or _agree(totals, settings.spread):
            break
        few = 1 + int(_BATCH_SHARE * 1e3 * settings.sample_seconds / max(1e-3, statistics.median(totals)))
        steps += _batch(subject, lane, min(few, _MOST_IN_BATCH, settings.max_repeats - len(steps)))
    forward, backward = zip(*steps, strict=True)
    return StepTimes(forward, backward)


def _batch(subject: Subject, lane: Lane, count: int) -> list[tuple[float, float]]:
    def work() -> list[tuple[Mark, Mark, Mark]]:
        return [run_step(subject, lane) for _ in range(count)]

    return [
        (start.ms_until(middle), middle.ms_until(end) if end is not middle else 0.0)
        for start, middle, end in lane.submit(work).wait()
    ]


def _agree(times: list[float], spread: float) -> bool:
    first, median, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return third - first <= spread * median
