"""Table and picture of ``isolation``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.microbench.isolation import Delay, IsolationResult, LayoutUnits
from mosaic.microbench.tables import number_text, spread_text, table_of, where_text
from mosaic.report.bars import slots_text
from mosaic.report.charts import Bar, Words, draw_bars

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (("short on", False), ("beside", False), ("alone\nms", True), ("beside it\nms", True),
            ("worst\nms", True), ("times\nas long", True))  # fmt: skip


def table_isolation(result: IsolationResult) -> Table:
    """Returns a row for each kind of lanes and long kernel; below it what the partitions ran on."""
    rows = [
        (
            delay.variant,
            f"{delay.long_kernel}, {delay.long_ms:.1f} ms",
            number_text(delay.alone_ms.median, 3),
            spread_text(delay.beside_ms),
            number_text(delay.worst_ms, 3),
            number_text(_times_as_long(delay)),
        )
        for delay in result.delays
    ]
    summary = [*map(_layout_text, result.layouts)]
    summary += [
        f"{time.kernel} on half of the device, {time.slots_are} slots: {spread_text(time.time_ms)} ms"
        + (f" on {time.num_sms} SMs" if time.num_sms is not None else "")
        for time in result.placements
    ]
    summary += dict.fromkeys(f"{delay.variant}: {delay.note}" for delay in result.delays if delay.note)
    return table_of("Does a long kernel delay a short one, measured", result, _COLUMNS, rows, summary=summary)


def draw_isolation(result: IsolationResult, path: Path) -> None:
    """Writes bars of the short kernel's time, alone and beside each long kernel."""
    bars = []
    for delay in result.delays:
        for what, spread in (("alone", delay.alone_ms), (f"beside {delay.long_kernel}", delay.beside_ms)):
            value = None if spread is None else spread.median
            quartiles = None if spread is None else (spread.first_quartile, spread.third_quartile)
            text = "never met" if spread is None else f"{spread.median * 1e3:.1f} us"
            bars.append(Bar(name=f"{delay.variant}, {what}", group=what, value=value, quartiles=quartiles, text=text))
    bars += [Bar(name=absent.what, text=f"not measured: {absent.reason}") for absent in result.absent]
    title = "A short kernel alone and beside a long one, measured"
    draw_bars(bars, Words(title=title, subtitle=where_text(result), x_axis="milliseconds a call"), path)


def _times_as_long(delay: Delay) -> float | None:
    if delay.beside_ms is None or delay.alone_ms.median <= 0:
        return None
    return delay.beside_ms.median / delay.alone_ms.median


def _layout_text(layout: LayoutUnits) -> str:
    sizes = "+".join(str(quota) for quota in layout.quotas)
    units = " | ".join(slots_text(partition.units) for partition in layout.partitions[:4])
    more = " | ..." if len(layout.partitions) > 4 else ""
    kept = all(partition.keeps_backward for partition in layout.partitions)
    return (
        f"{sizes} slots ({layout.slots_are}) ran on {units}{more}: "
        f"{'disjoint' if layout.disjoint else 'NOT DISJOINT'}, backward {'inside' if kept else 'NOT INSIDE'}"
    )
