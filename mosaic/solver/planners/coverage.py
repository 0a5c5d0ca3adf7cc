"""The check that a schedule of waves runs a whole graph, in an order that keeps its dependencies."""

from __future__ import annotations

from itertools import pairwise

from mosaic.errors import InvalidPlanError
from mosaic.graph import ModuleGraph
from mosaic.solver.planners.waves import Part, WavePlan

_Position = tuple[int, int, int]
"""Wave, run within it, place within the run."""


def check_schedule(schedule: WavePlan, graph: ModuleGraph) -> None:
    """Raises InvalidPlanError unless every operator runs once, in order, and after all that its module waits for.

    Paper section 3.1, formulas 2 and 3, with slices: what a module waits for must have ended in an earlier wave, or
    earlier in the same run.
    """
    parts: dict[str, list[tuple[_Position, Part]]] = {}
    for index, wave in enumerate(schedule.waves):
        for number, run in enumerate(wave.runs):
            for place, part in enumerate(run.parts):
                parts.setdefault(part.module, []).append(((index, number, place), part))
    missing = [name for name in graph.names if name not in parts]
    unknown = [name for name in parts if name not in graph.names]
    if missing or unknown:
        raise InvalidPlanError(
            f"the schedule leaves out {missing or 'nothing'} and runs {unknown or 'nothing'} that the graph lacks"
        )
    for name, found in parts.items():
        _check_parts(name, found)
    for edge in graph.edges:
        if not _is_before(parts[edge.source][-1][0], parts[edge.target][0][0]):
            raise InvalidPlanError(
                f"{edge.target!r} starts in wave {parts[edge.target][0][0][0]}, before {edge.source!r}, on which it "
                f"depends, ends in wave {parts[edge.source][-1][0][0]}; put it in a later wave"
            )


def _check_parts(name: str, found: list[tuple[_Position, Part]]) -> None:
    done = 0
    for _, part in found:
        if part.first != done or part.total != found[0][1].total:
            raise InvalidPlanError(
                f"{name!r} goes on at operator {part.first} of {part.total} after {done}; run each once, in order"
            )
        done += part.count
    if done != found[0][1].total:
        raise InvalidPlanError(f"{name!r} runs {done} of its {found[0][1].total} operators; run them all")
    for (before, _), (after, _) in pairwise(found):
        if not _is_before(before, after):
            raise InvalidPlanError(f"two parts of {name!r} run at the same time in wave {after[0]}; put one later")


def _is_before(first: _Position, second: _Position) -> bool:
    return first[0] < second[0] or (first[:2] == second[:2] and first[2] < second[2])
