"""``pool``: the cost of a new context and stream, against one from the pool.

Paper section 3.2 and Fig. 11(a): about 37 ms on demand, about 0.013 ms from the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from mosaic.backends.base import Backend
from mosaic.backends.cuda import driver
from mosaic.backends.cuda.pool import Slots
from mosaic.errors import BackendUnavailableError, CudaError
from mosaic.microbench.report import Picture, Report, bar_of, spread_text
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings, Budget
from mosaic.report.charts import Bar

PAPER_CREATE_MS, PAPER_LEND_MS = 37.0, 0.013
"""On-demand creation, and from the pool: paper Fig. 11(a)."""
GOAL_LEND_NS = 1000.0
"""Goal of a lend."""
Make = Callable[[Slots], Callable[[], object]]
"""Creates the resources of a partition; returns a function that destroys them."""
_BATCHES = 10
_MIB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """Creation and destruction of one partition's resources, by the host's clock: the calls are synchronous."""

    way: str
    """The resources and their creator."""
    quota: int
    """Slots of the partition."""
    create_ms: Spread
    destroy_ms: Spread
    held_bytes: Spread | None
    """Device memory in use during its life; None if unknown."""
    kept_bytes: int | None
    """Device memory still in use after all repetitions; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """Lends of existing resources."""

    way: str
    """The timed operation."""
    lends: int
    """Number of lends."""
    time_ns: Spread
    """Mean of each batch, with Python's call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Repeated growth of a pool by one partition."""

    contexts: int
    """Number of contexts at the end."""
    asked: int
    """Requested contexts; our limit, not the device's."""
    stopped_by: str
    """Error of the driver; empty if none."""
    add_layout_ms: Spread | None
    """Time to add a layout with one new partition to a pool in use."""
    driver_bytes: int
    """Their memory, by the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolResult(Result):
    """Costs of creation and of lending."""

    creations: tuple[Creation, ...]
    """Way by way, by rising quota."""
    lending: Lending | None
    """None if there was no time."""
    growth: Growth | None
    """None on the host, or if there was no time."""


def measure_pool(backend: Backend, settings: BenchSettings, budget: Budget | None = None) -> PoolResult:
    """Times creation and destruction at several quotas, lending, and the growth of a pool."""
    recorder = Recorder(backend, budget or Budget())
    whole = backend.device.slots
    _free_bytes(backend)  # torch makes the primary context, before a pool retains it
    lending = _lend(backend, whole, settings) if recorder.budget.allows("lending") else None
    creations: list[Creation] = []
    for way, find in _ways(backend).items():
        try:
            make = find()
        except BackendUnavailableError as error:
            recorder.cannot(way, error)
            continue
        for quota in settings.quotas(len(whole)):
            if recorder.budget.allows(f"{way} at {quota} slots"):
                try:
                    creations.append(_create(backend, way, make, quota, settings, recorder))
                except (CudaError, BackendUnavailableError, RuntimeError) as error:
                    recorder.cannot(f"{way} at {quota} slots", error)
    growth = None
    if backend.api is not None and recorder.budget.allows("many contexts"):
        growth = _grow(backend, settings)
    return PoolResult(creations=tuple(creations), lending=lending, growth=growth, **recorder.common())


def _ways(backend: Backend) -> dict[str, Callable[[], Make]]:
    """Returns the ways to create a partition's resources; each checks its availability when called."""
    if backend.api is None:
        return {"lanes": lambda: lambda slots: backend.open_lanes([slots]).close}
    ordinal = backend.torch_device.index or 0
    return {
        "context and stream": lambda: lambda slots: driver.open_pool(ordinal, [[slots]]).close,
        "torch.cuda.green_contexts": lambda: _torch_contexts(backend.device.sms_per_slot, ordinal),
    }


def _torch_contexts(sms_per_slot: int, ordinal: int) -> Make:
    from torch.cuda import green_contexts

    kind: Any = green_contexts.GreenContext
    create = getattr(kind, "create", kind)
    if not getattr(green_contexts, "SUPPORTED", True) or not hasattr(kind, "Stream"):
        raise BackendUnavailableError(
            "torch's green contexts cannot be had",
            found=f"torch {torch.__version__}",
            needed="torch 2.11 built with CUDA 12.8 or newer",
        )

    def make(slots: Slots) -> Callable[[], object]:
        context = create(num_sms=len(slots) * sms_per_slot, device_id=ordinal)
        held = [context, context.Stream()]
        return held.clear  # both end with their last reference

    return make


def _create(
    backend: Backend, way: str, make: Make, quota: int, settings: BenchSettings, recorder: Recorder
) -> Creation:
    slots = tuple(range(quota))
    make(slots)()  # one-time setup of the process is not part of a repetition
    create, destroy, held = [], [], []
    first = _free_bytes(backend)
    for number in range(settings.repeats):
        if number >= 3 and not recorder.budget.left_s:
            break
        before = _free_bytes(backend)
        start = time.perf_counter_ns()
        close = make(slots)
        create.append((time.perf_counter_ns() - start) / 1e6)
        meanwhile = _free_bytes(backend)
        start = time.perf_counter_ns()
        close()
        destroy.append((time.perf_counter_ns() - start) / 1e6)
        if before is not None and meanwhile is not None:
            held.append(float(before - meanwhile))
    last = _free_bytes(backend)
    return Creation(
        way=way,
        quota=quota,
        create_ms=Spread.of(create),
        destroy_ms=Spread.of(destroy),
        held_bytes=Spread.of(held) if held else None,
        kept_bytes=first - last if first is not None and last is not None else None,
    )


def _lend(backend: Backend, slots: Slots, settings: BenchSettings) -> Lending:
    """Times a pool's lend and return, or the lookup of a lane without a pool."""
    if backend.api is None:
        with backend.open_lanes([slots]) as lanes:
            return _lending("look up a lane", lambda: lanes.lane(slots), settings)
    pool = driver.open_pool(backend.torch_device.index or 0, [[slots]])
    lend, give_back = pool.lend, pool.give_back
    try:
        return _lending("lend and give back", lambda: give_back(lend(0, 0)), settings)
    finally:
        pool.close()


def _lending(way: str, once: Callable[[], object], settings: BenchSettings) -> Lending:
    batch = max(1, settings.lends // _BATCHES)
    means = []
    once()
    for _ in range(_BATCHES):
        start = time.perf_counter_ns()
        for _ in range(batch):
            once()
        means.append((time.perf_counter_ns() - start) / batch)
    return Lending(way=way, lends=batch * _BATCHES, time_ns=Spread.of(means))


def _free_bytes(backend: Backend) -> int | None:
    """Returns the device's free memory from its driver; None on the host."""
    return None if backend.api is None else backend.api.free_bytes()


def _grow(backend: Backend, settings: BenchSettings) -> Growth:
    sizes = range(1, backend.device.num_slots + 1)
    every = (tuple(range(start, start + size)) for size in sizes for start in range(len(sizes) - size + 1))
    partitions = list(islice(every, settings.max_contexts))
    pool: Any = driver.open_pool(backend.torch_device.index or 0, [[partitions[0]]])
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


def report_pool(result: PoolResult) -> Report:
    """Returns a row and a bar per way and quota; below them the costs of lending and of growth."""
    rows, bars, lines = [], [], []
    for creation in result.creations:
        held = None if creation.held_bytes is None else creation.held_bytes.median / _MIB
        kept = None if creation.kept_bytes is None else creation.kept_bytes / _MIB
        rows.append((creation.way, creation.quota, creation.create_ms, creation.destroy_ms, held, kept))
        name, spread = f"{creation.way}, {creation.quota} slots", creation.create_ms
        bars.append(bar_of(name, creation.way, spread, f"{spread.median:.3f} ms"))
    if (lending := result.lending) is not None:
        lent_ns = lending.time_ns.median
        bars.append(Bar(name=lending.way, group="lend", value=lent_ns / 1e6, text=f"{lent_ns:.0f} ns"))
        text = f"{lending.way}: {spread_text(lending.time_ns, 0)} ns, over {lending.lends} times"
        lines.append(f"{text}; the goal is under {GOAL_LEND_NS:.0f} ns")
    if (growth := result.growth) is not None:
        added = f", a layout more takes {spread_text(growth.add_layout_ms)} ms" if growth.add_layout_ms else ""
        end = f"; then: {growth.stopped_by}" if growth.stopped_by else ", no limit met"
        text = f"{growth.contexts} contexts at once of {growth.asked} asked for, {growth.driver_bytes / _MIB:.0f} MiB"
        lines.append(text + added + end)
    lines.append(f"the paper: {PAPER_CREATE_MS:.0f} ms to create and {PAPER_LEND_MS} ms to lend, on H100s (Fig. 11a)")
    return Report(
        title="Creation against lending, measured",
        headings=(("resources", None), ("slots", 0), ("created in, ms", 3), ("ended in, ms", 3), ("holds\nMiB", 1),
                  ("not given\nback, MiB", 1)),
        rows=rows,
        merged=True,
        summary=lines,
        picture=Picture(
            title="Creation of a partition's resources, against lending, measured", x_axis="milliseconds", bars=bars
        ),
    )  # fmt: skip
