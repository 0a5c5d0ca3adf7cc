"""``mosaic doctor --trace FILE...``: which of several ranks is slow, from the traces that they wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mosaic.rank_trace import RankTrace
from mosaic.report.slow_ranks import RankComparison, compare_ranks


def examine_traces(paths: Sequence[Path]) -> RankComparison:
    """Reads traces, or folders of them, and compares the ranks.

    Raises:
        InvalidFileError: A file is no trace of a rank, or they do not belong together.
    """
    files = [found for path in paths for found in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return compare_ranks([RankTrace.read(path) for path in files])


def render(found: RankComparison, console: Console) -> None:
    """Prints the comparison for people."""
    table = Table(title=f"{found.num_steps} steps, measured", title_justify="left")
    for heading in ("rank", "computes (ms a step)", "waits (ms a step)", "slow by (ms a step)"):
        table.add_column(heading, justify="right")
    table.add_column("machine")
    for one in found.ranks:
        lost = f"{one.lost_ms:.2f}" if one.slow else "-"
        table.add_row(str(one.rank), f"{one.compute_ms:.2f}", f"{one.wait_ms:.2f}", lost, escape(one.host))
    console.print(table)
    for sentence in found.sentences():
        console.print(escape(sentence))
