"""``pool``: the cost of creating a context and a stream, and of acquiring them from the pool.

Paper section 3.2 and Fig. 11(a): about 37 ms on demand, about 0.013 ms from the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

from mosaic.backends.base import Backend
from mosaic.backends.cuda import driver
from mosaic.backends.cuda.pool import Slots
from mosaic.microbench.result import Question, Result, Row, Setup, absent, bars_figure
from mosaic.microbench.settings import Spread
from mosaic.microbench.variants import UNAVAILABLE

_BATCHES = 10


def measure_pool(setup: Setup) -> Iterator[Row]:
    """Times creation and destruction at several quotas, acquisition, and the growth of a pool.

    Timed by the host's clock, because the driver's calls are synchronous.
    """
    backend, budget = setup.backend, setup.budget
    _free_mib(backend)  # torch creates the primary context before a pool retains it
    if budget.allows("lending"):
        yield _lend(backend, setup.settings.lends)
    for quota in setup.settings.quotas(backend.device.num_slots):
        if budget.allows(f"resources of {quota} slots"):
            try:
                yield _create(setup, quota)
            except UNAVAILABLE as error:
                yield absent(f"resources of {quota} slots", error)
    if backend.api is not None and budget.allows("many contexts"):
        yield _grow(backend, setup.settings.max_contexts)


def _driver(backend: Backend) -> driver.CudaDriver:
    return driver.CudaDriver(backend.torch_device.index or 0)


def _free_mib(backend: Backend) -> float:
    """Returns the device's free memory from its driver; 0 on the host."""
    return 0.0 if backend.api is None else backend.api.free_bytes() / 2**20


def _open(backend: Backend, slots: Slots) -> Callable[[], object]:
    """Creates the resources of a partition; returns the function that destroys them."""
    return backend.open_lanes([slots]).close if backend.api is None else _driver(backend).open_pool([[slots]]).close


def _create(setup: Setup, quota: int) -> Row:
    backend, slots = setup.backend, tuple(range(quota))
    _open(backend, slots)()  # excludes one-time setup of the process
    create, destroy, held_mib = [], [], []
    first_mib = _free_mib(backend)
    for number in range(setup.settings.repeats):
        if number >= 3 and not setup.budget.left_s:
            break
        before_mib = _free_mib(backend)
        start = time.perf_counter_ns()
        close = _open(backend, slots)
        create.append((time.perf_counter_ns() - start) / 1e6)
        held_mib.append(before_mib - _free_mib(backend))
        start = time.perf_counter_ns()
        close()
        destroy.append((time.perf_counter_ns() - start) / 1e6)
    values: dict[str, Spread | float | None] = {"create_ms": Spread.of(create), "destroy_ms": Spread.of(destroy)}
    if backend.api is not None:
        values |= {"held_mib": Spread.of(held_mib), "not_returned_mib": first_mib - _free_mib(backend)}
    label = "lanes" if backend.api is None else "context and stream"
    return Row(of="creations", labels={"way": label, "quota": quota}, values=values)


def _lend(backend: Backend, lends: int) -> Row:
    """Times acquiring from and returning to a pool, or without a pool looking up a lane; includes Python's call."""
    slots, batch = backend.device.slots, max(1, lends // _BATCHES)
    once: Callable[[], object]
    with ExitStack() as stack:
        if backend.api is None:
            label, once = "look up a lane", partial(stack.enter_context(backend.open_lanes([slots])).lane, slots)
        else:
            pool: Any = _driver(backend).open_pool([[slots]])
            stack.callback(pool.close)
            lend, give_back = pool.lend, pool.give_back
            label, once = "acquire and return", lambda: give_back(lend(0, 0))
        once()
        means = []
        for _ in range(_BATCHES):
            start = time.perf_counter_ns()
            for _ in range(batch):
                once()
            means.append((time.perf_counter_ns() - start) / batch)
    return Row(of="lending", labels={"way": label, "lends": batch * _BATCHES}, values={"time_ns": Spread.of(means)})


def _grow(backend: Backend, max_contexts: int) -> Row:
    """Adds partitions to a pool in use, up to the limit of the settings or the driver."""
    sizes = range(1, backend.device.num_slots + 1)
    every = (tuple(range(start, start + size)) for size in sizes for start in range(len(sizes) - size + 1))
    partitions = list(islice(every, max_contexts))
    pool: Any = _driver(backend).open_pool([[partitions[0]]])
    times: list[float] = []
    limit_reason = ""
    try:
        for slots in partitions[1:]:
            start = time.perf_counter_ns()
            try:
                pool.add_layout([slots])
            except UNAVAILABLE as error:
                limit_reason = str(error)
                break
            times.append((time.perf_counter_ns() - start) / 1e6)
        stats = pool.stats()
    finally:
        pool.close()
    return Row(
        of="growth",
        labels={"contexts": stats.num_contexts, "asked": len(partitions)},
        values={
            "add_layout_ms": Spread.of(times) if times else None,
            "driver_mib": stats.driver_bytes / 2**20,
        },
        note=limit_reason,
    )


def _summary(result: Result) -> Sequence[str]:
    lines = []
    for row in result.of("lending"):
        lines.append(f"{row.labels['way']}: {row.text('time_ns')} ns, over {row.labels['lends']} times")
    for row in result.of("growth"):
        layouts = f", another layout takes {row.text('add_layout_ms')} ms" if row.values["add_layout_ms"] else ""
        end = f"; then: {row.note}" if row.note else ", no limit reached"
        size = f"{row.text('driver_mib', 0)} MiB"
        count = f"{row.labels['contexts']} contexts at once of {row.labels['asked']} requested"
        lines.append(f"{count}, {size}{layouts}{end}")
    lines.append("the paper: 37 ms to create and 0.013 ms to acquire, on H100s (Fig. 11a)")
    return lines


def _picture(result: Result, title: str, subtitle: str) -> Any:
    bars: list[tuple[str, str, Spread | float, str]] = []
    for row in result.of("creations"):
        name = f"{row.labels['way']}, slots: {row.labels['quota']}"
        create_ms = row.values["create_ms"] or 0.0
        bars.append((name, str(row.labels["way"]), create_ms, f"{row.number('create_ms'):.3f} ms"))
    for row in result.of("lending"):
        time_ns = row.number("time_ns") or 0.0
        bars.append((str(row.labels["way"]), "lend", time_ns / 1e6, f"{time_ns:.0f} ns"))
    return bars_figure(title, subtitle, "milliseconds", bars)


POOL = Question(
    name="pool",
    asks="what do creating and acquiring a context and a stream cost?",
    measure=measure_pool,
    title="Creation and acquisition of a partition's resources, measured",
    of="creations",
    columns={"way": ("resources", None), "quota": ("slots", 0), "create_ms": ("creation, ms", 3),
             "destroy_ms": ("destruction, ms", 3), "held_mib": ("holds, MiB", 1),
             "not_returned_mib": ("not\nfreed, MiB", 1)},
    summary=_summary,
    picture=_picture,
)  # fmt: skip
