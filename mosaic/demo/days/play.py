"""Plays the days of the demo in a folder, as timer, user and bad luck would, and says whether all came as expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from time import monotonic

from rich.table import Table

from mosaic.demo.days.acts import Check, Stage
from mosaic.demo.days.making import open_material, write_day
from mosaic.demo.days.node import Node, Say
from mosaic.demo.days.starter import write_starter
from mosaic.demo.days.story import STORY, StoryDay
from mosaic.errors import MosaicError

FIRST_DAY = date(2026, 11, 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much the demo does."""

    num_rows: int = 800
    """Rows of a day."""
    num_frozen: int = 1800
    """Frozen rows."""
    steps: int = 120
    """Steps of a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A day that was played."""

    number: int
    """The first one is 1."""
    day: StoryDay
    """What was to happen."""
    checks: tuple[Check, ...]
    """What came of it."""
    seconds: float
    """What it took."""

    @property
    def met(self) -> bool:
        """Whether all is as expected."""
        return all(check.met for check in self.checks)


def play(folder: Path, say: Say, *, numbers: Sequence[int] = range(1, 8), scale: Scale | None = None) -> list[Played]:
    """Plays days of the story.

    Args:
        folder: A new one.
        say: Is told what happens.
        numbers: Which days; 1 is the first.
        scale: How much data and how many steps.

    Raises:
        MosaicError: Something stands in the way; says what.
    """
    scale = scale if scale is not None else Scale()
    node = Node(folder, lambda line: say(f"    {line}"))
    played: list[Played] = []
    with open_material() as material:
        for place, number in enumerate(numbers):
            day, name, began = STORY[number - 1], FIRST_DAY + timedelta(days=place), monotonic()
            say(f"day {number}, {name}: {day.change}")
            data = replace(day.data, num_rows=scale.num_rows)
            if place == 0:
                write_starter(folder, name, num_rows=scale.num_rows, num_frozen=scale.num_frozen)
                node.set(budget__steps=str(scale.steps), budget__save='"1s"')
            else:
                write_day(folder / "data" / name.isoformat(), data, material, seed=number)
            quick_s = min((one.seconds for one in played), default=0.0)
            checks = tuple(_checks(day, Stage(node, name, scale.steps, quick_s)))
            played.append(Played(number=number, day=day, checks=checks, seconds=monotonic() - began))
            for check in checks:
                detail = f" ({check.detail})" if check.detail else ""
                say(f"  {'ok' if check.met else 'NOT AS EXPECTED'}: {check.found}{detail}")
    return played


def _checks(day: StoryDay, stage: Stage) -> list[Check]:
    checks = []
    try:
        for check in day.act(stage):
            checks.append(check)
    except MosaicError as error:
        checks.append(Check(found="it FAILED", met=False, detail=str(error)))
    return checks


def played_table(played: Sequence[Played]) -> Table:
    """Returns a row for each day."""
    table = Table("day", "change", "expected", "came of it", "", box=None, padding=(0, 1))
    for one in played:
        found = "; ".join(check.found for check in one.checks)
        table.add_row(str(one.number), one.day.change, one.day.expected, found, "ok" if one.met else "NO")
    return table
