"""Times modules on lanes: alone, and beside other modules on their own partitions.

On the host a lane is a thread. On CUDA the calling thread launches for all lanes, so their launches take turns in small
pieces without waiting. A piece counts as *side by side* only if the other lanes ran during all of it.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mosaic.backends.base import Lane, Mark, Ticket
from mosaic.profile import Phase
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject

Call = Callable[[], object]
"""One repetition; launches on the current stream, or runs on the calling thread."""

MAX_PIECES = 300
"""Limits launches ahead: a full queue of one stream would block launches to the other lane."""

_CPU = torch.device("cpu")
_TRIES = 3  # on a busy machine a thread may wait for its core
_MAX_IN_BATCH = 5
_BATCH_SHARE = 0.05  # share of a sample's time
_SLICE_MS = 0.5
_MIN_SLICES = 8
_LAUNCH_MS = 0.02  # approximate launch time of a piece and its mark
_MAX_HOLD_MS = 5.0
_WAIT_S = 120.0


def measure(subject: Subject, lane: Lane, settings: ProfileSettings) -> dict[Phase, tuple[float, ...]]:
    """Times forward and backward of a module alone on a lane; synchronizes once per batch of repetitions.

    Returns milliseconds per repetition; zeros for the backward of a module without gradients.
    """

    def step() -> tuple[Mark, Mark, Mark]:
        start = lane.mark()
        outputs = subject.forward()
        middle = lane.mark()
        if not outputs:
            return start, middle, middle
        subject.backward(outputs)
        return start, middle, lane.mark()

    def batch(count: int) -> list[tuple[float, float]]:
        marks = lane.submit(lambda: [step() for _ in range(count)]).wait()
        return [(start.ms_until(mid), mid.ms_until(end) if end is not mid else 0.0) for start, mid, end in marks]

    batch(settings.warmup)
    deadline = time.perf_counter() + settings.sample_seconds
    steps = batch(settings.min_repeats)
    while len(steps) < settings.max_repeats:
        totals = [forward + backward for forward, backward in steps]
        quartiles = statistics.quantiles(totals, n=4, method="inclusive") if len(totals) > 1 else totals * 3
        if time.perf_counter() > deadline or quartiles[2] - quartiles[0] <= settings.spread * quartiles[1]:
            break
        few = 1 + int(_BATCH_SHARE * 1e3 * settings.sample_seconds / max(1e-3, quartiles[1]))
        steps += batch(min(few, _MAX_IN_BATCH, settings.max_repeats - len(steps)))
    return dict(zip(Phase, zip(*steps, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Pieces:
    """The timed pieces of one lane, with ``calls`` calls each."""

    marks_ms: tuple[float, ...]
    """Start of the first piece and end of each piece, on the lanes' common clock."""
    calls: int

    def within(self, start_ms: float, end_ms: float) -> tuple[float, ...]:
        """Returns milliseconds per call of the pieces within a window."""
        ends = itertools.pairwise(self.marks_ms)
        return tuple((b - a) / self.calls for a, b in ends if a >= start_ms and b <= end_ms)

    @property
    def all_ms(self) -> tuple[float, ...]:
        return self.within(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class TimedWork:
    """The work of one lane: at least ``pieces`` pieces of ``calls`` calls."""

    lane: Lane
    call: Call
    calls: int
    pieces: int
    call_ms: float = 0.0
    """Approximate time of a call alone; determines the order of launches."""

    def run(self, count: int) -> list[Mark]:
        """Runs or launches pieces from the lane's work; returns marks around each."""
        marks = [self.lane.mark()]
        for _ in range(count):
            for _ in range(self.calls):
                self.call()
            marks.append(self.lane.mark())
        return marks


def run_alone(lane: Lane, call: Call, *, calls: int, pieces: int, held_on: torch.device | None = None) -> Pieces:
    """Times ``pieces`` pieces of ``calls`` calls on one lane, and synchronizes.

    On a device ``held_on``, work starts after the first launches, as in ``run_together``.
    """
    if held_on is not None:
        _hold_back(held_on, pieces)
    marks = lane.submit(partial(TimedWork(lane, call, calls, pieces).run, pieces)).wait()
    return _on_clock(marks[0], marks, calls)


def run_together(
    parts: Sequence[TimedWork], *, inline: bool, device: torch.device, seconds: float = _WAIT_S
) -> tuple[Pieces, ...]:
    """Keeps all lanes running until each has its pieces; thread lanes stop after ``seconds`` in any case.

    ``inline``: the calling thread launches the work (``Lanes.launches_inline``).
    """
    if inline:
        _hold_back(device, sum(part.pieces for part in parts))
    marks = _launch_in_turn(parts) if inline else _run_on_threads(parts, seconds)
    return tuple(_on_clock(marks[0][0], own, part.calls) for own, part in zip(marks, parts, strict=True))


def window_ms(pieces: Sequence[Pieces]) -> tuple[float, float]:
    """Returns the window in which all lanes ran; its end is before its start if there was none."""
    return max(own.marks_ms[0] for own in pieces), min(own.marks_ms[-1] for own in pieces)


def _hold_back(device: torch.device, pieces: int) -> None:
    """Delays pieces on the caller's stream while they are launched, so that they start together."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(min(_MAX_HOLD_MS, pieces * _LAUNCH_MS) * 1.5e6))  # clock cycles at about 1.5 GHz


def _on_clock(origin: Mark, marks: Sequence[Mark], calls: int) -> Pieces:
    return Pieces(tuple(0.0 if mark is origin else origin.ms_until(mark) for mark in marks), calls)


def _launch_in_turn(parts: Sequence[TimedWork]) -> list[list[Mark]]:
    """Launches the next slice of the lane with the least launched work, by time alone."""
    marks: list[list[Mark]] = [[] for _ in parts]
    tickets: list[Ticket[object]] = []

    def launch(mine: int, pieces: int) -> None:
        own = parts[mine].run(pieces)
        marks[mine] += own[1:] if marks[mine] else own

    left = [part.pieces for part in parts]
    launched_ms = [0.0] * len(parts)
    while any(left):
        mine = min((index for index in range(len(parts)) if left[index]), key=lambda index: launched_ms[index])
        piece_ms = max(1e-4, parts[mine].calls * parts[mine].call_ms)
        few = min(int(_SLICE_MS / piece_ms), parts[mine].pieces // _MIN_SLICES)
        pieces = min(left[mine], max(1, few))
        tickets.append(parts[mine].lane.submit(partial(launch, mine, pieces)))
        left[mine] -= pieces
        launched_ms[mine] += pieces * piece_ms
    for ticket in tickets:
        ticket.wait()
    return marks


def _run_on_threads(parts: Sequence[TimedWork], seconds: float) -> list[list[Mark]]:
    """Starts all lanes; each continues until all have their pieces, counted from their common start."""
    enough = [threading.Event() for _ in parts]
    marks: list[list[Mark]] = [[] for _ in parts]
    deadline = time.monotonic() + seconds

    def work(mine: int) -> None:
        part, own, counted = parts[mine], marks[mine], 0
        try:
            own.append(part.lane.mark())
            while not all(event.is_set() for event in enough):
                all_run = all(marks)
                own += part.run(1)[1:]
                counted += all_run
                if counted >= part.pieces:
                    enough[mine].set()
                if time.monotonic() > deadline:
                    break
        finally:
            if counted < part.pieces:  # after the deadline or an error the others stop
                for event in enough:
                    event.set()

    tickets = [part.lane.submit(partial(work, mine)) for mine, part in enumerate(parts)]
    with ExitStack() as stack:  # waits for all lanes even if one raises
        for ticket in tickets:
            stack.callback(ticket.wait)
    return marks


class BesideTimes(NamedTuple):
    """Raw times of one of several modules, in milliseconds."""

    beside_ms: tuple[float, ...]
    """Beside all others."""
    alone_ms: tuple[float, ...]
    """Alone."""


def measure_beside(
    subjects: Sequence[Subject],
    lanes: Sequence[Lane],
    phase: Phase,
    settings: ProfileSettings,
    *,
    inline: bool = False,
    device: torch.device = _CPU,
) -> tuple[BesideTimes, ...]:
    """Times one phase of modules alone and side by side in turn, on the same lanes.

    Returns nothing if a module lacks the phase, or if they never ran at the same time.
    """
    calls: list[Call] = []
    for lane, subject in zip(lanes, subjects, strict=True):
        call = lane.submit(partial(subject.prepare, phase)).wait()
        if call is None:
            return ()
        calls.append(call)
    alone = [
        run_alone(lane, call, calls=1, pieces=settings.warmup + settings.min_repeats).all_ms[settings.warmup :]
        for lane, call in zip(lanes, calls, strict=True)
    ]
    middles = [max(1e-4, statistics.median(times)) for times in alone]
    least = settings.min_repeats + 2  # the first of each may be warm-up
    length_ms = max(middles) * least
    parts = [
        TimedWork(lane, call, 1, min(MAX_PIECES, math.ceil(length_ms / ms)) if inline else least, ms)
        for lane, call, ms in zip(lanes, calls, middles, strict=True)
    ]
    for _ in range(_TRIES):
        pieces = run_together(parts, inline=inline, device=device, seconds=2 * settings.sample_seconds)
        beside = [own.within(*window_ms(pieces)) for own in pieces]
        if all(beside):
            return tuple(map(BesideTimes, beside, alone))
    return ()
