"""A schedule that ranks of a pipeline execute, and its lowering from orders of tasks.

An action of a row is a text. ``2F0.1`` is chunk 2's forward of microbatch 0, sub-microbatch 1; the first one's number
is left out, ``2F0``. Messages go from one task to another: ``SEND(2F0.1>5F0)`` and ``RECV(2F0.1>5F0)`` post one on both
sides, ``WAIT_SEND(2F0.1>5F0)`` waits until its buffer is free again, and ``WAIT_RECV(2F0.1>5F0)`` until it arrives.
``FREE(2F0.1)`` frees the activations of a forward, and ``REDUCE(2)`` sums a chunk's gradients over its data-parallel
ranks. Every message is an action, because with sub-microbatches, skipped modules and any order a rank cannot infer the
next message of others.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from mosaic.artifact import Ge, StrictFile, fingerprint
from mosaic.errors import InvalidScheduleError
from mosaic.graph import Part
from mosaic.pipelining.partition import Chunk, Partition, Request, efficient_sizes
from mosaic.pipelining.task_graph import Strategies
from mosaic.pipelining.tasks import ActionKind, Orders, PairKey, Task, TaskGraph


class Verb(StrEnum):
    SEND = "SEND"
    RECEIVE = "RECV"
    WAIT_SEND = "WAIT_SEND"
    WAIT_RECV = "WAIT_RECV"
    FREE = "FREE"
    REDUCE = "REDUCE"


_NUMBER = r"(?:0|[1-9]\d*)"
_TASK = re.compile(rf"({_NUMBER})([FBW])({_NUMBER})(?:\.([1-9]\d*))?")
_NAME = rf"{_NUMBER}[FBW]{_NUMBER}(?:\.[1-9]\d*)?"
_CELL = re.compile(rf"{_NAME}|(?:SEND|RECV|WAIT_SEND|WAIT_RECV)\({_NAME}>{_NAME}\)|FREE\({_NAME}\)|REDUCE\({_NUMBER}\)")


@dataclass(frozen=True, slots=True)
class TaskName:
    """Name of a task of a step; ``str`` gives ``2F0.1``."""

    chunk: int
    kind: ActionKind
    microbatch: int
    piece: int = 0
    """Index of its sub-microbatch."""

    @classmethod
    def of(cls, task: Task) -> TaskName:
        return cls(task.chunk, task.kind, task.microbatch, task.piece)

    @classmethod
    def parse(cls, text: str) -> TaskName:
        """Reads the text of ``str``.

        Raises:
            InvalidScheduleError: It is not the name of a task.
        """
        match = _TASK.fullmatch(text)
        if match is None:
            raise _no_action(text)
        chunk, kind, microbatch, piece = match.groups()
        return cls(int(chunk), ActionKind(kind), int(microbatch), int(piece or 0))

    @property
    def forward(self) -> TaskName:
        """The forward of its chunk with the same piece."""
        return replace(self, kind=ActionKind.FORWARD)

    def __str__(self) -> str:
        piece = f".{self.piece}" if self.piece else ""
        return f"{self.chunk}{self.kind.value}{self.microbatch}{piece}"


def _no_action(text: str) -> InvalidScheduleError:
    return InvalidScheduleError(
        f"{text!r} is no action of a pipeline; write 2F0.1, SEND(2F0.1>5F0), RECV, WAIT_SEND or WAIT_RECV of the same, "
        "FREE(2F0.1) or REDUCE(2)"
    )


MAX_ACTIONS = 5_000_000
"""Most actions of a schedule: about 200 MB of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule(StrictFile):
    """Actions of all rows of a pipeline.

    Raises:
        InvalidScheduleError: A cell is not an action, the schedule has too many, rows and ranks differ in number, or
            the file was changed after its hash was made.
    """

    schema_version: int = 1
    plan: str
    """Fingerprint of its tasks; see ``plan_of``."""
    num_microbatches: Annotated[int, Ge(1)]
    """Microbatches of the step."""
    rank_of: tuple[int, ...]
    """Rank of each row; rows of one rank are its lanes."""
    chunks: tuple[str, ...]
    """Parts of each chunk, such as ``vision[6:8/8]+text[0:1/8]``."""
    rows: tuple[tuple[str, ...], ...]
    """Actions of each row, in order."""
    edges: dict[str, int] = field(default_factory=dict)
    """Bytes between tasks, ``2F0.1>5F0``; edges of one target are in the order of its arguments."""
    kept: dict[str, int] = field(default_factory=dict)
    """Bytes that a forward keeps until its FREE."""
    strategy: str = "keep"
    """Default activation strategy."""
    strategies: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Strategy index of each layer, by forward."""
    turns: tuple[tuple[int, ...], ...] = ()
    """For each rank the lane of each action, in an order of all its lanes that cannot deadlock on one thread."""
    hash: str = ""
    """Hash of the content, by which ranks compare schedules; computed if empty."""

    def __post_init__(self) -> None:
        if self.num_actions > MAX_ACTIONS:
            raise InvalidScheduleError(
                f"{self.num_actions} actions; a schedule has at most {MAX_ACTIONS}: use larger sub-microbatches, fewer "
                "chunks or fewer microbatches"
            )
        if len(self.rows) != len(self.rank_of):
            raise InvalidScheduleError(
                f"{len(self.rows)} rows, and ranks for {len(self.rank_of)}; give each row its rank"
            )
        for row, cells in enumerate(self.rows):
            for place, cell in enumerate(cells):
                if _CELL.fullmatch(cell) is None:
                    raise wrong_cell(self, row, place, str(_no_action(cell)))
        sizes = (_listed(self.edges), _listed(self.kept), self.strategy, _listed(self.strategies), self.turns)
        content_hash = fingerprint((self.plan, self.num_microbatches, self.rank_of, self.chunks, self.text, *sizes))
        if self.hash not in ("", content_hash):
            raise InvalidScheduleError(
                f"the schedule's hash is {self.hash}, and its content has {content_hash}; leave the hash out if it was "
                "changed on purpose",
                grid=self.text,
            )
        object.__setattr__(self, "hash", content_hash)

    def rows_of(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """Returns the actions of each lane of a rank, in order."""
        return tuple(row for row, other in zip(self.rows, self.rank_of, strict=True) if other == rank)

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.rows))

    @property
    def text(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in zip(self.rank_of, self.rows, strict=True))


def plan_of(graph: TaskGraph, chunks: Sequence[str]) -> str:
    """Returns the fingerprint of a step's tasks and messages, without times."""
    tasks = [f"{task.row}:{TaskName.of(task)}" for task in graph.tasks]
    waits = [f"{wait.source}>{wait.target}:{wait.num_bytes}" for wait in graph.waits]
    return fingerprint((graph.rank_of, tuple(chunks), " ".join(tasks), " ".join(waits)))


def _listed(values: Mapping[str, object]) -> str:
    """Returns one text of all items, whose fingerprint is faster to compute."""
    return " ".join(f"{name}:{value}" for name, value in values.items())


def wrong_cell(schedule: PipelineSchedule, row: int, place: int, problem: str) -> InvalidScheduleError:
    cell = schedule.rows[row][place] if place < len(schedule.rows[row]) else "its end"
    where = f"rank {schedule.rank_of[row]}"
    if schedule.rank_of.count(schedule.rank_of[row]) > 1:
        where += f", lane {schedule.rank_of[:row].count(schedule.rank_of[row])}"
    return InvalidScheduleError(f"{where}, action {place} ({cell}): {problem}", grid=schedule.text)


def partition_of_schedule(schedule: PipelineSchedule, request: Request) -> Partition:
    """Returns the partition of a schedule.

    A schedule has no sizes of sub-microbatches: modules that it cuts have efficient sizes.

    Raises:
        InvalidScheduleError: A chunk has no task and so no rank, or a rank has lanes, whose shares a schedule lacks.
    """
    parts = [tuple(Part.parse(text) for text in chunk.split("+")) for chunk in schedule.chunks]
    if len(set(schedule.rank_of)) < len(schedule.rank_of):
        raise InvalidScheduleError("the schedule has lanes, and does not say how large; give its Partition")
    rank: dict[int, int] = {}
    cut: set[str] = set()
    for row, cells in zip(schedule.rank_of, schedule.rows, strict=True):
        for task in (TaskName.parse(cell) for cell in cells if cell[-1] != ")"):
            rank[task.chunk] = row
            cut |= {part.module for part in parts[task.chunk] if task.piece}
    missing = next((index for index in range(len(parts)) if index not in rank), None)
    if missing is not None:
        raise InvalidScheduleError(
            f"chunk {missing} ({schedule.chunks[missing]}) has no task in the schedule, and so no rank; plan a step in "
            "which every module has something to do"
        )
    sizes = efficient_sizes(request.model, request.microbatches) if cut else {}
    return Partition(
        num_ranks=1 + max(schedule.rank_of),
        chunks=tuple(Chunk(parts=own_parts, rank=rank[index]) for index, own_parts in enumerate(parts)),
        sizes={name: size for name, size in sizes.items() if name in cut},
    )


def lower(
    partition: Partition,
    graph: TaskGraph,
    orders: Orders,
    *,
    strategies: Strategies = "keep",
    training: Collection[int] = (),
) -> PipelineSchedule:
    """Returns the schedule that runs a step's tasks in these orders.

    One walk runs all rows in causal order, by the tasks' times. At a task that sends, it writes the sender's ``SEND``
    and the receiver's ``RECV`` at the same point. So both ends of each pair of rows see one order of messages, and a
    waiting action comes after its cause in the walk: with a first-in first-out channel for each pair and direction a
    deadlock is impossible. The idea is DynaPipe's (instruction lists of both ends planned together,
    https://arxiv.org/abs/2311.10418); the walk is by causes.

    Raises:
        InvalidScheduleError: The rows deadlock.
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
        turns=tuple(map(tuple, walk.turns)) if len(set(graph.rank_of)) < graph.num_rows else (),
    )


class _Walk:
    def __init__(self, graph: TaskGraph, orders: Orders, training: set[int]) -> None:
        self.graph, self.orders = graph, orders
        self.names = [str(TaskName.of(task)) for task in graph.tasks]
        self.rows: list[list[str]] = [[] for _ in orders]
        self.turns: list[list[int]] = [[] for _ in range(graph.num_ranks)]
        self._lane = [graph.rank_of[:row].count(rank) for row, rank in enumerate(graph.rank_of)]
        self.kept: dict[str, int] = {}
        self._inputs: list[list[int]] = [[] for _ in graph.tasks]
        self._outputs: list[list[int]] = [[] for _ in graph.tasks]
        for index, wait in enumerate(graph.waits):
            self._inputs[wait.target].append(index)
            self._outputs[wait.source].append(index)
        self._forward: dict[PairKey, str] = {}
        self._last: dict[PairKey, int] = {}
        """Last phase of each pair."""
        self._reduced_by: dict[int, int] = {}
        """Last backward of each training chunk."""
        self._unsent: dict[str, list[str]] = defaultdict(list)
        """Messages of a forward, whose buffers its last phase awaits."""
        self._open: dict[tuple[int, int, bool], tuple[int, list[str]]] = {}
        """Last sender of each channel, and its messages, whose buffers the next sender awaits."""
        for index in (index for order in orders for index in order):
            task = graph.tasks[index]
            key = task.chunk, task.microbatch, task.piece
            self._last[key] = index
            if task.kind is ActionKind.FORWARD:
                self._forward[key] = self.names[index]
                if task.takes_bytes > task.frees_bytes:
                    self.kept[self.names[index]] = task.takes_bytes - task.frees_bytes
            elif task.chunk in training:
                self._reduced_by[task.chunk] = index

    def run(self) -> None:
        """Runs every task, the earliest start first."""
        at, free = [0] * len(self.orders), [0] * len(self.orders)
        missing, end = [len(inputs) for inputs in self._inputs], [0] * len(self.names)
        ready: list[tuple[int, int]] = []

        def offer(row: int) -> None:
            if at[row] < len(self.orders[row]) and not missing[self.orders[row][at[row]]]:
                waits = (self.graph.waits[index] for index in self._inputs[self.orders[row][at[row]]])
                start = max((end[wait.source] + wait.lag_ns for wait in waits), default=0)
                heapq.heappush(ready, (max(start, free[row]), row))

        for row in range(len(self.orders)):
            offer(row)
        while ready:
            start, row = heapq.heappop(ready)
            task = self.orders[row][at[row]]
            at[row] += 1
            free[row] = end[task] = start + self.graph.tasks[task].time_ns
            self._write(task)
            for index in self._outputs[task]:
                target = self.graph.waits[index].target
                missing[target] -= 1
                other = self.graph.tasks[target].row
                if other != row and not missing[target] and self.orders[other][at[other]] == target:
                    offer(other)
            offer(row)
        self._check_end(at)
        for (row, _, _), (_, messages) in self._open.items():
            self._put(row, *(f"WAIT_SEND({message})" for message in messages))

    def _write(self, index: int) -> None:
        task = self.graph.tasks[index]
        cells = [f"WAIT_RECV({self._message(wait)})" for wait in self._inputs[index] if self._crosses(wait)]
        cells.append(self.names[index])
        key = task.chunk, task.microbatch, task.piece
        forward = self._forward[key]
        if self._last[key] == index:
            if forward in self.kept:
                cells.append(f"FREE({forward})")
            cells += (f"WAIT_SEND({message})" for message in self._unsent.pop(forward, ()))
        if self._reduced_by.get(task.chunk) == index:
            cells.append(f"REDUCE({task.chunk})")
        self._put(task.row, *cells)
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
                self._put(source.row, *(f"WAIT_SEND({earlier})" for earlier in messages))
                messages = []
            self._open[channel] = ends.source, [*messages, message]
        self._put(source.row, f"SEND({message})")
        self._put(target.row, f"RECV({message})")

    def _put(self, row: int, *cells: str) -> None:
        self.rows[row] += cells
        self.turns[self.graph.rank_of[row]] += [self._lane[row]] * len(cells)

    def _message(self, wait: int) -> str:
        return f"{self.names[self.graph.waits[wait].source]}>{self.names[self.graph.waits[wait].target]}"

    def _crosses(self, wait: int) -> bool:
        tasks, ranks = self.graph.tasks, self.graph.rank_of
        source, target = self.graph.waits[wait].source, self.graph.waits[wait].target
        return ranks[tasks[source].row] != ranks[tasks[target].row]

    def _check_end(self, at: Sequence[int]) -> None:
        for row, order in enumerate(self.orders):
            if at[row] == len(order):
                continue
            task = order[at[row]]
            sources = (self.names[self.graph.waits[wait].source] for wait in self._inputs[task])
            raise InvalidScheduleError(
                f"rank {self.graph.rank_of[row]} would wait for ever at {self.names[task]}, which needs "
                f"{', '.join(sources)}; change an order"
            )
