"""``mosaic retrain``: a folder whose model is retrained on each day's data, judged, and promoted or kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import arg, subcommand

from mosaic.cli.options import DayArgument, FolderArgument, Json, write_json
from mosaic.errors import MosaicError


@dataclass(frozen=True, kw_only=True)
class Init:
    """Make a folder that works at once: recipe, model, a day of data, frozen rows; or files that start it every day."""

    folder: FolderArgument = Path()
    template: Literal["systemd", "slurm", "kubernetes", "cron"] | None = None
    """Write what starts the folder's recipe every day by this, and nothing else."""

    def execute(self) -> None:
        """Writes the files and says what to do next."""
        if self.template is not None:
            from mosaic.retrain.templates import next_steps, write_template

            written = write_template(self.template, self.folder)
            print(*(f"wrote {path}" for path in written), next_steps(self.template, self.folder), sep="\n")
            return
        from mosaic.demo.days.starter import write_starter

        print(*(f"wrote {path}" for path in write_starter(self.folder)), sep="\n")
        print(f"next: mosaic retrain check {self.folder}; then mosaic retrain run {self.folder}, every day")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Take a step, score the frozen rows, and find what would fail at night; leaves nothing."""

    folder: FolderArgument = Path()

    def execute(self) -> None:
        """Prints what is found; raises what would fail."""
        _aside(self.folder, None, "check")
        print("nothing is wrong")


@dataclass(frozen=True, kw_only=True)
class RunDay:
    """Take the folder from where it stands to where it should be; start it as often as you like.

    Exits with 0: done, or nothing to do; 1: failed; 2: the recipe is wrong; 5: refused or quarantined; 75:
    interrupted, and the next start goes on.
    """

    folder: FolderArgument = Path()
    now: str | None = None
    """Take this for the time, such as 2026-11-22T01:00Z, to rehearse a night."""

    def execute(self) -> int:
        """Runs; returns the exit code."""
        from mosaic.retrain.folder import named_remedy
        from mosaic.retrain.run import Clock, run

        clock = Clock()
        if self.now is not None:
            clock = Clock(_time(self.now) - datetime.now(UTC))
        with named_remedy():
            return run(self.folder, lambda line: print(line, flush=True), clock)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Say how the folder stands: champion, anchor, the last days, new data, who runs it."""

    folder: FolderArgument = Path()

    def execute(self) -> None:
        """Prints it."""
        from mosaic.retrain.folder import named_remedy
        from mosaic.retrain.steering import status_of

        with named_remedy():
            print(*status_of(self.folder), sep="\n")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a day's page again and say where it is."""

    folder: FolderArgument = Path()
    day: DayArgument = None
    json: Json = None

    def execute(self) -> None:
        """Writes report.json and report.html."""
        from mosaic.retrain.folder import Folder
        from mosaic.retrain.page import write_page
        from mosaic.retrain.reporting import find_day, report_of

        day = find_day(Folder(self.folder), self.day)
        report = report_of(Folder(self.folder), day)
        write_json(report, self.json)
        write_json(report, day.report)
        write_page(report, day.page)
        if self.json is None:
            print(f"{report.day}: {report.outcome}: {report.reason}\n{day.page}")


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Make a version the champion and the anchor: you have looked at it, and approve it."""

    folder: Annotated[tyro.conf.Positional[Path], arg(metavar="FOLDER", help="The folder with retrain.toml.")]
    version: Annotated[tyro.conf.Positional[str], arg(metavar="VERSION", help="Such as 0042, or 42.")]

    def execute(self) -> None:
        """Sets the links and runs the hooks."""
        from mosaic.retrain.steering import promote

        print(promote(self.folder, self.version))


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Let the version be the champion that was it before."""

    folder: FolderArgument = Path()

    def execute(self) -> None:
        """Sets the link and runs the hooks."""
        from mosaic.retrain.steering import rollback

        print(rollback(self.folder))


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Stop promotions by the gate; days are trained and judged all the same."""

    folder: FolderArgument = Path()
    off: bool = False
    """Allow them again."""

    def execute(self) -> None:
        """Sets the mark, or removes it."""
        from mosaic.retrain.steering import hold

        print(hold(self.folder, off=self.off))


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Repeat steps of a day from a checkpoint and compare them with its log, bit for bit."""

    folder: FolderArgument = Path()
    day: DayArgument = None
    steps: int = 50
    """How many at most."""

    def execute(self) -> None:
        """Prints what was found; raises what differs."""
        _aside(self.folder, self.day, "verify", "--steps", str(self.steps))


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Play seven days in which something happens: kills, new data, a new task, wrong labels, other ranks, drift.

    Trains for real, on small data, in under four minutes on two cores; exits with 1 if a day ends other than expected.
    """

    folder: Annotated[
        tyro.conf.Positional[Path], arg(metavar="FOLDER", help="A new folder, in which all is left to look at.")
    ] = Path("mosaic-seven-days")

    def execute(self) -> int:
        """Plays the days; prints what came of them, and where the last page is."""
        from rich.console import Console

        from mosaic.demo.days.play import play, played_table
        from mosaic.retrain.folder import Folder
        from mosaic.retrain.reporting import find_day

        played = play(self.folder, lambda line: print(line, flush=True))
        Console().print(played_table(played))
        print(find_day(Folder(self.folder), None).page)
        return 0 if all(one.met for one in played) else 1


@dataclass(frozen=True, kw_only=True)
class Retrain:
    """Retrain a model on each day's data, unattended: judged against the one in force, and promoted or kept."""

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
        | Annotated[Demo, subcommand("demo")]
    )

    def execute(self) -> int | None:
        """Does what is asked; returns the exit code where it is not 0."""
        execute: Callable[[], int | None] = self.action.execute
        return execute()


def _aside(root: Path, day: str | None, part: str, *more: str) -> None:
    from mosaic.retrain.folder import Folder
    from mosaic.retrain.recipe import read_recipe
    from mosaic.retrain.reporting import find_day
    from mosaic.retrain.workers import Workers

    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    of = find_day(folder, day) if part == "verify" else folder.day("check")
    ended = Workers(folder, of, recipe).aside(part, *more)
    if ended.how != "done":
        raise MosaicError(ended.reason or f"it {ended.how}")


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"--now {text} is no time; write it as 2026-11-22T01:00Z") from error
    if found.tzinfo is None:
        raise ValueError(f"--now {text} has no time zone; write it as {text}Z for UTC")
    return found
