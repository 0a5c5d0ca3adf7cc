"""Terminal table of a planned pipeline step and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.pipelining.compare import Contender, bubble_share
from mosaic.pipelining.planner import PlannedStep
from mosaic.pipelining.tasks import TaskGraph, Timed
from mosaic.report.frame import empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    ("schedule", False),
    ("step\nms", True),
    ("× ours", True),
    ("bubbles\n%", True),
    ("fullest rank\nGB", True),
    ("activations", False),
)


def pipeline_table(planned: PlannedStep, contenders: Sequence[Contender]) -> Table:
    """Returns simulated rows of the plan and of each baseline; a baseline that cannot run has its reason."""
    table = empty_table("One step, simulated", "nothing here was measured", _COLUMNS)
    table.add_row(*plain(_cells("planned", planned.graph, planned.timed, 1.0, _strategies(planned)), "bold"))
    for contender in contenders:
        if (run := contender.run) is None:
            table.add_row(*plain([contender.name, "-", "-", "-", "-", contender.reason], ""))
            continue
        ratio = run.timed.makespan_ns / planned.makespan_ns if planned.makespan_ns else 1.0
        table.add_row(*plain(_cells(contender.name, run.graph, run.timed, ratio, run.strategy), ""))
    return table


def _cells(name: str, graph: TaskGraph, timed: Timed, ratio: float, strategy: str) -> list[str]:
    return [
        name,
        f"{timed.makespan_ns / 1e6:.1f}",
        f"{ratio:.2f}",
        f"{100 * bubble_share(graph, timed):.1f}",
        f"{max(timed.peak_bytes) / 1e9:.1f}",
        strategy,
    ]


def _strategies(planned: PlannedStep) -> str:
    if isinstance(planned.strategies, str):
        return planned.strategies
    layers = [index for choices in planned.strategies.values() for index in choices]
    changed = sum(index > 0 for index in layers)
    return f"keep, but for {changed / len(layers):.0%} of layers" if layers else "keep"
