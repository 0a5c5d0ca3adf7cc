"""Table and picture of ``overlap``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.microbench.overlap_result import Gain, OverlapResult, VariantTime
from mosaic.microbench.tables import number_text, spread_text, table_of, where_text
from mosaic.report.charts import Bar, Words, draw_bars

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (("step", False), ("variant", False), ("time, ms", True), ("against one\nafter the other", True))


def table_overlap(result: OverlapResult) -> Table:
    """Returns a row for each kind of step and way of sharing."""
    rows = []
    previous = ""
    for time in result.times:
        step = f"{time.passes}, {time.launching}"
        rows.append(
            (
                step if step != previous else "",
                time.variant,
                spread_text(time.step_ms),
                number_text(_speedup(time, result)),
            )
        )
        previous = step
    notes = dict.fromkeys(f"{time.variant}: {time.note}" for time in result.times if time.note)
    title = f"{result.modules[0]} and {result.modules[1]} side by side, measured"
    return table_of(title, result, _COLUMNS, rows, summary=[*map(_words, result.gains), *notes])


def draw_overlap(result: OverlapResult, path: Path) -> None:
    """Writes bars of step times, grouped by kind of step."""
    bars = [
        Bar(
            name=f"{time.variant}, {time.passes}, {time.launching}",
            group=f"{time.passes}, {time.launching}",
            value=time.step_ms.median,
            quartiles=(time.step_ms.first_quartile, time.step_ms.third_quartile),
            text=f"{time.step_ms.median:.2f} ms  ({number_text(_speedup(time, result))}×)",
        )
        for time in result.times
    ]
    bars += [Bar(name=absent.what, group="", text=f"not measured: {absent.reason}") for absent in result.absent]
    words = Words(
        title=f"{result.modules[0]} and {result.modules[1]}: a step of both, measured",
        subtitle=where_text(result),
        x_axis="milliseconds a step; (×) against one after the other",
    )
    draw_bars(bars, words, path)


def _speedup(time: VariantTime, result: OverlapResult) -> float | None:
    base = [
        other.step_ms.median
        for other in result.times
        if other.kind == "sequential" and (other.passes, other.launching) == (time.passes, time.launching)
    ]
    return base[0] / time.step_ms.median if base and time.step_ms.median > 0 else None


def _words(gain: Gain) -> str:
    return (
        f"{gain.passes}, {gain.launching}: gain {number_text(gain.total)} = concurrency "
        f"{number_text(gain.concurrency)} x quotas {number_text(gain.quotas)}"
        + (f" ({gain.best_partitions}, best of those tried)" if gain.best_partitions else "")
    )
