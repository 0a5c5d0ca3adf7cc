"""Tables of the questions' results for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.microbench.result import Result, Spread
from mosaic.report.frame import Column, empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table


def table_of(
    title: str, result: Result, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, summary: Sequence[str] = ()
) -> Table:
    """Returns a table with one line for each thing that is absent or left out, and where it was measured."""
    least = [min(12, max((len(row[index]) for row in rows), default=4)) for index in range(len(columns))]
    caption = "\n".join([*summary, *_caption(result)])
    table = empty_table(f"{title}: {result.origin.device.name}", caption, columns, least=least)
    for row in rows:
        table.add_row(*plain(row))
    return table


def spread_text(spread: Spread | None, digits: int | None = None) -> str:
    """Returns median and quartiles: ``1.23 (1.20-1.31)``."""
    if spread is None:
        return "-"
    places = digits if digits is not None else 1 if spread.median >= 100 else 3
    return f"{spread.median:.{places}f} ({spread.first_quartile:.{places}f}-{spread.third_quartile:.{places}f})"


def number_text(value: float | None, digits: int = 2) -> str:
    """Returns a number, ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def where_text(result: Result) -> str:
    """Returns one line that says where and when a result was measured."""
    origin = result.origin
    driver = f", driver CUDA {origin.driver_version}" if origin.driver_version else ""
    slots = "host" if origin.device.kind == "host" else f"{origin.device.num_slots} slots"
    return f"{origin.device.name} ({slots}), torch {origin.torch_version}{driver}, {origin.provenance.created[:10]}"


def _caption(result: Result) -> list[str]:
    origin = result.origin
    share = "unknown" if origin.foreign_cpu_share is None else f"{origin.foreign_cpu_share:.0%}"
    lines = [f"not measured: {absent.what}: {absent.reason}" for absent in result.absent]
    lines += [f"no time left for {piece}" for piece in result.left_out[:5]]
    if len(result.left_out) > 5:
        lines.append(f"no time left for {len(result.left_out) - 5} more, which the JSON file names")
    lines += [f"note: {note}" for note in origin.notes]
    lines.append(
        f"medians (quartiles), measured in {origin.seconds:.1f} s with torch {origin.torch_version}"
        + (f" and CUDA driver {origin.driver_version}" if origin.driver_version else "")
        + f"; other processes took {share} of the CPU"
    )
    return lines
