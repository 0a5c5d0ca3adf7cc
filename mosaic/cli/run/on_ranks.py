"""``mosaic run`` under torchrun: measures plans on all ranks, in turn with data-parallel training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.cli.workload import load_workload
from mosaic.plan import Plan
from mosaic.profile import note_of_others
from mosaic.profiler import ProfileSettings
from mosaic.ranks.compare import MeasuredMethod, Rounds, compare_launched
from mosaic.ranks.world.world import World
from mosaic.report.frame import empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table

_ROUNDS = 4
_MB = 1e6

_COLUMNS = (
    ("planner", False),
    ("step ms\nmeasured", True),
    ("DDP ms\nmeasured", True),
    ("ratio\nmeasured", True),
    ("modules\nms pre-\ndicted", True),
    ("sent MB\na step", True),
    ("held MB\n(DDP)", True),
)


def run_on_ranks(
    where: str, methods: Sequence[str], plan: Plan | None, steps: int, settings: ProfileSettings
) -> tuple[list[MeasuredMethod], bool]:
    """Measures each method's plan on torchrun's ranks; every rank calls it.

    Args:
        where: The model, as for ``load_workload``; the same on every rank. Its sample is a rank's batch.
        methods: Planners.
        plan: A plan to measure instead.
        steps: Training steps of each plan, and of data-parallel training.
        settings: Settings of the profiler.

    Returns:
        The measurements, the same on every rank, and True on the rank that prints them.
    """
    rounds = Rounds(rounds=_ROUNDS, steps=max(1, round(steps / _ROUNDS)))
    measured = compare_launched(lambda: load_workload(where), methods, plan=plan, rounds=rounds, settings=settings)
    for method_result in measured[0]:
        if method_result.plan is not None:
            note_of_others(method_result.foreign_cpu_share, method_result.plan.device, strict=settings.strict)
    return measured


def is_launched() -> bool:
    """Returns True if this process is one of several torchrun ranks."""
    return World.is_there()


def measured_table(measured: Sequence[MeasuredMethod]) -> Table:
    """Returns one row per planner, with columns of measured and predicted times."""
    title = "Plans measured on these ranks, in turn with data-parallel training"
    table = empty_table(title, _caption(measured), _COLUMNS)
    for row in measured:
        table.add_row(*plain(_cells(row)))
    return table


def _caption(measured: Sequence[MeasuredMethod]) -> str:
    lines = ["medians; a step ends with its slowest rank; held: parameters, gradients, optimizer, most on a rank"]
    lines += [
        f"{row.method}: {note}"
        for row in measured
        if row.plan is not None and (note := note_of_others(row.foreign_cpu_share, row.plan.device))
    ]
    lines += [f"{row.method}: the same plan as {row.same_as}" for row in measured if row.same_as]
    lines += [f"{row.method}: {row.reason}" for row in measured if row.plan is None]
    return "\n".join(lines)


def _cells(measured: MeasuredMethod) -> list[str]:
    if measured.plan is None:
        return [measured.method, *["-"] * (len(_COLUMNS) - 1)]
    return [
        measured.method,
        f"{statistics.median(measured.step_ms):.1f}",
        f"{statistics.median(measured.ddp_ms):.1f}",
        f"{statistics.median(measured.ratios):.2f}",
        f"{measured.predicted_ms:.1f}" if measured.predicted_ms else "-",
        f"{sum(measured.sent_bytes.values()) / _MB:.2f}",
        f"{max(measured.held_bytes) / _MB:.1f} ({max(measured.ddp_held_bytes) / _MB:.1f})",
    ]
