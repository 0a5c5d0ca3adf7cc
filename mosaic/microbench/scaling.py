"""``scaling``: the time of work at every quota. Paper section 3.3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.backends.base import Backend
from mosaic.microbench.kernels import Kernel, kernel_of_module, kernel_set
from mosaic.microbench.report import Picture, Report
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings, Budget
from mosaic.microbench.timing import time_alone
from mosaic.profiler import Subject
from mosaic.report.charts import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One kernel or module at one quota, alone on the device."""

    work: str
    """The kernel or module."""
    quota: int
    """Its slots."""
    num_sms: int | None
    """Granted SMs; None if the backend does not report them."""
    time_ms: Spread
    """Time of a call."""
    tflops: float | None
    """Achieved 1e12 operations a second; None if not counted."""
    gb_per_s: float | None
    """Achieved 1e9 bytes a second, by least traffic; None if not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingResult(Result):
    """Time by quota."""

    points: tuple[ScalingPoint, ...]
    """Work by work, by rising quota."""

    def of(self, work: str) -> tuple[ScalingPoint, ...]:
        """Returns the points of one kernel or module, by rising quota."""
        return tuple(point for point in self.points if point.work == work)

    @property
    def works(self) -> tuple[str, ...]:
        """The measured kernels and modules."""
        return tuple(dict.fromkeys(point.work for point in self.points))


def measure_scaling(
    backend: Backend,
    settings: BenchSettings,
    budget: Budget | None = None,
    *,
    subjects: Sequence[Subject] = (),
) -> ScalingResult:
    """Times kernels, or modules, at every quota of the grid.

    ``subjects`` are modules to time, forward and forward with backward; none for the kernel set.
    """
    recorder = Recorder(backend, budget or Budget())
    kernels = [kernel_of_module(subject, backward=backward) for subject in subjects for backward in (False, True)]
    kernels = kernels or [*kernel_set(settings.scale, backend.torch_device)]
    quotas = settings.quotas(backend.device.num_slots)
    points: list[ScalingPoint] = []
    with backend.open_lanes(tuple(range(quota)) for quota in quotas) as lanes:
        for work in kernels:
            if not recorder.budget.allows(work.name):
                continue
            call = work.prepare(backend.torch_device)
            for quota in reversed(quotas):  # the whole device first, so that the slowest points are left out
                if recorder.budget.allows(f"{work.name} at {quota} slots"):
                    lane = lanes.lane(tuple(range(quota)))
                    spread = Spread.of(time_alone(lane, call, settings).all_ms)
                    points.append(point_of(work, quota, lane.num_sms, spread))
            lanes.drain()
    order = {work.name: index for index, work in enumerate(kernels)}
    points.sort(key=lambda point: (order[point.work], point.quota))
    return ScalingResult(points=tuple(points), **recorder.common())


def point_of(work: Kernel, quota: int, num_sms: int | None, time_ms: Spread) -> ScalingPoint:
    """Returns a point with the rates at the median."""
    seconds = time_ms.median / 1e3
    return ScalingPoint(
        work=work.name,
        quota=quota,
        num_sms=num_sms,
        time_ms=time_ms,
        tflops=work.flops / seconds / 1e12 if work.flops and seconds > 0 else None,
        gb_per_s=gb_per_s(work, time_ms.median),
    )


def gb_per_s(work: Kernel, time_ms: float) -> float | None:
    """Returns the bandwidth of a call in 1e9 bytes a second; None if its traffic is not counted."""
    return work.moved_bytes / time_ms / 1e6 if work.moved_bytes and time_ms > 0 else None


def report_scaling(result: ScalingResult) -> Report:
    """Returns a row per kernel or module and quota, and lines of speed over quota."""
    rows, lines = [], []
    count = result.origin.device.num_slots
    for work in result.works:
        points = result.of(work)
        whole = points[-1].time_ms.median
        for point in points:
            speed = whole / point.time_ms.median if point.time_ms.median > 0 else 1.0
            rows.append((work, point.quota, point.num_sms, point.time_ms, speed, point.tflops, point.gb_per_s))
        times = [(point.quota / count, point.time_ms) for point in points]
        quartiles = [
            (share, whole / time.median, whole / time.third_quartile, whole / time.first_quartile)
            for share, time in times
        ]
        lines.append(Line(name=work, points=tuple(quartiles)))
    return Report(
        title="Time by quota, measured",
        headings=(("work", None), ("slots", 0), ("SMs", 0), ("time, ms", 3), ("speed", 2), ("TFLOP/s", 2), ("GB/s", 0)),
        rows=rows,
        merged=True,
        summary=("speed is relative to the largest quota that was measured; GB/s count the least possible traffic",),
        picture=Picture(
            title="Speed by quota, measured",
            x_axis="share of the slots",
            y_axis="speed, relative to the largest quota",
            lines=lines,
        ),
    )
