"""The ground of the rungs: lanes of the GPU, or in a rehearsal of the fake runtime; and errors that are readings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.gpu.bench import Bench
from bench.record import Figure, missing_figure, one_line
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.cuda.pool import StreamLoan

Slots = tuple[int, ...]


@contextmanager
def on_lanes(bench: Bench) -> Iterator[CudaBackend]:
    """Yields the backend of the GPU; in a rehearsal one on the fake runtime of the tests, which finds races."""
    if isinstance(bench.backend, CudaBackend):
        yield bench.backend
        return
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
    from fake_streams import FakeStreams
    from fake_streams.driver import FakeGreenDriver

    runtime = FakeStreams()
    with runtime.watching():
        yield CudaBackend(api=runtime, driver=FakeGreenDriver(16))


@contextmanager
def green_streams(backend: CudaBackend, partitions: Iterable[Slots]) -> Iterator[StreamLoan]:
    """Lends streams of partitions without lanes, which record the events that a rung may have to ask about."""
    loan = backend.borrow_streams(partitions)
    try:
        yield loan
    finally:
        backend.api.synchronize()
        loan.give_back()


def halves(backend: CudaBackend) -> tuple[Slots, Slots]:
    """Returns two partitions that are all slots together."""
    slots = backend.device.slots
    return slots[: len(slots) // 2], slots[len(slots) // 2 :]


def reading(look: Callable[[], Any]) -> Any:
    """Returns what was found, or the error as text: a reading that fails leaves the others."""
    try:
        return look()
    except Exception as error:
        return one_line(error, 160)


def readings(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what was found, or the error under ``error``."""
    result = reading(look)
    return {"error": result} if isinstance(result, str) else result


def figures_of(readings: Mapping[str, Any]) -> Iterator[Figure]:
    """Yields a figure for each reading that is a number or an error; lists are for the verdict alone."""
    for name, value in readings.items():
        if isinstance(value, bool | int | float):
            yield Figure(name=name, source="measured", value=float(value))
        elif isinstance(value, str):
            yield missing_figure(name, value)
