"""Modules on the simulated chip, on all cores of this machine; how much of it a study asks for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.cost.chip.machine import Ran, run
from bench.cost.chip.spec import Chip, Work
from mosaic.profile import Phase, Sample

Job = tuple[tuple[tuple[Work, int], ...], int]
"""Modules with their SMs, and a seed."""

_MIN_JOBS = 16  # fewer are not worth other processes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipScale:
    """How much to simulate."""

    num_modules: int
    """Modules of each set."""
    sizes: tuple[int, ...]
    """Modules side by side."""
    num_fit: int
    """Groups to fit, of each size."""
    num_choose: int
    """Groups to choose a form by, of each size."""
    num_judge: int
    """Groups that judge, of each size and set."""
    num_plans: int
    """Models that every form plans for."""
    num_chips: int
    """Chips that judge surfaces, in the order of ``bench.cost.alone.chip_curves``."""


def run_all(chip: Chip, jobs: Sequence[Job]) -> list[tuple[Ran, ...]]:
    """Runs jobs on the chip, on all cores where there are many."""
    cores = len(os.sched_getaffinity(0))
    if len(jobs) < _MIN_JOBS or cores == 1:
        return [_run(chip, job) for job in jobs]
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run, [chip] * len(jobs), jobs, chunksize=4))


def _run(chip: Chip, job: Job) -> tuple[Ran, ...]:
    placed, seed = job
    return run(chip, placed, seed=seed)


def simulate_alone(chip: Chip, works: Sequence[Work], quotas: Sequence[int], degree: int = 1) -> tuple[Sample, ...]:
    """Returns what a profiler would see of modules alone, with their share of the chip's bandwidth."""
    asked = [(work, quota) for work in works for quota in quotas]
    ran = run_all(chip, [(((work.on_share(degree), quota),), 1000 * degree + quota) for work, quota in asked])
    return tuple(
        Sample(
            module=work.name,
            phase=Phase.FORWARD,
            degree=degree,
            quota=quota,
            times_ms=(one.time_ns / 1e6,),
            bandwidth_utilisation=min(1.0, one.bytes_per_ns / chip.dram_bytes_per_ns),
        )
        for (work, quota), (one,) in zip(asked, ran, strict=True)
    )
