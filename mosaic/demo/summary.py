"""The demo's result as a table."""

from __future__ import annotations

from rich.table import Table

from mosaic.demo.record import RunRecord


def summary_table(record: RunRecord) -> Table:
    """Returns what a person wants to know of a run; everything is measured unless its row says predicted."""
    table = Table(title="measured", title_justify="left", show_header=False, box=None, padding=(0, 2))
    equal = "equal bit for bit" if record.bitwise_equal else f"DIFFERENT by up to {record.max_abs_difference:.3g}"
    rounds = sorted(record.round_speedups)
    rows = [
        ("losses and parameters, plain and colocated", f"{equal} after {record.equality_steps} steps"),
        ("step of the plain loop at its best", f"{record.step_ms_plain:.1f} ms"),
        ("step of the colocated loop", f"{record.step_ms_colocated:.1f} ms"),
        (
            "speed-up",
            f"{record.speedup:.2f}× (rounds from {rounds[0]:.2f} to {rounds[-1]:.2f})",
        ),
        ("predicted speed-up of the modules alone", f"{record.predicted_speedup:.2f}×"),
        ("lane time with another lane busy", f"{record.overlap:.0%}"),
    ]
    rows += [(f"R@1 {name} (chance {record.chance:.3f})", f"{value:.2f}") for name, value in record.retrieval.items()]
    if record.foreign_cpu_share is not None:
        rows.append(("CPU taken by other processes meanwhile", f"{record.foreign_cpu_share:.0%}"))
    for name, value in rows:
        table.add_row(name, value)
    for note in record.notes:
        table.add_row("note", note)
    return table
