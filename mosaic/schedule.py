"""When parts run: for each rank the order of its actions.

A plan says where each part is; a schedule of it has a row for each rank, from left to right in time. Two parts on two
ranks, with two microbatches::

    rank 0    F0:vision   F1:vision   B0:vision   B1:vision
    rank 1    F0:text     B0:text     F1:text     B1:text

An action of a part on several ranks is in the row of each of them, and they do it together. Whether a schedule can run
is checked against its plan and graph: ``simulate.order.check_schedule``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, fingerprint
from mosaic.device import FORBID_EXTRA
from mosaic.errors import InvalidScheduleError
from mosaic.graph import Part


class ActionKind(StrEnum):
    """What a rank does; its letters stand in an action's text."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


_TEXT = re.compile(r"(?P<kind>[A-Z]+)(?P<microbatch>\d+):(?P<part>.+)")
_KINDS = {kind.value: kind for kind in ActionKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One piece of work of one rank; ``str`` gives ``2/F0:text[4:8/12]``: rank, kind, microbatch, part."""

    rank: int
    """Who does it."""
    kind: ActionKind
    """What is done."""
    part: Part
    """With which part."""
    microbatch: int = 0
    """Index in the step."""

    def __str__(self) -> str:
        return f"{self.rank}/{self.cell}"

    @property
    def cell(self) -> str:
        """Its text in its rank's row, such as ``F0:text[4:8/12]``."""
        return f"{self.kind.value}{self.microbatch}:{self.part}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads what ``str`` wrote.

        Raises:
            InvalidScheduleError: It is no action.
        """
        rank, slash, cell = text.partition("/")
        if not slash or not rank.isdecimal():
            raise InvalidScheduleError(f"{text!r} names no rank; write an action as 2/F0:text")
        kind, microbatch, part = _parsed(cell)
        return cls(rank=int(rank), kind=kind, part=part, microbatch=microbatch)


def _parsed(cell: str) -> tuple[ActionKind, int, Part]:
    found = _TEXT.fullmatch(cell)
    if found is None or found["kind"] not in _KINDS:
        kinds = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in ActionKind)
        raise InvalidScheduleError(f"{cell!r} is no action; write F0:text or B1:text[4:8/12], with one of {kinds}")
    return _KINDS[found["kind"]], int(found["microbatch"]), Part.parse(found["part"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of actions on each rank of a plan.

    Raises:
        InvalidScheduleError: A cell is no action, or the file was changed after its hash was made.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    plan: str
    """Fingerprint of the plan whose parts it runs."""
    num_microbatches: Annotated[int, Ge(1)] = 1
    """Microbatches of a step; each passes through all parts."""
    rows: tuple[tuple[str, ...], ...]
    """For each rank its actions' cells, in order."""
    hash: str = ""
    """Names the content, so that all ranks can tell that they have the same one; made where it is left out."""

    def __post_init__(self) -> None:
        for rank, row in enumerate(self.rows):
            for place, cell in enumerate(row):
                try:
                    _parsed(cell)
                except InvalidScheduleError as error:
                    raise bad_cell(self, rank, place, str(error)) from None
        made = fingerprint((self.plan, self.num_microbatches, self.rows))
        if self.hash not in ("", made):
            raise InvalidScheduleError(
                f"the schedule's hash is {self.hash}, and its content has {made}; leave the hash "
                "out if it was changed on purpose",
                grid=self.grid,
            )
        object.__setattr__(self, "hash", made)

    @classmethod
    def of(cls, actions: Iterable[Action], *, plan: str, num_ranks: int, num_microbatches: int = 1) -> Schedule:
        """Puts actions into their ranks' rows, in the order given."""
        rows: list[list[str]] = [[] for _ in range(num_ranks)]
        for action in actions:
            rows[action.rank].append(action.cell)
        return cls(plan=plan, num_microbatches=num_microbatches, rows=tuple(map(tuple, rows)))

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Returns what a rank does, in order."""
        found = []
        for cell in self.rows[rank]:
            kind, microbatch, part = _parsed(cell)
            found.append(Action(rank=rank, kind=kind, part=part, microbatch=microbatch))
        return tuple(found)

    @property
    def grid(self) -> str:
        """All rows as text, a line for each rank."""
        return "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(self.rows))


def bad_cell(schedule: Schedule, rank: int, place: int, problem: str) -> InvalidScheduleError:
    """Returns the error that names one cell of a schedule and what is wrong with it."""
    cell = schedule.rows[rank][place] if place < len(schedule.rows[rank]) else "its end"
    return InvalidScheduleError(
        f"rank {rank}, action {place} ({cell}): {problem}", grid=schedule.grid, cell=(rank, place)
    )
