"""One measurement: repeat on a lane until the numbers agree, the time is up, or the machine is too busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from mosaic.backends.base import Lane
from mosaic.errors import UnstableMeasurementError
from mosaic.profiler.noise import ForeignLoad
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject

_TRIES = 3


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
    return quietest(lambda: _repeat(subject, lane, settings), settings, what=subject.name)[0]


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
            f"above {settings.refuse_share:.0%} a profile means nothing: stop them, or measure later"
        )
    return best


def run_step(subject: Subject) -> tuple[float, float]:
    """Runs one forward and backward on the calling thread; returns both times in milliseconds."""
    start = time.perf_counter_ns()
    outputs = subject.forward()
    middle = time.perf_counter_ns()
    subject.backward(outputs)
    end = time.perf_counter_ns()
    return (middle - start) / 1e6, (end - middle) / 1e6 if outputs else 0.0


def _repeat(subject: Subject, lane: Lane, settings: ProfileSettings) -> StepTimes:
    def work() -> StepTimes:
        for _ in range(settings.warmup):
            run_step(subject)
        deadline = time.perf_counter() + settings.sample_seconds
        steps: list[tuple[float, float]] = []
        while len(steps) < settings.max_repeats:
            steps.append(run_step(subject))
            if len(steps) >= settings.min_repeats and (
                time.perf_counter() > deadline or _agree([f + b for f, b in steps], settings.spread)
            ):
                break
        forward, backward = zip(*steps, strict=True)
        return StepTimes(forward, backward)

    return lane.submit(work).wait()


def _agree(times: list[float], spread: float) -> bool:
    first, median, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return third - first <= spread * median
