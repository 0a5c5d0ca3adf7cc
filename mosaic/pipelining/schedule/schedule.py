"""A schedule that ranks of a pipeline execute: for each row its actions, with all that they need beside the model.

Every message is an action, because with pieces, skipped modules and any order no rank could tell otherwise what the
others send next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, fingerprint
from mosaic.device import FORBID_EXTRA
from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule.action import PipelineAction, TaskName, check_cell
from mosaic.pipelining.tasks import TaskGraph

MAX_ACTIONS = 5_000_000
"""Of a schedule: about 200 MB of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """Actions of all rows of a pipeline.

    Raises:
        InvalidScheduleError: A cell is no action, there are too many or other rows than ranks, or the file was changed
            after its hash was made.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    plan: str
    """Fingerprint of the tasks that it runs, as ``plan_of`` gives it."""
    num_microbatches: Annotated[int, Ge(1)]
    """Microbatches of the step."""
    rank_of: tuple[int, ...]
    """For each row its rank; rows of one rank are its lanes."""
    chunks: tuple[str, ...]
    """For each chunk its parts, such as ``vision[6:8/8]+text[0:1/8]``."""
    rows: tuple[tuple[str, ...], ...]
    """For each row its actions, in order."""
    edges: dict[str, int] = field(default_factory=dict)
    """Bytes of what each task hands to another, ``2F0.1>5F0``; of one target in the order of its arguments."""
    kept: dict[str, int] = field(default_factory=dict)
    """Bytes that a forward keeps until they are freed."""
    strategy: str = "keep"
    """What becomes of activations where ``strategies`` does not say."""
    strategies: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For a forward the index of each of its layers' strategies."""
    hash: str = ""
    """Names the content, so that all ranks can tell that they have the same one; made where it is left out."""

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
                try:
                    check_cell(cell)
                except InvalidScheduleError as error:
                    raise wrong_cell(self, row, place, str(error)) from None
        sizes = (_listed(self.edges), _listed(self.kept), self.strategy, _listed(self.strategies))
        made = fingerprint((self.plan, self.num_microbatches, self.rank_of, self.chunks, self.text, *sizes))
        if self.hash not in ("", made):
            raise InvalidScheduleError(
                f"the schedule's hash is {self.hash}, and its content has {made}; leave the hash out if it was "
                "changed on purpose",
                grid=self.text,
            )
        object.__setattr__(self, "hash", made)

    @property
    def num_actions(self) -> int:
        """Actions of all rows."""
        return sum(map(len, self.rows))

    def actions(self, row: int) -> Iterable[PipelineAction]:
        """Gives what a row does, in order."""
        return map(PipelineAction.parse, self.rows[row])

    @property
    def text(self) -> str:
        """All rows, a line for each, as ``rows_of`` reads them."""
        return "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in zip(self.rank_of, self.rows, strict=True))


def rows_of(text: str) -> tuple[tuple[str, ...], ...]:
    """Reads rows that ``text`` wrote, or a person.

    Raises:
        InvalidScheduleError: A line does not begin with its rank.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        head, colon, cells = line.partition(":")
        if not colon or head.split()[:1] != ["rank"] or not head.split()[-1].isdecimal():
            raise InvalidScheduleError(f"line {number}, {line[:40]!r}, names no rank; begin it with 'rank 0:'")
        rows.append(tuple(cells.split()))
    return tuple(rows)


def plan_of(graph: TaskGraph, chunks: Sequence[str]) -> str:
    """Returns the fingerprint of what a step's tasks are and hand to each other, whatever their times."""
    tasks = [f"{task.row}:{TaskName.of(task)}" for task in graph.tasks]
    waits = [f"{wait.source}>{wait.target}:{wait.num_bytes}" for wait in graph.waits]
    return fingerprint((graph.rank_of, tuple(chunks), " ".join(tasks), " ".join(waits)))


def _listed(values: Mapping[str, object]) -> str:
    """Returns one text of all items, which is quicker to take a fingerprint of than they are."""
    return " ".join(f"{name}:{value}" for name, value in values.items())


def wrong_cell(schedule: PipelineSchedule, row: int, place: int, problem: str) -> InvalidScheduleError:
    """Returns the error that names one cell of a schedule and what is wrong with it."""
    cell = schedule.rows[row][place] if place < len(schedule.rows[row]) else "its end"
    where = f"rank {schedule.rank_of[row]}"
    if schedule.rank_of.count(schedule.rank_of[row]) > 1:
        where += f", lane {schedule.rank_of[:row].count(schedule.rank_of[row])}"
    return InvalidScheduleError(f"{where}, action {place} ({cell}): {problem}", grid=schedule.text, cell=(row, place))
