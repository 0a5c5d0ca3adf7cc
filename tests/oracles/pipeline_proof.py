"""The best orders of small steps, proven by CP-SAT: cases of up to about 60 tasks close in seconds."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from mosaic.errors import InfeasibleError
from mosaic.pipelining.tasks import Orders, TaskGraph, lower_bound_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What CP-SAT found out."""

    is_optimal: bool
    """Whether no schedule is shorter."""
    makespan_ns: int | None
    """Of the best schedule that it has; None: it came upon none."""
    start_ns: tuple[int, ...] = ()
    """Of each task in that schedule."""
    orders: Orders = ()
    """Of each row in that schedule."""
    bound_ns: int
    """No schedule is shorter."""


def prove(
    graph: TaskGraph,
    *,
    hint: Sequence[int] | None = None,
    seconds: float = 10.0,
    effort: float = math.inf,
    threads: int = 1,
    seed: int = 0,
) -> Proven:
    """Searches for the shortest schedule and proves it where time allows.

    Pieces, or whole microbatches, that could be exchanged without a difference start in their order.

    Args:
        graph: Tasks of a step.
        hint: Start of each task in a good schedule, such as a search's.
        seconds: Wall clock.
        effort: CP-SAT's own count of its work, about seconds of one worker: with one worker the same on each run.
        threads: Workers of CP-SAT.
        seed: Of CP-SAT's own draws.

    Raises:
        InfeasibleError: No schedule fits memory.
    """
    from ortools.sat.python import cp_model  # 0.3 s to import; only proofs need it

    model = cp_model.CpModel()
    horizon = max(hint[i] + task.time_ns for i, task in enumerate(graph.tasks)) if hint else _longest(graph)
    least = lower_bound_ns(graph)
    starts = [model.new_int_var(0, horizon, f"start_{index}") for index in range(len(graph.tasks))]
    makespan = model.new_int_var(min(least, horizon), horizon, "makespan")
    for start, task in zip(starts, graph.tasks, strict=True):
        model.add(start + task.time_ns <= makespan)
    for wait in graph.waits:
        model.add(starts[wait.source] + graph.tasks[wait.source].time_ns + wait.lag_ns <= starts[wait.target])
    for row in range(graph.num_rows):
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(starts[index], task.time_ns, f"run_{index}")
                for index, task in enumerate(graph.tasks)
                if task.row == row and task.time_ns > 0
            ]
        )
    _add_memory(model, graph, starts, horizon)
    alike = exchangeable(graph)
    for units in alike:
        for unit, other in itertools.pairwise(units):
            model.add(starts[unit[0]] <= starts[other[0]])
    if hint is not None:
        for start, value in zip(starts, _in_order(hint, alike), strict=True):
            model.add_hint(start, value)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # or it leaves the process without Python's own handler
    return _answer(cp_model, solver, model, graph, starts)


def _longest(graph: TaskGraph) -> int:
    """What surely suffices: one task after the other."""
    return sum(task.time_ns for task in graph.tasks) + sum(wait.lag_ns for wait in graph.waits)


def _answer(cp_model: Any, solver: Any, model: Any, graph: TaskGraph, starts: list[Any]) -> Proven:
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(
            "no schedule fits memory",
            reasons=[
                f"rank {rank} has {limit} bytes; raise its limit, recompute more, or cut microbatches smaller"
                for rank, limit in enumerate(graph.limit_bytes)
                if limit > 0
            ],
        )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proven(is_optimal=False, makespan_ns=None, bound_ns=lower_bound_ns(graph))
    values = tuple(solver.value(start) for start in starts)
    by_start = sorted(range(len(values)), key=lambda index: (values[index], graph.tasks[index].time_ns, index))
    return Proven(
        is_optimal=status == cp_model.OPTIMAL,
        makespan_ns=round(solver.objective_value),
        start_ns=values,
        orders=tuple(
            tuple(index for index in by_start if graph.tasks[index].row == row) for row in range(graph.num_rows)
        ),
        bound_ns=round(solver.best_objective_bound),
    )


def _add_memory(model: Any, graph: TaskGraph, starts: list[Any], horizon: int) -> None:
    """What each rank holds, as boxes of bytes from a start to an end; events where boxes are not all there is."""
    holds, is_exact = match_holds(graph)
    base = graph.base_bytes or (0,) * graph.num_ranks
    for rank, limit in enumerate(graph.limit_bytes):
        if limit == 0:
            continue
        if not is_exact[rank]:
            _add_events(model, graph, starts, rank, limit - base[rank])
            continue
        boxes, sizes = [], []
        for number, (at, source, target, size) in enumerate(holds):
            if at != rank:
                continue
            end = horizon if target < 0 else starts[target] + graph.tasks[target].time_ns
            length = model.new_int_var(0, horizon, f"held_{rank}_{number}")
            boxes.append(model.new_interval_var(starts[source], length, end, f"hold_{rank}_{number}"))
            sizes.append(size)
        model.add_cumulative(boxes, sizes, max(0, limit - base[rank]))


def match_holds(graph: TaskGraph) -> tuple[list[tuple[int, int, int, int]], list[bool]]:
    """Returns (rank, from, to, bytes) of what is held, and for each rank whether that is all.

    Bytes that a task takes go to the next later tasks that free some, as brackets close; ``to`` is -1 where none does.
    A task that frees what no earlier one took leaves its rank without such a match.
    """
    after: dict[int, list[int]] = defaultdict(list)
    for wait in graph.waits:
        after[wait.source].append(wait.target)
    order = list(
        TopologicalSorter(
            {t: [w.source for w in graph.waits if w.target == t] for t in range(len(graph.tasks))}
        ).static_order()
    )
    reach: dict[int, set[int]] = {}
    for task in reversed(order):
        reach[task] = set(after[task]).union(*(reach[other] for other in after[task]))
    left = [max(0, task.frees_bytes - task.takes_bytes) for task in graph.tasks]
    ranks = [graph.rank_of[task.row] for task in graph.tasks]
    holds = []
    for at, index in reversed(list(enumerate(order))):
        task = graph.tasks[index]
        if passing := min(task.takes_bytes, task.frees_bytes):
            holds.append((ranks[index], index, index, passing))
        bytes_left = task.takes_bytes - task.frees_bytes
        for other in order[at + 1 :]:
            if bytes_left > 0 and left[other] and ranks[other] == ranks[index] and other in reach[index]:
                part = min(bytes_left, left[other])
                holds.append((ranks[index], index, other, part))
                left[other] -= part
                bytes_left -= part
        if bytes_left > 0:
            holds.append((ranks[index], index, -1, bytes_left))
    unmatched = {ranks[index] for index, size in enumerate(left) if size}
    return holds, [rank not in unmatched for rank in range(graph.num_ranks)]


def _add_events(model: Any, graph: TaskGraph, starts: list[Any], rank: int, room: int) -> None:
    times, changes = [], []
    for index, task in enumerate(graph.tasks):
        if graph.rank_of[task.row] == rank:
            times += [starts[index], starts[index] + task.time_ns]
            changes += [task.takes_bytes, -task.frees_bytes]
    model.add_reservoir_constraint(times, changes, min(0, room), room)


def exchangeable(graph: TaskGraph) -> list[list[list[int]]]:
    """Returns sets of units that could be exchanged without a difference, each unit with its tasks by place.

    Units are the pieces of a microbatch in a module, and then whole microbatches. Two are alike where their tasks do
    the same, one by one, and wait for the same and are waited for by the same outside.
    """
    ways: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list), defaultdict(list)]
    for wait in graph.waits:
        ways[0][wait.target].append((wait.source, wait.lag_ns))
        ways[1][wait.source].append((wait.target, wait.lag_ns))
    pieces: dict[object, list[int]] = defaultdict(list)
    microbatches: dict[object, list[int]] = defaultdict(list)
    for index, task in enumerate(graph.tasks):
        pieces[task.microbatch, task.group, task.piece].append(index)
        microbatches[task.microbatch].append(index)
    found = []
    for units in (pieces, microbatches):
        alike: dict[object, list[list[int]]] = defaultdict(list)
        for unit in units.values():
            alike[_looks(graph, unit, ways)].append(unit)
        found += [members for members in alike.values() if len(members) > 1]
    return found


def _in_order(values: Sequence[int], alike: list[list[list[int]]]) -> list[int]:
    """Exchanges units so that the first tasks of those that are alike start in order."""
    starts = list(values)
    for units in alike:
        by_start = sorted(units, key=lambda unit: starts[unit[0]])
        moved = [[starts[index] for index in unit] for unit in by_start]
        for unit, times in zip(units, moved, strict=True):
            for index, time in zip(unit, times, strict=True):
                starts[index] = time
    return starts


def _looks(graph: TaskGraph, unit: list[int], ways: list[dict[int, list[tuple[int, int]]]]) -> object:
    """What two units have in common that can be exchanged: tasks of their own by place, others by index."""
    place = {index: number for number, index in enumerate(unit)}

    def arrows(index: int) -> object:
        return tuple(
            tuple(sorted((other not in place, place.get(other, other), lag) for other, lag in way[index]))
            for way in ways
        )

    return tuple(
        (task.row, task.kind, task.time_ns, task.takes_bytes, task.frees_bytes, arrows(index))
        for index, task in ((index, graph.tasks[index]) for index in unit)
    )
