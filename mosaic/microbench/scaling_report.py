"""Table and picture of ``scaling``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.microbench.scaling import ScalingPoint, ScalingResult
from mosaic.microbench.tables import number_text, spread_text, table_of, where_text
from mosaic.report.charts import Line, Words, draw_lines

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (("work", False), ("slots", True), ("SMs", True), ("time, ms", True), ("speed", True),
            ("TFLOP/s", True), ("GB/s", True))  # fmt: skip
_SUMMARY = ("speed is relative to the largest quota that was measured; GB/s count the least possible traffic",)


def table_scaling(result: ScalingResult) -> Table:
    """Returns a row for each kernel or module and quota."""
    rows = []
    for work in result.works:
        points = result.of(work)
        for index, point in enumerate(points):
            rows.append(
                (
                    work if index == 0 else "",
                    str(point.quota),
                    "-" if point.num_sms is None else str(point.num_sms),
                    spread_text(point.time_ms),
                    f"{_speed(point, points):.2f}",
                    number_text(point.tflops),
                    number_text(point.gb_per_s, 0),
                )
            )
    return table_of("Time by quota, measured", result, _COLUMNS, rows, summary=_SUMMARY)


def draw_scaling(result: ScalingResult, path: Path) -> None:
    """Writes a picture of speed over quota, each relative to the largest quota measured."""
    count = result.origin.device.num_slots
    lines = []
    for work in result.works:
        points = result.of(work)
        whole = points[-1].time_ms.median
        lines.append(
            Line(
                name=work,
                points=tuple(
                    (
                        point.quota / count,
                        whole / point.time_ms.median,
                        whole / point.time_ms.third_quartile,
                        whole / point.time_ms.first_quartile,
                    )
                    for point in points
                ),
            )
        )
    words = Words(
        title="Speed by quota, measured",
        subtitle=where_text(result),
        x_axis="share of the slots",
        y_axis="speed, relative to the largest quota",
    )
    draw_lines(lines, words, path, level=1.0)


def _speed(point: ScalingPoint, points: tuple[ScalingPoint, ...]) -> float:
    return points[-1].time_ms.median / point.time_ms.median if point.time_ms.median > 0 else 1.0
