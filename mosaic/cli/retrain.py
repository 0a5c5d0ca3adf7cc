"""``mosaic retrain``: retrains a folder's model on each day's data, judges it, and promotes it or not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

from mosaic.cli.options import Json, console_beside, write_json
from mosaic.errors import MosaicError

Root = Annotated[
    tyro.conf.Positional[Path], arg(metavar="FOLDER", help="The folder of retrain.toml; by default the current one.")
]
Day = Annotated[
    tyro.conf.Positional[str | None], arg(metavar="DAY", help="Such as 2026-11-22; the last one by default.")
]


def init(folder: Root = Path()) -> None:
    """Create a folder that works: recipe, model, a day of data, frozen rows."""
    from mosaic.demo.days.digits import write_starter

    print(*(f"wrote {path}" for path in write_starter(folder)), sep="\n")
    print(f"next: mosaic retrain check {folder}; then mosaic retrain run {folder}, every day")


def check(folder: Root = Path()) -> None:
    """Rehearse a step, scoring and the gate, and report what would fail at night. Leaves no files."""
    _inspect(folder, None, "check")
    print("no problems")


def run(folder: Root = Path(), *, now: datetime | None = None) -> int:
    """Run the missing phases of the folder's day; safe to start at any time.

    Exits with 0: done, or nothing to do; 1: failed; 2: wrong recipe; 5: refused or quarantined; 75: interrupted, the
    next start resumes.

    Args:
        now: Use this time, such as 2026-11-22T01:00Z, to rehearse a night.
    """
    from mosaic.retrain import day

    if now is not None and now.tzinfo is None:
        raise ValueError(f"--now {now.isoformat()} has no time zone; write it as {now.isoformat()}Z for UTC")
    offset = timedelta() if now is None else now - datetime.now(UTC)
    return day.run(folder, partial(print, flush=True), offset)


def status(folder: Root = Path()) -> None:
    """Show the folder's status: champion, anchor, the last days, new data, the current run."""
    from mosaic.retrain.steering import status_of

    print(*status_of(folder), sep="\n")


def report(folder: Root = Path(), day: Day = None, *, json: Json = None) -> None:
    """Write a day's page again and print its path."""
    from mosaic.artifact import write_text
    from mosaic.retrain.folder import Folder
    from mosaic.retrain.report import page_of, report_of

    folder_day = Folder(folder).find_day(day)
    content = report_of(Folder(folder), folder_day)
    write_json(content, json)
    write_json(content, folder_day.report)
    write_text(page_of(content), folder_day.page)
    if json is None:
        print(f"{content.state.day}: {content.outcome}: {content.reason}\n{folder_day.page}")


def promote(
    folder: Root, version: Annotated[tyro.conf.Positional[str], arg(metavar="VERSION", help="Such as 0042, or 42.")]
) -> None:
    """Approve a version: make it the champion and the anchor."""
    from mosaic.retrain import steering

    print(steering.promote(folder, version))


def rollback(folder: Root = Path()) -> None:
    """Make the previous champion the champion again."""
    from mosaic.retrain import steering

    print(steering.rollback(folder))


def hold(folder: Root = Path(), *, off: bool = False) -> None:
    """Stop promotions by the gate; days are still trained and judged.

    Args:
        off: Allow promotions again.
    """
    from mosaic.retrain import steering

    print(steering.hold(folder, off=off))


def verify(folder: Root = Path(), day: Day = None, *, steps: int = 50) -> None:
    """Repeat steps of a day from a checkpoint and compare them with its log, bit for bit.

    Args:
        steps: Maximum number of steps to repeat.
    """
    _inspect(folder, day, "verify", "--steps", str(steps))


def simulate(folder: Root = Path(), *, last: int = 7) -> None:
    """Repeat the decisions of past days with today's recipe; promotes and writes nothing.

    Each candidate is compared with the versions of that day, on the rows of that day.

    Args:
        last: Number of most recent days.
    """
    from rich.table import Table

    from mosaic.retrain import day

    table = Table("day", "candidate", "decision then", "decision now", "why", box=None, padding=(0, 1))
    for simulated in day.simulate(folder, last):
        table.add_row(*simulated)
    console_beside(None).print(table)


def demo(folder: Root = Path("mosaic-seven-days")) -> int:
    """Play seven days in a new folder: kills, new data, a new task, wrong labels, other ranks, drift.

    Trains on small data in under four minutes on two cores; exits with 1 if a day has an unexpected outcome.
    """
    from mosaic.demo.days.play import play, played_table
    from mosaic.retrain.folder import Folder

    played = play(folder, partial(print, flush=True))
    console_beside(None).print(played_table(played))
    print(Folder(folder).find_day(None).page)
    return 0 if all(day.met for day in played) else 1


def _inspect(root: Path, day: str | None, part: str, *more: str) -> None:
    from mosaic.retrain.folder import Folder
    from mosaic.retrain.recipe import read_recipe
    from mosaic.retrain.workers import Workers

    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    folder_day = folder.find_day(day) if part == "verify" else folder.day("check")
    outcome = Workers(folder, folder_day, recipe).inspect(part, *more)
    if outcome.how != "done":
        raise MosaicError(outcome.reason or f"it {outcome.how}")


ACTIONS = {
    action.__name__: action
    for action in (init, check, run, status, report, promote, rollback, hold, verify, simulate, demo)
}
