"""``mosaic run`` under torchrun: plans measured on all ranks, in turn with data-parallel training."""

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
    """Measures each method's plan on the ranks that torchrun started; every rank calls it.

    Args:
        where: The model, as ``load_workload`` takes it; the same on every rank. Its sample is a rank's batch.
        methods: Who plans.
        plan: A plan to measure instead.
        steps: Training steps of each plan, and as many of data-parallel training.
        settings: How carefully to profile.

    Returns:
        What was measured, the same on every rank, and whether this rank is the one that tells it.
    """
    rounds = Rounds(rounds=_ROUNDS, steps=max(1, round(steps / _ROUNDS)))
    made = compare_launched(lambda: load_workload(where), methods, plan=plan, rounds=rounds, settings=settings)
    for one in made[0]:
        if one.plan is not None:
            note_of_others(one.foreign_cpu_share, one.plan.device, strict=settings.strict)
    return made


def is_launched() -> bool:
    """Whether torchrun started several ranks, of which this process is one."""
    return World.is_there()


def measured_table(found: Sequence[MeasuredMethod]) -> Table:
    """Returns one row for each planner; measured and predicted times in columns of their own."""
    title = "Plans measured on these ranks, in turn with data-parallel training"
    table = empty_table(title, _caption(found), _COLUMNS)
    for one in found:
        table.add_row(*plain(_cells(one)))
    return table


def _caption(found: Sequence[MeasuredMethod]) -> str:
    lines = ["medians; a step ends with its slowest rank; held: parameters, gradients, optimizer, most on a rank"]
    lines += [
        f"{one.method}: {note}"
        for one in found
        if one.plan is not None and (note := note_of_others(one.foreign_cpu_share, one.plan.device))
    ]
    lines += [f"{one.method}: the same plan as {one.same_as}" for one in found if one.same_as]
    lines += [f"{one.method}: {one.reason}" for one in found if one.plan is None]
    return "\n".join(lines)


def _cells(one: MeasuredMethod) -> list[str]:
    if one.plan is None:
        return [one.method, *["-"] * (len(_COLUMNS) - 1)]
    return [
        one.method,
        f"{statistics.median(one.step_ms):.1f}",
        f"{statistics.median(one.ddp_ms):.1f}",
        f"{statistics.median(one.ratios):.2f}",
        f"{one.predicted_ms:.1f}" if one.predicted_ms else "-",
        f"{sum(one.sent_bytes.values()) / _MB:.2f}",
        f"{max(one.held_bytes) / _MB:.1f} ({max(one.ddp_held_bytes) / _MB:.1f})",
    ]
