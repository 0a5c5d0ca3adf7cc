"""``pool``: what does it cost to make a context and a stream, against lending one that was made beforehand?

Paper section 3.2 and Fig. 11(a): about 37 ms on demand, about 0.013 ms from the pool.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.device import FORBID_EXTRA
from mosaic.errors import BackendUnavailableError, CudaError
from mosaic.microbench.budget import Budget
from mosaic.microbench.makers import Maker, free_bytes, makers, many_partitions, open_lender
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings

PAPER_CREATE_MS = 37.0
"""On-demand creation, paper Fig. 11(a)."""
PAPER_LEND_MS = 0.013
"""From the pool, paper Fig. 11(a)."""
GOAL_LEND_NS = 1000.0
"""What lending should stay under here."""

_BATCHES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """Making and ending what runs on one partition, by the host's clock: these calls return when they are done."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    way: str
    """What was made, and by whom."""
    quota: int
    """Slots of the partition."""
    create_ms: Spread
    """Time to make it."""
    destroy_ms: Spread
    """Time to end it."""
    held_bytes: Spread | None
    """Memory that the device had less while it existed; None where nobody tells."""
    kept_bytes: int | None
    """Memory that the device had less after all repetitions than before the first; None where nobody tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """Handing out what exists."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    way: str
    """What was timed."""
    lends: int
    """How often, in all."""
    time_ns: Spread
    """Mean of each batch, Python's call included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A pool that got one partition more again and again."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    contexts: int
    """How many there were at the end."""
    asked: int
    """How many were asked for; a bound of ours, not of the device."""
    stopped_by: str
    """What the driver said; empty if nothing did."""
    add_layout_ms: Spread | None
    """Time to add a layout of one new partition to a pool in use."""
    driver_bytes: int
    """Memory that they took, by the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolResult(Result):
    """Costs of making and of lending."""

    creations: tuple[Creation, ...]
    """Way by way, by rising quota."""
    lending: Lending | None
    """None if there was no time."""
    growth: Growth | None
    """None on the host, or if there was no time."""


def measure_pool(backend: Backend, settings: BenchSettings, budget: Budget | None = None) -> PoolResult:
    """Times creation and destruction at several quotas, lending, and how a pool grows.

    Args:
        backend: Where to measure.
        settings: Bounds.
        budget: Time; what does not fit is named in ``left_out``.
    """
    recorder = Recorder(backend, budget or Budget())
    whole = backend.device.slots
    free_bytes(backend)  # torch makes the primary context, before a pool retains it
    lending = _lend(backend, whole, settings) if recorder.budget.allows("lending") else None
    creations: list[Creation] = []
    for maker, name, reason in makers(backend):
        if maker is None:
            recorder.cannot(name, reason)
            continue
        for quota in settings.quotas(len(whole)):
            if recorder.budget.allows(f"{name} at {quota} slots"):
                try:
                    creations.append(_create(backend, maker, quota, settings, recorder))
                except (CudaError, BackendUnavailableError, RuntimeError) as error:
                    recorder.cannot(f"{name} at {quota} slots", error)
    growth = None
    if backend.torch_device.type == "cuda" and recorder.budget.allows("many contexts"):
        growth = _grow(backend, settings)
    return PoolResult(
        creations=tuple(creations),
        lending=lending,
        growth=growth,
        absent=tuple(recorder.absent),
        left_out=recorder.left_out,
        origin=recorder.origin(),
    )


def _create(backend: Backend, maker: Maker, quota: int, settings: BenchSettings, recorder: Recorder) -> Creation:
    slots = tuple(range(quota))
    maker.make(slots).close()  # what is set up once for the process belongs to no repetition
    create, destroy, held = [], [], []
    first = free_bytes(backend)
    for number in range(settings.repeats):
        if number >= 3 and not recorder.budget.left_s:
            break
        before = free_bytes(backend)
        start = time.perf_counter_ns()
        made = maker.make(slots)
        there = time.perf_counter_ns()
        meanwhile = free_bytes(backend)
        closing = time.perf_counter_ns()
        made.close()
        gone = time.perf_counter_ns()
        create.append((there - start) / 1e6)
        destroy.append((gone - closing) / 1e6)
        if before is not None and meanwhile is not None:
            held.append(float(before - meanwhile))
    last = free_bytes(backend)
    return Creation(
        way=maker.name,
        quota=quota,
        create_ms=Spread.of(create),
        destroy_ms=Spread.of(destroy),
        held_bytes=Spread.of(held) if held else None,
        kept_bytes=first - last if first is not None and last is not None else None,
    )


def _lend(backend: Backend, slots: tuple[int, ...], settings: BenchSettings) -> Lending:
    batch = max(1, settings.lends // _BATCHES)
    means = []
    with open_lender(backend, slots) as lender:
        once = lender.once
        once()
        for _ in range(_BATCHES):
            start = time.perf_counter_ns()
            for _ in range(batch):
                once()
            means.append((time.perf_counter_ns() - start) / batch)
        return Lending(way=lender.name, lends=batch * _BATCHES, time_ns=Spread.of(means))


def _grow(backend: Backend, settings: BenchSettings) -> Growth:
    partitions = many_partitions(backend.device.num_slots, settings.most_contexts)
    pool: Any = cuda.open_pool(backend.torch_device.index or 0, [[partitions[0]]])
    times: list[float] = []
    stopped_by = ""
    try:
        for slots in partitions[1:]:
            start = time.perf_counter_ns()
            pool.add_layout([slots])
            times.append((time.perf_counter_ns() - start) / 1e6)
    except (CudaError, BackendUnavailableError) as error:
        stopped_by = str(error)
    try:
        stats = pool.stats()
        return Growth(
            contexts=stats.num_contexts,
            asked=len(partitions),
            stopped_by=stopped_by,
            add_layout_ms=Spread.of(times) if times else None,
            driver_bytes=stats.driver_bytes,
        )
    finally:
        pool.close()
