"""The best orders of small steps, proven by CP-SAT: cases of up to about 60 tasks close in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from mosaic.pipelining.tasks import TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A bound on a step, and its optimum where the search closes."""

    is_optimal: bool
    """True if no schedule is shorter than ``makespan_ns``."""
    makespan_ns: int
    """Time of the best schedule of the search."""
    bound_ns: int
    """No schedule is shorter."""


def prove(graph: TaskGraph, *, hint: Sequence[int], seconds: float, effort: float) -> Proven:
    """Searches for the shortest schedule with one worker, the same on each run.

    Args:
        graph: Tasks of a step.
        hint: Start of each task in a good schedule, such as a search's.
        seconds: Limit by the wall clock.
        effort: Limit by CP-SAT's own count of its work, about seconds.
    """
    model = cp_model.CpModel()
    horizon = max(start + task.time_ns for start, task in zip(hint, graph.tasks, strict=True))
    starts = [model.new_int_var(0, horizon, f"start_{index}") for index in range(len(graph.tasks))]
    ends = [start + task.time_ns for start, task in zip(starts, graph.tasks, strict=True)]
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, ends)
    for wait in graph.waits:
        model.add(ends[wait.source] + wait.lag_ns <= starts[wait.target])
    for row in range(graph.num_rows):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[index], task.time_ns, f"run_{index}")
            for index, task in enumerate(graph.tasks)
            if task.row == row and task.time_ns > 0
        )
    base = graph.base_bytes or (0,) * graph.num_ranks
    for rank, limit in enumerate(graph.limit_bytes):
        own = [index for index, task in enumerate(graph.tasks) if graph.rank_of[task.row] == rank]
        times = [time for index in own for time in (starts[index], ends[index])]
        changes = [size for index in own for size in (graph.tasks[index].takes_bytes, -graph.tasks[index].frees_bytes)]
        if limit > 0:
            model.add_reservoir_constraint(times, changes, min(0, limit - base[rank]), limit - base[rank])
    for start, value in zip(starts, hint, strict=True):
        model.add_hint(start, value)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), status
    return Proven(
        is_optimal=status == cp_model.OPTIMAL,
        makespan_ns=round(solver.objective_value),
        bound_ns=round(solver.best_objective_bound),
    )
