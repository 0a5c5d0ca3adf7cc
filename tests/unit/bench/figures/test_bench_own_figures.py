"""Figures of the Mosaic paper that no other study makes: work of SMs under a plan, lanes of the host, warps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.figures import on_host
from bench.figures.__main__ import NEEDS_GPU, parts
from bench.gpu.bench import Bench
from bench.gpu.warps import measure_warps
from bench.ranks.launch import on_ranks
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profiler import Utilisation


def test_the_host_shows_steps_busy_cores_and_what_making_lanes_costs():
    found = [*on_host.figure_4b(rounds=1, steps=1), *on_host.figure_11a(repeats=2)]
    found += on_host.figure_11b(name="clip", rounds=1, steps=1)
    assert len({figure.name for figure in found}) == len(found) == 7
    assert all(figure.source == "measured" and figure.value is not None for figure in found)
    busy = [figure.value for figure in found if "cores busy" in figure.name]
    assert all(0 < share <= 101 for share in busy)


def test_groups_are_measured_on_two_ranks():
    found = list(on_ranks(lambda rank, size: on_host.group_reuse(rank, size, repeats=2), 2, 60))
    assert [figure.name.split(": ")[1] for figure in found] == ["groups", "groups"]


def test_what_needs_gpus_has_a_reason_and_each_figure_its_parts():
    assert all(figure.value is None and figure.reason for figure in NEEDS_GPU.values())
    assert all(parts(only, quick=quick) for only in NEEDS_GPU for quick in (True, False))


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
