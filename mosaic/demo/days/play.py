"""Plays the demo's days in a folder, with a timer, a user and failures, and compares the outcomes with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from time import monotonic

from rich.table import Table

from mosaic.demo.days.acts import Check, Stage
from mosaic.demo.days.digits import open_material, write_day
from mosaic.demo.days.node import Node, Say
from mosaic.demo.days.starter import write_starter
from mosaic.demo.days.story import STORY, StoryDay
from mosaic.errors import MosaicError

FIRST_DAY = date(2026, 11, 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of the demo."""

    num_rows: int = 800
    """Rows of a day."""
    num_frozen: int = 1800
    """Frozen rows."""
    steps: int = 120
    """Steps of a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Result of a played day."""

    number: int
    """Number of the day, from 1."""
    day: StoryDay
    """Day of the story."""
    checks: tuple[Check, ...]
    """Checks of the day."""
    seconds: float
    """Duration of the day."""

    @property
    def met(self) -> bool:
        """True if all checks are as expected."""
        return all(check.met for check in self.checks)


def play(folder: Path, say: Say, *, numbers: Sequence[int] = range(1, 8), scale: Scale | None = None) -> list[Played]:
    """Plays days of the story.

    Args:
        folder: A new folder.
        say: Prints the events.
        numbers: Days to play; 1 is the first.
        scale: Amount of data and steps.

    Raises:
        MosaicError: The demo cannot run.
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
            quick_s = min((each.seconds for each in played), default=0.0)
            checks = tuple(_checks(day, Stage(node, name, scale.steps, quick_s)))
            played.append(Played(number=number, day=day, checks=checks, seconds=monotonic() - began))
            for check in checks:
                detail = f" ({check.detail})" if check.detail else ""
                say(f"  {'ok' if check.met else 'NOT AS EXPECTED'}: {check.result}{detail}")
    return played


def _checks(day: StoryDay, stage: Stage) -> list[Check]:
    checks = []
    try:
        for check in day.act(stage):
            checks.append(check)
    except MosaicError as error:
        checks.append(Check(result="it FAILED", met=False, detail=str(error)))
    return checks


def played_table(played: Sequence[Played]) -> Table:
    """Returns a row per day."""
    table = Table("day", "change", "expected", "came of it", "", box=None, padding=(0, 1))
    for day in played:
        outcomes = "; ".join(check.result for check in day.checks)
        table.add_row(str(day.number), day.day.change, day.day.expected, outcomes, "ok" if day.met else "NO")
    return table
