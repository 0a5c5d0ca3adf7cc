"""``mosaic retrain``: retrains a folder's model on each day's data, judges it, and promotes it or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg, subcommand

from mosaic.cli.options import DayArgument, FolderArgument, Json, console_beside, write_json
from mosaic.errors import MosaicError


@dataclass(frozen=True, kw_only=True)
class _InFolder:
    folder: FolderArgument = Path()


@dataclass(frozen=True, kw_only=True)
class Init(_InFolder):
    """Create a working folder: recipe, model, a day of data, frozen rows."""

    def execute(self) -> None:
        from mosaic.demo.days.digits import write_starter

        print(*(f"wrote {path}" for path in write_starter(self.folder)), sep="\n")
        print(f"next: mosaic retrain check {self.folder}; then mosaic retrain run {self.folder}, every day")


@dataclass(frozen=True, kw_only=True)
class Check(_InFolder):
    """Take a step, score the frozen rows, and report what would fail at night; keeps nothing."""

    def execute(self) -> None:
        _aside(self.folder, None, "check")
        print("nothing is wrong")


@dataclass(frozen=True, kw_only=True)
class RunDay(_InFolder):
    """Run the missing steps of the folder's day; start it as often as you like.

    Exits with 0: done, or nothing to do; 1: failed; 2: the recipe is wrong; 5: refused or quarantined; 75:
    interrupted, and the next start goes on.
    """

    now: str | None = None
    """Use this time, such as 2026-11-22T01:00Z, to rehearse a night."""

    def execute(self) -> int:
        from mosaic.retrain.day import run
        from mosaic.retrain.folder import named_remedy

        offset = timedelta() if self.now is None else _time(self.now) - datetime.now(UTC)
        with named_remedy():
            return run(self.folder, lambda line: print(line, flush=True), offset)


@dataclass(frozen=True, kw_only=True)
class Status(_InFolder):
    """Show the folder's status: champion, anchor, the last days, new data, the current run."""

    def execute(self) -> None:
        from mosaic.retrain.folder import named_remedy
        from mosaic.retrain.steering import status_of

        with named_remedy():
            print(*status_of(self.folder), sep="\n")


@dataclass(frozen=True, kw_only=True)
class Report(_InFolder):
    """Write a day's page again and print its path."""

    day: DayArgument = None
    json: Json = None

    def execute(self) -> None:
        from mosaic.artifact import write_text
        from mosaic.retrain.folder import Folder
        from mosaic.retrain.report import page_of, report_of

        day = Folder(self.folder).find_day(self.day)
        report = report_of(Folder(self.folder), day)
        write_json(report, self.json)
        write_json(report, day.report)
        write_text(page_of(report), day.page)
        if self.json is None:
            print(f"{report.state.day}: {report.outcome}: {report.reason}\n{day.page}")


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Make a version the champion and the anchor, after you checked and approved it."""

    folder: Annotated[tyro.conf.Positional[Path], arg(metavar="FOLDER", help="The folder with retrain.toml.")]
    version: Annotated[tyro.conf.Positional[str], arg(metavar="VERSION", help="Such as 0042, or 42.")]

    def execute(self) -> None:
        from mosaic.retrain.steering import promote

        print(promote(self.folder, self.version))


@dataclass(frozen=True, kw_only=True)
class Rollback(_InFolder):
    """Make the previous champion the champion again."""

    def execute(self) -> None:
        from mosaic.retrain.steering import rollback

        print(rollback(self.folder))


@dataclass(frozen=True, kw_only=True)
class Hold(_InFolder):
    """Stop promotions by the gate; days are still trained and judged."""

    off: bool = False
    """Allow promotions again."""

    def execute(self) -> None:
        from mosaic.retrain.steering import hold

        print(hold(self.folder, off=self.off))


@dataclass(frozen=True, kw_only=True)
class Verify(_InFolder):
    """Repeat steps of a day from a checkpoint and compare them with its log, bit for bit."""

    day: DayArgument = None
    steps: int = 50
    """Most steps to repeat."""

    def execute(self) -> None:
        _aside(self.folder, self.day, "verify", "--steps", str(self.steps))


@dataclass(frozen=True, kw_only=True)
class Simulate(_InFolder):
    """Judge past days again by today's recipe; promotes and writes nothing.

    Each candidate meets the versions that it met then, on the rows of that day.
    """

    last: int = 7
    """Number of days, the latest ones."""

    def execute(self) -> None:
        from rich.table import Table

        from mosaic.retrain.day import simulate
        from mosaic.retrain.folder import named_remedy

        table = Table("day", "candidate", "decision then", "decision now", "why", box=None, padding=(0, 1))
        with named_remedy():
            for day in simulate(self.folder, self.last):
                table.add_row(*day)
        console_beside(None).print(table)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Play seven eventful days: kills, new data, a new task, wrong labels, other ranks, drift.

    Trains on small data in under four minutes on two cores; exits with 1 if a day has an unexpected outcome.
    """

    folder: Annotated[tyro.conf.Positional[Path], arg(metavar="FOLDER", help="A new folder for all results.")] = Path(
        "mosaic-seven-days"
    )

    def execute(self) -> int:
        from rich.console import Console

        from mosaic.demo.days.play import play, played_table
        from mosaic.retrain.folder import Folder

        played = play(self.folder, lambda line: print(line, flush=True))
        Console().print(played_table(played))
        print(Folder(self.folder).find_day(None).page)
        return 0 if all(day.met for day in played) else 1


@dataclass(frozen=True, kw_only=True)
class Retrain:
    """Retrain a model on each day's data, unattended: judge it against the champion, and promote it or not."""

    action: (
        Annotated[Init, subcommand("init")]
        | Annotated[Check, subcommand("check")]
        | Annotated[RunDay, subcommand("run")]
        | Annotated[Status, subcommand("status")]
        | Annotated[Report, subcommand("report")]
        | Annotated[Promote, subcommand("promote")]
        | Annotated[Rollback, subcommand("rollback")]
        | Annotated[Hold, subcommand("hold")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[Simulate, subcommand("simulate")]
        | Annotated[Demo, subcommand("demo")]
    )

    def execute(self) -> int | None:
        execute: Callable[[], int | None] = self.action.execute
        return execute()


def _aside(root: Path, day: str | None, part: str, *more: str) -> None:
    from mosaic.retrain.folder import Folder
    from mosaic.retrain.recipe import read_recipe
    from mosaic.retrain.workers import Workers

    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    of = folder.find_day(day) if part == "verify" else folder.day("check")
    ended = Workers(folder, of, recipe).aside(part, *more)
    if ended.how != "done":
        raise MosaicError(ended.reason or f"it {ended.how}")


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"--now {text} is no time; write it as 2026-11-22T01:00Z") from error
    if time.tzinfo is None:
        raise ValueError(f"--now {text} has no time zone; write it as {text}Z for UTC")
    return time
