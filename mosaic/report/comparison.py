"""The planners side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.report.frame import empty_table, plain
from mosaic.solver.compare import Comparison

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.plan import Plan

_COLUMNS = (
    ("planner", False),
    ("predicted\nms", True),
    ("× best", True),
    ("stages", True),
    ("sliced\nmodules", True),
    ("search\ns", True),
    ("note", False),
)


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Returns one row per planner, in order: predicted times, search times, proofs.

    A planner without a plan has its reason as a note.
    """
    table = empty_table("Planners compared, predicted by one cost model", _caption(compared), _COLUMNS)
    for comparison in compared:
        style = "bold" if comparison.ratio is not None and comparison.ratio <= 1 else ""
        table.add_row(*plain(_cells(comparison), style))
    return table


def _cells(row: Comparison) -> list[str]:
    plan = row.plan
    if plan is None:
        return [row.method, "-", "-", "-", "-", f"{row.seconds:.2f}", f"{row.status}: {row.reason}"]
    return [
        row.method,
        f"{plan.predicted_ms:.2f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        str(len(plan.stages)),
        str(len(plan.sliced)),
        f"{row.seconds:.2f}",
        _note(plan),
    ]


def _note(plan: Plan) -> str:
    if plan.search.status == "optimal":
        return "proven best of whole modules"
    if plan.search.bound_ms > 0 and plan.predicted_ms:
        return f"at most {plan.predicted_ms / plan.search.bound_ms - 1:.1%} above the best of whole modules"
    return "cannot be run: it slices modules" if plan.sliced else ""


def _caption(compared: Sequence[Comparison]) -> str:
    lines = ["nothing here was measured; modules only, without optimizer and loss"]
    if any(comparison.method.startswith("distmm") for comparison in compared):
        lines.append("distmm is a reconstruction: the best plan of whole devices, by our own search")
    if any(comparison.plan is not None and comparison.plan.sliced for comparison in compared):
        lines.append("slices are cut between equal operators; their number is assumed where not given")
    return "\n".join(lines)
