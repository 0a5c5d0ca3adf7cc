"""Checks that a schedule runs each task of a step once, with the right data, within memory, and to the end.

The check shares no code with the search or the lowering: it reads the actions one by one, first each row by itself,
then the two ends of every channel, then all rows together with a clock (``replay``). A cell has one canonical form: its
text names the action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.replay import Rows, Step, replay, split
from mosaic.pipelining.schedule.schedule import PipelineSchedule, plan_of, wrong_cell
from mosaic.pipelining.tasks import TaskGraph, Timed

_Place = tuple[int, int]
"""Row, and place in it."""


def check_pipeline_schedule(
    schedule: PipelineSchedule, graph: TaskGraph, *, training: Collection[int] | None = None
) -> Timed:
    """Checks a schedule against the tasks of its step; returns their times, with messages in their channels' order.

    Args:
        schedule: The schedule.
        graph: The expected tasks, with times and memory.
        training: Chunks whose gradients must be reduced; None: those that the schedule reduces.

    Raises:
        InvalidScheduleError: It is of another plan, an action is missing, twice, in a wrong row or at a wrong place,
            both ends of a channel differ, rows wait for each other for ever, or memory does not suffice; has the cell.
    """
    plan = plan_of(graph, schedule.chunks)
    if schedule.plan != plan or schedule.rank_of != graph.rank_of:
        raise InvalidScheduleError(
            f"the schedule is of plan {schedule.plan}, and this one is {plan}; make the schedule again"
        )
    step = Step.of(graph)
    _check_sizes(schedule, step)
    checks = _Checks(schedule=schedule, step=step, where=_find(schedule))
    checks.check_tasks()
    checks.check_messages()
    checks.check_frees()
    checks.check_reduces(training)
    rows: Rows = [[split(cell) for cell in row] for row in schedule.rows]
    _check_channels(schedule, step, rows)
    return replay(schedule, step, rows)


def _check_sizes(schedule: PipelineSchedule, step: Step) -> None:
    edges = {message: step.graph.waits[at].num_bytes for message, at in step.edges.items()}
    for field, own, expected in (("edges", schedule.edges, edges), ("kept", schedule.kept, step.kept)):
        mismatch = next((name for name in expected.keys() | own.keys() if own.get(name) != expected.get(name)), None)
        if mismatch is not None:
            raise InvalidScheduleError(
                f"{field}: {mismatch} has {own.get(mismatch)} bytes, and the step's tasks say "
                f"{expected.get(mismatch)}; make the schedule again"
            )


def _find(schedule: PipelineSchedule) -> dict[str, _Place]:
    where: dict[str, _Place] = {}
    for row, cells in enumerate(schedule.rows):
        for place, cell in enumerate(cells):
            if cell in where:
                raise wrong_cell(
                    schedule, row, place, f"it is also action {where[cell][1]} of row {where[cell][0]}; once"
                )
            where[cell] = row, place
    return where


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """Checks of each row by itself."""

    schedule: PipelineSchedule
    step: Step
    where: dict[str, _Place]
    """Place of each action."""

    def check_tasks(self) -> None:
        """Checks that every task is once in its row, after its inputs of the row."""
        for cell, (row, place) in self.where.items():
            if split(cell)[0] is None and self.step.row.get(cell) != row:
                raise wrong_cell(self.schedule, row, place, "the step has no such task in this row")
        for name, row in self.step.row.items():
            if name not in self.where:
                raise self._missing(row, name)
        for message in self.step.edges:
            source, target = message.split(">")
            if self.step.row[source] == self.step.row[target] and self.where[source] > self.where[target]:
                problem = f"it needs {source}, which comes later in its row; put it before"
                raise wrong_cell(self.schedule, *self.where[target], problem)

    def check_messages(self) -> None:
        """Checks that every message is sent after its source, received before its target, and awaited at both ends."""
        for cell, (row, place) in self.where.items():
            verb, message = split(cell)
            source, arrow, target = message.partition(">")
            if not arrow:
                continue
            if message not in self.step.channels:
                raise wrong_cell(self.schedule, row, place, "the step hands nothing of that name to another rank")
            end = source if verb in ("SEND", "SENT") else target
            if self.step.row[end] != row:
                raise wrong_cell(self.schedule, row, place, f"it belongs into row {self.step.row[end]}, to {end}")
        for message, (sender, receiver, _) in self.step.channels.items():
            source, target = message.split(">")
            self._check_in_turn((source, f"SEND({message})", f"SENT({message})"), sender)
            self._check_in_turn((f"RECV({message})", f"GOT({message})", target), receiver)

    def check_frees(self) -> None:
        """Checks that activations are freed after the last phase of their chunk with the same piece."""
        last: dict[tuple[int, int, int], str] = {}
        for text in self.step.row:
            name = TaskName.parse(text)
            key = name.chunk, name.microbatch, name.piece
            if key not in last or self.where[last[key]] < self.where[text]:
                last[key] = text
        for text in self.step.kept:
            name = TaskName.parse(text)
            row = self.step.row[text]
            self._check_in_turn((last[name.chunk, name.microbatch, name.piece], f"FREE({text})"), row)
        for cell, (row, place) in self.where.items():
            verb, what = split(cell)
            if verb == "FREE" and (what not in self.step.kept or self.step.row[what] != row):
                raise wrong_cell(self.schedule, row, place, "nothing of that name is kept in this row")

    def check_reduces(self, training: Collection[int] | None) -> None:
        """Checks that gradients are reduced after the last backward of their chunk."""
        last: dict[int, str] = {}
        for text in self.step.row:
            name = TaskName.parse(text)
            is_later = name.chunk not in last or self.where[last[name.chunk]] < self.where[text]
            if name.kind is not ActionKind.FORWARD and is_later:
                last[name.chunk] = text
        reduced = {int(split(cell)[1]): place for cell, place in self.where.items() if split(cell)[0] == "REDUCE"}
        for chunk, (row, place) in reduced.items():
            if chunk not in last or (training is not None and chunk not in training):
                raise wrong_cell(self.schedule, row, place, "that chunk has no gradients to reduce")
        for chunk in sorted(reduced.keys() | set(training or ()) & last.keys()):
            self._check_in_turn((last[chunk], f"REDUCE({chunk})"), self.step.row[last[chunk]])

    def _check_in_turn(self, cells: Sequence[str], row: int) -> None:
        """Checks that actions are in one row, in this order."""
        for before, cell in zip(("", *cells), cells, strict=False):
            if cell not in self.where:
                raise self._missing(row, cell)
            if before and (self.where[before] > self.where[cell] or self.where[cell][0] != row):
                raise wrong_cell(self.schedule, *self.where[cell], f"it belongs behind {before}, in row {row}")

    def _missing(self, row: int, cell: str) -> InvalidScheduleError:
        return wrong_cell(self.schedule, row, len(self.schedule.rows[row]), f"{cell} is missing; do it once")


def _check_channels(schedule: PipelineSchedule, step: Step, rows: Rows) -> None:
    """Checks that both ends of a channel name the same messages in the same order."""
    sent: dict[object, list[str]] = defaultdict(list)
    for row in rows:
        for verb, message in row:
            if verb == "SEND":
                sent[step.channels[message]].append(message)
    num_received: dict[object, int] = defaultdict(int)
    for number, row in enumerate(rows):
        for place, (verb, message) in enumerate(row):
            if verb == "RECV":
                channel = step.channels[message]
                other = sent[channel][num_received[channel]]
                num_received[channel] += 1
                if other != message:
                    problem = (
                        f"row {channel[0]} sends {other} as its {num_received[channel]}. one; post both ends alike"
                    )
                    raise wrong_cell(schedule, number, place, problem)
