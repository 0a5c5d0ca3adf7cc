"""Warps in flight are read from the GPU's counters over both loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.gpu.bench import Bench
from bench.gpu.warps import measure_warps
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profiler import Utilisation


class FakeWindow:
    """Is long enough when it is looked at for the second time."""

    found: Utilisation | None = None
    looks = 0

    @property
    def is_long_enough(self) -> bool:
        self.looks += 1
        return self.looks > 1


class FakeCounters:
    """Counters that read the same every time, after a step or two."""

    missing = ""

    def __enter__(self) -> FakeCounters:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @contextmanager
    def window(self, seconds: float) -> Iterator[FakeWindow]:
        window = FakeWindow()
        yield window
        window.found = Utilisation(sm_util=0.5, sm_occupancy=0.25)


def test_warps_are_read_over_both_loops_and_a_host_says_that_it_has_none():
    bench = Bench(backend=HostBackend(num_slots=2), budget=Budget(), dry_run=True)
    (none,) = measure_warps(bench)
    assert none.value is None
    assert "counters" in none.reason
    found = list(measure_warps(bench, counters=FakeCounters()))  # type: ignore[arg-type]
    warps = {figure.labels["loop"]: figure.value for figure in found if figure.name == "sm_occupancy_percent"}
    assert warps == {"plain": 25, "green lanes": 25}
    assert [figure.reason for figure in found if figure.value is None] == [
        "NVML gave no value at the end of the window"
    ] * 2
