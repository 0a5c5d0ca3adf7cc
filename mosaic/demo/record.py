"""The demo's record: one JSON file with all measurements and the machine, and its table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from mosaic.artifact import StrictFile
from mosaic.device import Device

PREDICTED = "the modules alone; the plain loop as one module after the other, each at its best"
MEASURED = "whole steps, with loss and optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(StrictFile):
    """A run of the demo. Times and shares are measured unless a name says predicted."""

    schema_version: int = 1
    command: str
    created: str
    commit: str
    mosaic_version: str
    torch_version: str
    python_version: str
    driver: str = ""
    machine: Device
    seed: int
    bitwise_equal: bool
    max_abs_difference: float
    """Largest difference between their losses or parameters; relative for values above 1."""
    equality_tolerance: float = 0.0
    equality_steps: int
    equality_overlap: float
    """Overlap of the colocated run in that comparison; above 0, or the comparison would prove nothing."""
    equality_of_timed_plan: bool | None = None
    """True if that run had the timed plan; False if the timed plan has no modules side by side."""
    retrieval: dict[str, float]
    """R@1 by direction on held-out strings, voices and handwriting, after training colocated."""
    retrieval_plain: dict[str, float]
    chance: float
    train_steps: int
    step_ms_plain: float
    """Median step of the plain loop at its best: on the host in a process of its own, with all cores."""
    plain_waiting: str = ""
    """Way of waiting of its threads; empty on a GPU."""
    step_ms_colocated: float
    speedup: float
    """Median over rounds of plain over colocated, rounds taken in turn (A B A B)."""
    round_speedups: tuple[float, ...]
    step_times_ms_plain: tuple[float, ...]
    step_times_ms_colocated: tuple[float, ...]
    predicted_ms_plain: float | None = None
    predicted_ms_colocated: float | None = None
    predicted_speedup: float
    colocated: bool
    """True if the solved plan ran on lanes; False if its predicted gain was too small and the plain loop ran."""
    overlap: float
    foreign_cpu_share: float | None
    """Share of the CPU time of other processes during timed steps; None if unknown."""
    notes: tuple[str, ...]


def summary_table(record: RunRecord) -> Table:
    notes = "".join(f"\nnote: {note}" for note in record.notes)
    caption = f"predicted: {PREDICTED}\nmeasured: {MEASURED}{notes}"
    table = Table("", "predicted", "measured", box=None, padding=(0, 2), caption=caption, caption_justify="left")
    for row in summary_rows(record):
        table.add_row(*row)
    return table


def summary_rows(record: RunRecord) -> list[tuple[str, str, str]]:
    """Returns rows of a name, a prediction, and a measurement."""
    equal = agreement(record.max_abs_difference, record.equality_tolerance)
    by = {None: "", True: " by the same plan", False: " by a plan of one slot a module"}[record.equality_of_timed_plan]
    rounds = record.round_speedups
    speedup = f"{record.speedup:.2f}×, median of rounds ({min(rounds):.2f} to {max(rounds):.2f})"
    if not record.colocated:  # the ratio is noise
        speedup = "none: the loop ran as it was"
    recall = ", ".join(f"{name} {value:.2f}" for name, value in record.retrieval.items())
    rows = [
        (f"losses and parameters after {record.equality_steps} steps{by}", "", equal),
        ("step of the plain loop at its best", _ms(record.predicted_ms_plain), _ms(record.step_ms_plain)),
        ("step of the colocated loop", _ms(record.predicted_ms_colocated), _ms(record.step_ms_colocated)),
        ("speed-up", f"{record.predicted_speedup:.2f}×", speedup),
        ("lane time with another lane busy", "", f"{record.overlap:.0%}"),
        (f"R@1 after {record.train_steps} steps (chance {record.chance:.3f})", "", recall),
    ]
    if record.foreign_cpu_share is not None:
        rows.append(("CPU taken by other processes meanwhile", "", f"{record.foreign_cpu_share:.0%}"))
    return rows


def agreement(max_abs_difference: float, tolerance: float) -> str:
    """Describes the outcome of the comparison of two trainings."""
    if max_abs_difference == 0:
        return "equal bit for bit"
    if max_abs_difference <= tolerance:
        return f"equal within {tolerance:g} (by up to {max_abs_difference:.1g})"
    return f"DIFFERENT by up to {max_abs_difference:.3g}"


def _ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.1f} ms"
