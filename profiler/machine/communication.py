"""The time to sum gradients over several devices, so that degrees beyond this machine can be composed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError
from mosaic.hardware import Link

_SIZES = tuple(4**power for power in range(5, 12))  # 1 KiB to 4 MiB
_REPEATS = 7
_TURNS = 4
"""Most times that all sizes are measured."""


class Network(Protocol):
    """Links between devices; ``mosaic.hardware.Cluster`` is one, ``Ring`` another."""

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time in which ``degree`` devices sum ``num_bytes`` that each of them has, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring of equal links: 2 (d-1) steps in which each device sends 1/d of the bytes (Patarasuk and Yuan, 2009)."""

    latency_us: float
    """Time of a step whatever its size, in microseconds."""
    gb_per_s: float
    """What one device sends, in 10^9 bytes a second."""

    def __post_init__(self) -> None:
        if not (0 <= self.latency_us < math.inf and 0 < self.gb_per_s < math.inf):
            raise ValueError(
                f"latency_us={self.latency_us}, gb_per_s={self.gb_per_s}; a latency of 0 or more, a bandwidth above 0"
            )

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time of a ring all-reduce, in milliseconds."""
        return Link(latency_us=self.latency_us, gb_per_s=self.gb_per_s).all_reduce_ms(num_bytes, degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """One measured all-reduce."""

    num_bytes: int
    """Bytes on each device."""
    degree: int
    """Devices."""
    time_ms: float
    """How long it took, in milliseconds."""


def fit_ring(measured: Sequence[AllReduce]) -> Ring:
    """Returns the latency and bandwidth with the least squares of relative errors.

    Raises:
        ValueError: There are not two sizes over two devices or more, or they tell of no bandwidth.
    """
    points = [(*_ring(m.num_bytes, m.degree), m.time_ms) for m in measured if m.degree > 1 and m.time_ms > 0]
    if len({(steps, sent) for steps, sent, _ in points}) < 2:
        raise ValueError(
            f"{len(points)} all-reduces over several devices; two different sizes tell latency and bandwidth"
        )
    rows = [(steps / ms, sent / ms) for steps, sent, ms in points]
    aa, ab, bb = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (math.fsum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    step_ms = (a * bb - b * ab) / determinant if determinant > 0 else 0.0
    if step_ms < 0:
        step_ms = 0.0
    byte_ms = (b - ab * step_ms) / bb
    if byte_ms <= 0:
        raise ValueError("larger all-reduces took no longer; measure larger ones to see the bandwidth")
    return Ring(latency_us=step_ms * 1e3, gb_per_s=1 / byte_ms / 1e6)


def measure_ring(device: torch.device, *, group: dist.ProcessGroup | None = None) -> Ring:
    """Times all-reduces over a process group and fits them; every rank of the group calls it, and all get the same.

    Raises:
        BackendUnavailableError: There is no process group of two ranks or more.
        ValueError: See ``fit_ring``.
    """
    degree = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if degree < 2:
        raise BackendUnavailableError(
            "communication cannot be measured", found=f"{degree} rank", needed="a torch.distributed group of 2 or more"
        )
    for _ in range(_TURNS - 1):  # on a busy machine a turn may tell of no bandwidth; all ranks see the same times
        with suppress(ValueError):
            return fit_ring(_measure_sizes(device, degree, group))
    return fit_ring(_measure_sizes(device, degree, group))


def _measure_sizes(device: torch.device, degree: int, group: dist.ProcessGroup | None) -> list[AllReduce]:
    measured = []
    for size in _SIZES:
        data = torch.zeros(size // 4, device=device)
        times = torch.tensor([_time_ms(data, group) for _ in range(_REPEATS)][1:], device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=group)  # a collective ends with its slowest rank
        measured.append(AllReduce(num_bytes=size, degree=degree, time_ms=statistics.median(times.tolist())))
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What the ranks that torchrun started measured of their links."""

    ring: Ring
    """The same on every rank."""
    rank: int
    """Of this process."""
    world_size: int
    """Ranks."""


def measure_launched(environ: Mapping[str, str], *, on_gpu: bool) -> Launched | None:
    """Opens a group of the ranks that torchrun started, measures its links and closes it; None for a process alone.

    Args:
        environ: Where torchrun left ``WORLD_SIZE``, ``LOCAL_RANK`` and where to meet.
        on_gpu: Whether the links are those between GPUs (NCCL), one a rank, or between hosts (gloo).

    Raises:
        ValueError: See ``fit_ring``.
    """
    if int(environ.get("WORLD_SIZE", "1")) < 2:
        return None
    device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        return Launched(ring=measure_ring(device), rank=dist.get_rank(), world_size=dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _time_ms(data: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    start = time.perf_counter()
    dist.all_reduce(data, group=group)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return (time.perf_counter() - start) * 1e3


def _ring(num_bytes: float, degree: int) -> tuple[int, float]:
    """Steps of a ring, and the bytes that each device sends in all of them."""
    return 2 * (degree - 1), 2 * (degree - 1) / degree * num_bytes
