"""A schedule that ranks of a pipeline execute: the actions of each row, and their data beside the model.

Every message is an action, because with pieces, skipped modules and any order a rank cannot infer the next message of
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, fingerprint
from mosaic.device import FORBID_EXTRA
from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule.action import PipelineAction, TaskName, check_cell
from mosaic.pipelining.tasks import TaskGraph

MAX_ACTIONS = 5_000_000
"""Most actions of a schedule: about 200 MB of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """Actions of all rows of a pipeline.

    Raises:
        InvalidScheduleError: A cell is not an action, the schedule has too many, rows and ranks differ in number, or
            the file was changed after its hash was made.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
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
                try:
                    check_cell(cell)
                except InvalidScheduleError as error:
                    raise wrong_cell(self, row, place, str(error)) from None
        sizes = (_listed(self.edges), _listed(self.kept), self.strategy, _listed(self.strategies))
        content_hash = fingerprint((self.plan, self.num_microbatches, self.rank_of, self.chunks, self.text, *sizes))
        if self.hash not in ("", content_hash):
            raise InvalidScheduleError(
                f"the schedule's hash is {self.hash}, and its content has {content_hash}; leave the hash out if it was "
                "changed on purpose",
                grid=self.text,
            )
        object.__setattr__(self, "hash", content_hash)

    @property
    def num_actions(self) -> int:
        """Actions of all rows."""
        return sum(map(len, self.rows))

    def actions(self, row: int) -> Iterable[PipelineAction]:
        """Returns the actions of a row, in order."""
        return map(PipelineAction.parse, self.rows[row])

    @property
    def text(self) -> str:
        """All rows, one line each, for ``rows_of``."""
        return "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in zip(self.rank_of, self.rows, strict=True))


def rows_of(text: str) -> tuple[tuple[str, ...], ...]:
    """Reads rows in the form of ``text``.

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
    """Returns the fingerprint of a step's tasks and messages, without times."""
    tasks = [f"{task.row}:{TaskName.of(task)}" for task in graph.tasks]
    waits = [f"{wait.source}>{wait.target}:{wait.num_bytes}" for wait in graph.waits]
    return fingerprint((graph.rank_of, tuple(chunks), " ".join(tasks), " ".join(waits)))


def _listed(values: Mapping[str, object]) -> str:
    """Returns one text of all items, whose fingerprint is faster to compute."""
    return " ".join(f"{name}:{value}" for name, value in values.items())


def wrong_cell(schedule: PipelineSchedule, row: int, place: int, problem: str) -> InvalidScheduleError:
    """Returns the error of one cell of a schedule."""
    cell = schedule.rows[row][place] if place < len(schedule.rows[row]) else "its end"
    where = f"rank {schedule.rank_of[row]}"
    if schedule.rank_of.count(schedule.rank_of[row]) > 1:
        where += f", lane {schedule.rank_of[:row].count(schedule.rank_of[row])}"
    return InvalidScheduleError(f"{where}, action {place} ({cell}): {problem}", grid=schedule.text, cell=(row, place))


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
