"""Lowering of orders of tasks to actions of rows: messages, waits and frees.

One walk runs all rows in causal order, by the tasks' times. At a task that sends, it writes the sender's ``SEND`` and
the receiver's ``RECV`` at the same point. So both ends of each pair of rows see one order of messages, and a waiting
action comes after its cause in the walk: with a first-in first-out channel for each pair and direction a deadlock is
impossible. The idea is DynaPipe's (instruction lists of both ends planned together,
https://arxiv.org/abs/2311.10418); the walk is by causes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.costs import Strategies
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule, plan_of
from mosaic.pipelining.tasks import Orders, TaskGraph


def lower(
    partition: Partition,
    graph: TaskGraph,
    orders: Orders,
    *,
    strategies: Strategies = "keep",
    training: Collection[int] = (),
) -> PipelineSchedule:
    """Returns the schedule that runs a step's tasks in these orders.

    Args:
        partition: The partition of the tasks.
        graph: The step's tasks.
        orders: Tasks of each row, in order.
        strategies: Strategies of the graph.
        training: Chunks whose gradients are reduced after their last backward; see ``training_chunks``.

    Raises:
        InvalidScheduleError: A task is not in its row once, or the rows deadlock.
    """
    chunks = tuple(map(str, partition.chunks))
    walk = _Walk(graph, orders, set(training))
    walk.run()
    names = walk.names
    chosen = {} if isinstance(strategies, str) else strategies
    return PipelineSchedule(
        plan=plan_of(graph, chunks),
        num_microbatches=1 + max((task.microbatch for task in graph.tasks), default=0),
        rank_of=graph.rank_of,
        chunks=chunks,
        rows=tuple(map(tuple, walk.rows)),
        edges={f"{names[wait.source]}>{names[wait.target]}": wait.num_bytes for wait in graph.waits},
        kept=walk.kept,
        strategy=strategies if isinstance(strategies, str) else "keep",
        strategies={
            str(TaskName(chunk, ActionKind.FORWARD, microbatch, piece)): tuple(layers)
            for (chunk, microbatch, piece), layers in sorted(chosen.items())
        },
    )


class _Walk:
    """Walk over all rows, one task at a time."""

    def __init__(self, graph: TaskGraph, orders: Orders, training: set[int]) -> None:
        self.graph, self.orders = graph, orders
        self.names = [str(TaskName.of(task)) for task in graph.tasks]
        self.rows: list[list[str]] = [[] for _ in orders]
        self.kept: dict[str, int] = {}
        self._check_rows()
        self._inputs: list[list[int]] = [[] for _ in graph.tasks]
        self._outputs: list[list[int]] = [[] for _ in graph.tasks]
        for index, wait in enumerate(graph.waits):
            self._inputs[wait.target].append(index)
            self._outputs[wait.source].append(index)
        self._missing = [len(inputs) for inputs in self._inputs]
        self._end = [0] * len(graph.tasks)
        self._forward: dict[tuple[int, int, int], str] = {}
        self._last: dict[tuple[int, int, int], int] = {}
        self._reduced_by: dict[int, int] = {}
        self._find_last(training)
        self._unsent: dict[str, list[str]] = defaultdict(list)
        """Messages of a forward, whose buffers its last phase awaits."""
        self._open: dict[tuple[int, int, bool], tuple[int, list[str]]] = {}
        """Last sender of each channel, and its messages, whose buffers the next sender awaits."""

    def run(self) -> None:
        """Runs every task, the earliest start first."""
        at = [0] * len(self.orders)
        free = [0] * len(self.orders)
        ready: list[tuple[int, int]] = []

        def offer(row: int) -> None:
            if at[row] < len(self.orders[row]) and not self._missing[self.orders[row][at[row]]]:
                task = self.orders[row][at[row]]
                waits = (self.graph.waits[index] for index in self._inputs[task])
                start = max((self._end[wait.source] + wait.lag_ns for wait in waits), default=0)
                heapq.heappush(ready, (max(start, free[row]), row))

        for row in range(len(self.orders)):
            offer(row)
        while ready:
            start, row = heapq.heappop(ready)
            task = self.orders[row][at[row]]
            at[row] += 1
            free[row] = self._end[task] = start + self.graph.tasks[task].time_ns
            self._write(task)
            for index in self._outputs[task]:
                target = self.graph.waits[index].target
                self._missing[target] -= 1
                other = self.graph.tasks[target].row
                if other != row and not self._missing[target] and self.orders[other][at[other]] == target:
                    offer(other)
            offer(row)
        self._check_end(at)
        for (row, _, _), (_, messages) in self._open.items():
            self.rows[row] += (f"SENT({message})" for message in messages)

    def _write(self, index: int) -> None:
        task = self.graph.tasks[index]
        row = self.rows[task.row]
        row += (f"GOT({self._message(wait)})" for wait in self._inputs[index] if self._crosses(wait))
        row.append(self.names[index])
        key = task.chunk, task.microbatch, task.piece
        forward = self._forward[key]
        if self._last[key] == index:
            if forward in self.kept:
                row.append(f"FREE({forward})")
            row += (f"SENT({message})" for message in self._unsent.pop(forward, ()))
        if self._reduced_by.get(task.chunk) == index:
            row.append(f"REDUCE({task.chunk})")
        for wait in self._outputs[index]:
            if self._crosses(wait):
                self._send(wait, lives_on=self._last[key] != index and task.kind is ActionKind.FORWARD)

    def _send(self, wait: int, *, lives_on: bool) -> None:
        """Writes both ends of a message; its own backward, or the channel's next task, awaits its buffer."""
        ends = self.graph.waits[wait]
        source, target = self.graph.tasks[ends.source], self.graph.tasks[ends.target]
        message = self._message(wait)
        if lives_on:
            self._unsent[self.names[ends.source]].append(message)
        else:
            channel = source.row, target.row, source.kind is ActionKind.FORWARD
            sender, messages = self._open.get(channel, (ends.source, []))
            if sender != ends.source:
                self.rows[source.row] += (f"SENT({earlier})" for earlier in messages)
                messages = []
            self._open[channel] = ends.source, [*messages, message]
        self.rows[source.row].append(f"SEND({message})")
        self.rows[target.row].append(f"RECV({message})")

    def _message(self, wait: int) -> str:
        return f"{self.names[self.graph.waits[wait].source]}>{self.names[self.graph.waits[wait].target]}"

    def _crosses(self, wait: int) -> bool:
        tasks, ranks = self.graph.tasks, self.graph.rank_of
        source, target = self.graph.waits[wait].source, self.graph.waits[wait].target
        return ranks[tasks[source].row] != ranks[tasks[target].row]

    def _find_last(self, training: set[int]) -> None:
        """Finds the last phase of each pair, kept bytes of forwards, and each chunk's last training backward."""
        for order in self.orders:
            for index in order:
                task = self.graph.tasks[index]
                key = task.chunk, task.microbatch, task.piece
                self._last[key] = index
                if task.kind is ActionKind.FORWARD:
                    self._forward[key] = self.names[index]
                    if task.takes_bytes > task.frees_bytes:
                        self.kept[self.names[index]] = task.takes_bytes - task.frees_bytes
                elif task.chunk in training:
                    self._reduced_by[task.chunk] = index

    def _check_rows(self) -> None:
        seen: set[int] = set()
        for row, order in enumerate(self.orders):
            for index in order:
                if index in seen or self.graph.tasks[index].row != row:
                    raise InvalidScheduleError(
                        f"row {row} has {self.names[index]} of row {self.graph.tasks[index].row}; run each task once, "
                        "in its own row"
                    )
                seen.add(index)
        if len(self.orders) != self.graph.num_rows or len(seen) < len(self.graph.tasks):
            left = next((name for index, name in enumerate(self.names) if index not in seen), "nothing")
            raise InvalidScheduleError(
                f"orders of {len(self.orders)} rows leave out {left}; there are {self.graph.num_rows} rows: run each "
                "task once"
            )

    def _check_end(self, at: Sequence[int]) -> None:
        stuck = next((row for row, order in enumerate(self.orders) if at[row] < len(order)), None)
        if stuck is None:
            return
        task = self.orders[stuck][at[stuck]]
        todo = {index for row, order in enumerate(self.orders) for index in order[at[row] :]}
        source = next(end for end in (self.graph.waits[wait].source for wait in self._inputs[task]) if end in todo)
        other = self.graph.tasks[source].row
        now = self.names[self.orders[other][at[other]]]
        raise InvalidScheduleError(
            f"rank {self.graph.rank_of[stuck]} stands at {self.names[task]}, which waits for {self.names[source]} of "
            f"rank {self.graph.rank_of[other]}, which stands at {now}: both wait for ever; change an order"
        )
