"""The plainest simulation of fixed orders there is: an oracle for the fast ones, which shares no code with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mosaic.pipelining.tasks import Orders, TaskGraph, Timed


def simulated(graph: TaskGraph, orders: Orders) -> Timed | None:
    """Starts each row's next task when it can; None where no row's next one ever can."""
    waits = defaultdict(list)
    for wait in graph.waits:
        waits[wait.target].append((wait.source, wait.lag_ns))
    start: dict[int, int] = {}
    at = [0] * len(orders)
    free = [0] * len(orders)
    has_moved = True
    while has_moved:
        has_moved = False
        for row, order in enumerate(orders):
            while at[row] < len(order) and all(source in start for source, _ in waits[order[at[row]]]):
                task = order[at[row]]
                assert graph.tasks[task].row == row
                ready = [start[source] + graph.tasks[source].time_ns + lag for source, lag in waits[task]]
                start[task] = max([free[row], *ready])
                free[row] = start[task] + graph.tasks[task].time_ns
                at[row] += 1
                has_moved = True
    if len(start) < len(graph.tasks):
        return None
    times = [start[task] for task in range(len(graph.tasks))]
    return Timed(start_ns=times, makespan_ns=max(free, default=0), peak_bytes=peaks(graph, times, orders))


def peaks(graph: TaskGraph, start_ns: Sequence[int], orders: Orders) -> tuple[int, ...]:
    """The most in use on each rank; what ends at an instant is free before what starts at it, in the row's order."""
    place = {task: at for order in orders for at, task in enumerate(order)}
    found = []
    for rank in range(graph.num_ranks):
        events = []
        for index, (task, start) in enumerate(zip(graph.tasks, start_ns, strict=True)):
            if graph.rank_of[task.row] == rank:
                events.append((start, place[index], 1, task.takes_bytes))
                events.append((start + task.time_ns, -1 if task.time_ns else place[index], 2, -task.frees_bytes))
        used = most = graph.base_bytes[rank] if graph.base_bytes else 0
        for *_, change in sorted(events):
            used += change
            most = max(most, used)
        found.append(most)
    return tuple(found)


def natural(graph: TaskGraph) -> Orders:
    """Every row's tasks in the order of the graph."""
    rows = [[] for _ in graph.rank_of]
    for index, task in enumerate(graph.tasks):
        rows[task.row].append(index)
    return tuple(map(tuple, rows))
