"""A retraining folder on the disk: where everything is, and the small files that say how far a day has come."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from mosaic.artifact import load, save
from mosaic.errors import InvalidFileError
from mosaic.lines import append_line
from mosaic.retrain.recipe import RECIPE
from mosaic.retrain.records import Outcome

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@contextmanager
def named_remedy() -> Iterator[None]:
    """Adds the remedy to the error of a damaged file."""
    try:
        yield
    except InvalidFileError as error:
        raise InvalidFileError(
            f"{error}; restore this file from a backup, or, if it is in the folder of a day that is not over, move "
            "days/DAY away: the next run begins that day anew. A damaged version is replaced by another one with "
            "`mosaic retrain promote FOLDER VERSION`"
        ) from None


def load_of_earlier_day(kind: type[_T], path: Path) -> _T | None:
    """Returns a record of an earlier day; None, with a warning, where the file is damaged.

    A day goes on without the figures, scores and plans of the days before it.
    """
    if not path.is_file():
        return None
    try:
        return load(kind, path)
    except InvalidFileError as error:
        _LOG.warning("%s; this day goes on without it", error)
        return None


Phase = Literal["prepared", "training", "trained", "evaluated", "decided", "promoted"]
"""How far a day has come; each is written once all before it is on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start of the processes that train a day."""

    at: str
    """UTC, ISO 8601."""
    boot: str
    """The machine's boot, as the kernel names it."""
    from_step: int
    """The step that it went on from."""
    ended: str = ""
    """How it ended, such as ``done``, ``killed (SIGKILL)``, ``launcher killed``, ``SIGTERM``; empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayState:
    """``state.json``: how far a day has come; written last in each phase."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    day: str
    """Its name: the newest of the data's dates."""
    phase: Phase
    """How far it has come."""
    new: tuple[str, ...]
    """Dates of the data that is new: those that missed runs left are taken together."""
    replay: tuple[str, ...]
    """Dates of promoted days that are trained on again."""
    parent: str | None
    """Version that was in force when the day began: what the challenger is trained from."""
    champion: str | None
    """Version that it is compared with: the one in force when it was judged."""
    anchor: str | None
    """Version that a person had approved then."""
    began: str
    """UTC, ISO 8601."""
    deadline: str | None
    """When the device has to be given back, UTC; None for never."""
    starts: tuple[Start, ...] = ()
    """In order."""
    outcome: Outcome | None = None
    """How the day ended; None before."""
    reason: str = ""
    """Why, in one sentence."""
    ended: str | None = None
    """When the last run of it ended, UTC; None before."""
    version: str | None = None
    """The challenger's name, once it has one."""
    messages: tuple[str, ...] = ()
    """What the morning should know."""

    @property
    def is_over(self) -> bool:
        """Whether no run will go on with it."""
        return self.outcome not in (None, "interrupted", "failed")


class _File:
    """A file of a folder, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, _: Any = None) -> Path:
        path: Path = folder.path
        return path / self._name


@dataclass(frozen=True, slots=True)
class DayFolder:
    """One day's files."""

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
        """How far it has come."""
        return load(DayState, self.path / "state.json")

    @property
    def has_begun(self) -> bool:
        """Whether there is such a day."""
        return (self.path / "state.json").is_file()

    def set(self, state: DayState, **changes: Any) -> DayState:
        """Writes how far the day has come, whole or not at all, and returns it."""
        changed = replace(state, **changes)
        save(changed, self.path / "state.json")
        return changed


@dataclass(frozen=True, slots=True)
class Folder:
    """A retraining folder."""

    path: Path

    recipe = _File(RECIPE)
    history = _File("history.jsonl")
    hold = _File("hold")
    pending = _File("hooks.json")
    frozen = _File("frozen.json")
    versions = _File("versions")
    quarantine = _File("quarantine")

    def day(self, day: str) -> DayFolder:
        """Returns the files of a day."""
        return DayFolder(self.path / "days" / day)

    def days(self) -> tuple[DayFolder, ...]:
        """Returns the days that have begun, the oldest first."""
        found = (DayFolder(path) for path in sorted((self.path / "days").glob("????-??-??")))
        return tuple(day for day in found if day.has_begun)

    def note(self, event: str, **more: Any) -> None:
        """Adds a line to ``history.jsonl``."""
        append_line(self.history, {"at": utc_text(datetime.now(UTC)), "event": event, **more}, flush=True)


def utc_text(at: datetime) -> str:
    """Returns a time as files have it: UTC, ISO 8601, whole seconds."""
    return at.astimezone(UTC).isoformat(timespec="seconds")
