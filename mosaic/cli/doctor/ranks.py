"""``mosaic doctor --trace FILE...``: finds slow ranks from their traces."""

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
        InvalidFileError: A file is not a rank's trace, or the traces do not belong together.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return compare_ranks([RankTrace.read(path) for path in files])


def render(comparison: RankComparison, console: Console) -> None:
    """Prints the comparison."""
    table = Table(title=f"{comparison.num_steps} steps, measured", title_justify="left")
    for heading in ("rank", "computes (ms a step)", "waits (ms a step)", "slow by (ms a step)"):
        table.add_column(heading, justify="right")
    table.add_column("machine")
    for rank in comparison.ranks:
        lost = f"{rank.lost_ms:.2f}" if rank.slow else "-"
        table.add_row(str(rank.rank), f"{rank.compute_ms:.2f}", f"{rank.wait_ms:.2f}", lost, escape(rank.host))
    console.print(table)
    for sentence in comparison.sentences():
        console.print(escape(sentence))
