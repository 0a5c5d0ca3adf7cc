"""Measures communication between devices, to compose samples of higher degrees."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError
from mosaic.hardware import Cluster, Link

_SIZES = tuple(4**power for power in range(5, 12))  # 1 KiB to 4 MiB
_ROUTE_SIZES = tuple(8**power for power in range(4, 8))  # 4 KiB to 2 MiB
_REPEATS = 7
_TRIES = 4
Network = Cluster | Link
"""Links between devices; one ``Link`` is a plain ring."""


def fit_link(points: Sequence[tuple[int, float, float]]) -> Link:
    """Fits latency and bandwidth by least squares of relative errors.

    ``points`` are (number of sequential messages, total bytes, milliseconds). Raises ValueError without two sizes, or
    if larger messages took no longer.
    """
    if len({point[:2] for point in points}) < 2:
        raise ValueError(f"{len(points)} measured messages; measure at least two different sizes")
    from scipy.optimize import nnls  # 0.5 s to import

    rows = [(steps / ms, sent / 1e6 / ms) for steps, sent, ms in points]
    (step_ms, megabyte_ms), _ = nnls(rows, [1.0] * len(rows))
    if megabyte_ms <= 0:
        raise ValueError("larger messages took no longer; measure larger ones to fit the bandwidth")
    return Link(latency_us=float(step_ms) * 1e3, gb_per_s=1 / float(megabyte_ms))


def measure_ring(device: torch.device, *, group: dist.ProcessGroup | None = None) -> Link:
    """Times all-reduces over a process group and fits them; every rank calls it and gets the same result.

    Raises BackendUnavailableError without a process group of two or more ranks.
    """
    degree = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if degree < 2:
        raise BackendUnavailableError(
            "communication cannot be measured", found=f"{degree} rank", needed="a torch.distributed group of 2 or more"
        )

    def point(size: int) -> tuple[int, float, float]:
        work = partial(dist.all_reduce, torch.zeros(size // 4, device=device), group=group)
        return 2 * (degree - 1), 2 * (degree - 1) / degree * size, _slowest_ms(work, device, group)

    return _fitted(point, _SIZES)


def measure_route(device: torch.device, *, group: dist.ProcessGroup) -> Link:
    """Times rows from all ranks of a group to its first one; every rank calls it and gets the same result."""
    degree, rank = dist.get_world_size(group), dist.get_rank(group)

    def point(size: int) -> tuple[int, float, float]:
        rows = torch.zeros(size // 4, device=device)
        receives = [len(rows) if rank == 0 else 0] * degree
        sends = [len(rows), *[0] * (degree - 1)]
        received = rows.new_empty(sum(receives))
        work = partial(dist.all_to_all_single, received, rows, receives, sends, group=group)
        return degree - 1, (degree - 1) * size, _slowest_ms(work, device, group)

    return _fitted(point, _ROUTE_SIZES)


def _fitted(point: Callable[[int], tuple[int, float, float]], sizes: Sequence[int]) -> Link:
    """Measures all sizes, and repeats them if a busy machine prevents a fit; all ranks have the same times."""
    for _ in range(_TRIES - 1):
        with suppress(ValueError):
            return fit_link(list(map(point, sizes)))
    return fit_link(list(map(point, sizes)))


def _slowest_ms(work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Returns the median of the slowest rank's times."""

    def once_ms() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    times = torch.tensor([once_ms() for _ in range(_REPEATS)][1:], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return float(statistics.median(times.tolist()))
