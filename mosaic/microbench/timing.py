"""Timing work on lanes by their own clock, alone and side by side.

On the host a lane is a thread, and two lanes run at the same time by themselves. On CUDA the calling thread launches
for both, so their launches take turns in small pieces, and nothing waits before all are launched. Either way a piece
counts as *side by side* only if the other lane was running from its beginning to its end.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mosaic.backends.base import Lane, Lanes, Mark, Ticket
from mosaic.microbench.settings import BenchSettings

Call = Callable[[], object]
"""One repetition of some work; launches on the current stream, or runs on the calling thread."""

_MOST_PIECES = 300  # a stream's queue of launches is finite: full, it would keep the other lane from its own
_SLICE_MS = 0.5
_LAUNCH_MS = 0.02  # about what a piece takes to launch, its mark included
_MOST_HOLD_MS = 5.0
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Pieces:
    """When the timed pieces of one lane began and ended."""

    marks_ms: tuple[float, ...]
    """Ends of neighbouring pieces on a clock that all lanes share; one more than there are pieces."""
    calls: int
    """Calls in each piece."""

    def within(self, start_ms: float, end_ms: float) -> tuple[float, ...]:
        """Returns milliseconds a call of the pieces that lie in a window."""
        ends = itertools.pairwise(self.marks_ms)
        return tuple((b - a) / self.calls for a, b in ends if a >= start_ms and b <= end_ms)

    @property
    def all_ms(self) -> tuple[float, ...]:
        """Milliseconds a call of every piece."""
        return self.within(-math.inf, math.inf)


def time_alone(lane: Lane, call: Call, settings: BenchSettings) -> Pieces:
    """Times work on a lane while the others have nothing to do."""
    estimate = estimate_ms(lane, call)
    calls = calls_in_piece(estimate, settings.piece_ms)
    few = max(3, round(settings.sample_ms / (calls * estimate)))
    origin, marks = lane.submit(partial(_run_pieces, lane, call, calls, min(settings.repeats, few))).wait()
    return Pieces(_on_clock(origin, marks), calls)


def estimate_ms(lane: Lane, call: Call) -> float:
    """Warms up and returns about how long one call takes."""
    lane.submit(call).wait()
    _, marks = lane.submit(partial(_run_pieces, lane, call, 1, 3)).wait()
    times = _on_clock(marks[0], marks)
    return max(1e-4, min(b - a for a, b in itertools.pairwise(times)))


def calls_in_piece(call_ms: float, piece_ms: float) -> int:
    """Returns how often to call in a piece that should not be shorter than ``piece_ms``."""
    return max(1, math.ceil(piece_ms / call_ms))


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
    calls = [calls_in_piece(ms, settings.piece_ms) for ms in alone_ms]
    counts = [
        min(_MOST_PIECES, max(3, math.ceil(settings.together_ms / (ms * inner))))
        for ms, inner in zip(alone_ms, calls, strict=True)
    ]
    if lanes.launches_inline:
        hold_back(device, min(_MOST_HOLD_MS, sum(counts) * _LAUNCH_MS))
        marks = _launch_in_turn(both, calls, counts, alone_ms)
    else:
        marks = _run_on_threads(both, calls, counts)
    origin = marks[0][0]
    return tuple(Pieces(_on_clock(origin, found), inner) for found, inner in zip(marks, calls, strict=True))


def window_ms(pieces: Sequence[Pieces]) -> tuple[float, float]:
    """Returns when all of them were running; the end lies before the start where they never met."""
    return max(found.marks_ms[0] for found in pieces), min(found.marks_ms[-1] for found in pieces)


def hold_back(device: torch.device, milliseconds: float) -> None:
    """Keeps the caller's stream busy, so that what is launched behind it starts at one time; nothing on the host."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * 1.5e6))


def _run_pieces(lane: Lane, call: Call, calls: int, count: int) -> tuple[Mark, list[Mark]]:
    marks = [lane.mark()]
    for _ in range(count):
        for _ in range(calls):
            call()
        marks.append(lane.mark())
    return marks[0], marks


def _on_clock(origin: Mark, marks: Sequence[Mark]) -> tuple[float, ...]:
    return tuple(0.0 if mark is origin else origin.ms_until(mark) for mark in marks)


def _launch_in_turn(
    both: Sequence[tuple[Lane, Call]], calls: Sequence[int], counts: Sequence[int], alone_ms: Sequence[float]
) -> list[list[Mark]]:
    """Launches the next slice of whichever lane has the least launched, by time alone."""
    marks: list[list[Mark]] = [[] for _ in both]
    tickets: list[Ticket[object]] = []

    def launch(mine: int, pieces: int) -> None:
        lane, call = both[mine]
        _, found = _run_pieces(lane, call, calls[mine], pieces)
        marks[mine] += found[1:] if marks[mine] else found

    left = list(counts)
    launched_ms = [0.0] * len(both)
    while any(left):
        mine = min((index for index in range(len(both)) if left[index]), key=lambda index: launched_ms[index])
        piece_ms = calls[mine] * alone_ms[mine]
        pieces = min(left[mine], max(1, int(_SLICE_MS / piece_ms)))
        tickets.append(both[mine][0].submit(partial(launch, mine, pieces)))
        left[mine] -= pieces
        launched_ms[mine] += pieces * piece_ms
    for ticket in tickets:
        ticket.wait()
    return marks


def _run_on_threads(both: Sequence[tuple[Lane, Call]], calls: Sequence[int], counts: Sequence[int]) -> list[list[Mark]]:
    """Starts all lanes at once; each goes on until every one has its pieces."""
    started = threading.Barrier(len(both), timeout=_WAIT_S)
    enough = [threading.Event() for _ in both]
    deadline = time.monotonic() + _WAIT_S

    def work(mine: int) -> list[Mark]:
        lane, call = both[mine]
        marks: list[Mark] = []
        try:
            started.wait()
            marks.append(lane.mark())
            while not all(event.is_set() for event in enough) and len(marks) < 10 * _MOST_PIECES:
                for _ in range(calls[mine]):
                    call()
                marks.append(lane.mark())
                if len(marks) > counts[mine] or time.monotonic() > deadline:
                    enough[mine].set()
        except BaseException:
            started.abort()
            raise
        finally:
            enough[mine].set()
        return marks

    tickets = [lane.submit(partial(work, mine)) for mine, (lane, _) in enumerate(both)]
    return _first_error_of(tickets)


def _first_error_of(tickets: Sequence[Ticket[list[Mark]]]) -> list[list[Mark]]:
    """Waits for all; raises what went wrong first, rather than that the others stopped for it."""
    errors: list[BaseException] = []
    found: list[list[Mark]] = []
    for ticket in tickets:
        try:
            found.append(ticket.wait())
        except BaseException as error:
            errors.append(error)
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return found
