"""One measurement: repeat on a lane until the numbers agree or the time is up, and again where others took the CPU."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from mosaic.backends.base import Lane, Mark
from mosaic.device import Device
from mosaic.profile import Phase, note_of_others
from mosaic.profiler.noise import CpuTime, ForeignLoad
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject

OUT_OF_MEMORY = "out of memory"

_Measured = TypeVar("_Measured")
_TRIES = 3
_MAX_IN_BATCH = 5
_BATCH_SHARE = 0.05  # of the time for a sample
_MAX_CHARACTERS = 300


def measure(subject: Subject, lane: Lane, settings: ProfileSettings) -> dict[Phase, tuple[float, ...]]:
    """Times forward and backward of a module on a lane while the others are idle.

    Repeats in batches, since the calling thread waits for the device once a batch.

    Returns:
        Milliseconds of each repetition; zeros for the backward of a module without gradients.
    """
    _batch(subject, lane, settings.warmup)
    deadline = time.perf_counter() + settings.sample_seconds
    steps = _batch(subject, lane, settings.min_repeats)
    while len(steps) < settings.max_repeats:
        totals = [forward + backward for forward, backward in steps]
        if time.perf_counter() > deadline or _agree(totals, settings.spread):
            break
        few = 1 + int(_BATCH_SHARE * 1e3 * settings.sample_seconds / max(1e-3, statistics.median(totals)))
        steps += _batch(subject, lane, min(few, _MAX_IN_BATCH, settings.max_repeats - len(steps)))
    return dict(zip(Phase, zip(*steps, strict=True), strict=True))


def _batch(subject: Subject, lane: Lane, count: int) -> list[tuple[float, float]]:
    def step() -> tuple[Mark, Mark, Mark]:
        start = lane.mark()
        outputs = subject.forward()
        middle = lane.mark()
        if not outputs:
            return start, middle, middle
        subject.backward(outputs)
        return start, middle, lane.mark()

    return [
        (start.ms_until(middle), middle.ms_until(end) if end is not middle else 0.0)
        for start, middle, end in lane.submit(lambda: [step() for _ in range(count)]).wait()
    ]


def _agree(times: list[float], spread: float) -> bool:
    first, median, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return third - first <= spread * median


def prepare_phase(subject: Subject, phase: Phase) -> Callable[[], object] | None:
    """Returns one repetition of a phase, the other phase's work done once; None for a module without that phase.

    To be called on the lane on which it will be repeated.
    """
    if phase is Phase.FORWARD:

        def call() -> None:
            subject.forward()  # its result, and with it the graph, goes at once

        return call
    outputs = subject.forward()
    return partial(subject.backward, outputs, keep=True) if outputs else None


def phase_peaks(subject: Subject, device: torch.device) -> tuple[int, int]:
    """Runs a step on a GPU; returns the most bytes in use during forward and backward, each above those before it.

    The allocator counts when memory is asked for, by the launching thread: nothing waits for the device. Its own
    record of the highest use on the device is reset.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = subject.forward()
    forward = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    between = torch.cuda.memory_allocated(device)
    subject.backward(outputs)
    backward = torch.cuda.max_memory_allocated(device) - between
    return max(0, forward), max(0, backward)


class Retries:
    """Measures again what was measured while others took the CPU, as long as there is time.

    Args:
        settings: Has the time, ``retry_seconds``, and what is too much.
        device: Where it is measured. A GPU's events time its own work, whatever the CPU does.

    Attributes:
        taken: CPU time over the tries that were kept.
    """

    def __init__(self, settings: ProfileSettings, device: Device) -> None:
        self.taken = CpuTime(0.0, 0.0, 0.0)
        self._settings = settings
        self._device = device
        self._seconds = settings.retry_seconds if device.kind == "host" else 0.0

    @property
    def note(self) -> str:
        """The note for the result; empty where others hardly used the CPU.

        Raises:
            UnstableMeasurementError: They did, and the settings are strict.
        """
        share, settings = self.taken.share or 0.0, self._settings
        return note_of_others(share, self._device, strict=settings.strict) if share > settings.foreign_share else ""

    def quietest(self, take: Callable[[], _Measured]) -> tuple[_Measured, float | None]:
        """Measures up to three times, until others take little enough of the CPU, and keeps the quietest try.

        Returns:
            What was measured, and the share that others took; None where unknown, or too short a while to say.
        """
        tries: list[tuple[_Measured, CpuTime]] = []
        while True:
            began, load = time.perf_counter(), ForeignLoad()
            tries.append((take(), load.taken or CpuTime(0.0, 0.0, 0.0)))
            share, took_s = tries[-1][1].share, time.perf_counter() - began
            if share is None or share <= self._settings.foreign_share or len(tries) == _TRIES or took_s > self._seconds:
                break
            self._seconds -= took_s
        measured, taken = min(tries, key=lambda attempt: attempt[1].share or 0.0)
        self.taken += taken
        return measured, taken.share


class Attempt:
    """The outcome of a block that may fail."""

    reason: str | None = None
    """The error in one line."""


@contextmanager
def attempt() -> Iterator[Attempt]:
    """Keeps what the block raises as a reason and releases what it held; interrupts go on as errors."""
    outcome = Attempt()
    is_memory = False
    try:
        yield outcome
    except Exception as error:  # of any kind: the user's module raised it
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = OUT_OF_MEMORY if is_memory else type(error).__name__
        outcome.reason = f"{kind}: {lines[0][:_MAX_CHARACTERS]}" if lines else kind
        if is_memory:  # whoever called this still holds the error, and it the tensors of the frames that it passed
            traceback.clear_frames(error.__traceback__)
    if is_memory:
        gc.collect()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
