"""Slack of each task in a simulated step: its possible delay without a longer step."""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.pipelining.tasks import TaskGraph, Timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Followers:
    """Successors of each task of a graph, independent of times."""

    waits: tuple[tuple[tuple[int, int], ...], ...]
    """Successors of each task, with lags."""

    @classmethod
    def of(cls, graph: TaskGraph) -> Followers:
        """Returns the successors in a graph."""
        followers: list[list[tuple[int, int]]] = [[] for _ in graph.tasks]
        for wait in graph.waits:
            followers[wait.source].append((wait.target, wait.lag_ns))
        return cls(waits=tuple(map(tuple, followers)))

    def slack_ns(self, graph: TaskGraph, timed: Timed) -> list[int]:
        """Returns the slack of each task in the order of its row; 0 on a critical path."""
        start = timed.start_ns
        order = sorted(range(len(start)), key=lambda i: (start[i], start[i] + graph.tasks[i].time_ns, i))
        next_of_row: list[int | None] = [None] * graph.num_rows
        latest = list(start)
        for index in reversed(order):
            task = graph.tasks[index]
            end = timed.makespan_ns
            follower = next_of_row[task.row]
            if follower is not None:
                end = min(end, latest[follower])
            for target, lag in self.waits[index]:
                end = min(end, latest[target] - lag)
            latest[index] = end - task.time_ns
            next_of_row[task.row] = index
        return [last - now for last, now in zip(latest, start, strict=True)]
