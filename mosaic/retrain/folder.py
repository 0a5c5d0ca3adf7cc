"""A retraining folder on disk: its paths, each day's state, and the days that its data makes new."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from glob import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

from mosaic.artifact import append_line, load, save
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.recipe import RECIPE, Recipe

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

Phase = Literal["prepared", "training", "trained", "evaluated", "decided"]
"""Phase of a day, by the files that are complete."""
Outcome = Literal["promoted", "held", "refused", "quarantined", "failed", "interrupted"]
"""Outcome of a day. ``held``: passed the gate during a ``hold``; ``refused``: failed the gate; ``quarantined``: its
data was not trained on; ``interrupted``: not finished, will resume."""
OUTCOMES: dict[Outcome, tuple[str, str, str, str]] = {
    "promoted": ("PROMOTED", "P", "promoted", "{new} is the champion now"),
    "held": ("KEPT", "H", "held by a person", "{stays}; promotions are on hold"),
    "refused": ("KEPT", "R", "refused by the gate", "{stays}; the gate refused {new}"),
    "quarantined": ("KEPT", "Q", "data quarantined", "{stays}; today's data was set aside"),
    "failed": ("FAILED", "F", "failed", "{stays}"),
    "interrupted": ("NOT FINISHED", "N", "not finished", "{stays}; the next start goes on"),
}
"""Headline, letter, words, and subtitle of each outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    at: str
    from_step: int
    ended: str = ""
    """End, such as ``done``, ``killed (SIGKILL)``, ``launcher killed``, ``SIGTERM``; empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayState:
    """``state.json``: the state of a day."""

    schema_version: int = 1
    day: str
    """Name of the day: the newest date of its data."""
    new: tuple[str, ...]
    """Dates of new data; a day also takes the data of missed runs."""
    replay: tuple[str, ...]
    """Dates of promoted days to replay."""
    parent: str | None
    """Version in force when the day began; the challenger starts from it."""
    champion: str | None
    """Version in force when the challenger was judged; the gate compares them."""
    anchor: str | None
    """Approved version at that time."""
    version: str
    began: str
    deadline: str | None = None
    """Time to release the device, UTC; None for none."""
    starts: tuple[Start, ...] = ()
    outcome: Outcome | None = None
    reason: str = ""
    ended: str | None = None
    """End of its last run, UTC; None before."""
    messages: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """True if no run will resume it."""
        return self.outcome not in (None, "interrupted", "failed")


class _File:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, _: Any = None) -> Path:
        path: Path = folder.path
        return path / self._name


@dataclass(frozen=True, slots=True)
class DayFolder:
    path: Path

    recipe = _File(RECIPE)
    sources = _File("sources.json")
    environment = _File("environment.json")
    plan = _File("plan.json")
    profile = _File("profile.json")
    figures = _File("figures.json")
    data_check = _File("data_check.json")
    facts = _File("facts.json")
    checkpoints = _File("checkpoints")
    metrics = _File("metrics.jsonl")
    trained = _File("trained.json")
    model = _File("model.safetensors")
    scores = _File("scores.json")
    gate = _File("gate.json")
    report = _File("report.json")
    page = _File("report.html")

    @property
    def state(self) -> DayState:
        return load(DayState, self.path / "state.json")

    @property
    def has_begun(self) -> bool:
        return (self.path / "state.json").is_file()

    @property
    def is_trained(self) -> bool:
        return self.trained.is_file() and self.model.is_file()

    @property
    def is_scored(self) -> bool:
        return self.facts.is_file() and self.scores.is_file()

    @property
    def phase(self) -> Phase:
        """The first phase whose files are not complete: a file that is removed is made again."""
        if not self.data_check.is_file() or load(DataCheck, self.data_check).quarantine:
            return "prepared"
        if not self.is_trained:
            return "training"
        if not self.is_scored:
            return "trained"
        return "decided" if self.gate.is_file() else "evaluated"

    def set(self, state: DayState, **changes: Any) -> None:
        """Writes the day's state atomically."""
        save(replace(state, **changes), self.path / "state.json")

    def drop_weights(self) -> None:
        """Removes checkpoints and weights; a rename comes first, so a part of them is never read."""
        aside = self.path / ".dropped"
        with suppress(OSError):  # the next day tries again
            if self.checkpoints.is_dir() and not aside.exists():
                self.checkpoints.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            self.model.unlink(missing_ok=True)

    def drop_unfinished(self) -> None:
        """Removes hidden files and folders, which killed processes leave."""
        for path in self.path.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    recipe = _File(RECIPE)
    history = _File("history.jsonl")
    hold = _File("hold")
    pending = _File("hooks.json")
    versions = _File("versions")
    quarantine = _File("quarantine")

    def day(self, day: str) -> DayFolder:
        return DayFolder(self.path / "days" / day)

    def days(self) -> tuple[DayFolder, ...]:
        days = (DayFolder(path) for path in sorted((self.path / "days").glob("????-??-??")))
        return tuple(day for day in days if day.has_begun)

    def find_day(self, day: str | None) -> DayFolder:
        """Returns a day, the last one by default."""
        days = {each.path.name: each for each in self.days()}
        chosen = days.get(day) if day is not None else next(reversed(days.values()), None)
        if chosen is None:
            missing = "no day" if day is None else f"no day {day}"
            raise MosaicError(f"{self.path} has {missing}; there are {', '.join([*days][-8:]) or 'none yet'}")
        return chosen

    def note(self, event: str, **more: Any) -> None:
        append_line(self.history, {"at": utc_text(), "event": event, **more}, flush=True)


def utc_text(at: datetime | None = None) -> str:
    """Formats a time for files, the present one by default: UTC, ISO 8601, whole seconds."""
    return (at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")


@contextmanager
def named_remedy() -> Iterator[None]:
    """Adds the remedy to the error of a damaged file."""
    try:
        yield
    except InvalidFileError as error:
        raise InvalidFileError(
            f"{error}; restore this file from a backup, or, if it is in the folder of a day that is not over, remove "
            "it: the next run makes it again. A damaged version is replaced by another one with `mosaic retrain "
            "promote FOLDER VERSION`"
        ) from None


def load_if_intact(kind: type[_T], path: Path) -> _T | None:
    """Returns a record that a day can run without; None without the file, or with a warning if it is damaged."""
    try:
        return load(kind, path) if path.is_file() else None
    except InvalidFileError as error:
        _LOG.warning("%s; this day goes on without it", error)
        return None


# New days and days to replay, read from the folders and independent of a clock.


def ready_dates(folder: Folder, recipe: Recipe) -> tuple[str, ...]:
    """Returns the dates whose data folder is complete, the oldest first."""
    new = recipe.sources.new
    before, after = new.path.split("{day}")
    markers = folder.path.glob(f"{escape(before)}*{escape(after)}/{escape(new.ready)}")
    paths = (marker.parent.relative_to(folder.path).as_posix() for marker in markers)
    return tuple(sorted(day for path in paths if _is_date(day := path[len(before) : len(path) - len(after)])))


def new_dates(folder: Folder, recipe: Recipe) -> tuple[str, ...]:
    """Returns the dates that no day has used, missed days included."""
    used = {date for day in folder.days() if not _is_released(folder, day) for date in day.state.new}
    return tuple(date for date in ready_dates(folder, recipe) if date not in used)


def replay_dates(folder: Folder, recipe: Recipe) -> tuple[str, ...]:
    """Returns the dates to replay: those of the last promoted days."""
    promoted = [date for day in folder.days() if day.state.outcome == "promoted" for date in day.state.new]
    ready, count = set(ready_dates(folder, recipe)), recipe.sources.replay.days
    return tuple(sorted(date for date in promoted if date in ready)[-count:]) if count else ()


def archive(day: DayFolder) -> None:
    """Archives a day whose data another day uses."""
    names = (day.path.with_name(f"{day.path.name}.{number}") for number in itertools.count(1))
    day.path.rename(next(name for name in names if not name.exists()))


def _is_released(folder: Folder, day: DayFolder) -> bool:
    """Returns True if a person removed a quarantined day's note, which makes its data new again."""
    state = day.state
    return state.outcome == "quarantined" and not any(
        (folder.quarantine / f"{date}.json").exists() for date in state.new
    )


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
