"""The forwards of a schedule alone, for evaluation."""

from __future__ import annotations

from dataclasses import replace

from mosaic.pipelining.schedule.schedule import PipelineSchedule


def forward_only(schedule: PipelineSchedule) -> PipelineSchedule:
    """Returns a schedule's forwards and the messages between them, in the same order.

    Both ends of each remaining message keep their order, so no new deadlock arises.
    """
    return replace(
        schedule,
        plan=f"forwards of {schedule.plan}",
        rows=tuple(tuple(filter(_is_forward, row)) for row in schedule.rows),
        edges={edge: size for edge, size in schedule.edges.items() if _is_forward(edge)},
        kept={},
        strategy="keep",
        strategies={},
        hash="",
    )


def _is_forward(cell: str) -> bool:
    """Returns True for a cell or an edge of forwards alone: ``2F0``, ``SEND(2F0>3F0)``, ``2F0>3F0``."""
    verb, parenthesis, inner = cell.rstrip(")").partition("(")
    names = (inner if parenthesis else cell).split(">")
    return verb not in ("FREE", "REDUCE") and all("F" in name for name in names)
