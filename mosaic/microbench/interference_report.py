"""Table and picture of ``interference``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.microbench.interference import InterferencePoint, InterferenceResult
from mosaic.microbench.tables import number_text, table_of, where_text
from mosaic.report.charts import Words, draw_matrix

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (("kernel", False), ("beside", False), ("slots", True), ("alone\nms", True), ("together\nms", True),
            ("slow-\ndown", True), ("GB/s\nalone", True), ("GB/s\ntogether", True))  # fmt: skip


def table_interference(result: InterferenceResult) -> Table:
    """Returns a row for each kernel, its neighbour, and how the slots were split."""
    rows = [
        (
            point.kernel,
            point.beside,
            _split(point),
            number_text(point.alone_ms.median, 3),
            number_text(point.together_ms.median if point.together_ms else None, 3),
            number_text(point.slowdown),
            number_text(point.alone_gb_per_s, 0),
            number_text(point.together_gb_per_s, 0),
        )
        for point in result.points
    ]
    return table_of("Two kernels side by side, measured", result, _COLUMNS, rows, summary=_summary(result))


def draw_interference(result: InterferenceResult, path: Path) -> None:
    """Writes a matrix of slow-downs: a row for each kernel and its slots, a column for each neighbour and its slots."""
    rows = dict.fromkeys(_row(point) for point in sorted(result.points, key=lambda p: (p.kernel, p.quota)))
    columns = dict.fromkeys(point.beside for point in result.points)
    values = {(_row(point), point.beside): point.slowdown for point in result.points if point.slowdown is not None}
    words = Words(
        title="Slow-down beside a neighbour that has the other slots, measured",
        subtitle=where_text(result),
        y_axis="each row: a kernel and its share of the slots; 1 is undisturbed, blank was not measured",
    )
    draw_matrix(list(rows), list(columns), values, words, path)


def _row(point: InterferencePoint) -> str:
    return f"{point.kernel}, {point.quota} of {point.quota + point.beside_quota}"


def _split(point: InterferencePoint) -> str:
    return f"{point.quota}+{point.beside_quota}"


def _summary(result: InterferenceResult) -> list[str]:
    lines = ["together counts only the calls during which the other kernel ran from beginning to end"]
    known = [point for point in result.points if point.slowdown is not None]
    if known:
        worst = max(known, key=lambda point: point.slowdown or 0)
        lines.append(
            f"at most {worst.slowdown:.2f} times as long: {worst.kernel} on {worst.quota} slots beside "
            f"{worst.beside} on {worst.beside_quota}"
        )
    lines += _bandwidth(result)
    missed = sum(point.together_ms is None for point in result.points)
    if missed:
        lines.append(f"{missed} rows have no time together: no call lay inside the other's run")
    return lines


def _bandwidth(result: InterferenceResult) -> list[str]:
    """Says what two memory-bound kernels of one kind move together; their points stand next to each other."""
    totals = [
        (one.together_gb_per_s + other.together_gb_per_s, one)
        for one, other in zip(result.points[::2], result.points[1::2], strict=True)
        if one.kernel == other.kernel and one.together_gb_per_s is not None and other.together_gb_per_s is not None
    ]
    if not totals:
        return []
    most, point = max(totals, key=lambda found: found[0])
    return [f"most moved by two kernels together: {most:.0f} GB/s, {point.kernel} on {_split(point)} slots"]
