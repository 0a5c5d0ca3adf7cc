"""What two modules cost each other: both run over and over on partitions of their own, each timed beside the other."""

from __future__ import annotations

import threading
import time
from functools import partial

from mosaic.backends.base import Lane
from mosaic.profile import PairSample, Phase
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject


def measure_pair(
    first: Subject, second: Subject, lanes: tuple[Lane, Lane], phase: Phase, settings: ProfileSettings
) -> tuple[PairSample, ...]:
    """Times one phase of two modules, alone and side by side, and returns a sample for each of them.

    Alone and beside are taken in turn on the same lanes, so that a drift of the machine hits both.
    """
    subjects = (first, second)
    alone = [_loop_alone(subject, lane, phase, settings) for subject, lane in zip(subjects, lanes, strict=True)]
    beside = _loop_beside(subjects, lanes, phase, settings)
    if not all(alone) or not all(beside):
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


class _Repeater:
    """Repeats one phase of a module; the other phase's work is prepared once, outside the timing."""

    def __init__(self, subject: Subject, phase: Phase) -> None:
        self._subject = subject
        self._outputs = subject.forward() if phase is Phase.BACKWARD else []
        self.has_work = phase is Phase.FORWARD or bool(self._outputs)

    def once(self) -> float:
        """Runs the phase once; returns its time in milliseconds."""
        start = time.perf_counter_ns()
        if self._outputs:
            self._subject.backward(self._outputs, keep=True)
        else:
            self._subject.forward()
        return (time.perf_counter_ns() - start) / 1e6


def _loop_alone(subject: Subject, lane: Lane, phase: Phase, settings: ProfileSettings) -> tuple[float, ...]:
    def work() -> tuple[float, ...]:
        repeater = _Repeater(subject, phase)
        if not repeater.has_work:
            return ()
        for _ in range(settings.warmup):
            repeater.once()
        return tuple(repeater.once() for _ in range(settings.min_repeats))

    return lane.submit(work).wait()


def _loop_beside(
    subjects: tuple[Subject, Subject], lanes: tuple[Lane, Lane], phase: Phase, settings: ProfileSettings
) -> list[tuple[float, ...]]:
    """Keeps both running until each has its repetitions; the first of each is warm-up."""
    started = threading.Barrier(2, timeout=120)
    enough = [threading.Event(), threading.Event()]
    deadline = time.perf_counter() + 2 * settings.sample_seconds

    def work(mine: int) -> tuple[float, ...]:
        times: list[float] = []
        try:
            repeater = _Repeater(subjects[mine], phase)
            started.wait()
            if repeater.has_work:
                repeater.once()
            while repeater.has_work and not all(event.is_set() for event in enough):
                times.append(repeater.once())
                if len(times) >= settings.min_repeats or time.perf_counter() > deadline:
                    enough[mine].set()
        finally:
            enough[mine].set()  # or the other would go on for ever
        return tuple(times)

    tickets = [lane.submit(partial(work, mine)) for mine, lane in enumerate(lanes)]
    return [ticket.wait() for ticket in tickets]
