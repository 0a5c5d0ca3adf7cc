"""Table and picture of ``pool``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.microbench.pool import GOAL_LEND_NS, PAPER_CREATE_MS, PAPER_LEND_MS, Growth, PoolResult
from mosaic.microbench.tables import number_text, spread_text, table_of, where_text
from mosaic.report.charts import Bar, Words, draw_bars

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (("what is made", False), ("slots", True), ("made in, ms", True), ("ended in, ms", True),
            ("holds\nMiB", True), ("not given\nback, MiB", True))  # fmt: skip
_MIB = 2.0**20


def table_pool(result: PoolResult) -> Table:
    """Returns a row for each way and quota; below it what lending and a growing pool cost."""
    rows = []
    previous = ""
    for creation in result.creations:
        held = None if creation.held_bytes is None else creation.held_bytes.median / _MIB
        kept = None if creation.kept_bytes is None else creation.kept_bytes / _MIB
        rows.append(
            (
                creation.way if creation.way != previous else "",
                str(creation.quota),
                spread_text(creation.create_ms),
                spread_text(creation.destroy_ms),
                number_text(held, 1),
                number_text(kept, 1),
            )
        )
        previous = creation.way
    return table_of("Making against lending, measured", result, _COLUMNS, rows, summary=_summary(result))


def draw_pool(result: PoolResult, path: Path) -> None:
    """Writes bars of the time to make each, and of lending, which is too short to see."""
    bars = [
        Bar(
            name=f"{creation.way}, {creation.quota} slots",
            group=creation.way,
            value=creation.create_ms.median,
            quartiles=(creation.create_ms.first_quartile, creation.create_ms.third_quartile),
            text=f"{creation.create_ms.median:.3f} ms",
        )
        for creation in result.creations
    ]
    if result.lending is not None:
        lent = result.lending.time_ns.median
        bars.append(Bar(name=result.lending.way, group="lend", value=lent / 1e6, text=f"{lent:.0f} ns"))
    bars += [Bar(name=absent.what, text=f"not measured: {absent.reason}") for absent in result.absent]
    words = Words(title="Making what runs on a partition, against lending it, measured", subtitle=where_text(result),
                  x_axis="milliseconds")  # fmt: skip
    draw_bars(bars, words, path)


def _summary(result: PoolResult) -> list[str]:
    lines = []
    if result.lending is not None:
        spread = result.lending.time_ns
        lines.append(
            f"{result.lending.way}: {spread_text(spread, 0)} ns, over {result.lending.lends} times; "
            f"the goal is under {GOAL_LEND_NS:.0f} ns"
        )
    if result.growth is not None:
        lines.append(_growth_text(result.growth))
    lines.append(f"the paper has {PAPER_CREATE_MS:.0f} ms to make and {PAPER_LEND_MS} ms to lend, on H100s (Fig. 11a)")
    return lines


def _growth_text(growth: Growth) -> str:
    added = "" if growth.add_layout_ms is None else f", a layout more takes {spread_text(growth.add_layout_ms)} ms"
    end = f"; then: {growth.stopped_by}" if growth.stopped_by else ", no limit met"
    return (
        f"{growth.contexts} contexts at once of {growth.asked} asked for, {growth.driver_bytes / _MIB:.0f} MiB"
        f"{added}{end}"
    )
