"""The demo's result as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from mosaic.demo.record import RunRecord

PREDICTED = "the modules alone; the plain loop as one module after the other, each at its best"
MEASURED = "whole steps, with loss and optimizer"


def summary_table(record: RunRecord) -> Table:
    """Returns what a person wants to know of a run."""
    notes = "".join(f"\nnote: {note}" for note in record.notes)
    caption = f"predicted: {PREDICTED}\nmeasured: {MEASURED}{notes}"
    table = Table("", "predicted", "measured", box=None, padding=(0, 2), caption=caption, caption_justify="left")
    for row in summary_rows(record):
        table.add_row(*row)
    return table


def summary_rows(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yields rows of a name, what was predicted, and what was measured."""
    equal = "equal bit for bit" if record.bitwise_equal else f"DIFFERENT by up to {record.max_abs_difference:.3g}"
    by = {None: "", True: " by the same plan", False: " by a plan of one slot a module"}[record.equality_of_timed_plan]
    rounds = sorted(record.round_speedups)
    yield f"losses and parameters after {record.equality_steps} steps{by}", "", equal
    yield "step of the plain loop at its best", _ms(record.predicted_ms_plain), _ms(record.step_ms_plain)
    yield "step of the colocated loop", _ms(record.predicted_ms_colocated), _ms(record.step_ms_colocated)
    measured = f"{record.speedup:.2f}×, median of rounds ({rounds[0]:.2f} to {rounds[-1]:.2f})"
    yield "speed-up", f"{record.predicted_speedup:.2f}×", measured
    yield "lane time with another lane busy", "", f"{record.overlap:.0%}"
    found = ", ".join(f"{name} {value:.2f}" for name, value in record.retrieval.items())
    yield f"R@1 after {record.train_steps} steps (chance {record.chance:.3f})", "", found
    if record.foreign_cpu_share is not None:
        yield "CPU taken by other processes meanwhile", "", f"{record.foreign_cpu_share:.0%}"


def _ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.1f} ms"
